"""Answers of a disk tier about pages that it does not keep."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import CapacityError, PrimeblocksError, ShapeError
from ..page import DIGEST_BYTES
from ..tier import Record

__all__ = ["Answer", "full", "misfit", "refusal", "refusing"]

Answer = PrimeblocksError | OSError | None

_FULL = (errno.ENOSPC, errno.EDQUOT)


def misfit(record: Record, *, room: int) -> ShapeError | None:
    """Return why no disk can keep a record; None if one can."""
    if record.content.nbytes <= room and len(record.digest) == DIGEST_BYTES:
        return None
    return ShapeError(
        f"a page with attachments has at most {room} bytes and a digest of {DIGEST_BYTES}; got "
        f"{record.content.nbytes} and {len(record.digest)}"
    )


def full(error: OSError) -> bool:
    """Whether the file system has no room."""
    return error.errno in _FULL


def refusal(error: PrimeblocksError | OSError, path: Path) -> PrimeblocksError | OSError:
    """Translate an error of the file system: CapacityError where it is full."""
    if isinstance(error, OSError) and full(error):
        return CapacityError(f"no space for pages in {path}: {error}")
    return error


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise errors of the file system as `refusal` translates them."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path) from error

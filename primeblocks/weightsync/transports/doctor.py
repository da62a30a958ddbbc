"""A look at shared memory: what is there under our names, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .place import sweep

__all__ = ["Found", "doctor"]


class Found(NamedTuple):
    """A directory of versions in shared memory.

    Attributes:
        bytes: of its files, and of the memory that they link to.
        user: the number of the user whose it is.
        removed: whether it was: its owner is dead.
    """

    path: Path
    bytes: int
    user: int
    removed: bool


def doctor(root: str = "/dev/shm") -> tuple[Found, ...]:
    """Remove what killed owners of this user left in shared memory; list that and the rest. Local.

    Living owners keep theirs, and so do other users.
    """
    found = list(_look(Path(root)))
    removed = set(sweep(Path(root)))
    return tuple(each._replace(removed=each.path in removed) for each in found)


def _look(root: Path) -> Iterator[Found]:
    for path in sorted(root.glob("primeblocks-*-*")):
        with suppress(FileNotFoundError):
            yield Found(path, sum(_bytes(path)), path.lstat().st_uid, False)


def _bytes(path: Path) -> Iterator[int]:
    # Another user's cannot be looked into; memory that a link leads to may be gone.
    with suppress(PermissionError, NotADirectoryError):
        for file in path.iterdir():
            with suppress(OSError):
                yield file.stat().st_size

"""What callers ask of a store, checked and ready for its catalogue."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ...errors import ShapeError
from ..attachments import pack_attachments
from ..page import PageKey
from ..tier import Loaded, Saved
from .batch import Batch
from .buffers import page_pieces
from .copier import Source, Target
from .moves import LoadRequest, SaveRequest

__all__ = ["load_requests", "same_length", "save_requests"]


def save_requests(
    batch: Batch[Saved],
    keys: Sequence[PageKey],
    pages: Sequence[Any],
    attachments: Sequence[Mapping[str, bytes] | None],
    *,
    page_bytes: int,
    attachment_bytes: int,
    rollout: Hashable,
) -> list[SaveRequest]:
    """One request a page.

    Raises:
        ShapeError: a page or its packed attachments have the wrong size.
        UnsupportedError: a page is not in host memory.
    """
    users = () if rollout is None else (rollout,)
    requests = []
    for index, (key, page, named) in enumerate(zip(keys, pages, attachments, strict=True)):
        pieces = page_pieces(page, page_bytes=page_bytes, writable=False)
        extra = pack_attachments(named or {})
        if len(extra) > attachment_bytes:
            raise ShapeError(
                f"the packed attachments have {len(extra)} bytes; the tiers keep "
                f"{attachment_bytes}. Make them with attachment_bytes={len(extra)} or more."
            )
        source = Source(batch, index, pieces, extra)
        requests.append(SaveRequest(key, page_bytes + len(extra), users, source))
    return requests


def load_requests(
    batch: Batch[Loaded],
    keys: Sequence[PageKey],
    into: Sequence[Any],
    *,
    page_bytes: int,
    rollout: Hashable,
) -> list[LoadRequest]:
    """One request a page.

    Raises:
        ShapeError: a buffer has the wrong size or is read-only.
        UnsupportedError: a buffer is not in host memory.
    """
    users = () if rollout is None else (rollout,)
    requests = []
    for index, (key, page) in enumerate(zip(keys, into, strict=True)):
        pieces = page_pieces(page, page_bytes=page_bytes, writable=True)
        requests.append(LoadRequest(key, users, Target(batch, index, pieces)))
    return requests


def same_length(**sequences: Sequence[Any]) -> None:
    """Raises `ShapeError` unless a batch has one of each for every page."""
    lengths = {name: len(each) for name, each in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise ShapeError(f"a batch has one of each for every page; got {lengths}")

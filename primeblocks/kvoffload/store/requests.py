"""Requests of a store's callers, checked and ready for its catalogue."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ...errors import PlanError, ShapeError, UnsupportedError, UsageError
from ..attachments import pack_attachments
from ..host import HostTier
from ..page import PageKey
from ..tier import Loaded, Saved, Tier
from .buffers import page_buffer
from .moves import LoadRequest, SaveRequest
from .pending import Batch

__all__ = ["in_order", "load_requests", "same_length", "save_requests", "users_of"]


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
    """Make one save request for each page.

    Raises:
        ShapeError: a page or its packed attachments have the wrong size.
        UnsupportedError: a page is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    requests = []
    for index, (key, page, named) in enumerate(zip(keys, pages, attachments, strict=True)):
        buffer = page_buffer(batch, index, page, page_bytes=page_bytes, writable=False)
        if named:
            buffer.extra = _packed(named, attachment_bytes)
        _check(key)
        requests.append(SaveRequest(key, page_bytes + len(buffer.extra), users, buffer))
    return requests


def load_requests(
    batch: Batch[Loaded],
    keys: Sequence[PageKey],
    into: Sequence[Any],
    *,
    page_bytes: int,
    rollout: Hashable,
) -> list[LoadRequest]:
    """Make one load request for each page.

    Raises:
        ShapeError: a buffer has the wrong size or is read-only.
        UnsupportedError: a buffer is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    requests = []
    for index, (key, page) in enumerate(zip(keys, into, strict=True)):
        buffer = page_buffer(batch, index, page, page_bytes=page_bytes, writable=True)
        _check(key)
        requests.append(LoadRequest(key, users, buffer))
    return requests


def users_of(*names: Hashable) -> tuple[Hashable, ...]:
    """Return the names that are not None; raise `UsageError` for one that is not hashable."""
    for name in names:
        try:
            hash(name)
        except TypeError as error:
            raise UsageError(
                f"rollouts, and what they wait for, have names that can be hashed, such as text; "
                f"got {name!r}"
            ) from error
    return tuple(name for name in names if name is not None)


def _packed(attachments: Mapping[str, bytes], room: int) -> bytes:
    packed = pack_attachments(attachments)
    if len(packed) > room:
        raise ShapeError(
            f"the packed attachments have {len(packed)} bytes; the tiers keep "
            f"{room}. Make them with attachment_bytes={len(packed)} or more."
        )
    return packed


def _check(key: PageKey) -> None:
    if not isinstance(key, PageKey):
        raise UsageError(f"a page is named by a PageKey; got {key!r}")


def same_length(**sequences: Sequence[Any]) -> None:
    """Raise `ShapeError` unless a batch has one of each for every page."""
    lengths = {name: len(each) for name, each in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise ShapeError(f"a batch has one of each for every page; got {lengths}")


def in_order(tiers: Sequence[HostTier | Tier]) -> tuple[HostTier, list[Tier]]:
    """Split tiers into host memory and those below it.

    Raises:
        UnsupportedError: no host tier in front, or a tier below one that others write to.
        PlanError: the tiers differ in their page or attachment size.
    """
    names = [tier.name for tier in tiers]
    if not tiers or not isinstance(tiers[0], HostTier):
        raise UnsupportedError(
            f"the first tier must be a HostTier; got {names}. Put HostTier(...) in front."
        )
    host = tiers[0]
    below = [tier for tier in tiers[1:] if not isinstance(tier, HostTier)]
    if len(below) != len(tiers) - 1 or len(set(names)) != len(names):
        raise UnsupportedError(f"tiers need different names and one host tier; got {names}")
    if any(tier.shared for tier in below[:-1]):
        raise UnsupportedError(f"a tier that others write to must be the last; got {names}")
    sizes = {(tier.page_bytes, tier.attachment_bytes) for tier in tiers}
    if len(sizes) != 1:
        raise PlanError(f"tiers with different (page, attachment) bytes: {sorted(sizes)}")
    return host, below

"""The bytes of a version from what arrived: whole, or deltas on the version before. All checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CorruptionError, DeadlineError
from .delta.bucket import apply_payload, encode_payload
from .digest import bucket_digest
from .held import Held, pack, packed_views
from .marker import Marker
from .plan import Plan
from .transports.transport import Incoming

__all__ = ["Version", "bring", "check", "checking", "undone"]

# Less than this is done before a thread has started.
_BYTES_A_THREAD = 8 << 20


class Version(NamedTuple):
    """A version that this reader has.

    Attributes:
        bytes: what was read for it.
        undo: by bucket, what makes of it the version that it was made of.
        is_checked: whether its bytes are known to be right.
    """

    marker: Marker
    held: Held
    bytes: int
    undo: Mapping[int, memoryview]
    is_checked: bool = True

    def loaded(self) -> Version:
        """The same, with nothing to go back to, and checked."""
        return self._replace(undo={}, is_checked=True)


def bring(
    plan: Plan,
    reader: int,
    found: Sequence[Incoming],
    base: Version | None,
    *,
    deadline: float,
    undoable: bool,
    threads: int,
) -> Version:
    """The bytes of the last of `found`, each a delta to the one before.

    Args:
        base: what the first of them is a delta to; it becomes the new version in place.
        undoable: whether to find out what leads back to `base`; one more pass over both.
        threads: how many buckets are worked on at a time, where there is enough to do.

    Raises:
        CorruptionError: it is not what was sent.
        DeadlineError: it was not checked in time.
        TransferError: it was retired meanwhile.
    """
    deltas = [one for one in found if one.marker.base is not None]
    if len(deltas) < len(found):
        held = found[0].whole()
    else:
        assert base is not None, "a delta to what is not held"
        held = base.held
    marker, mine, undo = found[-1].marker, plan.of_reader(reader), {}
    if deltas:
        held.own()
    done = count()

    def bring_bucket(index: int) -> None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"checked {next(done)} of {len(mine)} buckets in time")
        if deltas:
            payloads = [delta.payload(index) for delta in deltas]
            back = _overwrite(plan, index, held, payloads, undoable=undoable)
            if back is not None:
                undo[index] = back
        _check_bucket(plan, index, held, marker)
        next(done)

    try:
        _for_each(plan, mine, bring_bucket, threads=threads)
    except BaseException:
        held.own()  # Whatever is wrong with it, nobody shall read it again.
        held.close()
        raise
    size = sum(one.marker.sizes[index] for one in found for index in mine)
    return Version(marker, held, size, undo)


def undone(plan: Plan, reader: int, version: Version, marker: Marker) -> Version:
    """What `version` was made of, in its place, checked.

    Raises:
        CorruptionError: it is not what it was.
    """
    for index, payload in version.undo.items():
        _overwrite(plan, index, version.held, [payload], undoable=False)
    old = Version(marker, version.held, version.bytes, {})
    check(plan, reader, old)
    return old


def check(plan: Plan, reader: int, version: Version) -> None:
    """Check every byte that this reader wants.

    Raises:
        CorruptionError: one is not what was sent.
    """
    for index in plan.of_reader(reader):
        _check_bucket(plan, index, version.held, version.marker)


@contextmanager
def checking(plan: Plan, reader: int, version: Version) -> Iterator[Callable[[str], None]]:
    """Check buckets in a thread; what it gives returns once all bytes of a tensor are right.

    One thread: more take from the copy what memory gives.

    Raises:
        CorruptionError: from what it gives, one is not what was sent.
    """
    buckets_of: dict[str, list[Future[None]]] = {}
    with ThreadPoolExecutor(1) as pool:
        turn = {name: place for place, name in enumerate(plan.wants[reader])}
        first = {
            index: min(turn[copy.name] for copy in plan.buckets[index].copies)
            for index in plan.of_reader(reader)
        }
        for index in sorted(first, key=first.__getitem__):
            future = pool.submit(_check_bucket, plan, index, version.held, version.marker)
            for name in {copy.name for copy in plan.buckets[index].copies}:
                buckets_of.setdefault(name, []).append(future)

        def wait_for(name: str) -> None:
            for future in buckets_of.get(name, ()):
                future.result()

        try:
            yield wait_for
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _for_each(
    plan: Plan, indices: Sequence[int], work: Callable[[int], None], *, threads: int
) -> None:
    """Work on each bucket; the first error ends it, once those under way are done."""
    size = sum(plan.buckets[index].bytes for index in indices)
    threads = min(threads, len(indices), 1 + size // _BYTES_A_THREAD)
    if threads <= 1:
        for index in indices:
            work(index)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, index) for index in indices]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _check_bucket(plan: Plan, index: int, held: Held, marker: Marker) -> None:
    bucket = plan.buckets[index]
    if bucket_digest(held.views(index)) != marker.buckets[index]:
        names = sorted({copy.name for copy in bucket.copies})
        raise CorruptionError(
            f"bucket {index} of version {marker.version} fails its digest: "
            f"{bucket.bytes:,} bytes from rank {bucket.rank}, {len(names)} tensors such "
            f"as {names[0]!r}. Publish again."
        )


def _overwrite(
    plan: Plan, index: int, held: Held, payloads: Sequence[memoryview], *, undoable: bool
) -> memoryview | None:
    """Apply deltas to a bucket, oldest first; what undoes them, if that is asked for."""
    pieces = held.views(index)
    packed = pack(plan, index, pieces)
    before = packed.clone() if undoable else None
    for payload in payloads:
        if len(payload) == len(packed):
            packed = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        else:
            apply_payload(plan, index, packed, payload)
    after: list[Tensor] = packed_views(plan, index, packed)
    for piece, new in zip(pieces, after, strict=True):
        piece.copy_(new)
    if before is None:
        return None
    back = encode_payload(plan, index, before, packed)
    return before.numpy().data if back is None else memoryview(back)

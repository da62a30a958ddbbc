"""The bytes of a version on their way into a load: fetched, checked, loaded.

A load gets only bytes that were checked. Other processes cannot change bytes in this process's
memory, or bytes that their writers sealed. These bytes are checked once, and the load uses them in
place. Other processes may still write to lent bytes. So the load gets copies, which are checked,
even if the bytes were checked before the load.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CorruptionError, PlanError
from ..layout import Shard
from .convert.conversion import Wiring
from .delta.deltas import apply_payloads
from .digest import bucket_digest, cast_and_digest, pool_of
from .held import Boxes, CachingAllocator, Held, Lent, Sealed, chunks_of, copy_bucket, in_time, used
from .marker import Digests, Marker
from .plan import Plan
from .progress import Counted
from .transports.transport import Incoming, ReceiveRequest

__all__ = ["Feed", "Fetched", "ReaderState", "bring", "check", "check_plan", "feeding", "write"]

# Fewer bytes than this are checked before another thread has started.
_BYTES_A_THREAD = 8 << 20
# Buckets that are checked before a load asks for them.
_AHEAD = 2


class ReaderState(Enum):
    """The states of a reader and of its versions. The head of `receive.py` draws them."""

    EMPTY = "empty"
    FETCHED = "fetched"
    CHECKED = "checked"
    LOADED = "loaded"
    TORN = "torn"


class Fetched(NamedTuple):
    """The weights of one version, as this reader has them.

    Attributes:
        held: the bytes. None after they were released.
        bytes: the number of bytes read for the version.
        state: FETCHED, or CHECKED after every byte was checked.
        digests: digests of the engine's tensors after the load, if they are observed.
    """

    marker: Marker
    held: Held | Lent | None
    bytes: int
    state: ReaderState = ReaderState.CHECKED
    digests: Digests | None = None

    def closed(self) -> Fetched:
        """Release the bytes, and return what is known of them."""
        if self.held is not None:
            self.held.close()
        return self._replace(held=None)


def check_plan(plan: Plan, marker: Marker) -> None:
    """Check that a version was sent by a plan, before any byte of the version is read.

    Raises:
        PlanError: the version was sent by another plan.
        CorruptionError: the sizes in the marker do not fit this plan.
    """
    if marker.plan != plan.fingerprint():
        raise PlanError(
            f"version {marker.version} was written by plan {marker.plan}, but this reader has "
            f"plan {plan.fingerprint()}. Build both from the same manifests. If the trainer has "
            "announced another plan, call find again, and make a new Subscriber."
        )
    sizes, whole = marker.sizes, tuple(bucket.bytes for bucket in plan.buckets)
    fits = len(sizes) == len(whole) and all(map(operator.le, sizes, whole))
    if not fits or (marker.base is None and sizes != whole):
        raise CorruptionError(
            f"the marker of version {marker.version} has bucket sizes that do not fit its plan. "
            "Publish again."
        )


def bring(
    request: ReceiveRequest,
    found: Sequence[Incoming],
    base: Held | Lent | None,
    *,
    memory: CachingAllocator,
    threads: int,
    counted: Counted,
) -> Fetched:
    """Return the checked bytes of the last version in `found`.

    The first version in `found` may be full. The other versions are deltas, each to the previous
    one. Deltas are applied to a copy, so that their base stays whole. Then the result is checked.

    Args:
        base: the version to which the first version in `found` is a delta. It is not written to.
        memory: the source of memory for the copy.
        threads: how many buckets are handled at a time, if there are enough bytes.
        counted: gets the bytes of each checked bucket.

    Raises the errors that `Subscriber.receive` raises before a load.
    """
    plan, reader, deadline = request.plan, request.reader, request.deadline
    for each in found:
        check_plan(plan, each.marker)
    marker, mine = found[-1].marker, plan.of_reader(reader)
    deltas = [one for one in found if one.marker.base is not None]
    whole = None if len(deltas) == len(found) else found[0].whole()
    start = base if whole is None else whole
    assert start is not None, "a delta to what is not held"
    held = start
    if deltas:
        held = Boxes(plan, reader, stays=start.stays, device=start.device, memory=memory)
    checked: list[int] = []
    counted.begin(plan.read_bytes(reader))

    def bring_bucket(index: int) -> None:
        done, every = len(checked), len(mine)
        in_time(deadline, f"the reader checked {done} of {every} buckets in time")
        if isinstance(held, Boxes) and deltas:
            pieces = held.views(index)
            copy_bucket(plan, index, start, pieces)
            digest = apply_payloads(plan, index, pieces, [one.payload(index) for one in deltas])
            _compare(plan, index, marker, digest)
        else:
            _check_bucket(plan, index, start, marker)
        checked.append(index)

    is_kept = False
    try:
        with used(start):
            _for_each(plan, mine, start, bring_bucket, threads=threads, counted=counted)
            late = f"the reader checked all {len(mine)} buckets, but after the deadline"
            in_time(deadline, late)
        is_kept = not deltas
    finally:
        if whole is not None and not is_kept:
            whole.close()
    size = sum(one.marker.sizes[index] for one in found for index in mine)
    return Fetched(marker, held, size)


def check(plan: Plan, reader: int, fetched: Fetched) -> None:
    """Check every byte that this reader wants, or raise CorruptionError."""
    assert fetched.held is not None
    for index in plan.of_reader(reader):
        _check_bucket(plan, index, fetched.held, fetched.marker)


def write(
    plan: Plan,
    reader: int,
    fetched: Fetched,
    places: Mapping[str, Tensor],
    *,
    threads: int,
    counted: Counted,
) -> None:
    """Copy a version into an engine's own tensors, and check the copies, in one pass.

    Raises:
        CorruptionError: a byte is not as sent. Some tensors were already written.
    """
    held, into = fetched.held, Boxes(plan, reader, stays=True, served=places)
    assert held is not None

    def write_bucket(index: int) -> None:
        pieces = into.views(index)
        # Caches of values made from these tensors look at torch's count of writes.
        torch.autograd.graph.increment_version([one for one in pieces if not one.is_inference()])
        _check_bucket(plan, index, held, fetched.marker, into=pieces)

    with used(held):
        mine = plan.of_reader(reader)
        _for_each(plan, mine, held, write_bucket, threads=threads, counted=counted)


class Feed:
    """The checked tensors of a version, for one load.

    If bytes do not change and were checked, the load gets them in place. Other bytes are checked
    in threads, a few buckets ahead of the load. Lent bytes are copied, and each copy is freed
    after its last use.

    Args:
        convert: the wiring from the plan's tensors to the tensors that the load gets.
        written: the names of tensors that an earlier load wrote to. The load gets copies of these,
            because kept bytes are the base of the next delta. This load's names are added.
    """

    def __init__(
        self,
        plan: Plan,
        reader: int,
        fetched: Fetched,
        convert: Wiring | None,
        written: set[str],
        pool: Executor,
    ) -> None:
        assert fetched.held is not None
        self._plan, self._pool = plan, pool
        self._source, self._marker = fetched.held, fetched.marker
        self._wants, self._convert, self._written = plan.wants[reader], convert, written
        self.names = list(self._wants if convert is None else convert.targets)
        self._uses = Counter(source for name in self.names for source in self._made_of(name))
        self._copies = None
        held = fetched.held
        if isinstance(held, Lent):
            held = self._copies = Boxes(plan, reader, stays=False, device=held.device)
        self._held: Held = held
        self._order: list[int] = []
        if self._copies is not None or fetched.state is ReaderState.FETCHED:
            # In the load's order, so that few copies exist at a time.
            turn = {name: place for place, name in enumerate({**self._uses, **self._wants})}
            first = {
                index: min(turn[copy.name] for copy in plan.buckets[index].copies)
                for index in plan.of_reader(reader)
            }
            self._order = sorted(first, key=first.__getitem__)
        self._places: dict[str, list[int]] = {}
        for place, index in enumerate(self._order):
            for name in {copy.name for copy in plan.buckets[index].copies}:
                self._places.setdefault(name, []).append(place)
        self._checks: list[Future[None]] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) pairs for a load, or raise CorruptionError.

        Each tensor is valid until the next one.
        """
        for name in self.names:
            tensor = self._tensor(name)
            before = _writes(tensor)
            yield name, tensor
            is_lent = self._convert is None  # Otherwise the tensor was made for this load.
            if is_lent and _writes(tensor) != before and name not in self._written:
                self._written.add(name)
                self._held.stays = isinstance(self._held, Sealed)  # Deltas need unchanged bytes.
            if self._copies is not None:
                for source in self._made_of(name):
                    self._uses[source] -= 1
                    if self._uses[source] == 0:
                        self._copies.drop(source)

    def check(self) -> None:
        """Check all unchecked bytes before the load asks for a tensor, or raise CorruptionError."""
        self._checks = [self._pool.submit(self._check, index) for index in self._order]
        for check in self._checks:
            check.result()

    def _made_of(self, name: str) -> Iterable[str]:
        if self._convert is None:
            return (name,)
        return {piece.source for piece in self._convert.by_target[name]}

    def _tensor(self, name: str) -> Tensor:
        if self._convert is None:
            (box,) = self._wants[name]
            held = self._box(name, box)
            return held.clone() if self._copies is None and name in self._written else held
        spec, pieces = self._convert.targets[name], self._convert.by_target[name]
        made = torch.zeros(spec.shape, dtype=spec.dtype, device="cpu")  # Padding is zero.
        for piece in pieces:
            source = self._box(piece.source, piece.source_box)
            made[piece.target_box.slices].copy_(piece.view(source, piece.source_box))
        return made

    def _box(self, name: str, box: Shard) -> Tensor:
        places = self._places.get(name, ())
        for index in self._order[len(self._checks) : max(places, default=-1) + 1 + _AHEAD]:
            self._checks.append(self._pool.submit(self._check, index))
        for place in places:
            self._checks[place].result()
        return self._held.box(name, box)

    def _check(self, index: int) -> None:
        into = None if self._copies is None else self._copies.views(index)
        _check_bucket(self._plan, index, self._source, self._marker, into=into)


def _writes(tensor: Tensor) -> int:
    """Return torch's count of writes, which tensors of inference mode do not have."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def feeding(
    plan: Plan,
    reader: int,
    fetched: Fetched,
    convert: Wiring | None,
    written: set[str],
    *,
    threads: int,
) -> Iterator[Feed]:
    """Open a `Feed` for the duration of one load."""
    lent, cores = isinstance(fetched.held, Lent), len(os.sched_getaffinity(0))
    threads = _as_many(plan, plan.of_reader(reader), threads)
    # If a load uses all cores of this process, checks at the same time only slow it down.
    before = not lent and torch.get_num_threads() >= cores > 1
    # Two threads for copies. More would take memory bandwidth from the load, and more memory.
    most = cores if before else 2 if lent else 1
    assert fetched.held is not None
    with used(fetched.held), pool_of(min(most, threads)) as pool:
        feed = Feed(plan, reader, fetched, convert, written, pool)
        try:
            if before:
                feed.check()
            yield feed
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _as_many(plan: Plan, indices: Sequence[int], threads: int) -> int:
    """Return the number of threads that have enough bytes each."""
    size = sum(plan.buckets[index].bytes for index in indices)
    return max(1, min(threads, len(indices), 1 + size // _BYTES_A_THREAD))


def _for_each(
    plan: Plan,
    indices: Sequence[int],
    held: Held | Lent,
    work: Callable[[int], None],
    *,
    threads: int,
    counted: Counted,
) -> None:
    """Work on each bucket. After the first error, only the buckets already started are finished."""
    if not isinstance(held, Lent):  # For bytes in memory, more threads than cores only wait.
        threads = min(threads, len(os.sched_getaffinity(0)))
    threads = _as_many(plan, indices, threads)
    if threads == 1:
        for index in indices:
            work(index)
            counted.add(plan.buckets[index].bytes)
        return
    with pool_of(threads) as pool:
        futures = [pool.submit(work, index) for index in indices]
        try:
            for index in indices:
                futures.pop(0).result()
                counted.add(plan.buckets[index].bytes)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            futures.clear()  # An error would keep this frame and its bytes alive.


def _check_bucket(
    plan: Plan,
    index: int,
    held: Held | Lent,
    marker: Marker,
    *,
    into: Sequence[Tensor] | None = None,
) -> None:
    """Check one bucket. With `into`, copy the bucket to these tensors, and check the copies."""

    def digest() -> str:
        if isinstance(held, Lent):
            return bucket_digest(chunks_of(plan, index, held, into))
        if into is None:
            return bucket_digest(held.views(index))
        return cast_and_digest(held.views(index), [piece.dtype for piece in into], into)

    found = digest()
    if isinstance(held, Sealed) and found != marker.buckets[index]:
        held.rest(is_right=False)  # An earlier load may have written to this process's pages.
        found = digest()
    _compare(plan, index, marker, found)


def _compare(plan: Plan, index: int, marker: Marker, digest: str) -> None:
    bucket = plan.buckets[index]
    if digest != marker.buckets[index]:
        names = sorted({copy.name for copy in bucket.copies})
        raise CorruptionError(
            f"bucket {index} of version {marker.version} fails its digest: "
            f"{bucket.bytes:,} bytes from rank {bucket.rank}, {len(names)} tensors such "
            f"as {names[0]!r}. Publish again."
        )

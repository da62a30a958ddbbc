"""One rank's part of one version: taken once, digested, made smaller where that is sooner."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..errors import DeadlineError, TransferError
from .delta.deltas import CHUNK_BYTES, Chunk, apply_payloads, take_payload
from .digest import Digest, as_buffer, cast_and_digest, taken
from .held import packed_views
from .parts import Parts
from .plan import Plan

__all__ = ["Pace", "Sent", "SentBytes", "Shipment"]

# Buckets that wait for a thread: what `encode` made for them is in memory.
_AHEAD = 4
# Less takes so little time either way that a clock tells nothing: there the fewer bytes win.
_WORTH_A_CHOICE_BYTES = 8 << 20

T = TypeVar("T")
Views = tuple[list[Tensor], list[torch.dtype]]


@dataclass(frozen=True)
class Sent:
    """The cost of one version.

    Attributes:
        bytes: as it travelled, of all ranks.
        seconds: until all ranks had taken, encoded and sent it.
        apply_s: what a reader needs for it beyond what a full version needs.
    """

    bytes: int
    seconds: float
    apply_s: float = 0.0

    def expected_s(self, link_bytes_per_s: float | None) -> float:
        """Return the seconds from a publish until readers have it."""
        carry_s = 0.0 if link_bytes_per_s is None else self.bytes / link_bytes_per_s
        return self.seconds + self.apply_s + carry_s


@dataclass(frozen=True)
class Pace:
    """The costs of the last full version and the last delta, and what was sent since.

    Attributes:
        fulls: full versions since the last delta.
        deltas: deltas since the last full version, of `delta_bytes` in all.
    """

    full: Sent | None = None
    delta: Sent | None = None
    fulls: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    def after(self, sent: Sent, *, is_delta: bool) -> Pace:
        """Return the pace after one more version."""
        if is_delta:
            size = self.delta_bytes + sent.bytes
            return replace(self, delta=sent, fulls=0, deltas=self.deltas + 1, delta_bytes=size)
        return replace(self, full=sent, fulls=self.fulls + 1, deltas=0, delta_bytes=0)

    def wants_delta(self, *, full_every: int, link_bytes_per_s: float | None) -> bool:
        """Tell whether the next version is to be a delta.

        It is full where `full_every` or the bytes of the deltas since the last full one say so;
        else whichever is expected sooner. What was not tried for `full_every` versions is tried.
        """
        if self.full is None or self.deltas + 1 >= full_every:
            return False
        if self.delta_bytes >= self.full.bytes:
            return False
        if self.delta is None or self.fulls >= full_every:
            return True
        if self.full.bytes < _WORTH_A_CHOICE_BYTES:
            return True
        delta_s, full_s = (one.expected_s(link_bytes_per_s) for one in (self.delta, self.full))
        return delta_s <= full_s


class SentBytes:
    """The bytes that this rank sent last, packed, from which the next deltas are made.

    Attributes:
        apply_s_a_byte: the seconds that a reader needs for each byte of a delta, in one thread.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.apply_s_a_byte: float | None = None
        self.buffers: dict[int, UInt8[Tensor, " bytes"]] = {}

    def forget(self) -> None:
        """Have the next version sent in full."""
        self.version = None
        self.buffers = {}

    def kept(self, plan: Plan, index: int) -> UInt8[Tensor, " bytes"]:
        """Return the memory of a bucket; new memory where there is none."""
        if index not in self.buffers:
            self.buffers[index] = torch.empty(plan.buckets[index].bytes, dtype=torch.uint8)
        return self.buffers[index]


class Shipment:
    """Buckets of one version that a trainer rank sends, which a transport asks for in any order.

    They are made of pieces of the parameters, with the bytes that were sent of them before.
    A history becomes this version while the version is taken: where that or the commit fails, it is
    to be forgotten.

    Args:
        pool: threads that take buckets; None takes them one after another, in this one.
        progress: called with bytes taken and bytes to take, after each bucket, in this thread.

    Attributes:
        digests: of each bucket that was asked for.
        sizes: bytes of each as it travels.
    """

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        rank: int,
        version: int,
        *,
        base: int | None,
        history: SentBytes | None,
        pool: Executor | None,
        deadline: float,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.plan, self.rank, self.version, self.base = plan, rank, version, base
        self.digests: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self._parts, self._pool, self._deadline = parts, pool, deadline
        self._progress = progress
        self._history, self._payloads = history, dict[int, memoryview]()
        if base is not None and (history is None or history.version != base):
            raise TransferError(f"rank {rank} has not what it sent as version {base} any more")
        if history is not None:
            history.version = None  # From here on it is neither of the two versions.

    def fill_all(self, buckets: Iterable[tuple[int, Sequence[Tensor] | None]]) -> None:
        """Copy buckets in full, several at a time: each of their copies, shaped as its box."""
        for index, digest in self._each(self._fill, buckets):
            self._note(index, digest, self.plan.buckets[index].bytes)

    def payload(self, index: int) -> memoryview:
        """Return a bucket as it travels: a delta if `base` is given and smaller, else packed."""
        if not self._payloads:
            mine = [(each, None) for each in self.plan.of_rank(self.rank)]
            for each, (digest, payload) in self._each(self._encode, mine):
                self._note(each, digest, len(payload))
                self._payloads[each] = payload
        return self._payloads[index]

    def digest_all(self) -> None:
        """Take every piece, for its digest alone."""
        self.fill_all((index, None) for index in self.plan.of_rank(self.rank))

    def sent(self) -> float:
        """Remember what was sent as the base of the next delta; return `Sent.apply_s`."""
        if self._history is None:
            return 0.0
        self._history.version = self.version
        if not self._payloads:
            return 0.0
        if self._history.apply_s_a_byte is None:
            self._history.apply_s_a_byte = self._apply_s_a_byte()
        return self._history.apply_s_a_byte * sum(self.sizes.values())

    def _apply_s_a_byte(self) -> float:
        """Apply one bucket once more, to a copy as readers do, to see how long that takes."""
        assert self._history is not None
        index, payload = max(self._payloads.items(), key=lambda item: len(item[1]))
        pieces = packed_views(self.plan, index, self._history.kept(self.plan, index))
        start = time.monotonic()
        apply_payloads(self.plan, index, [piece.clone() for piece in pieces], [payload])
        return (time.monotonic() - start) / len(payload)

    def _note(self, index: int, digest: str, size_bytes: int) -> None:
        self.digests[index], self.sizes[index] = digest, size_bytes
        if self._progress is not None:
            done = sum(self.plan.buckets[each].bytes for each in self.digests)
            self._progress(done, self.plan.written_bytes(self.rank))

    def _fill(self, index: int, views: Views, into: Sequence[Tensor] | None) -> str:
        if self._history is None:
            return cast_and_digest(*views, into)
        kept = packed_views(self.plan, index, self._history.kept(self.plan, index))
        digest = cast_and_digest(*views, kept)
        for view, piece in zip(into or (), kept, strict=True):
            view.copy_(piece)
        return digest

    def _encode(self, index: int, views: Views, into: object) -> tuple[str, memoryview]:
        assert self._history is not None, "a delta to what is not held"
        old, digest = self._history.kept(self.plan, index), Digest()
        rooms = packed_views(self.plan, index, old)

        def chunks() -> Iterator[Chunk]:
            for view, dtype, room in zip(*views, rooms, strict=True):
                for new, place in taken(view, dtype, room, CHUNK_BYTES):
                    assert place is not None, "kept bytes are plain"
                    digest.update(new.data)
                    yield new, place

        coded = take_payload(self.plan, index, chunks(), old)
        return digest.hexdigest(), as_buffer(old) if coded is None else memoryview(coded)

    def _each(
        self, work: Callable[..., T], buckets: Iterable[tuple[int, Sequence[Tensor] | None]]
    ) -> Iterator[tuple[int, T]]:
        """Work on buckets, several at a time; yield each with what came of it, in order.

        Their tensors are looked up, and encoded, in this thread.
        """

        def in_time(*args: object) -> T:
            self._check_deadline()
            return work(*args)

        under_way: deque[tuple[int, Future[T]]] = deque()
        for index, into in buckets:
            self._check_deadline()
            views = self._parts.views(index)
            if self._pool is None:
                yield index, work(index, views, into)
                continue
            under_way.append((index, self._pool.submit(in_time, index, views, into)))
            if len(under_way) > _AHEAD:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            done, whole = len(self.digests), len(self.plan.of_rank(self.rank))
            raise DeadlineError(f"took {done} of {whole} buckets before the deadline")

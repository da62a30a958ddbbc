"""One rank's part of one version: read once, digested, and sent as a delta if that is faster.

`SentBytes` keeps what this rank sent last, as the base of the next delta. `Pace` keeps what the
last full version and the last delta cost, and chooses between them. `Shipment` is one version that
is being sent. During a shipment, `SentBytes` has bytes of both versions, and `version=None`.
If the send or the commit fails, the publisher drops the bytes, and sends the next version in full.
"""

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

from ..errors import TransferError
from .delta.deltas import CHUNK_BYTES, Chunk, apply_payloads, take_payload
from .digest import Digest, as_buffer, cast_and_digest, taken
from .held import in_time, packed_views
from .parts import Parts
from .plan import Plan
from .progress import Counted, Progress

__all__ = ["Pace", "Sent", "SentBytes", "Shipment"]

# The buckets that wait for a thread. The tensors that `encode` made for them are in memory.
_AHEAD = 4
# Smaller versions take too little time to compare. For these, a delta wins, because it is smaller.
_WORTH_A_CHOICE_BYTES = 8 << 20

T = TypeVar("T")
Views = tuple[list[Tensor], list[torch.dtype]]


@dataclass(frozen=True)
class Sent:
    """The cost of one version. `bytes` counts all ranks, and `seconds` is the time of the send.

    `apply_s` is the time that the reader of the most bytes needs to apply the deltas of all ranks.
    """

    bytes: int
    seconds: float
    apply_s: float = 0.0

    def expected_s(self, link_bytes_per_s: float | None) -> float:
        """Return the expected seconds from a publish until readers have the version."""
        carry_s = 0.0 if link_bytes_per_s is None else self.bytes / link_bytes_per_s
        return self.seconds + self.apply_s + carry_s


@dataclass(frozen=True)
class Pace:
    """The costs of the last full version and of the last delta, and counts of versions.

    Attributes:
        fulls: the number of full versions since the last delta.
        deltas, delta_bytes: the number and the bytes of deltas since the last full version.
    """

    full: Sent | None = None
    delta: Sent | None = None
    fulls: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    def after(self, sent: Sent, *, is_delta: bool) -> Pace:
        if is_delta:
            size = self.delta_bytes + sent.bytes
            return replace(self, delta=sent, fulls=0, deltas=self.deltas + 1, delta_bytes=size)
        return replace(self, full=sent, fulls=self.fulls + 1, deltas=0, delta_bytes=0)

    def wants_delta(self, *, full_every: int, link_bytes_per_s: float | None) -> bool:
        """Whether the next version should be a delta.

        The faster kind wins. But at least one in `full_every` versions is full, and a delta follows
        `full_every` full versions. A version is also full if the deltas since the last full version
        have at least as many bytes as that version.
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
    """The bytes that this rank sent last, packed. The next delta is made from them.

    Attributes:
        version: the version of the bytes, or None while they are replaced.
        apply_s_a_byte: the seconds that a reader needs per byte of a delta, in one thread.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.apply_s_a_byte: float | None = None
        self.buffers: dict[int, UInt8[Tensor, " bytes"]] = {}

    def forget(self) -> None:
        """Drop the bytes, so that the next version is sent in full."""
        self.version = None
        self.buffers = {}

    def kept(self, plan: Plan, index: int) -> UInt8[Tensor, " bytes"]:
        """Return the memory of a bucket."""
        if index not in self.buffers:
            self.buffers[index] = torch.empty(
                plan.buckets[index].bytes, dtype=torch.uint8, device="cpu"
            )
        return self.buffers[index]


class Shipment:
    """The buckets of one version that a trainer rank sends. A transport asks for them in any order.

    Reads the parameters, and overwrites `history` with their bytes. If the send or the commit
    fails, call `history.forget()`.

    Args:
        base: the version to which buckets are sent as deltas. With None, buckets are sent in full.
        history: the bytes that this rank sent last. With None, no bytes are kept.
        pool: threads that read buckets. With None, the caller's thread reads one bucket at a time.
        progress: called after each bucket, in the caller's thread, with bytes read and their total.
    """

    def __init__(
        self,
        parts: Parts,
        version: int,
        *,
        base: int | None,
        history: SentBytes | None,
        pool: Executor | None,
        deadline: float,
        progress: Progress | None,
    ) -> None:
        self.plan, self.rank, self.version, self.base = parts.plan, parts.rank, version, base
        self.digests: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self._parts, self._pool, self._deadline = parts, pool, deadline
        self._counted = Counted(progress)
        self._counted.begin(self.plan.written_bytes(self.rank))
        self._history, self._payloads = history, dict[int, memoryview]()
        if base is not None and (history is None or history.version != base):
            raise TransferError(
                f"rank {self.rank} does not have the bytes of version {base} any more. Publish "
                "again."
            )
        if history is not None:
            history.version = None  # From now on, it has bytes of both versions.

    def fill_all(self, buckets: Iterable[tuple[int, Sequence[Tensor] | None]]) -> None:
        """Fill the tensors of whole buckets, several buckets at a time."""
        for index, digest in self._each(self._fill, buckets):
            self._note(index, digest, self.plan.buckets[index].bytes)

    def payload(self, index: int) -> memoryview:
        """Return a bucket as sent with a `base`: as a delta, or in full if that is smaller."""
        if not self._payloads:
            mine = [(each, None) for each in self.plan.of_rank(self.rank)]
            for each, (digest, payload) in self._each(self._encode, mine):
                self._note(each, digest, len(payload))
                self._payloads[each] = payload
        return self._payloads[index]

    def digest_all(self) -> None:
        """Read every bucket, only for its digest."""
        self.fill_all((index, None) for index in self.plan.of_rank(self.rank))

    def sent(self, read_bytes: int) -> float:
        """Keep the sent bytes for the next delta. Return `apply_s` of a reader of `read_bytes`."""
        if self._history is None:
            return 0.0
        self._history.version = self.version
        if not self._payloads:
            return 0.0
        if self._history.apply_s_a_byte is None:
            self._history.apply_s_a_byte = self._apply_s_a_byte()
        return self._history.apply_s_a_byte * read_bytes

    def _apply_s_a_byte(self) -> float:
        """Apply one bucket's delta to a copy, as readers do, and return the seconds per byte."""
        assert self._history is not None
        index, payload = max(self._payloads.items(), key=lambda item: len(item[1]))
        pieces = packed_views(self.plan, index, self._history.kept(self.plan, index))
        start = time.monotonic()
        apply_payloads(self.plan, index, [piece.clone() for piece in pieces], [payload])
        return (time.monotonic() - start) / len(payload)

    def _note(self, index: int, digest: str, size_bytes: int) -> None:
        if index not in self.digests:  # A process group fills a bucket once for each reader.
            self._counted.add(self.plan.buckets[index].bytes)
        self.digests[index], self.sizes[index] = digest, size_bytes

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
        """Work on buckets, several at a time. Tensors are encoded in the caller's thread."""

        def work_in_time(*args: object) -> T:
            self._check_deadline()
            return work(*args)

        under_way: deque[tuple[int, Future[T]]] = deque()
        for index, into in buckets:
            self._check_deadline()
            views = self._parts.views(index)
            if self._pool is None:
                yield index, work(index, views, into)
                continue
            under_way.append((index, self._pool.submit(work_in_time, index, views, into)))
            if len(under_way) > _AHEAD:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()

    def _check_deadline(self) -> None:
        done, whole = len(self.digests), len(self.plan.of_rank(self.rank))
        read = f"the rank read {done} of {whole} buckets before the deadline"
        in_time(self._deadline, read)

"""A transport whose trainer ranks each pack their buckets into one buffer, which engines fetch.

`Commits` lists the versions, and gives leases that protect the buffers of a version from writes. A
carrier brings the bytes to an engine, in one of two ways. `Packed` bytes are copied into a buffer
of the engine. `Borrowed` bytes stay in place, and the engine reads them during the load, under the
lease.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, DeadlineError, PlanError, TransferError
from ...layout import Shard
from ..held import Held, Lent, copied, in_time, packed_views
from ..marker import Marker, as_corruption
from ..outgoing import Shipment
from ..plan import Copy, Plan
from .carriers import ALIGN_BYTES, Carrier, OpenedSpans, Shared, Span, noted, starts_of
from .transport import (
    Begun,
    Commits,
    Incoming,
    Lease,
    ReceiveRequest,
    await_versions,
    last_chain,
    newest_only,
)

__all__ = ["Borrowed", "Packed", "PackedTransport", "Pool", "starts_of_version"]

_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


class PackedTransport:
    """A transport whose trainer ranks pack buffers, and whose engines fetch them at any time.

    Each trainer rank packs its part of a version into one buffer on its device. Two buffers are
    used in turn, and each delta has a buffer of its own in host memory. An engine has a lease on
    the version it fetches. A publish that needs a buffer again waits, until its deadline, for the
    leases on this buffer to end. You may publish again after a failure. To join again, a restarted
    rank or engine constructs its end of the transport. If the process of a trainer rank ends, no
    engine can fetch its versions any more, and engines keep the versions that they have.

    A trainer rank needs memory for twice the bytes that it sends, and host memory for its deltas.
    An engine that reads in place needs memory for about three buckets of each trainer rank. Other
    engines need memory for the buckets that they want, or for twice as many with `keep` or deltas.

    Args:
        commits: the `Commits` of this process, which is closed with the transport.
        carrier: the carrier of this process, which is closed with the transport.
        keep: whether engines keep the bytes of the loaded version. Deltas are applied to a copy of
            these bytes. If a later load fails, an engine loads these bytes again, even after the
            trainer's process has ended.
    """

    def __init__(self, commits: Commits, carrier: Carrier, *, keep: bool = False) -> None:
        self.commits, self._carrier, self._keep = commits, carrier, keep
        self._receive_until = 0.0
        # Deltas are made and applied on the host. Torch frees a shared GPU buffer only if it was
        # opened and closed exactly once.
        self._full, self._deltas = Pool(carrier), Pool(carrier, device="cpu")

    def spec(self) -> dict[str, Any]:
        parts = {"commits": self.commits.spec(), "carrier": self._carrier.spec()}
        return {"kind": "packed", **parts, "keep": self._keep}

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: wait until no engine reads the version whose buffers will be reused."""
        markers = self.commits.markers(deadline=deadline)
        self.commits.begin(version, keep=last_chain(markers), deadline=deadline)
        return Begun(self.commits.run, newest_only(base, markers))

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: pack its buckets, and tell readers where its buffers are."""
        kept = [marker.version for marker in self.commits.markers(deadline=deadline)]
        for pool in (self._full, self._deltas):
            pool.keep(kept)
        if outgoing.base is None:
            _pack_all(outgoing, self._full)
        else:
            _pack_payloads(outgoing, self._deltas)
        used = self._full.used | self._deltas.used
        for gpu in {s.buffer.device for s in used.values() if s.buffer.device.type == "cuda"}:
            torch.cuda.synchronize(gpu)  # Other processes do not wait for this stream.
        notes = {
            str(version): {"bytes": len(shared.buffer), "at": shared.note}
            for version, shared in used.items()
        }
        self.commits.post(_note(outgoing.rank), json.dumps(notes), deadline=deadline)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        self.commits.commit(marker, deadline=deadline)

    def abort(self, version: int) -> None:
        self.commits.abort(version)

    def markers(self) -> tuple[Marker, ...]:
        # In a `receive`, a store that stalls has until the deadline to answer.
        return self.commits.markers(deadline=max(self._receive_until, time.monotonic()))

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        self._receive_until = request.deadline
        chain = await_versions(self.commits, request)
        return [_Incoming(self, request, marker) for marker in chain]

    def close(self) -> None:
        try:
            self.commits.close()
        finally:
            self._full.close()
            self._deltas.close()
            self._carrier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Pool:
    """The buffers of one trainer rank, by version, and at most one spare for the next version.

    `device` is the device of the buffers. None is the carrier's device.
    """

    def __init__(self, carrier: Carrier, *, device: str | None = None) -> None:
        self._carrier, self._device = carrier, device
        self.used: dict[int, Shared] = {}
        self._spare: Shared | None = None

    def keep(self, versions: Collection[int]) -> None:
        """Free the buffers of all other versions."""
        for version in [version for version in self.used if version not in versions]:
            self._drop_spare()
            self._spare = self.used.pop(version)

    def take(self, version: int, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Return a buffer for a version. A spare buffer of another size is dropped first."""
        size_bytes = max(1, size_bytes)  # An empty buffer cannot be mapped or registered.
        if self._spare is None or len(self._spare.buffer) != size_bytes:
            self._drop_spare()
            self._spare = self._carrier.make(size_bytes, device=self._device)
        self.used[version], self._spare = self._spare, None
        return self.used[version].buffer

    def close(self) -> None:
        self.keep(())
        self._drop_spare()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._carrier.drop(self._spare)
        self._spare = None


class Packed:
    """The boxes that one reader wants, as views of packed buckets. Implements `Held`.

    A box inside one `Copy` is a view. Any other box is put together in new memory.
    """

    def __init__(
        self, plan: Plan, buckets: Mapping[int, Tensor], *, stays: bool, close: Callable[[], object]
    ) -> None:
        self.stays, self._plan = stays, plan
        self._views = {index: packed_views(plan, index, part) for index, part in buckets.items()}
        self._copies: dict[str, list[tuple[Shard, Tensor]]] = {}
        for index, views in self._views.items():
            for copy, view in zip(plan.buckets[index].copies, views, strict=True):
                self._copies.setdefault(copy.name, []).append((copy.box, view))
        self.device = next((part.device for part in buckets.values()), torch.device("cpu"))
        self.close = weakref.finalize(self, close)
        self.close.atexit = False

    def views(self, index: int) -> list[Tensor]:
        return self._views[index]

    def box(self, name: str, box: Shard) -> Tensor:
        made, found = None, 0
        for have, view in self._copies.get(name, ()):
            common = have.intersect(box)
            if common == box:
                return view[box.within(have).slices]
            if common is not None:
                if made is None:
                    made = torch.empty(box.sizes, dtype=view.dtype, device=view.device)
                made[common.within(box).slices].copy_(view[common.within(have).slices])
                found += common.numel
        if found != box.numel:
            raise PlanError(
                f"the reader wants only {found} of the {box.numel} elements of {box} of {name!r}"
            )
        if made is None:
            dtype = self._plan.target[name].dtype
            made = torch.empty(box.sizes, dtype=dtype, device=self.device)
        return made


class Borrowed:
    """Packed buckets in buffers of trainer ranks, unchanged until `close`. Implements `Lent`."""

    stays = False

    def __init__(self, buckets: Mapping[int, Tensor], *, close: Callable[[], object]) -> None:
        self._buckets = buckets
        self.device = next((part.device for part in buckets.values()), torch.device("cpu"))
        self.close = weakref.finalize(self, close)
        self.close.atexit = False

    def chunks(
        self, index: int, copy: Copy, into: UInt8[Tensor, " bytes"] | None
    ) -> Iterator[UInt8[Tensor, " chunk"]]:
        lies = self._buckets[index][copy.offset : copy.offset + copy.bytes]
        # Large chunks need few launches on a GPU. Small chunks stay in the cache of a CPU.
        step = _CHUNK_BYTES[lies.device.type]
        for start in range(0, copy.bytes, step):
            part = lies[start : start + step]
            yield part.clone() if into is None else into[start : start + step].copy_(part)


class _Incoming:
    """A committed version in buffers of trainer ranks."""

    def __init__(self, end: PackedTransport, request: ReceiveRequest, marker: Marker) -> None:
        self.marker, self._request = marker, request
        self._commits, self._carrier, self._keep = end.commits, end._carrier, end._keep
        self._payloads: dict[int, memoryview] = {}
        self._lock = threading.Lock()  # A reader applies deltas in several threads.

    def whole(self) -> Held | Lent:
        plan, request = self._request.plan, self._request
        lease = self._commits.hold(self.marker, deadline=request.deadline)
        try:
            buckets, opened = self._fetch(lease, again=True)
        except BaseException:
            lease.close()
            raise
        if opened.is_own:
            lease.close()
            return Packed(plan, buckets, stays=self._keep, close=opened.close)

        def close() -> None:
            try:
                opened.close()
            finally:
                lease.close()

        lent = Borrowed(buckets, close=close)
        if not self._keep and lease.until == math.inf:
            return lent
        try:
            until = min(lease.until, request.deadline)  # What is lent for a time is copied in it.
            return copied(plan, request.reader, lent, stays=self._keep, deadline=until)
        finally:
            lent.close()

    def payload(self, index: int) -> memoryview:
        with self._lock:
            if not self._payloads:
                self._payloads = self._fetch_payloads()
        return self._payloads[index]

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing. A committed version stands, whether or not this reader has it."""

    def _fetch_payloads(self) -> dict[int, memoryview]:
        lease = self._commits.hold(self.marker, deadline=self._request.deadline)
        with closing(lease):
            buckets, opened = self._fetch(lease, again=False)
            with closing(opened):
                payloads = {
                    index: memoryview(part.numpy().tobytes()) for index, part in buckets.items()
                }
        return payloads

    def _fetch(self, lease: Lease, *, again: bool) -> tuple[dict[int, Tensor], OpenedSpans]:
        spans = dict(self._spans())
        until = min(lease.until, self._request.deadline)
        try:
            opened = self._carrier.fetch(list(spans.values()), again=again, deadline=until)
        except DeadlineError as error:
            if lease.until >= self._request.deadline:
                raise
            raise DeadlineError(
                f"the lease ended before version {self.marker.version} was fetched. Raise the "
                "owner's lease_s."
            ) from error
        return dict(zip(spans, opened.parts, strict=True)), opened

    def _spans(self) -> Iterator[tuple[int, Span]]:
        plan, marker, deadline = self._request.plan, self.marker, self._request.deadline
        mine = set(plan.of_reader(self._request.reader))
        ranks = sorted({plan.buckets[index].rank for index in mine})
        # Engines begin at random ranks, so that they do not all load one rank's network card.
        first = secrets.randbelow(len(ranks)) if ranks else 0
        for done, rank in enumerate(ranks[first:] + ranks[:first]):
            found = f"the reader found the buffers of {done} of {len(ranks)} ranks in time"
            in_time(deadline, found)
            said = self._commits.look(_note(rank), run=marker.run, deadline=deadline)
            size, note = _noted(said, rank, marker.version)
            starts, size_bytes = starts_of_version(plan, marker, rank)
            if size < size_bytes:
                raise CorruptionError(
                    f"rank {rank} has {size:,} bytes, but the plan needs {size_bytes:,}. Publish "
                    "again."
                )
            for index in sorted(mine & starts.keys()):
                yield index, Span(note, starts[index], marker.sizes[index])


def _note(rank: int) -> str:
    return f"rank-{rank}"


def _noted(said: str | None, rank: int, version: int) -> tuple[int, Mapping[str, Any]]:
    """Return the bytes of a rank's buffer, and its note for the carrier."""
    with as_corruption(f"the note of rank {rank}"):
        found = None if said is None else json.loads(said).get(str(version))
        if found is not None:
            return noted(found, "bytes"), dict(found["at"])
    raise TransferError(
        f"rank {rank} does not have version {version} any more. Receive the newest version."
    )


def starts_of_version(plan: Plan, marker: Marker, rank: int) -> tuple[dict[int, int], int]:
    """Return `starts_of` a rank's buckets in a version. A full version is aligned. Pure."""
    sizes = {index: marker.sizes[index] for index in plan.of_rank(rank)}
    return starts_of(sizes, align_bytes=ALIGN_BYTES if marker.base is None else 1)


def _pack_all(outgoing: Shipment, pool: Pool) -> None:
    plan = outgoing.plan
    sizes = {index: plan.buckets[index].bytes for index in plan.of_rank(outgoing.rank)}
    starts, size_bytes = starts_of(sizes)
    buffer = pool.take(outgoing.version, size_bytes)
    outgoing.fill_all(
        (index, packed_views(plan, index, buffer[start : start + sizes[index]]))
        for index, start in starts.items()
    )


def _pack_payloads(outgoing: Shipment, pool: Pool) -> None:
    payloads = {index: outgoing.payload(index) for index in outgoing.plan.of_rank(outgoing.rank)}
    sizes = {index: len(payload) for index, payload in payloads.items()}
    starts, size_bytes = starts_of(sizes, align_bytes=1)
    # Rounded up to a power of two, so that deltas of similar size can share a registered buffer.
    buffer = pool.take(outgoing.version, 1 << max(0, size_bytes - 1).bit_length())
    for index, start in starts.items():
        payload = torch.frombuffer(payloads[index], dtype=torch.uint8)
        buffer[start : start + sizes[index]].copy_(payload)

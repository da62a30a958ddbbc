"""Packed buffers of trainer ranks: commits say what is in them, a carrier brings it to engines."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CorruptionError, DeadlineError, TransferError
from ..held import Held, Lent, copied
from ..lease import Lease
from ..marker import Marker, as_corruption
from ..outgoing import Shipment
from ..plan import Plan
from .carriers import Carrier, HandleCarrier, OpenedSpans, Span, Wire, WireCarrier, noted
from .commits import Commits, await_versions, last_chain, newest_only
from .directory_commits import DirectoryCommits
from .packed import Borrowed, Packed, Pool, pack_all, pack_payloads, places_of_version
from .place import PrivatePlace
from .store_commits import StoreCommits
from .transport import Begun, Incoming, ReceiveRequest

__all__ = ["IpcTransport", "PackedTransport", "PullTransport"]


class PackedTransport:
    """A transport whose trainer ranks pack, and whose engines fetch from each rank when they want.

    Each trainer rank packs its part of a version into one buffer on its device; two take turns. A
    delta has a buffer of its own. An engine holds the version that it fetches, and its buffers are
    not written to until it lets go: a publish waits for that until its deadline. A publish may
    follow a failed one, and a restarted rank or engine joins by constructing its end again. A
    version ends with any of its trainer ranks: an engine that has not fetched it keeps the one
    before.

    Peak memory: on each trainer rank, twice the bytes that it sends, and its deltas; on an engine,
    the tensors in about three buckets of each trainer rank where it reads them in place, else the
    buckets that it wants, twice with `keep` or deltas.

    This process's ends of commits and carrier are closed with it. The commits are its attribute.

    Args:
        keep: engines keep what they receive, as the base of deltas, and so that a load that fails
            goes back after the trainer's end.
    """

    def __init__(self, commits: Commits, carrier: Carrier, *, keep: bool = False) -> None:
        self.commits, self._carrier, self._keep = commits, carrier, keep
        self._receive_until = 0.0
        self._full, self._deltas = Pool(carrier), Pool(carrier)

    def spec(self) -> dict[str, Any]:
        """Return what `open_transport` needs in another process.

        Raises:
            UnsupportedError: the commits lie in a store of this process.
        """
        parts = {"commits": self.commits.spec(), "carrier": self._carrier.spec()}
        return {"kind": "packed", **parts, "keep": self._keep}

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: wait until nobody reads the version whose buffers are needed.

        Raises:
            CapacityError: an engine reads it.
            TransferError: another owner took over.
        """
        markers = self.commits.markers(deadline=deadline)
        self.commits.begin(version, keep=last_chain(markers), deadline=deadline)
        return Begun(self.commits.run, newest_only(base, markers))

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: pack its buckets, and post their places."""
        kept = [marker.version for marker in self.commits.markers(deadline=deadline)]
        for pool in (self._full, self._deltas):
            pool.keep(kept)
        if outgoing.base is None:
            pack_all(outgoing, self._full)
        else:
            pack_payloads(outgoing, self._deltas)
        used = {**self._full.by_version(), **self._deltas.by_version()}
        for gpu in {s.buffer.device for s in used.values() if s.buffer.device.type == "cuda"}:
            torch.cuda.synchronize(gpu)  # Others do not wait for this stream.
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
        """Reader: wait for a version.

        Raises:
            UsageError: the directory belongs to another user, or others may write to it.
        """
        self._receive_until = request.deadline
        ends = self.commits, self._carrier
        chain = await_versions(self.commits, request)
        return [_Incoming(*ends, request, marker, keep=self._keep) for marker in chain]

    def close(self) -> None:
        """Let go. The owner's versions end; twice is fine."""
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


def IpcTransport(
    name: str,
    *,
    owner: bool = False,
    wire: Wire | None = None,
    device: torch.device | str = "cpu",
    keep: bool = False,
    root: str = "/dev/shm",
) -> PackedTransport:
    """Return packed buffers found through a directory: one host, one user.

    Engines read them where they lie, or over a wire. An engine's death ends its hold. Markers and
    notes are small files in a directory that only this user can read, with the promises of
    `SharedMemoryTransport` about it.

    On a GPU, close engines' ends before the trainer's: their memory is the trainer's. On a
    GPU it has run with one trainer and one engine process; with CPU tensors everything except the
    handles is the same.

    Args:
        name: one word that trainer and engines agree on.
        owner: true on trainer rank 0, and there only.
        wire: this process's. None gives engines handles of memory: memfd, or CUDA IPC.
        device: the device on which this trainer rank packs.
        keep: as in `PackedTransport`.
        root: the parent of the directory, on a tmpfs.

    Raises:
        UnsupportedError: this is not Linux, `root` does not exist, or the device cannot be used.
        UsageError: `name` is not one path component, or has a living owner; or others may rename
            what is in `root`.
    """
    carrier = _carrier(wire, device)
    place = PrivatePlace(name, root, prefix="primeblocks-ipc")
    return PackedTransport(DirectoryCommits(place, owner=owner), carrier, keep=keep)


def PullTransport(
    store: dist.Store,
    wire: Wire | None = None,
    *,
    name: str = "policy",
    owner: bool = False,
    device: torch.device | str = "cpu",
    keep: bool = False,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
) -> PackedTransport:
    """Return packed buffers found through a store: engines fetch them over a wire, from any host.

    Buffers are registered once. An engine owns the bytes that it has fetched; it has `lease_s` to
    fetch one version. A restarted trainer starts with no version.

    Args:
        store: the same for all; one that outlives the ranks.
        wire: this process's. It is closed with the transport. None gives engines handles of memory,
            on one host.
        name: names this policy, where several share the store.
        owner: true on trainer rank 0, and there only.
        device: the device of this process's buffers.
        keep: as in `PackedTransport`.
        lease_s: the time that an engine has to fetch one version; the owner's value counts.
        timeout_s: for the construction.

    Raises:
        TransferError: the store does not answer.
    """
    commits = StoreCommits(store, name=name, owner=owner, lease_s=lease_s, timeout_s=timeout_s)
    return PackedTransport(commits, _carrier(wire, device), keep=keep)


def _carrier(wire: Wire | None, device: torch.device | str) -> Carrier:
    if wire is None:
        return HandleCarrier(device=device)
    return WireCarrier(wire, device=device)


class _Incoming:
    """A committed version in buffers of trainer ranks."""

    def __init__(
        self,
        commits: Commits,
        carrier: Carrier,
        request: ReceiveRequest,
        marker: Marker,
        *,
        keep: bool,
    ) -> None:
        self.marker = marker
        self._commits, self._carrier, self._request = commits, carrier, request
        self._keep = keep
        self._payloads: dict[int, memoryview] = {}
        self._lock = threading.Lock()  # A reader applies deltas in several threads.

    def whole(self) -> Held | Lent:
        plan, request = self._request.plan, self._request
        lease = self._commits.hold(self.marker, deadline=request.deadline)
        try:
            buckets, opened = self._fetch(lease, again=True)
            if opened.is_own:
                held = Packed(plan, buckets, stays=self._keep, close=opened.close)
                lease.close()
                return held
        except BaseException:
            lease.close()
            raise

        def close() -> None:
            try:
                opened.close()
            finally:
                lease.close()

        lent = Borrowed(buckets, close=close)
        if not self._keep and lease.until == math.inf:
            return lent
        try:
            until = min(lease.until, request.deadline)
            return copied(plan, request.reader, lent, stays=self._keep, deadline=until)
        finally:
            lent.close()

    def payload(self, index: int) -> memoryview:
        with self._lock:
            if not self._payloads:
                self._payloads = self._fetch_payloads()
        return self._payloads[index]

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing: what is committed stands, whoever reads it."""

    def _fetch_payloads(self) -> dict[int, memoryview]:
        lease = self._commits.hold(self.marker, deadline=self._request.deadline)
        with closing(lease):
            buckets, opened = self._fetch(lease, again=False)
            with closing(opened):
                payloads = {
                    index: memoryview(part.cpu().numpy().tobytes())
                    for index, part in buckets.items()
                }
            if time.monotonic() > lease.until:
                raise DeadlineError("the lease was over before a delta was read")
        return payloads

    def _fetch(self, lease: Lease, *, again: bool) -> tuple[dict[int, Tensor], OpenedSpans]:
        """Return the buckets that this reader wants of the version, and what they were read by."""
        spans = dict(self._spans())
        until = min(lease.until, self._request.deadline)
        opened = self._carrier.fetch(list(spans.values()), again=again, deadline=until)
        return dict(zip(spans, opened.parts, strict=True)), opened

    def _spans(self) -> Iterator[tuple[int, Span]]:
        """Yield the places of the buckets that this reader wants."""
        plan, marker, deadline = self._request.plan, self.marker, self._request.deadline
        mine = set(plan.of_reader(self._request.reader))
        ranks = sorted({plan.buckets[index].rank for index in mine})
        for done, rank in enumerate(ranks):
            if time.monotonic() > deadline:
                raise DeadlineError(f"found the buffers of {done} of {len(ranks)} ranks in time")
            said = self._commits.look(_note(rank), run=marker.run, deadline=deadline)
            size, note = _noted(said, rank, marker.version)
            starts, size_bytes = places_of_version(plan, marker, rank)
            if size < size_bytes:
                raise CorruptionError(
                    f"rank {rank} has {size:,} bytes; the plan needs {size_bytes:,}"
                )
            for index in sorted(mine & starts.keys()):
                yield index, Span(note, starts[index], marker.sizes[index])


def _note(rank: int) -> str:
    return f"rank-{rank}"


def _noted(said: str | None, rank: int, version: int) -> tuple[int, Mapping[str, Any]]:
    """Return the bytes and the place of a rank's buffer, from its note."""
    with as_corruption(f"the note of rank {rank}"):
        found = None if said is None else json.loads(said).get(str(version))
        if found is not None:
            return noted(found, "bytes"), dict(found["at"])
    raise TransferError(f"rank {rank} has not version {version} any more. Receive the newest.")

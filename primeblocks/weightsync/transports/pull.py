"""Transport by one-sided reads: engines on any host fetch packed buckets from trainer ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ClosedError, TransferError, UnsupportedError, UsageError
from ..marker import Marker
from ..plan import Plan
from .board import Board
from .choose import chain_to
from .packed import Pool, pack_all, places
from .pull_version import Puller, PullIncoming
from .store_commits import StoreCommits
from .transport import Begun, Incoming, Outgoing, Request
from .waiting import await_versions
from .wire import Wire

__all__ = ["PullTransport"]

_LOOK_S = 0.02
_CLOSE_S = 1.0


class PullTransport:
    """A transport whose trainer ranks pack, and whose engines read from each rank when they want.

    A full version is one buffer on each trainer rank, and two take turns; a delta has a buffer of
    its own. They are registered once. An engine says in the store that it reads a version, and its
    buffers are not written to until the engine is done, or its lease is over: a publish waits for
    that until its deadline. An engine owns the bytes that it has read. A version ends with any of
    its trainer ranks: an engine that has not read it keeps the one before. A restarted rank or
    engine joins by constructing its end again; a restarted trainer starts with no version.

    Peak memory: on each trainer rank, twice the bytes that it sends, and its deltas; on an engine,
    the buckets that it wants, twice with `keep`.

    Args:
        store: the same for all; one that outlives the ranks.
        wire: this process's. It is closed with the transport.
        name: names this policy, where several share the store.
        owner: true on trainer rank 0, and there only.
        device: the device of this process's buffers.
        keep: on an engine, keep the bytes it received, so that deltas are applied to them and a
            load that fails can be undone.
        lease_s: the time that an engine has to read one version; the owner's value counts.
        timeout_s: for the construction.

    Raises:
        TransferError: the store does not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        wire: Wire,
        *,
        name: str = "policy",
        owner: bool = False,
        device: torch.device | str = "cpu",
        keep: bool = False,
        lease_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> None:
        self._board = Board(store, f"weightsync/pull/{name}")
        self._commits = StoreCommits(self._board)
        self._wire, self._device, self._keep = wire, torch.device(device), keep
        self._owner, self._closed = owner, False
        self._receive_until = 0.0
        self._full = Pool(self._share, self._unshare, spares=1)
        self._deltas = Pool(self._share, self._unshare, spares=1)
        self._puller = Puller(self._board, self._commits, wire, self._share)
        if owner:
            deadline = time.monotonic() + timeout_s
            self._commits.take_over(lease_s=lease_s, deadline=deadline)

    def spec(self) -> dict[str, Any]:
        """Refuse: a store and a wire cannot be opened by name.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a store and a wire cannot be opened by name. Construct PullTransport in each process."
        )

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: wait until nobody reads the version whose buffers are needed.

        Raises:
            CapacityError: an engine reads it.
            TransferError: another owner took over.
        """
        self._check(owner=True)
        found = self._commits.read(deadline=deadline)
        markers = () if found is None else found.markers
        stay = chain_to(markers[-1], markers, held=None) if markers else ()
        if base not in [marker.version for marker in markers[-1:]]:
            base = None  # Another publisher came between, or it is not kept.
        self._commits.retire(stay, deadline=deadline)
        return Begun("" if found is None else found.run, base)

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: pack its buckets, and post their places."""
        self._check()
        found = self._commits.read(deadline=deadline)
        if found is None:
            raise TransferError("no owner has begun. Construct it with owner=True on rank 0.")
        kept = [marker.version for marker in found.markers]
        for pool in (self._full, self._deltas):
            pool.keep(kept)
        if outgoing.base is None:
            pack_all(outgoing, partial(self._taken, self._full, outgoing.version))
        else:
            _put_payloads(outgoing, partial(self._taken, self._deltas, outgoing.version))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # A network card does not wait for this stream.
        used = {**self._full.by_version(), **self._deltas.by_version()}
        notes = json.dumps({str(version): note for version, (_, note) in used.items()})
        self._board.post(f"{found.run}/rank/{outgoing.rank}", notes, deadline=deadline)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically.

        Raises:
            TransferError: another owner took over.
        """
        self._check(owner=True)
        self._commits.commit(marker, deadline=deadline)

    def abort(self, version: int) -> None:
        """Do nothing: what is not committed is not seen, and its buffers are used again."""
        self._check(owner=True)

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first."""
        self._check()
        # In a `receive`, a store that stalls has until the deadline to answer.
        found = self._commits.read(deadline=max(self._receive_until, time.monotonic()))
        return () if found is None else found.markers

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: wait for a version; look every 20 ms."""
        self._check()
        self._receive_until = request.deadline
        chain = await_versions(self.markers, request, every_s=_LOOK_S)
        return [PullIncoming(self._puller, request, marker, keep=self._keep) for marker in chain]

    def close(self) -> None:
        """Let go. The owner's versions end; twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._owner:
            self._commits.leave(deadline=time.monotonic() + _CLOSE_S)
        self._full.close()
        self._deltas.close()
        self._puller.close()
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _taken(self, pool: Pool[tuple[Tensor, dict[str, Any]]], version: int, size: int) -> Tensor:
        return pool.take(version, size)[0]

    def _share(self, size_bytes: int) -> tuple[Tensor, dict[str, Any]]:
        # Not 0: there is nothing to register then.
        buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=self._device)
        return buffer, {"bytes": size_bytes, "wire": self._wire.share(buffer)}

    def _unshare(self, shared: tuple[Tensor, dict[str, Any]]) -> None:
        self._wire.unshare(shared[0])

    def _check(self, *, owner: bool = False) -> None:
        if self._closed:
            raise ClosedError("this PullTransport was closed")
        if owner and not self._owner:
            raise UsageError("only the owner begins and commits. Pass owner=True on rank 0.")


def _put_payloads(outgoing: Outgoing, make: Callable[[int], Tensor]) -> None:
    payloads = {index: outgoing.payload(index) for index in outgoing.plan.of_rank(outgoing.rank)}
    sizes = {index: len(payload) for index, payload in payloads.items()}
    starts, size_bytes = places(sizes, align_bytes=1)
    # A power of two, so that buffers of other deltas fit, which are registered.
    buffer = make(1 << max(0, size_bytes - 1).bit_length())
    for index, start in starts.items():
        # Bytes of a delta may not be written to, which frombuffer asks for.
        payload = torch.frombuffer(bytearray(payloads[index]), dtype=torch.uint8)
        buffer[start : start + sizes[index]].copy_(payload)

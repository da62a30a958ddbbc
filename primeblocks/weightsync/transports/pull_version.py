"""The engine's side of `PullTransport`, which reads buckets from the memory of trainer ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...errors import CorruptionError, DeadlineError, TransferError
from ..held import Held
from ..marker import Marker
from .board import Board
from .packed import Packed, places_of_reader, places_of_version
from .store_commits import StoreCommits
from .transport import Request
from .wire import Read, Wire

__all__ = ["PullIncoming", "Puller"]

_CLOSE_S = 1.0


class Puller:
    """Fetcher of versions into registered buffers of this process.

    Args:
        share: makes a registered buffer of that many bytes, with what others need to read it.
    """

    def __init__(
        self,
        board: Board,
        commits: StoreCommits,
        wire: Wire,
        share: Callable[[int], tuple[Tensor, dict[str, Any]]],
    ) -> None:
        self._board, self._commits, self._wire, self._share = board, commits, wire, share
        self._spare: Tensor | None = None
        self._closed = False

    def fetch(self, request: Request, marker: Marker) -> tuple[Tensor, dict[int, Tensor]]:
        """Read a version's buckets; return their buffer, to be given back, and the buckets.

        Raises:
            TransferError: it was retired, or a trainer rank is gone.
            DeadlineError: the deadline passed, or the lease.
            CorruptionError: a rank has other bytes than the plan.
        """
        starts, size_bytes = places_of_reader(request.plan, marker, request.reader)
        buffer, self._spare = self._spare, None
        if buffer is None or len(buffer) != size_bytes:
            self.give_back(buffer, again=False)
            buffer, _ = self._share(size_bytes)
        buckets = {i: buffer[at : at + marker.sizes[i]] for i, at in starts.items()}
        try:
            until = min(self._commits.hold(marker, deadline=request.deadline), request.deadline)
            try:
                self._wire.read(list(self._reads(request, marker, buckets)), deadline=until)
            finally:
                late = max(request.deadline, time.monotonic() + _CLOSE_S)
                self._commits.release(marker, deadline=late)
        except BaseException:
            self.give_back(buffer, again=False)
            raise
        return buffer, buckets

    def give_back(self, buffer: Tensor | None, *, again: bool) -> None:
        """Take a buffer back. `again`: keep it for the next version; not if a read may go on."""
        if buffer is None or self._closed:
            return
        if again and self._spare is None:
            self._spare = buffer
        else:
            self._wire.unshare(buffer)

    def close(self) -> None:
        """Forget the buffers; the wire deregisters them."""
        self._closed, self._spare = True, None

    def _reads(
        self, request: Request, marker: Marker, buckets: Mapping[int, Tensor]
    ) -> Iterator[Read]:
        plan = request.plan
        ranks = sorted({plan.buckets[index].rank for index in buckets})
        for done, rank in enumerate(ranks):
            if time.monotonic() > request.deadline:
                raise DeadlineError(f"found the buffers of {done} of {len(ranks)} ranks in time")
            said = self._board.look(f"{marker.run}/rank/{rank}", deadline=request.deadline)
            note = None if said is None else json.loads(said).get(str(marker.version))
            if note is None:
                raise TransferError(
                    f"rank {rank} has not version {marker.version} any more. Receive the newest."
                )
            starts, size_bytes = places_of_version(plan, marker, rank)
            if note["bytes"] < size_bytes:
                raise CorruptionError(
                    f"rank {rank} has {note['bytes']:,} bytes; the plan needs {size_bytes:,}"
                )
            for index in sorted(buckets.keys() & starts.keys()):
                yield Read(note["wire"], starts[index], buckets[index])


class PullIncoming:
    """A committed version in the memory of trainer ranks."""

    def __init__(self, puller: Puller, request: Request, marker: Marker, *, keep: bool) -> None:
        self.marker = marker
        self._puller, self._request, self._keep = puller, request, keep
        self._payloads: dict[int, memoryview] = {}
        self._lock = threading.Lock()  # A reader applies deltas in several threads.

    def whole(self) -> Held:
        buffer, buckets = self._puller.fetch(self._request, self.marker)
        return Packed(
            self._request.plan,
            buckets,
            stays=self._keep,
            close=partial(self._puller.give_back, buffer, again=True),
        )

    def payload(self, index: int) -> memoryview:
        with self._lock:
            self._fetch_payloads()
        return self._payloads[index]

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing: what is committed stands, whoever reads it."""

    def _fetch_payloads(self) -> None:
        if not self._payloads:
            buffer, buckets = self._puller.fetch(self._request, self.marker)
            for each, part in buckets.items():
                self._payloads[each] = memoryview(part.cpu().numpy().tobytes())
            self._puller.give_back(buffer, again=False)

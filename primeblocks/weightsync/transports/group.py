"""A transport of messages between trainer ranks and readers. Either all of them commit, or none.

A sync is a `Transaction`. Its states are notes in the store. Only the first text of a note counts:

    begun ----------> going --------> decided: "commit", or "abort" and the reason
      |
      +---> called off: nothing was sent, and the group can still be used

Rank 0 writes `begun`. Each reader joins. When all have joined, rank 0 writes `go`. Until then any
rank may call the sync off. Then trainer ranks send, and readers check and vote. The last vote
writes "commit". A rank that fails or is late writes "abort". After "abort", messages may still be
on their way, so this end refuses further use (`_broken`). Each time that rank 0 starts, it takes a
new generation, a number in the store. So notes of an earlier generation are never read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
import torch.distributed as dist

from ...errors import DeadlineError, PlanError, TransferError, UnsupportedError, UsageError
from ..held import Boxes
from ..marker import Marker, as_corruption
from ..outgoing import Shipment
from ..plan import Plan
from .board import Board, Go, Transaction, store_spec
from .carriers import indexed
from .group_wire import Arrived, Link, Rounds, join, receive_buckets, send_buckets
from .transport import Begun, Incoming, ReceiveRequest

__all__ = ["GroupTransport"]

_REASON_CHARS = 600


class GroupTransport:
    """Sends versions from trainer ranks to readers over gloo or NCCL.

    Trainer ranks construct a `GroupTransport`. A reader passes the `spec()` of trainer rank 0 to
    `open_transport`. You need not call `init_process_group`. When the first version is
    published, the ranks find each other through `store`, and make a group of their own.

    A publish waits until every reader calls `receive`. A call of `receive` returns a version only
    if all readers have the version. Each reader keeps the received bytes for deltas, and loads
    them again if a later load fails. The received bytes take as much memory as the reader's boxes,
    and twice as much with deltas or while the next version arrives. The store records whether a
    version is committed. Living ranks take this decision from the store, so they agree even if
    other ranks die. The store must survive failures of ranks.

    If the text of a TransferError asks for new transports, make them on all living or restarted
    ranks, with the same store. Then publish the failed version again, which the new transports send
    in full.

    Args:
        store: the same store on all ranks, also after a failure: a TCPStore that no rank hosts, or
            a FileStore on a shared disk.
        trainers: the number of trainer ranks.
        readers: the number of the plan's readers. Each reader is one process.
        rank: the trainer's rank in the plan. None for a reader.
        generation: only for a reader: the entry `generation` of the `spec()` that the reader opens.
        device: "cpu" sends messages over gloo, and "cuda" over NCCL, on the current device of this
            thread. This transport was never run with NCCL.
        timeout_s: how long the construction waits for the store.

    Raises:
        UsageError: `trainers` or `readers` is below 1, or the `rank` of a trainer is missing or out
            of range.
        UnsupportedError: torch was built without gloo or NCCL, or does not see the GPU of `device`.
        TransferError: rank 0 cannot reach the store.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        trainers: int,
        readers: int,
        rank: int | None = None,
        generation: int | None = None,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        if min(trainers, readers) < 1:
            raise UsageError(
                f"got {trainers} trainers and {readers} readers. Pass at least one of each."
            )
        if generation is None and not (rank is not None and 0 <= rank < trainers):
            raise UsageError(
                f"got rank {rank}, of {trainers} trainers. A reader opens the spec() of trainer "
                "rank 0."
            )
        self._store, self._trainers, self._readers = store, trainers, readers
        self._device = torch.device(device)
        is_there = dist.is_nccl_available if self._device.type == "cuda" else dist.is_gloo_available
        if not is_there():
            raise UnsupportedError(
                f"this build of torch cannot send messages on {device}. Use another transport."
            )
        self._device = indexed(device)
        self._broken = ""
        self._open = False
        self._markers: tuple[Marker, ...] = ()
        self._rounds: tuple[Plan, Rounds] | None = None
        self._link: Link | None = None
        # A reader learns its number from its first request.
        self._rank, self._is_any = (trainers, True) if rank is None else (rank, False)
        self._named = Board(store, "weightsync")
        self._generation: int | None = None
        if rank == 0:
            generation = self._named.add("generations", 1, deadline=deadline)
            self._named.post("generation", str(generation), deadline=deadline)
        if generation is not None:
            self._start(generation)

    def _start(self, generation: int) -> None:
        self._generation = generation
        self._board = Board(self._store, f"weightsync/{generation}")
        self._now = self._numbered(0)

    def spec(self) -> dict[str, Any]:
        """Return the argument with which a reader in another process calls `open_transport`.

        Raises:
            UnsupportedError: this is not trainer rank 0, or only this process can use the store.
        """
        if self._generation is None:
            raise UnsupportedError("only trainer rank 0 has the spec. Call spec() on that rank.")
        counts = {"trainers": self._trainers, "readers": self._readers}
        where = {"store": store_spec(self._store), "generation": self._generation}
        return {"kind": "group", **counts, **where, "device": self._device.type}

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Rank 0: wait until every reader calls `receive`.

        Raises:
            TransferError: a reader did not call `receive`, or refused the version. The group can
                still be used.
        """
        self._check(plan, trainer=True)
        self._now = now = self._numbered(self._now.number + 1)
        self._open = True
        note = {"version": version, "plan": plan.fingerprint()}
        now.post("begun", note, deadline=deadline)
        holds = [now.read_join(reader, deadline=deadline) for reader in range(self._readers)]
        if any(held != base for held in holds):
            base = None
        self._board.post("current", str(now.number), deadline=deadline)
        go = now.decide(Go(base, ""), deadline=deadline)
        if go.error:
            raise TransferError(go.error)
        return Begun(str(self._generation), go.base)

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: send every bucket to each of its readers."""
        self._check(outgoing.plan, trainer=True)
        if self._rank > 0:
            self._follow(deadline)
            number = self._board.read("current", deadline=deadline)
            if number is None:
                raise TransferError("rank 0 did not begin a sync in time. Publish again.")
            self._now = self._numbered(int(number))
        with self._aborting(deadline):
            if outgoing.base is not None:
                mine = outgoing.plan.of_rank(self._rank)
                sizes = [(index, len(outgoing.payload(index))) for index in mine]
                self._now.post(f"sizes/{self._rank}", sizes, deadline=deadline)
            messages = self._rounds_of(outgoing.plan).by_rank.get(self._rank, [])
            send_buckets(self._joined(deadline), outgoing, messages, deadline=deadline)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Rank 0: send the digests, and wait until every reader has checked its bytes."""
        now, text = self._now, marker.to_json()
        with self._aborting(deadline):
            now.finish(lambda: now.post("marker", text, deadline=deadline), deadline=deadline)
        self._open = False
        self._markers = (*self._markers[-1:], marker)
        # Every reader voted, so every reader has read these notes.
        sizes = [] if marker.base is None else [f"sizes/{rank}" for rank in range(self._trainers)]
        if time.monotonic() < deadline:
            now.clear(["marker", *sizes], deadline=deadline)

    def abort(self, version: int) -> None:
        """On rank 0, drop the unfinished version, and report the drop to the readers."""
        if not self._open or self._rank > 0:
            return
        self._open = False
        deadline, why = time.monotonic() + 1.0, "the trainer gave up"
        broken, self._broken = self._broken, self._broken or "a sync did not end"
        with suppress(TransferError):
            if self._now.decide(Go(None, why), deadline=deadline).error:
                self._broken = broken  # Nothing was sent.
            else:
                self._now.abort(why, deadline=deadline)

    def markers(self) -> tuple[Marker, ...]:
        """Rank 0: return the markers of the last two versions that it committed, oldest first.

        On other ranks, the result is empty, because a reader gets a version only while it is
        published.
        """
        return self._markers

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        """Reader: join the next publish, and receive its version.

        Raises:
            DeadlineError: no version was published in time. The group can still be used.
            PlanError: publisher and reader have different plans, or the published version is not
                the version of `request`.
        """
        if self._is_any:
            self._rank, self._is_any = self._trainers + request.reader, False
        self._check(request.plan, trainer=False)
        deadline = request.deadline
        reader = self._rank - self._trainers
        if request.reader != reader:
            raise UsageError(
                f"rank {self._rank} is reader {reader}, not reader {request.reader}. Receive as "
                f"reader {reader}."
            )
        note = self._begun(request)
        go = self._asked(request, note, deadline)
        if go.error:
            if time.monotonic() > deadline:
                raise DeadlineError(f"nothing was published in time: {go.error}.")
            raise TransferError(f"nothing was sent: {go.error}. Call receive() again.")
        with self._aborting(deadline):
            return [self._arrived(request, go.base, deadline)]

    def _begun(self, request: ReceiveRequest) -> dict[str, Any]:
        """Return the note of the next transaction that was not called off."""
        while True:
            now = self._numbered(self._now.number + 1)
            note = now.read_begun(deadline=request.deadline)
            if note is None:
                served = request.served and request.served.version
                raise DeadlineError(
                    f"no version was published in time. This engine has version {served}. Publish "
                    "a version, or pass a longer timeout_s."
                )
            self._now = now
            if note:
                return note

    def _asked(self, request: ReceiveRequest, note: dict[str, Any], deadline: float) -> Go:
        """Join the transaction, and return the decision whether it begins."""
        now, refused = self._now, ""
        if note["plan"] != request.plan.fingerprint():
            refused = f"its plan is {request.plan.fingerprint()}, the trainer's {note['plan']}"
        elif request.version not in (None, note["version"]):
            refused = f"it asks for version {request.version}"
        if refused:
            now.decide(Go(None, f"reader {request.reader} refused: {refused}"), deadline=deadline)
            raise PlanError(f"version {note['version']} is published, but {refused}.")
        held, holds = request.held, None
        if held is not None and held.run == str(self._generation):
            holds = held.version
        broken = self._broken
        self._broken = "the store failed while this reader asked"  # Ranks may send to it.
        now.post(f"join/{request.reader}", holds, deadline=deadline)
        go = now.read_go(deadline=deadline)
        if go is None:
            why = f"reader {request.reader} waited for the other ranks until the deadline"
            go = now.decide(Go(None, why), deadline=deadline)
        self._broken = broken
        return go

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self, error: str, deadline: float) -> None:
        """Vote, and follow the decision."""
        now = self._now
        if error:
            self._broken = error
            now.abort(f"rank {self._rank} met {error}"[:_REASON_CHARS], deadline=deadline)
            return
        with self._aborting(deadline):
            now.finish(lambda: now.vote(self._readers, deadline=deadline), deadline=deadline)

    def _arrived(self, request: ReceiveRequest, base: int | None, deadline: float) -> Incoming:
        plan, reader, now = request.plan, request.reader, self._now
        sizes = {index: plan.buckets[index].bytes for index in plan.of_reader(reader)}
        if base is not None:
            for rank in sorted({plan.buckets[index].rank for index in sizes}):
                said = now.read_or_abort(f"sizes/{rank}", deadline=deadline)
                with as_corruption(f"the sizes of rank {rank}"):
                    for index, size in said:
                        if index in sizes:
                            sizes[index] = range(plan.buckets[index].bytes + 1)[size]
        boxes = Boxes(plan, reader, stays=True, device=self._device)
        arrived = Arrived(plan, boxes if base is None else None, settle=self._settle)
        messages = self._rounds_of(plan).by_reader.get(reader, [])
        link = self._joined(deadline)
        receive_buckets(link, plan, sizes, messages, arrived.take, deadline=deadline)
        arrived.marker = Marker.from_json(now.read_or_abort("marker", deadline=deadline))
        return arrived

    @contextmanager
    def _aborting(self, deadline: float) -> Iterator[None]:
        """Abort the transaction, and end the use of the group, if the block raises."""
        try:
            yield
        except BaseException as error:
            self._open = False
            met = f"rank {self._rank} met {type(error).__name__}: {error}"
            reason = met.splitlines()[0][:_REASON_CHARS]
            kept = "Every rank keeps the previous version"
            try:
                reason = self._now.abort(reason, deadline=deadline)
            except TransferError as lost:
                reason = f"{lost}"
                kept = (
                    "This rank keeps the previous version. Other ranks may have committed the "
                    "new version"
                )
            self._broken = reason
            if isinstance(error, RuntimeError | TransferError | DeadlineError):
                raise TransferError(
                    f"{reason}. {kept}. Make new transports on all ranks, and publish the same "
                    "version again."
                ) from error
            raise

    def _check(self, plan: Plan, *, trainer: bool) -> None:
        if self._broken:
            raise TransferError(
                f"the group failed earlier: {self._broken}. Make new transports on all ranks."
            )
        if (plan.world_size, len(plan.wants)) != (self._trainers, self._readers):
            raise UsageError(
                f"the plan is for {plan.world_size} trainer ranks and {len(plan.wants)} readers, "
                f"but the group has {self._trainers} and {self._readers}."
            )
        if trainer is not (self._rank < self._trainers):
            raise UsageError(
                f"rank {self._rank} is a {'reader' if trainer else 'trainer rank'}. Of "
                f"{self._trainers + self._readers} ranks, the first {self._trainers} publish."
            )

    def _follow(self, deadline: float) -> None:
        """Trainer rank: read the generation that rank 0 has posted, if this rank has no link."""
        if self._link is None:
            said = self._named.read("generation", deadline=deadline)
            if said is None:
                raise TransferError(
                    "rank 0 did not post its generation in time. Check that rank 0 is running."
                )
            if int(said) != self._generation:
                self._start(int(said))

    def _joined(self, deadline: float) -> Link:
        """Return this end of the group. The first call makes the group, through the store."""
        if self._link is None:
            own = self._store.clone()  # type: ignore[attr-defined]  # Its stub lacks it.
            self._link = join(
                dist.PrefixStore(f"weightsync/{self._generation}/group", own),
                rank=self._rank,
                trainers=self._trainers,
                readers=self._readers,
                device=self._device,
                deadline=deadline,
            )
        return self._link

    def _rounds_of(self, plan: Plan) -> Rounds:
        if self._rounds is None or self._rounds[0] is not plan:
            self._rounds = plan, Rounds.of(plan)
        return self._rounds[1]

    def _numbered(self, number: int) -> Transaction:
        return Transaction(self._board, number, rank=self._rank)

"""Over a process group of trainer ranks and readers: shard to shard, and all commit, or none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from ..errors import DeadlineError, PlanError, TransferError, UnsupportedError, UsageError
from .agree import Agreement
from .board import Board
from .group_wire import receive_buckets, send_buckets
from .held import Boxes, Held, packed_views
from .marker import Marker
from .plan import Plan
from .rounds import Rounds
from .transport import Begun, Incoming, Outgoing, Request

__all__ = ["GroupTransport"]

_MESSAGE_BYTES = 256
_REASON_CHARS = 600
_COMMIT, _ABORT = "commit", "abort"


class GroupTransport:
    """Sends buckets from rank to rank: gloo or NCCL, point to point. Every rank has one.

    A publish waits for every reader to ask, and no reader returns a version that not all have:
    whether they do is written into the store once. The last reader to have checked its bytes writes
    "commit"; a rank that fails or whose time is up writes "abort"; the first word stands and all
    follow it, whoever dies when, as long as the store outlives the ranks.

    After a TransferError that says so the group is of no use: make a new group of living ranks (a
    restarted one may join), and new transports with the same store; then publish the same version
    again. It is sent in full.

    Constructing it is collective.

    Args:
        store: the same on all ranks, retries included. A TCPStore that no rank hosts, or a
            FileStore on a shared disk.
        trainers: the first ranks of `group` are the trainer's, by rank of the plan; the others are
            the plan's readers, in order, one process each.
        group: a group with gloo for CPU tensors, such as "gloo" or "cpu:gloo,cuda:nccl"; None is
            the default group.
        device: where messages live, and so which backend carries them.
        keep: on a reader, keep what was received, so that deltas can be sent and a load that fails
            can be undone. It costs the reader's boxes once more.
        timeout_s: of the construction.

    Raises:
        UsageError: there is no trainer or no reader.
        UnsupportedError: the group has no gloo.
        TransferError: not all ranks came in time.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        trainers: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        keep: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        size = dist.get_world_size(group)
        if not 0 < trainers < size:
            raise UsageError(
                f"{trainers} trainers of {size} ranks; needs one at least, and readers"
            )
        agreement = Agreement(world_size=size, group=group)
        self._rank, self._trainers, self._readers = agreement.rank, trainers, size - trainers
        self._group, self._device, self._keep = group, torch.device(device), keep
        # Drawn by one rank and told to the others: what an earlier group left in the store is
        # never read again.
        mine = {}
        if self._rank == 0:
            first = Board(store, "weightsync").add("generations", 1, deadline=deadline)
            mine = {"generation": first}
        said = agreement.exchange(mine, size_bytes=_MESSAGE_BYTES, deadline=deadline)
        self._generation = said[0]["generation"]
        self._board = Board(store, f"weightsync/{self._generation}")
        self._number = 0
        self._broken = ""
        self._open = False
        self._markers: tuple[Marker, ...] = ()
        self._rounds: tuple[Plan, Rounds] | None = None

    def spec(self) -> dict[str, Any]:
        """Refuses: a process group cannot be opened by name.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a process group cannot be opened by name. Construct GroupTransport on each rank."
        )

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Rank 0: wait until every reader asks.

        Raises:
            TransferError: a reader did not come, or refused. The group is as good as before.
        """
        self._check(plan, trainer=True)
        self._number += 1
        note = {"version": version, "plan": plan.fingerprint()}
        self._post("begun", json.dumps(note), deadline)
        self._open = True
        bases = []
        for reader in range(self._readers):
            said = self._board.read(self._key(f"join/{reader}"), deadline=deadline)
            if said is None:
                raise TransferError(f"reader {reader} of {self._readers} did not ask in time")
            answer = json.loads(said)
            if answer["error"]:
                raise TransferError(f"reader {reader} refused: {answer['error']}")
            bases.append(answer["holds"])
        if any(held != base for held in bases):
            base = None
        self._board.post("current", str(self._number), deadline=deadline)
        self._post("go", json.dumps({"base": base, "error": ""}), deadline)
        return Begun(str(self._generation), base)

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: send every bucket to each of its readers.

        Raises:
            TransferError: a reader died or gave up. Make a new group.
        """
        self._check(outgoing.plan, trainer=True)
        number = self._board.read("current", deadline=deadline)
        if number is None:
            raise TransferError("rank 0 did not say which transaction this is")
        self._number, self._open = int(number), True
        with self._aborting(deadline):
            if outgoing.base is not None:
                mine = outgoing.plan.of_rank(self._rank)
                sizes = {index: len(outgoing.payload(index)) for index in mine}
                self._post(f"sizes/{self._rank}", json.dumps(list(sizes.items())), deadline)
            send_buckets(
                outgoing,
                self._rounds_of(outgoing.plan).by_rank.get(self._rank, []),
                to=lambda reader: self._trainers + reader,
                group=self._group,
                device=self._device,
                deadline=deadline,
            )

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Rank 0: tell the digests, and wait until every reader has found its bytes to be right.

        Raises:
            TransferError: one has not. Make a new group.
        """
        with self._aborting(deadline):
            self._post("marker", marker.to_json(), deadline)
            self._await_decision(deadline)
        self._open = False
        self._markers = (*self._markers[-1:], marker)

    def abort(self, version: int) -> None:
        """Rank 0: give up what was begun, and tell the readers; else nothing."""
        if self._open and self._rank == 0:
            deadline = time.monotonic() + 1.0
            with suppress(TransferError):
                said = json.dumps({"base": None, "error": "the trainer gave up"})
                began = self._board.post_first(self._key("go"), said, deadline=deadline)
                if began != said:
                    self._decide(f"{_ABORT}: the trainer gave up", deadline)
                    self._broken = "a sync did not end"
        self._open = False

    def markers(self) -> tuple[Marker, ...]:
        """What this group committed: the last version, and the one before it."""
        return self._markers

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: ask, and receive what is published.

        Raises:
            DeadlineError: nothing was published in time. The group is as good as before.
            TransferError: a rank failed.
            PlanError: the publisher's plan is another one.
        """
        self._check(request.plan, trainer=False)
        deadline = request.deadline
        reader = self._rank - self._trainers
        if request.reader != reader:
            raise UsageError(f"rank {self._rank} is reader {reader}, not {request.reader}")
        self._number += 1
        begun = self._board.read(self._key("begun"), deadline=deadline)
        if begun is None:
            self._number -= 1
            raise DeadlineError("no version was published in time")
        note, error = json.loads(begun), ""
        if note["plan"] != request.plan.fingerprint():
            error = f"its plan is {request.plan.fingerprint()}, the trainer's {note['plan']}"
        elif request.version not in (None, note["version"]):
            error = f"it asks for version {request.version}"
        holds = None
        if request.held is not None and request.held.run == str(self._generation):
            holds = request.held.version
        self._post(f"join/{reader}", json.dumps({"holds": holds, "error": error}), deadline)
        if error:
            raise PlanError(f"version {note['version']} is published, but {error}.")
        go = self._board.read(self._key("go"), deadline=deadline)
        if go is None:
            self._give_up("waited for the trainer in vain", deadline)
        begun_as = json.loads(go)
        if begun_as["error"]:
            raise TransferError(f"nothing was sent: {begun_as['error']}. Ask again.")
        with self._aborting(deadline):
            return [self._arrived(request, begun_as["base"], deadline)]

    def close(self) -> None:
        """Refuse further use. Twice is fine; the group stays."""
        self._broken = self._broken or "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def settle(self, error: str, *, deadline: float) -> None:
        """Vote, and follow the decision. Called by what `receive` returned."""
        if error:
            self._decide(f"{_ABORT}: rank {self._rank} met {error}"[:_REASON_CHARS], deadline)
            self._broken = error
            return
        with self._aborting(deadline):
            votes = self._board.add(self._key("votes"), 1, deadline=deadline)
            if votes == self._readers:
                # The last voter writes it: no rank has to live longer than its own part.
                self._decide(_COMMIT, deadline)
            self._await_decision(deadline)

    def _arrived(self, request: Request, base: int | None, deadline: float) -> Incoming:
        plan, reader = request.plan, request.reader
        sizes = {index: plan.buckets[index].bytes for index in plan.of_reader(reader)}
        if base is not None:
            for rank in sorted({plan.buckets[index].rank for index in sizes}):
                said = self._read_or_abort(f"sizes/{rank}", deadline)
                sizes.update((i, size) for i, size in json.loads(said) if i in sizes)
        arrived = _Arrived(self, plan, reader, base is None, keep=self._keep, device=self._device)
        receive_buckets(
            sizes,
            self._rounds_of(plan).by_reader.get(reader, []),
            arrived.take,
            sender=lambda index: plan.buckets[index].rank,
            group=self._group,
            device=self._device,
            deadline=deadline,
        )
        arrived.marker = Marker.from_json(self._read_or_abort("marker", deadline))
        return arrived

    def _read_or_abort(self, key: str, deadline: float) -> str:
        """A note of this transaction, unless it was aborted."""
        keys = [self._key("decision"), self._key(key)]
        found = self._board.read_any(keys, deadline=deadline)
        if found is None:
            raise DeadlineError(f"waited for the {key} in vain")
        if found[0] == keys[0]:
            raise TransferError(found[1])
        return found[1]

    def _await_decision(self, deadline: float) -> None:
        said = self._board.read(self._key("decision"), deadline=deadline)
        if said is None:
            said = self._decide(
                f"{_ABORT}: rank {self._rank} waited for the others in vain", deadline
            )
        if said != _COMMIT:
            raise TransferError(said)

    def _decide(self, word: str, deadline: float) -> str:
        """Propose a decision and return the one that stands: the first."""
        return self._board.post_first(self._key("decision"), word, deadline=deadline)

    @contextmanager
    def _aborting(self, deadline: float) -> Iterator[None]:
        """Whatever ends the block ends the transaction, and the use of the group."""
        try:
            yield
        except BaseException as error:
            self._open = False
            met = f"rank {self._rank} met {type(error).__name__}: {error}"
            reason = f"{_ABORT}: {met}".splitlines()[0][:_REASON_CHARS]
            kept = "Every rank keeps the version before"
            try:
                reason = self._decide(reason, deadline)
            except TransferError as lost:
                reason = f"{lost}"
                kept = "This rank keeps the version before; others may have committed"
            self._broken = reason
            if isinstance(error, RuntimeError | TransferError | DeadlineError):
                raise TransferError(
                    f"{reason}. {kept}. Make a new group and publish the same version again."
                ) from error
            raise

    def _give_up(self, why: str, deadline: float) -> NoReturn:
        with self._aborting(deadline):
            raise DeadlineError(why)

    def _check(self, plan: Plan, *, trainer: bool) -> None:
        if self._broken:
            raise TransferError(
                f"the group failed earlier: {self._broken}. Make a new group and new transports."
            )
        if (plan.world_size, len(plan.wants)) != (self._trainers, self._readers):
            raise UsageError(
                f"the plan is for {plan.world_size} trainer ranks and {len(plan.wants)} readers, "
                f"the group has {self._trainers} and {self._readers}."
            )
        if trainer is not (self._rank < self._trainers):
            raise UsageError(
                f"rank {self._rank} is a {'reader' if trainer else 'trainer rank'}: "
                f"of {self._trainers + self._readers} ranks the first {self._trainers} publish."
            )

    def _rounds_of(self, plan: Plan) -> Rounds:
        if self._rounds is None or self._rounds[0] is not plan:
            self._rounds = plan, Rounds.of(plan)
        return self._rounds[1]

    def _key(self, key: str) -> str:
        return f"{self._number}/{key}"

    def _post(self, key: str, text: str, deadline: float) -> None:
        self._board.post(self._key(key), text, deadline=deadline)


class _Arrived:
    """A version in this reader's memory, of which the others may not have all."""

    marker: Marker

    def __init__(
        self,
        transport: GroupTransport,
        plan: Plan,
        reader: int,
        full: bool,
        *,
        keep: bool,
        device: torch.device,
    ) -> None:
        self._transport, self._plan = transport, plan
        self._boxes = Boxes(plan, reader, stays=keep, device=device) if full else None
        self._payloads: dict[int, memoryview] = {}

    def take(self, index: int, message: torch.Tensor) -> None:
        """Copy a message out of its buffer."""
        if self._boxes is None:
            self._payloads[index] = memoryview(message.cpu().numpy().tobytes())
            return
        pieces = packed_views(self._plan, index, message)
        for view, piece in zip(self._boxes.views(index), pieces, strict=True):
            view.copy_(piece)

    def whole(self) -> Held:
        assert self._boxes is not None, "a delta is not whole"
        return self._boxes

    def payload(self, index: int) -> memoryview:
        return self._payloads[index]

    def settle(self, error: str, *, deadline: float) -> None:
        self._transport.settle(error, deadline=deadline)

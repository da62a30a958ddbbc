"""Shard to shard over a process group of trainer and engine ranks: all commit, or none."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import EngineError, PlanError, PrimeblocksError, TransferError, UsageError
from .agree import Agreement
from .link_plan import LinkPlan
from .link_wire import Wire, local_parts
from .manifest import NamedTensors, named_tensors
from .marker import Receipt
from .receive import Load

__all__ = ["GroupSync"]

_MESSAGE_BYTES = 4096
_ERROR_CHARS = 600  # A character takes up to six bytes in JSON.
_COMMIT, _ABORT, _LOST = "commit", "abort", "the store does not answer"


class GroupSync:
    """Sends a trainer's shards to the engine ranks that want them. Every rank has one.

    An engine rank receives into a staging copy, which `load` gets once all ranks have all their
    bytes. Whether they do is written into `store` once: the last rank to finish writes "commit",
    a rank that fails or whose time is up "abort", the first word stands and all ranks follow it.
    So no two engines differ, whoever dies when, as long as the store outlives the ranks.

    After a TransferError the group is of no use: make a new group of living ranks (a restarted
    one may join) and a new GroupSync, and sync the same version again. All of it is sent again,
    to ranks that have it too.

    Args:
        plan: equal on all ranks; its ranks are those of `group`, trainer ranks first.
        store: the same on all ranks, retries included. A TCPStore that no rank hosts, or a
            FileStore on a shared disk (its waits end on whole seconds).
        parameters: on a trainer rank: what the rank described. A module is read at each sync.
        load: on an engine rank: takes the rank's own boxes by name, in the order of its target
            manifest, and copies them.
        group: a group with gloo for CPU tensors, such as "gloo" or "cpu:gloo,cuda:nccl"; None
            is the default group.
        device: where messages and staging copies live, and so which backend carries them.

    Raises:
        UsageError: the plan is for another number of ranks, or this rank has not exactly what
            its side needs.
        UnsupportedError: the group has no gloo.
    """

    def __init__(
        self,
        plan: LinkPlan,
        *,
        store: dist.Store,
        parameters: NamedTensors | None = None,
        load: Load | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._agreement = Agreement(world_size=plan.world_size, group=group)
        self._rank = self._agreement.rank
        sends = self._rank < len(plan.sources)
        if (parameters is None) is sends or (load is None) is not sends:
            raise UsageError(
                f"rank {self._rank} is {'a trainer' if sends else 'an engine'} rank of "
                f"{len(plan.sources)} + {len(plan.targets)}; it needs "
                f"{'parameters= and no load=' if sends else 'load= and no parameters='}."
            )
        if not isinstance(parameters, nn.Module | None):
            # Pairs may be an iterator: it would be empty the second time.
            parameters = named_tensors(parameters)
        self._plan, self._parameters, self._load = plan, parameters, load
        self._fingerprint = plan.fingerprint()
        self._store, self._group, self._device = store, group, torch.device(device)
        self._broken = ""

    def sync(self, version: int, *, timeout_s: float) -> Receipt:
        """Send or receive one version. Collective; `load` runs after the timed part.

        Cost: one copy and one XXH3-128 on each side, `plan.peak_extra_bytes(rank)` of memory,
        two small store calls a rank. Its Receipt has this rank's bytes and a digest over them.

        Raises:
            TransferError: some rank failed, died or was late: no rank loads anything.
            UsageError: ranks disagree about version or plan, or one lacks a tensor; all ranks
                raise and nothing was sent.
            EngineError: `load` failed here, on a version that the others have: this engine is
                torn. Restart it and sync the version again.
        """
        if self._broken:
            raise TransferError(
                f"the group failed earlier: {self._broken} Make a new group and a new GroupSync."
            )
        start = time.monotonic()
        deadline = start + timeout_s
        parts, attempt = self._prepare(version, deadline)
        transaction = f"weightsync/{version}/{attempt}"
        # Until it is done: a sync that is left half-way leaves messages under way.
        self._broken = f"the sync of version {version} did not end."
        staged, digest = self._transfer(transaction, parts, deadline)
        self._follow_decision(transaction, deadline)
        if self._load is not None:
            self._commit(version, staged, self._load)
        self._broken = ""
        size = self._plan.bytes_by_rank[self._rank]
        return Receipt(version, size, time.monotonic() - start, digest)

    def _prepare(self, version: int, deadline: float) -> tuple[dict[str, Tensor], int]:
        """Refuse on all ranks what is wrong on one; number the attempt."""
        message: dict[str, Any] = {"version": version, "plan": self._fingerprint}
        parts: dict[str, Tensor] = {}
        try:
            if self._parameters is not None:
                parts = local_parts(self._plan, self._rank, self._parameters)
            if self._rank == 0:
                # Drawn by one rank and told to the others: an old number cannot come back.
                message["attempt"] = self._store.add(f"weightsync/{version}/attempts", 1)
        except PlanError as error:
            message["error"] = str(error)[:_ERROR_CHARS]
        except RuntimeError as error:
            message["lost"] = f"{_LOST}: {error}".splitlines()[0][:_ERROR_CHARS]
        try:
            replies = self._agreement.exchange(
                message, size_bytes=_MESSAGE_BYTES, deadline=deadline
            )
        except TransferError as error:
            self._broken = str(error)
            raise
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            raise PlanError(f"nothing was sent. {' '.join(errors)}")
        if "lost" in replies[0]:
            raise TransferError(f"nothing was sent. {replies[0]['lost']}. Start it again.")
        for key in ("version", "plan"):
            said = [reply[key] for reply in replies]
            if len(set(said)) > 1:
                raise UsageError(f"ranks disagree about the {key}: {said}, by rank.")
        return parts, replies[0]["attempt"]

    def _transfer(
        self, transaction: str, parts: dict[str, Tensor], deadline: float
    ) -> tuple[dict[str, Tensor], str]:
        """Send or receive; on any error tell the others, who may wait for this rank."""
        try:
            wire = Wire(
                self._plan,
                self._rank,
                transaction,
                group=self._group,
                device=self._device,
                deadline=deadline,
            )
            if self._load is not None:
                return wire.receive()
            return {}, wire.send(parts)
        except BaseException as error:
            met = f"{type(error).__name__}: {error}".splitlines()[0][:_ERROR_CHARS]
            reason = self._decide(transaction, f"{_ABORT}: rank {self._rank} met {met}")
            if isinstance(error, RuntimeError | PrimeblocksError):
                raise self._aborted(reason) from error
            raise

    def _follow_decision(self, transaction: str, deadline: float) -> None:
        """Vote, wait, and raise unless all ranks commit.

        The last voter writes "commit" itself: no rank has to live longer than its own part.
        """
        word, votes = _COMMIT, 0
        # Any end of the wait, a lost store too, is followed by a look at what was decided.
        with suppress(RuntimeError):
            votes = self._store.add(f"{transaction}/votes", 1)
            if votes < self._plan.world_size:
                remaining = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                self._store.wait([f"{transaction}/decision"], remaining)
        if votes < self._plan.world_size:
            word = f"{_ABORT}: rank {self._rank} waited for the votes of the others in vain"
        decision = self._decide(transaction, word)
        if decision != _COMMIT:
            raise self._aborted(decision)

    def _decide(self, transaction: str, word: str) -> str:
        """Propose a decision and return the one that stands: the first."""
        try:
            return self._store.compare_set(f"{transaction}/decision", "", word).decode()
        except RuntimeError as error:
            return f"{_LOST}: {str(error).splitlines()[0][:_ERROR_CHARS]}"

    def _aborted(self, decision: str) -> TransferError:
        self._broken = f"{decision}."
        kept = "Every rank keeps the version before"
        if decision.startswith(_LOST):
            kept = "This rank keeps the version before; others may have committed"
        return TransferError(
            f"{decision}. {kept}. Make a new group and sync the same version again."
        )

    def _commit(self, version: int, staged: dict[str, Tensor], load: Load) -> None:
        tensors = iter(staged.items())
        try:
            load(tensors)
            left = sum(1 for _ in tensors)
            if left:
                raise TransferError(f"load left {left} of {len(staged)} tensors untaken")
        except Exception as error:  # Whatever load raises, the model is torn.
            raise EngineError(
                f"loading version {version} failed: {type(error).__name__}: {error}. The other "
                "ranks have it. Restart this engine, make a new group and sync it again."
            ) from error

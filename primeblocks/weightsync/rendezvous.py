"""Rendezvous by name: a trainer announces its plan next to its versions, and engines find it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import DeadlineError, RankError, UnsupportedError, UsageError
from .convert.conversion import Wiring, union
from .held import left_s
from .manifest import Manifest, NamedTensors, describe, gather_manifests
from .parts import Encode, Encoder
from .plan import Plan
from .planner import BUCKET_BYTES, plan_sync
from .transports.directory import SharedMemoryTransport
from .transports.transport import ANNOUNCED, Commits, Transport, pauses

__all__ = ["announce", "find"]

_ANNOUNCE_S = 60.0


def announce(
    where: str | Transport,
    parameters: NamedTensors,
    *,
    dtype: torch.dtype | None = None,
    convert: Wiring | None = None,
    encode: Encode | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> tuple[Plan, Transport]:
    """Make and announce a plan for engines that hold whole tensors, so that `find` returns it.

    Collective. The group's timeout limits the call. Pass the results, and the same parameters,
    `convert` and `encode`, to a `Publisher`. If `where` is a name, keep this process alive until
    the engines have loaded: plan and weights are removed when the process ends.

    Args:
        where: the name of a new `SharedMemoryTransport`, or this rank's end of a transport.
        parameters: as for `describe`.
        dtype: the dtype in which floats are sent, except codes, scales, and the tensors that
            `describe` does not round. With None, each tensor keeps its own dtype. Pass None if you
            pass both `convert` and `encode`.
        convert: as for `plan_sync`. The engines' tensors have the names and shapes that are in
            `convert.targets`.
        encode: as for `Publisher`.
        group: the trainer ranks. None is the default group, or only this process if
            torch.distributed is not initialized.

    Raises:
        CapacityError: the compressed plan is too large for the store of the transport. Only rank 0
            raises this error, and TransferError, and UsageError for a name with a living owner. The
            other ranks return, and their first `publish` raises TransferError.
        PlanError, UsageError: the errors of `describe` and `plan_sync`.
        RankError: `describe` or `encode` failed on another rank, and raised its error there.
        TransferError: the transport has no owner, or its store does not answer.
        UnsupportedError: the transport cannot store a plan.
        UsageError: a living process owns the name, or ranks passed different names.
    """
    alone = group is None and not dist.is_initialized()

    def mine() -> Manifest:
        if not isinstance(encode, Encoder):
            return describe(parameters)
        return encode.describe(describe(parameters, dtype=dtype))  # So scales keep their dtype.

    manifests = [mine()] if alone else _gathered(mine, where, group)
    if isinstance(encode, Encoder) and convert is None:
        dtype = None
    whole = (union(manifests) if convert is None else convert.targets).whole(dtype=dtype)
    plan = plan_sync(manifests, whole, bucket_bytes=bucket_bytes, convert=convert)
    owner = alone or dist.get_rank(group) == 0
    transport = SharedMemoryTransport(where, owner=owner) if isinstance(where, str) else where
    commits = _commits_of(transport)
    if owner:
        commits.post(ANNOUNCED, plan.to_json(), deadline=time.monotonic() + _ANNOUNCE_S)
    return plan, transport


def find(where: str | Transport, *, timeout_s: float) -> tuple[Plan, Transport]:
    """Wait until a trainer has announced its plan, and return the plan and a transport. Local.

    The plan of a killed trainer can be found until the next trainer starts. If the next trainer
    announces a different plan, `receive` with the old plan raises PlanError. Then call `find`
    again, which returns the new plan.

    Args:
        where: the announced name, or the reading end of the transport.

    Raises:
        DeadlineError: a trainer did not announce a plan in time.
        PlanError: the announced text is not a plan.
        CorruptionError: the note with the announced plan is damaged.
        TransferError: the store of the transport does not answer.
        UnsupportedError: the transport cannot store a plan.
        UsageError: the announced directory belongs to another user, or other users may write to it.
    """
    deadline = time.monotonic() + timeout_s
    transport = SharedMemoryTransport(where) if isinstance(where, str) else where
    try:
        plan = Plan.from_json(_await_announced(_commits_of(transport), deadline))
    except BaseException as error:
        if transport is not where:
            transport.close()
        if isinstance(error, DeadlineError):
            name = repr(where) if isinstance(where, str) else type(where).__name__
            raise DeadlineError(f"find({name}) waited {timeout_s:g} s: {error}") from error
        raise
    return plan, transport


def _gathered(
    mine: Callable[[], Manifest], where: str | Transport, group: dist.ProcessGroup | None
) -> list[Manifest]:
    manifest, error, refusal = Manifest(()), None, ""
    try:
        manifest = mine()
    except Exception as raised:  # This rank raises it when the other ranks know of it.
        error, refusal = raised, f"{type(raised).__name__}: {raised}"
    told: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    name = where if isinstance(where, str) else ""
    dist.all_gather_object(told, (refusal, name), group=group)
    if error is not None:
        raise error
    for rank, (refusal, _) in enumerate(told):
        if refusal:
            raise RankError(f"rank {rank} cannot describe its parameters: {refusal}")
    if len(names := {name for _, name in told if name}) > 1:
        raise UsageError(f"ranks announce different names: {sorted(names)}. Pass one name.")
    return gather_manifests(manifest, group=group)


def _await_announced(commits: Commits, deadline: float) -> str:
    never, pause = threading.Event(), pauses(commits.look_s)
    while (text := commits.look(ANNOUNCED, deadline=deadline)) is None:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                "no trainer announced a plan in time. Check that the trainer runs and uses this "
                f"name.{commits.hint()}"
            )
        never.wait(min(next(pause), left_s(deadline)))
    return text


def _commits_of(transport: Transport) -> Commits:
    commits: Commits | None = getattr(transport, "commits", None)
    if commits is None:
        raise UnsupportedError(
            f"{type(transport).__name__} has no place for a plan. Give engines plan.to_json() for "
            "Plan.from_json, and transport.spec() for open_transport."
        )
    return commits

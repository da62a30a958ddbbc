"""Rendezvous by name: a trainer announces its plan where its versions will be, engines find it."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from ..errors import DeadlineError, UnsupportedError
from .convert.conversion import Wiring, union
from .manifest import NamedTensors, describe, gather_manifests
from .plan import Plan
from .planner import BUCKET_BYTES, plan_sync
from .transports.commits import ANNOUNCED, Commits
from .transports.directory import SharedMemoryTransport
from .transports.transport import Transport

__all__ = ["announce", "find"]

_ANNOUNCE_S = 60.0


def announce(
    where: str | Transport,
    parameters: NamedTensors,
    *,
    dtype: torch.dtype | None = None,
    convert: Wiring | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> tuple[Plan, Transport]:
    """Plan for engines that hold whole tensors, and leave the plan for them to `find`. Collective.

    It gathers manifests, which waits as long as the group does. Give a `Publisher` the plan, the
    transport, and the same parameters and `convert`. With a name, the plan and the weights are
    removed when this process ends: keep it alive until engines have loaded.

    Args:
        where: a name, for `SharedMemoryTransport`; or this rank's end of a transport.
        parameters: the argument of `describe`.
        dtype: the dtype in which floats travel; None keeps theirs.
        convert: as for `plan_sync`; engines then hold its targets.
        group: the trainer ranks; None is the default group, or this process alone.

    Raises:
        PlanError: as `describe` and `plan_sync`.
        UnsupportedError: the transport has no place for a plan.
        UsageError: the name has a living owner.
    """
    alone = group is None and not dist.is_initialized()
    mine = describe(parameters)
    manifests = [mine] if alone else gather_manifests(mine, group=group)
    whole = (union(manifests) if convert is None else convert.targets).whole(dtype=dtype)
    plan = plan_sync(manifests, whole, bucket_bytes=bucket_bytes, convert=convert)
    owner = alone or dist.get_rank(group) == 0
    transport = SharedMemoryTransport(where, owner=owner) if isinstance(where, str) else where
    commits = _commits_of(transport)
    if owner:
        commits.post(ANNOUNCED, plan.to_json(), deadline=time.monotonic() + _ANNOUNCE_S)
    return plan, transport


def find(where: str | Transport, *, timeout_s: float) -> tuple[Plan, Transport]:
    """Wait for a trainer to announce its plan. Local.

    Of a trainer that was killed, the plan is found until the next one starts: with another plan, a
    `receive` says so, and `find` gives the new one.

    Args:
        where: the name that was announced; or the reading end of the transport.

    Raises:
        DeadlineError: nobody announced it in time.
        PlanError: what was announced is no plan.
        UnsupportedError: the transport has no place for a plan.
        UsageError: it belongs to another user, or others may write to it.
    """
    deadline = time.monotonic() + timeout_s
    transport = SharedMemoryTransport(where) if isinstance(where, str) else where
    try:
        plan = Plan.from_json(_await_announced(_commits_of(transport), deadline))
    except BaseException as error:
        if transport is not where:
            transport.close()
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"{where!r}, within {timeout_s:g} s: {error}") from error
        raise
    return plan, transport


def _await_announced(commits: Commits, deadline: float) -> str:
    never = threading.Event()
    while (text := commits.look(ANNOUNCED, deadline=deadline)) is None:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                "nobody announced a plan there in time. Is the trainer running, under that name?"
                f"{commits.hint()}"
            )
        never.wait(commits.look_s)
    return text


def _commits_of(transport: Transport) -> Commits:
    commits: Commits | None = getattr(transport, "commits", None)
    if commits is None:
        raise UnsupportedError(
            f"{type(transport).__name__} has no place for a plan. Give engines plan.to_json() and "
            "transport.spec(), for Plan.from_json and open_transport."
        )
    return commits

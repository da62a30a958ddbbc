"""How often a dispatch waits for the host, counted on four ranks and a device that is none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    LocalDispatcher,
    OncePerRankDispatcher,
    TokenDispatcher,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter

__all__ = ["figures"]

TOKENS, TOP_K, EXPERTS = 50, 2, 8


def _dispatchers(check: bool) -> dict[str, TokenDispatcher]:
    group = dist.group.WORLD
    assert group is not None
    return {
        "local": LocalDispatcher(check=check),
        "once_per_choice": AllToAllDispatcher(group, check=check),
        "once_per_rank": OncePerRankDispatcher(group, check=check),
        "capacity": AllToAllDispatcher(group, check=check, capacity_rows=TOKENS * TOP_K),
    }


def _count() -> dict[str, tuple[int, int, int]]:
    """By dispatcher: reads in dispatch, in combine, and in the backward of both."""
    # Here: its device stays with the process that imports it.
    from tests.pretend import Device

    found = {}
    with Device():
        for check in (True, False):
            for name, dispatcher in _dispatchers(check).items():
                found[f"{name}{'' if check else '.unchecked'}"] = _of_one(dispatcher)
    return found


def _of_one(dispatcher: TokenDispatcher) -> tuple[int, int, int]:
    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape).to("pretend").requires_grad_()

    x, scores = drawn(TOKENS, 4), drawn(TOKENS, TOP_K)
    ids = torch.randint(EXPERTS, (TOKENS, TOP_K)).to("pretend")
    with StepCounter(device="pretend") as there:
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
    with StepCounter(device="pretend") as back:
        out = dispatcher.combine(sent.tokens, sent)
    with StepCounter(device="pretend") as backward:
        out.backward(out)
    reads = [step.host_reads.total() for step in (there, back, backward)]
    return reads[0], reads[1], reads[2]


def figures() -> dict[str, tuple[float, str, str]]:
    """Of dispatch the most of all dispatchers, beside each one's."""
    by_rank = ranks.run(_count, world_size=4)
    found: dict[str, tuple[float, str, str]] = {}
    for name in by_rank[0]:
        for at, part in enumerate(("", ".combine", ".backward")):
            most = max(one[name][at] for one in by_rank)
            found[f"parallel.dispatch.{name}{part}.host_reads"] = (most, "count", "")
    most = max(count for one in by_rank for count, _, _ in one.values())
    return {"parallel.dispatch.host_reads": (most, "count", ""), **found}

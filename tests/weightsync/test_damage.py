"""Messages of a group that change on their way: refused by all, the old version served."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from primeblocks.testing import ranks
from primeblocks.weightsync.transports import group_wire
from tests.deadlines import HANG_S
from tests.weightsync.small_sync import RANKS, Small

ranks.preload(__name__)  # With all that it imports.

CULPRIT = 1  # The trainer rank whose messages are damaged.
FAULTS = ("first byte", "last byte", "reordered", "duplicated", "truncated")


def pair_of(plan):
    """Two buckets of the culprit that only differ in what is in them."""
    mine = plan.of_rank(CULPRIT)
    alike = lambda i, j: plan.buckets[i].bytes == plan.buckets[j].bytes  # noqa: E731
    same = lambda i, j: plan.buckets[i].readers == plan.buckets[j].readers  # noqa: E731
    return next((i, j) for i in mine for j in mine if i < j and alike(i, j) and same(i, j))


def damaged(fault, first, second):
    """Two messages as they arrive."""
    if fault in ("reordered", "duplicated"):
        return second, second if fault == "duplicated" else first
    changed = first.clone()
    changed[0 if fault == "first byte" else -1] ^= 4
    return changed, second


@contextmanager
def damaged_messages(plan, fault):
    """What this rank sends."""
    inner, (first, second) = group_wire._fill, pair_of(plan)

    def fill(outgoing, index, buffer):
        if index not in (first, second) or dist.get_rank() != CULPRIT:
            return inner(outgoing, index, buffer)
        if fault == "truncated":
            return inner(outgoing, index, buffer)[:-1]
        pair = [inner(outgoing, i, torch.empty_like(buffer)).clone() for i in (first, second)]
        message = damaged(fault, *pair)[index == second]
        return buffer[: len(message)].copy_(message)

    group_wire._fill = fill
    yield
    group_wire._fill = inner


def damage_body(where, cases):
    for number, (fault, full_every) in enumerate(cases):
        small = Small("group", f"{where}/{number}", full_every=full_every)
        small.sync(1)
        with damaged_messages(small.plan, fault):
            assert "fails its digest" in small.attempt(2, timeout_s=HANG_S)
        assert small.is_refused()
        assert small.holds(1)
        assert not small.is_engine or (small.engine.loads, small.side.subscriber.version) == (1, 1)
        dist.barrier()
        small.renew()
        small.sync(2)
        assert small.holds(2)
        dist.barrier()
        small.transport.close()


def test_damage_is_refused_and_the_old_version_is_served(tmp_path):
    cases = [(fault, full_every) for full_every in (1, 4) for fault in FAULTS]
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    ranks.run(damage_body, str(tmp_path), cases, world_size=RANKS)

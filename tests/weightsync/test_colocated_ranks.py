"""Several ranks take turns together, or go back together."""

from unittest.mock import Mock

import pytest
import torch.distributed as dist

from primeblocks.errors import CapacityError, TransferError
from primeblocks.testing import ranks
from tests.weightsync.colocated_site import TIMEOUT_S, Site, assert_same_state


def _rank_fails(path, fails, at, error):
    """Rank 0 drives the engine; a stage fails on rank `at`. What each rank met, then a retry."""
    site = Site(path, drives=dist.get_rank() == 0)
    site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    turns = [lambda: site.colocated.to_trainer(timeout_s=TIMEOUT_S)]
    if fails != "restore":
        turns.pop()()
        site.step()
        turns.append(lambda: site.colocated.to_engine(2, timeout_s=TIMEOUT_S))
    before = site.state()
    if dist.get_rank() == at:
        if fails.startswith("memory"):
            site.memory = Mock(side_effect=[*[0] * int(fails[-1]), error, *[0] * 9])
        else:
            site.faults[fails] = error
    met = None
    try:
        turns[0]()
    except Exception as raised:
        met = raised
    assert_same_state(site.state(), before)
    turns[0]()
    turn = site.colocated.turn
    dist.barrier()
    site.close()
    return type(met).__name__, str(met), turn


# The measurement of device memory before a turn, between its stages and at its end.
MEMORY = tuple((f"memory {count}", 1) for count in (0, 2, 5))
FAILS = (("release", 1), ("restore", 2), *MEMORY)


def _ranks_fail(path):
    error = CapacityError("no room")
    return [_rank_fails(path / fails, fails, at, error) for fails, at in FAILS]


def test_ranks_go_back_together(tmp_path):
    for fails, _ in FAILS:
        (tmp_path / fails).mkdir()
    for rank, both in enumerate(ranks.run(_ranks_fail, tmp_path, world_size=3)):
        for (fails, at), (kind, text, turn) in zip(FAILS, both, strict=True):
            assert kind == ("CapacityError" if rank == at else "TransferError")
            assert rank == at or f"rank {at}: CapacityError: no room" in text
            assert turn == ("trainer" if fails == "restore" else "engine")


def _rank_dies(path):
    site = Site(path, drives=dist.get_rank() == 0)
    site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    site.colocated.to_trainer(timeout_s=TIMEOUT_S)
    before = site.state()
    if dist.get_rank() == 1:
        site.release = lambda: ranks.kill(1)
    with pytest.raises(TransferError):
        site.colocated.to_engine(2, timeout_s=TIMEOUT_S)
    assert_same_state(site.state(), before)
    site.close()
    return site.colocated.turn


def test_a_rank_that_dies_leaves_the_others_where_they_were(tmp_path):
    assert ranks.run(_rank_dies, tmp_path, world_size=3) == ["trainer", None, "trainer"]

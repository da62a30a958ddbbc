import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import ClosedError, DeadlineError, RankError, UsageError
from primeblocks.testing import ranks
from tests.deadlines import EXPIRES_S, HANG_S


def _sum_of_ranks(start):
    total = start + dist.get_rank()
    dist.all_reduce(total)
    return total


def _settings():
    return torch.get_num_threads(), dist.get_backend(), torch.empty(3).isnan().all().item()


def _raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"told to fail on {rank}")
    dist.barrier()


def _die_on(rank, number):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def _exit_on(rank, code):
    if dist.get_rank() == rank:
        os._exit(code)
    _forever()


def _hang_on(rank):
    if dist.get_rank() == rank:
        _forever()


def _forever():
    threading.Event().wait()


def _planned_death(rank):
    ranks.kill(rank)
    try:
        dist.barrier()
    except RuntimeError:
        return "saw it"
    return "saw nothing"


def _say_and_hang(rank):
    if dist.get_rank() == rank:
        ranks.tell({"ready": rank})
        _forever()
    return "alive"


def _unpicklable():
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_by_rank_from_one_group(world_size):
    totals = ranks.run(_sum_of_ranks, torch.tensor([10.0]), world_size=world_size)
    expected = 10.0 * world_size + sum(range(world_size))
    assert [total.item() for total in totals] == [expected] * world_size


def test_a_rank_has_one_thread_gloo_and_poisoned_memory():
    assert ranks.run(_settings) == [(1, "gloo", True)] * 2


def test_every_failing_rank_shows_its_traceback_and_peers_are_ended():
    with pytest.raises(RankError, match="rank 1 of 3 raised; ended ranks 0, 2") as caught:
        ranks.run(_raise_on, 1, world_size=3)
    assert "ValueError: told to fail on 1" in str(caught.value)
    assert "in _raise_on" in str(caught.value)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(monkeypatch):
    monkeypatch.setattr(ranks, "_SETTLE_S", HANG_S)
    with pytest.raises(RankError, match="ranks 0, 1 of 2 raised"):
        ranks.run(_unpicklable)


def test_a_death_by_signal_is_noticed_long_before_the_deadline():
    # A deadline far behind the one that ends this test.
    with pytest.raises(
        RankError, match=r"(?s)^rank 2 of 3 died.*rank 2 ---\nit was ended by SIGTERM"
    ):
        ranks.run(_die_on, 2, signal.SIGTERM, world_size=3, timeout_s=3600)


def test_an_exit_without_a_result_is_a_failure():
    with pytest.raises(RankError, match=r"(?s)^rank 0 of 2 died.*exited with code 7"):
        ranks.run(_exit_on, 0, 7)


def test_a_hang_ends_at_the_deadline_and_shows_where():
    with pytest.raises(DeadlineError, match="rank 1 of 2 still ran after 10 s") as caught:
        ranks.run(_hang_on, 1, timeout_s=EXPIRES_S)  # A busy machine starts ranks in seconds.
    assert "in _forever" in str(caught.value)


def test_a_stopped_rank_is_ended_too(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    with ranks.gang(_say_and_hang, 0, world_size=1) as members:
        members.hear(0)
        os.kill(members._members[0].process.pid, signal.SIGSTOP)
        members._deadline = 0.0  # It has passed.
        with pytest.raises(DeadlineError, match="rank 0 of 1"):
            members.wait()
    assert members._members[0].process.exitcode == -signal.SIGKILL


def test_a_planned_death_leaves_the_others_running():
    assert ranks.run(_planned_death, 1, world_size=3) == ["saw it", None, "saw it"]


def test_a_gang_can_be_heard_and_killed():
    with ranks.gang(_say_and_hang, 1, world_size=3) as members:
        assert members.hear(1) == {"ready": 1}
        members.kill(1)
        assert members.wait() == ["alive", None, "alive"]
    with pytest.raises(ClosedError):
        members.kill(0)


def test_hearing_nothing_more_is_an_error():
    members = ranks.gang(_sum_of_ranks, torch.zeros(1))
    with members, pytest.raises(RankError, match="rank 0 ended and sent no further value"):
        members.hear(0)


def test_leaving_the_block_ends_what_still_runs():
    with ranks.gang(_say_and_hang, 0) as members:
        members.hear(0)
    codes = [member.process.exitcode for member in members._members]
    assert codes[0] == -signal.SIGKILL
    assert None not in codes


def test_a_body_that_cannot_travel_is_refused():
    with pytest.raises(UsageError, match="top level of a module"):
        ranks.run(lambda: None)
    with pytest.raises(UsageError, match="at least 1; got 0"):
        ranks.run(_settings, world_size=0)


def test_preload_comes_before_the_first_gang():
    ranks.run(_settings)
    with pytest.raises(UsageError, match="is already running"):
        ranks.preload("json")


def test_tell_and_kill_are_for_bodies():
    with pytest.raises(UsageError, match="body"):
        ranks.tell("nobody listens")

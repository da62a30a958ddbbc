"""Who may bring pages into a pool: room and patience; order, and the rest: test_vllm_manager."""

import pytest

from primeblocks.testing.faults import ManualClock

pytestmark = pytest.mark.vllm


def test_a_page_that_requests_share_needs_room_once(adapter):
    group, clock = ("a", "b", "c"), ManualClock()
    turns = adapter.manager.Turns(4, patience_s=lambda request: 1.0, clock=clock.now)
    for _ in range(2):
        assert all(turns.ask_ahead(name, page) for name in group for page in ("shared", name))
        assert not turns.ask_ahead("d", "d")
        assert all(turns.ask(name, page) == "come" for name in group for page in ("shared", name))
        assert turns.ask("d", "d") == "wait"
        for name in ("a", "d", "b"):
            turns.leave(name)
        assert [turns.ask_ahead("e", page) for page in "123"] == [True, True, False]
        for name in ("c", "e"):
            turns.leave(name)


def test_waiting_is_worth_what_loading_saves(adapter):
    speeds = adapter.manager.Speeds()
    assert speeds.patience_s(7) == 1.0
    speeds.load.add(4, 2.0)
    assert speeds.patience_s(7) == 1.0, "nothing was computed yet"
    speeds.compute.add(10, 30.0)
    assert speeds.patience_s(7) == 7 * (3.0 - 0.5)
    for _ in range(200):
        speeds.load.add(4, 40.0)
    assert speeds.patience_s(7) == 0.0, "computing is faster now"

"""Who may bring pages into a pool: order, room, patience."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from primeblocks.testing.faults import ManualClock

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def manager(adapter):
    return adapter.manager


@pytest.fixture(scope="module")
def turns_of(manager):
    return lambda pages, clock: manager.Turns(
        pages, patience_s=lambda request: 1.0, clock=clock.now
    )


def test_the_first_request_goes_before_all_others(turns_of):
    turns = turns_of(3, ManualClock())
    assert turns.ask("a", "1") == "come"
    assert [turns.ask("b", page) for page in "23"] == ["come", "come"]
    assert [turns.ask("a", page) for page in "45"] == ["come", "come"]
    assert turns.ask("b", "2") == "wait", "its page may have been pushed out"
    assert turns.is_first("a")
    assert not turns.is_first("b")
    turns.leave("a")
    assert [turns.ask("b", page) for page in "236"] == ["come"] * 3


def test_patience_is_counted_once_for_a_request(turns_of):
    clock = ManualClock()
    turns = turns_of(2, clock)
    turns.hold("a", "1")
    turns.hold("a", "2")
    assert turns.ask("b", "3") == "wait"
    clock.advance(0.9)
    assert turns.ask("b", "3") == turns.wait("b") == "wait"
    clock.advance(0.1)
    assert turns.ask("b", "3") == turns.ask("b", "4") == turns.wait("b") == "go on"
    assert turns.ask("c", "3") == "wait"


def test_a_page_that_requests_share_needs_room_once(turns_of):
    turns, group = turns_of(4, ManualClock()), ("a", "b", "c")
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


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    shared=st.integers(0, 3),
    capacity=st.integers(1, 8),
    order=st.randoms(use_true_random=False),
)
def test_everybody_gets_through(turns_of, sizes, shared, capacity, order):
    """A pool of requests that look up all their pages in each round, until they have them all."""
    turns = turns_of(capacity, ManualClock())
    waiting = {f"r{index}": size for index, size in enumerate(sizes)}
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds <= 2 * len(sizes), "nobody moves on"
        names = list(waiting)
        order.shuffle(names)  # a scheduler may look in any order
        for name in names:
            pages = [(name if page >= shared else "", page) for page in range(waiting[name])]
            answers = [turns.ask(name, page) for page in pages]
            assert answers.count("come") <= capacity
            if "wait" not in answers:
                turns.leave(name)
                del waiting[name]
    assert not turns._users
    assert not turns._all_users


def test_waiting_is_worth_what_loading_saves(manager):
    speeds = manager.Speeds()
    assert speeds.patience_s(7) == 1.0
    speeds.load.add(4, 2.0)
    assert speeds.patience_s(7) == 1.0, "nothing was computed yet"
    speeds.compute.add(10, 30.0)
    assert speeds.patience_s(7) == 7 * (3.0 - 0.5)
    for _ in range(200):
        speeds.load.add(4, 40.0)
    assert speeds.patience_s(7) == 0.0, "computing is faster now"

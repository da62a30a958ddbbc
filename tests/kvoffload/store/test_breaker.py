"""The three states of a circuit breaker, and what moves between them."""

from primeblocks.errors import CapacityError
from primeblocks.kvoffload.lower import Breaker, Circuit
from primeblocks.kvoffload.moves import Recalled
from primeblocks.testing.faults import ManualClock


def breaker():
    clock = ManualClock()
    return Breaker(patience_s=1.0, clock=clock.now), clock


def write(breaker, error=None):
    breaker.given(write=True)
    breaker.heard(error, write=True)


def test_a_refusal_opens_it_and_each_trial_that_fails_doubles_the_rest():
    tier, clock = breaker()
    for rest_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        write(tier, CapacityError("full"))
        tier.refused(room=3)
        assert (tier.circuit(), tier.room) == (Circuit.OPEN, 3)
        assert not tier.skips(feed=4)  # a page takes the place of another
        clock.advance(rest_s - 0.1)
        assert tier.circuit() is Circuit.OPEN
        clock.advance(0.1)
        assert tier.circuit() is Circuit.HALF_OPEN
        assert tier.room > 3
    tier.refused(room=0)
    assert tier.skips(feed=4)


def test_one_page_is_tried_and_all_once_it_is_written():
    tier, clock = breaker()
    tier.refused(room=0)
    clock.advance(1.0)
    assert not tier.skips(feed=4)
    assert tier.replaces()
    tier.given(write=True)
    assert tier.skips(feed=4)
    assert not tier.replaces()
    tier.heard(None, write=True)
    assert tier.circuit() is Circuit.CLOSED
    for _ in range(40):
        assert not tier.skips(feed=4)
        tier.given(write=True)
    tier.refused(room=0)
    clock.advance(1.0)
    assert tier.circuit() is Circuit.HALF_OPEN  # The rest is as short as the first.


def test_an_open_tier_that_is_slow_too_is_not_waited_for():
    tier, clock = breaker()
    for rest_s in (1.0, 2.0, 4.0):
        tier.refused(room=3)
        clock.advance(rest_s)
        tier.circuit()
    tier.refused(room=3)
    for _ in range(20):
        tier.given(write=True)
    tier.page_waits()
    for _ in range(2):
        clock.advance(0.9)
        tier.heard(None, write=True)
    assert (tier.circuit(), tier.unawaited(), tier.skips(feed=4)) == (Circuit.OPEN, 18, True)


def test_a_slow_tier_is_half_open():
    tier, clock = breaker()
    for _ in range(3):
        tier.given(write=True)
    assert not tier.page_waits()
    clock.advance(0.9)
    tier.heard(None, write=True)
    assert tier.unawaited() == 0
    clock.advance(0.2)
    assert tier.circuit() is Circuit.HALF_OPEN
    assert (tier.unawaited(), tier.skips(feed=2), tier.skips(feed=3)) == (2, True, False)


def test_a_silent_tier_is_left_alone_until_it_answers():
    tier, clock = breaker()
    tier.given(write=False)
    tier.given(write=True)
    clock.advance(1.1)
    assert (tier.circuit(), tier.silent(), tier.skips(feed=4)) == (Circuit.OPEN, True, True)
    assert [tier.page_waits(), tier.page_waits()] == [True, False]
    tier.heard(Recalled("hangs"), write=True)
    clock.advance(60.0)
    assert tier.silent()
    tier.heard(None, write=False)
    assert (tier.circuit(), tier.silent()) == (Circuit.HALF_OPEN, False)

"""The three states of a circuit breaker, and what moves between them."""

from primeblocks.kvoffload.lower import Breaker, Circuit
from primeblocks.testing.faults import ManualClock


def breaker():
    clock = ManualClock()
    return Breaker(patience_s=1.0, clock=clock.now), clock


def write(breaker, error=None):
    breaker.given(write=True)
    breaker.heard(error, write=True)


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

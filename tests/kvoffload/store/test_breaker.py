"""A circuit breaker; `test_store_degrades` has the others of its promises."""

from primeblocks.kvoffload.lower import Breaker, Circuit
from primeblocks.testing.faults import ManualClock


def breaker():
    clock = ManualClock()
    return Breaker(patience_s=1.0, clock=clock.now), clock


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

"""What the benchmark of eviction calls the most that a policy can have, against policies."""

from dataclasses import replace

import pytest

from benchmarks.kvoffload_parts.eviction_bound import bound
from primeblocks.kvoffload.evict import VersionAware, arc
from primeblocks.kvoffload.evict.belady import belady, play
from primeblocks.kvoffload.evict.fleets import Agents, Spread, Tool, simulate

pytestmark = pytest.mark.stress

TOOLS = (
    Tool("look", Spread(0.1, 1.0), Spread(400, 1.0), share=3),
    Tool("test", Spread(30, 0.5), Spread(900, 1.0)),
)
SMALL = Agents(concurrent=12, samples=1, batch=6, num_versions=3, system_tokens=0)
FLEETS = {"one tool": SMALL, "two tools": replace(SMALL, tools=TOOLS)}


@pytest.mark.parametrize("fleet", FLEETS)
def test_no_policy_has_more(fleet):
    trace = simulate(FLEETS[fleet], seed=7)
    pages = round(0.3 * trace.working_pages)
    most = bound(trace, capacity_pages=pages)
    for evict in (arc, VersionAware(8)):
        assert play(trace, evict=evict, capacity_pages=pages).hit_rate <= most
    # It says something: foresight has more.
    assert most < belady(trace, capacity_pages=pages).hit_rate


def test_more_room_is_never_worse():
    trace = simulate(FLEETS["two tools"], seed=1)
    bounds = [bound(trace, capacity_pages=pages) for pages in (1, 10, 100, 1000, 10_000)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(1, abs=0.01)

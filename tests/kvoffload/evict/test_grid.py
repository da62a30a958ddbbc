"""What policies cost where waits are unlike those that they were made for."""

import importlib
import inspect
import warnings

import pytest

from benchmarks.kvoffload_parts.eviction_grid import Cell, hits_of, traced
from primeblocks.kvoffload.evict import lru

TIER = "primeblocks.kvoffload.adapters.vllm.tier"
# Heavy tails, and people that answer; the engine holds few of the pages.
HARD = ("lognormal 30 s, 2.2", "bimodal 3 or 300 s", "people 900 s, 1.5", "Pareto 5 s, 1.1")


@pytest.fixture(scope="module")
def tier():
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module(TIER)


def least(policy, waits):
    """The least share of LRU's hits over a few cells."""
    cells = [Cell(waits, engine, size) for engine in (0.05, 0.2) for size in (0.25, 0.5)]
    policies = {"lru": lambda: lru, "policy": lambda: policy(8)}
    found = hits_of(traced(waits, capped=False, seed=7), cells, policies)
    assert min(hits["lru"] for hits in found.values()) > 100
    return min(hits["policy"] / hits["lru"] for hits in found.values())


@pytest.mark.parametrize("waits", HARD)
def test_the_default_of_the_vllm_tier_keeps_what_lru_keeps(tier, waits):
    name = inspect.signature(tier.StoreTier).parameters["evict"].default
    assert least(tier.EVICT[name], waits) >= 0.97

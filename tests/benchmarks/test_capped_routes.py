"""The benchmark's rule of vLLM 0.33 against 0.33's own class, and both beside ours.

With 0.32 the rule is put into its scheduler; in 0.33, unpacked, it is there (scripts/peers).
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving_parts.capped_routes import RouteCap, play
from benchmarks.serving_parts.sessions import recorded
from primeblocks.testing import tiny_models
from tests.engine_job import call
from tests.replay.test_vllm_schedules import (
    LAYERS,
    PAGE,
    Engine,
    configuration,
    prepare,
    vllm_release,
)

BLOCKS, AGENTS, TURNS = 24, 8, 4


def test_without_need_the_rule_costs_nothing_and_a_tier_of_the_same_size_gains_nothing():
    agents = recorded(6, seed=3)
    how = {"at_a_time": 3, "tier": 4000}
    ours = play(agents, **how, pages=4000, capped=False)
    assert play(agents, **how, pages=4000, capped=True) == ours
    assert (ours.tier, ours.local > 0.9 * ours.prompt) == (0, True)
    small = play(agents, **how, pages=60, capped=False)
    assert small.local + small.tier == ours.local, "routes with pages: a tier makes up for memory"
    assert play(agents, **how, pages=60, capped=True).tier < small.tier / 5


def test_one_page_without_routes_costs_all_pages_of_the_tier():
    memory = {"a", "b"}
    cap = RouteCap(1, memory.__contains__, room=2)
    cap.finish("ab")
    memory.clear()
    assert cap.allowed("ab", 0, 2) == 2
    assert cap.allowed("abc", 0, 3) == cap.allowed("abc", 1, 2) == 0
    memory |= set("xyz")
    cap.finish("xyz")  # five, of which two may stay, and what is in memory does
    assert (cap.lead("ab"), cap.lead("xyz")) == (0, 3)


@pytest.mark.vllm
def test_it_is_the_rule_of_vllm_0_33():
    if vllm_release() != "0.33":
        pytest.skip("vLLM 0.32 has no such rule")
    assert call(_compare) > 200


def _compare() -> int:
    """Ask both about random prompts as pages come and go; return how often one was refused."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    refused = 0
    for seed in range(200):
        draw = random.Random(seed)
        memory: set[bytes] = set()
        pool = SimpleNamespace(
            hash_block_size=1,
            get_cached_block=lambda key, groups, memory=memory: key in memory or None,
        )
        coordinator = SimpleNamespace(
            single_type_managers=[SimpleNamespace(block_size=1, block_pool=pool)]
        )
        stock = AuxOutputSchedulerConnector(
            SimpleNamespace(
                coordinator=coordinator,
                block_pool=pool,
                kv_cache_config=SimpleNamespace(num_blocks=4),
            ),
            object(),
        )
        ours = RouteCap(4, memory.__contains__)
        for step in range(60):
            trunk = draw.choice("abcd")
            keys = [f"{trunk}{place}".encode() for place in range(draw.randint(1, 7))]
            request = SimpleNamespace(
                request_id=str(step), block_hashes=keys, num_tokens=len(keys) + 1
            )
            request.num_computed_tokens = len(keys)
            local = draw.randint(0, len(keys))
            external = draw.randint(0, len(keys) - local)
            allowed = stock.cap_external_hit(request, local, external)
            assert ours.allowed(keys[: local + external], local, external) in (allowed, external)
            assert ours.lead(keys) == stock.max_cache_hit(request)
            assert ours.allowed(keys, local, len(keys) - local) == stock.cap_external_hit(
                request, local, len(keys) - local
            )
            refused += external > allowed
            memory |= set(keys)
            while len(memory) > 4:
                memory.discard(draw.choice(sorted(memory)))
            stock.request_finished(request)
            ours.finish(keys)
    return refused


@pytest.mark.vllm
def test_under_a_scheduler_a_tier_serves_what_the_rule_would_refuse(tmp_path):
    """Agents in turn, no model; the engine holds one or two of them, the tier all."""
    tiny_models.save("qwen3_moe", tmp_path / "model", num_layers=LAYERS)
    ours, capped = (call(_agents, str(tmp_path / "model"), capped) for capped in (False, True))
    print(ours, capped)
    assert ours["rate"] > 0.6
    assert capped["rate"] < ours["rate"] / 3
    assert ours["wrong"] == ours["missing"] == capped["wrong"] == 0


def _agents(model: str, capped: bool) -> dict[str, float]:
    prepare()
    config = configuration(model, "carried", primary_pages=400, host_pages=400)
    engine = Engine(config, 5, "carried", blocks=BLOCKS)
    if capped:
        _cap(engine.scheduler)
    texts = [[agent // 3**digit % 3 for digit in range(3)] * 6 for agent in range(AGENTS)]
    prompts = 0
    for _ in range(TURNS):
        for agent, text in enumerate(texts):
            engine.ask(text)
            prompts += len(text)
            while engine.scheduler.has_requests():
                engine.step()
            engine.drain()
            engine.step()  # transfers of its last pages
            name = f"r{len(engine.texts) - 1}"
            texts[agent] = engine.texts[name] + [1, 2, 0]
    engine.judge()
    counts = engine.counts
    engine.close()
    found = {name: counts[name] for name in ("cached", "from tiers", "wrong", "missing")}
    return {**found, "rate": counts["cached"] / prompts}


def _cap(scheduler: Any) -> None:
    """Have the scheduler follow the rule: 0.33's own where it is, else the benchmark's."""
    control = scheduler.aux_output_connector
    if hasattr(control, "cap_external_hit"):
        del control.max_cache_hit, control.cap_external_hit  # what the plug-in had lifted
        return
    pool = scheduler.kv_cache_manager.block_pool
    rule = RouteCap(BLOCKS, lambda key: bool(pool.get_cached_block(key, [0])))
    find, over = scheduler.connector.get_num_new_matched_tokens, control.request_finished

    def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
        found, later = find(request, computed)
        if found:
            pages = request.block_hashes[: (computed + found) // PAGE]
            found = rule.allowed(pages, computed // PAGE, found // PAGE) * PAGE
        return found, later and bool(found)

    def request_finished(request: Any) -> None:
        rule.finish(request.block_hashes[: request.num_computed_tokens // PAGE])
        over(request)

    scheduler.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    control.request_finished = request_finished

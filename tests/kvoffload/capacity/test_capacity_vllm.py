"""plan_capacity against vLLM's own accounting, and against when its scheduler really evicts."""

import dataclasses
import json
from pathlib import Path

import pytest

from primeblocks.kvoffload.capacity.footprint import Rollouts
from primeblocks.kvoffload.capacity.kv_shapes import kv_groups
from primeblocks.kvoffload.capacity.plan import Gpu, Weights
from primeblocks.kvoffload.capacity.planner import plan_capacity
from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_capacity_job.py")
QUICK = "exaone_moe"  # the others with --full
PAGE_TOKENS = {"qwen3_moe": 32, "exaone_moe": 32, "deepseek_v3": 16}
# Six pages of 32 a rollout, or a window of four that slides; one of the prompt's is shared.
SHARED = Rollouts(prompts=2, prompt_tokens=40, completion_tokens=153, samples=2)
# vLLM does not cache prefixes of latents on CPU, so nothing is shared.
ASKED = {
    "qwen3_moe": SHARED,
    "exaone_moe": SHARED,
    "deepseek_v3": dataclasses.replace(SHARED, prompts=4, samples=1),
}


def plan(family):
    groups = kv_groups(tiny_models.config(family), kv_dtype="float32")
    how = {"gpu": Gpu(1 << 30, reserve_bytes=0), "weights": Weights(0), "gpus": 1}
    return plan_capacity(groups, [ASKED[family]], page_tokens=PAGE_TOKENS[family], **how)


def need(family, full):
    if family != QUICK and not full:
        pytest.skip(f"an engine of {family} starts with --full")


def layers_a_page(family):
    """vLLM splits groups into parts of as many layers as the smallest has; a page is of a part."""
    return min(group.layers for group in plan(family).groups)


def vllm_pages(family):
    found = plan(family)
    parts = [group.layers // layers_a_page(family) for group in found.groups]
    return sum(map(int.__mul__, parts, found.pages))


@pytest.fixture(scope="module")
def engines(tmp_path_factory, request):
    """Of each family an engine with just enough pages, and one with a page less."""
    folder = tmp_path_factory.mktemp("capacity")
    cases = {}
    for family in PAGE_TOKENS:
        if family != QUICK and not request.config.getoption("--full"):
            continue
        tiny_models.save(family, folder / family, dtype="float32")
        # vLLM keeps page 0 for itself.
        for name, pages in (("enough", 1), ("less", 0)):
            cases[family, name] = {
                "model": str(folder / family),
                "pages": vllm_pages(family) + pages,
                "requests": dataclasses.asdict(ASKED[family]),
            }
    (folder / "cases.json").write_text(json.dumps([*cases.values()]))
    fork_job(JOB, str(folder / "cases.json"), str(folder / "results.json"))
    return dict(zip(cases, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.vllm
@pytest.mark.parametrize("family", PAGE_TOKENS)
def test_a_page_has_the_bytes_that_vllm_says(engines, family, full):
    need(family, full)
    found, ours, tokens = engines[family, "enough"], plan(family).groups, PAGE_TOKENS[family]
    assert sum(each["layers"] for each in found["groups"]) == sum(each.layers for each in ours)
    (layer,) = {each.page_bytes(tokens) // each.layers for each in ours}
    for group in found["groups"]:
        assert set(group["page_bytes"]) == {layer}
        assert group["page_tokens"] == tokens
        assert group["layers"] == layers_a_page(family)
    assert found["pool_bytes"] == found["pages"] * layer * layers_a_page(family)


@pytest.mark.vllm
@pytest.mark.parametrize("family", PAGE_TOKENS)
def test_vllm_evicts_nothing_with_the_planned_pages_and_something_with_one_less(
    engines, family, full
):
    need(family, full)
    assert engines[family, "enough"]["evictions"] == 0
    assert engines[family, "less"]["evictions"] > 0

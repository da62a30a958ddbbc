"""A whole model on trees against separate rollouts, in float64: the loss, and all gradients."""

import itertools
import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist

from primeblocks.async_loop import Rollout
from primeblocks.errors import UnsupportedError
from primeblocks.losses.packing import plan_trees
from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.parallel.attention import FlexKernel, ring_attention, ulysses_attention
from primeblocks.testing import ranks, tiny_models
from tests.integration.tree_site import (
    EXPERTS,
    LAYERS,
    TOP_K,
    VOCABULARY,
    agent,
    as_trees,
    batch_of,
    routes_of,
    separately,
)
from tests.parallel import test_peft
from tests.parallel.float64 import Float64
from tests.parallel.test_transformers_families import EAGER, FAMILIES, INDEXED, _errors, _model

WINDOW = 5
OWN_ATTENTION = {"afmoe", "deepseek_v3", "gpt_oss", "laguna", "llama", "qwen3_vl_moe"}
REFUSED = (*INDEXED, "nemotron_h", "qwen3_5_moe", "qwen3_next")


def _compare(family, degrees, options):
    """Errors of the loss and of the worst gradient against separate rollouts."""
    from primeblocks.parallel.adapters.transformers import parallelize

    model, whole = _models(family)
    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    if options.get("checkpointing"):
        contexts = {"context_fn": lambda: (nullcontext(), Float64())}
        model.gradient_checkpointing_enable({"use_reentrant": False} | contexts)
    attention = options.get("attention")
    parallelize(model, meshes, attention=attention)
    kind, count = options.get("routes"), 100.0
    found, want = torch.zeros((), dtype=torch.float64), 0.0
    with Float64():
        for seed in range(meshes.plan.batch):
            batch = batch_of(seed)
            routes = None if kind is None else routes_of(batch, seed, differing=kind != "equal")
            if seed == meshes.batch.get_local_rank():
                group, rule = meshes.context.get_group(), options.get("rule", "exact")
                order = options.get("order", "balanced")
                found, trees = as_trees(
                    model, group, batch, routes, rule=rule, order=order, count=count
                )
            if options.get("rule") == "first":
                routes = _first(batch, routes)
            if options.get("rule") == "own":
                routes = _own(batch, routes)
            want += separately(whole, batch, routes, count=count)
        dist.all_reduce(found)
    tokens, rows = len(trees.rows), len(trees.places)
    return _errors(found, model, want, whole) | {"ratio": tokens / rows}


def _models(family):
    if family == "qwen3_moe":  # With as many experts as there are routes for.
        sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K, "hidden": 64}
        models = [
            tiny_models.build(family, dtype="float64", vocab=VOCABULARY, router_std=1.0, **sizes)
            for _ in range(2)
        ]
        for model in models:
            model.set_attn_implementation("sdpa")
            model.set_experts_implementation("eager")
            model.train()
        return models
    models = [_model(family), _model(family)]
    for module in (module for model in models for module in model.modules()):
        for each in (module, getattr(module, "config", None)):
            if isinstance(getattr(each, "sliding_window", None), int):
                each.sliding_window = WINDOW
    return models


def _first(batch, routes):
    """What the rule "first" imposes on each rollout: of equal prefixes the first one's routes."""
    from primeblocks.replay import Routes

    known, found = {}, []
    for rollout, own in zip(batch, routes, strict=True):
        rows = [
            known.setdefault(tuple(rollout.tokens[: at + 1].tolist()), own.experts[at])
            for at in range(len(own))
        ]
        found.append(
            Routes.from_array(np.stack(rows), num_experts=EXPERTS, layer_ids=own.layer_ids)
        )
    return found


def _own(batch, routes):
    """What the rule "own" leaves of routes: those on which all rollouts agree."""
    from primeblocks.replay import Routes

    known = {}
    for rollout, own in zip(batch, routes, strict=True):
        for at in range(len(own)):
            prefix = tuple(rollout.tokens[: at + 1].tolist())
            known.setdefault(prefix, set()).add(own.experts[at].tobytes())
    found = []
    for rollout, own in zip(batch, routes, strict=True):
        prefixes = [tuple(rollout.tokens[: at + 1].tolist()) for at in range(len(own))]
        missing = np.array([len(known[prefix]) > 1 for prefix in prefixes])
        assert missing.any() or rollout is not batch[1]
        found.append(
            Routes.from_array(
                own.experts, num_experts=EXPERTS, layer_ids=own.layer_ids, missing=missing
            )
        )
    return found


def _assert_equal(found):
    for errors in found:
        for case, own in errors.items():
            assert own.pop("ratio") > 1.3, case
            assert max(own.values()) < 1e-12, (case, own)


CASES = {
    "plain": (1, {}, {}),
    "checkpointing": (1, {}, {"checkpointing": True, "routes": "equal"}),
    "equal routes": (1, {}, {"routes": "equal"}),
    "differing routes": (1, {}, {"routes": "differing"}),
    "the first's routes": (1, {}, {"routes": "differing", "rule": "first"}),
    "own choices": (1, {}, {"routes": "differing", "rule": "own"}),
    "flex": (1, {}, {"attention": "flex", "routes": "equal"}),
    "ulysses": (2, {"context": 2, "expert": 2}, {"routes": "differing", "checkpointing": True}),
    "ring": (2, {"context": 2}, {"attention": "ring", "order": "zigzag", "routes": "equal"}),
    "three": (3, {"context": 3, "expert": 1}, {"routes": "equal", "order": "contiguous"}),
    "four": (4, {"context": 2, "expert": 4}, {"routes": "differing", "checkpointing": True}),
    "four, flex": (4, {"context": 4, "expert": 2}, {"routes": "first", "rule": "first"}),
}
ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}


def _flex(*args, **kwargs):
    return ulysses_attention(*args, kernel=FlexKernel(tile_tokens=8), **kwargs)


def _run(cases):
    """Errors of each case: a family, degrees and options."""
    warnings.simplefilter("error")
    found = {}
    for case, (family, degrees, options) in cases.items():
        name = options.get("attention")
        attention = _flex if name == "flex" else ATTENTIONS.get(name)
        found[case] = _compare(family, degrees, options | {"attention": attention})
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_model_on_trees_equals_separate_rollouts(world_size):
    cases = {
        name: ("qwen3_moe", *rest) for name, (size, *rest) in CASES.items() if size == world_size
    }
    _assert_equal(ranks.run(_run, cases, world_size=world_size))


def test_a_family_on_trees_equals_separate_rollouts(request):
    families = {*FAMILIES} - {*REFUSED, "qwen3_moe"}
    if not request.config.getoption("--full"):
        families &= OWN_ATTENTION
    cases = {}
    for family in sorted(families):
        options = {"attention": "ring" if family in EAGER else "ulysses", "order": "zigzag"}
        cases[family] = (family, {"context": 2}, options)
    _assert_equal(ranks.run(_run, cases, world_size=2))


def _random():
    """Errors of four batches of short rollouts of two words, with equal and differing routes."""
    from primeblocks.parallel.adapters.transformers import parallelize

    model, whole = _models("qwen3_moe")
    meshes = plan_mesh(world_size=1).build("cpu")
    parallelize(model, meshes)
    found = []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        batch = []
        for _ in range(generator.integers(1, 10)):
            tokens = generator.integers(4, 6, generator.integers(3, 12))
            prompt = int(generator.integers(1, len(tokens) - 1))
            batch.append(
                Rollout(
                    tokens=tokens,
                    prompt_length=prompt,
                    logprobs=-3 - generator.random(len(tokens) - prompt),
                    versions=np.zeros(len(tokens) - prompt, np.int64),
                    loss_mask=np.arange(len(tokens) - prompt) != 1,
                    finish_reason="stop",
                )
            )
        routes = routes_of(batch, seed, differing=seed % 2 == 1)
        model.zero_grad()
        whole.zero_grad()
        with Float64():
            loss, _ = as_trees(model, meshes.context.get_group(), batch, routes, count=10.0)
            want = separately(whole, batch, routes, count=10.0)
        found.append(_errors(loss, model, want, whole))
    return found


def test_random_trees_equal_separate_rollouts():
    (found,) = ranks.run(_random, world_size=1)
    assert len(found) == 4
    assert max(max(errors.values()) for errors in found) < 1e-12, found


def _refused(family):
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    model = _model(family)
    meshes = plan_mesh(world_size=1).build("cpu")
    parallelize(model, meshes)
    group = meshes.context.get_group()
    plan = plan_sequence([3, 2, 2], ranks=1, parents=[-1, 0, 0])
    with pytest.raises(UnsupportedError, match=r"without trees|packed documents") as caught:
        model(**local_inputs(torch.arange(7), sequence=plan, group=group))
    return str(caught.value)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_follow_forks_is_refused_by_name(family):
    (text,) = ranks.run(_refused, family, world_size=1)
    assert text.startswith(family)


def _adapters():
    from primeblocks.parallel.adapters.transformers import parallelize

    warnings.simplefilter("error")
    ours, theirs = test_peft._pair("qwen3_moe")
    meshes = plan_mesh(world_size=dist.get_world_size(), context=2, expert=2).build("cpu")
    base = ours.get_base_model()
    parallelize(base, meshes)
    batch = batch_of(0)
    routes = routes_of(batch, 0, differing=True)
    with Float64():
        found, _ = as_trees(base, meshes.context.get_group(), batch, routes, count=100.0)
        dist.all_reduce(found)
        want = separately(theirs.get_base_model(), batch, routes, count=100.0)
    return abs(float(found / want) - 1), test_peft._error(ours, theirs, lambda x: x.grad)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_adapters_on_trees_equal_those_on_separate_rollouts():
    for errors in ranks.run(_adapters, world_size=2):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(("turns", "times"), [(20, 4.4), (64, 18.4)])
@pytest.mark.parametrize("members", [8, 16])
def test_agents_are_computed_once(turns, members, times):
    """Rows are the distinct positions, counted by a trie of dictionaries."""
    sizes = {20: {"thought": 40, "answer": 8, "question": 16}}
    sizes[64] = {"thought": 20, "answer": 16, "question": 32}
    generator = np.random.default_rng(0)
    prompt = generator.integers(4, VOCABULARY, 60)
    groups = [agent(generator, prompt, turns=turns, **sizes[turns]) for _ in range(members)]
    batch = [*itertools.chain(*groups)]
    assert len(batch) == turns * members
    trees = plan_trees(batch)
    nodes = {}
    for rollout in batch:
        node = -1
        for token in rollout.tokens.tolist():
            node = nodes.setdefault((node, token), len(nodes))
    assert len(trees.places) == len(nodes)
    assert len(trees.rows) / len(nodes) > times

"""The first module whose numbers differ is named."""

import copy

import pytest
import torch
from transformers import DynamicCache

from primeblocks.errors import UsageError
from primeblocks.exact import Trace, first_difference, invariant
from tests.exact.test_models import logits, model_of, tokens

FAMILIES = ("qwen3_moe", "glm4_moe", "olmoe")


def traced(model, ids, **more):
    with Trace(model) as trace:
        logits(model, ids, **more)
    return trace


def plainly(model, ids):
    with Trace(model) as trace, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return trace


def _next(output):
    """The same, but for one element, which is the next number."""
    first = output[0] if isinstance(output, tuple) else output
    first = first.clone()
    last = first.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
    return (first, *output[1:]) if isinstance(output, tuple) else first


@pytest.mark.parametrize("family", FAMILIES)
def test_an_element_that_one_module_returns_otherwise_is_found_in_every_module(family, full):
    if family != FAMILIES[0] and not full:
        pytest.skip("the other families run with --full")
    model, ids = model_of(family), tokens(1, 9)
    right, other = plainly(model, ids), copy.deepcopy(model)
    assert first_difference(right, plainly(other, ids)) is None
    called = {each.module for each in right.events if each.side == "output" and each.values}
    inside = [name for name in called if "layers." in name]
    assert len(inside) > 20
    for name in inside:
        module = other.get_submodule(name)
        wrong = module.register_forward_hook(lambda module, args, output: _next(output))
        found = first_difference(right, plainly(other, ids))
        wrong.remove()
        assert (found.module, found.side, found.rows) == (name, "output", 1)
        assert 0 < found.largest < 1e-3


def test_what_is_between_two_modules_is_its_callers(monkeypatch):
    model, ids = model_of("qwen3_moe"), tokens(1, 9)
    right, plain = traced(model, ids), invariant.scaled_dot_product_attention
    monkeypatch.setattr(
        invariant, "scaled_dot_product_attention", lambda *a, **k: _next(plain(*a, **k))
    )
    found = first_difference(right, traced(model, ids))
    assert (found.module, found.side) == ("model.layers.0.self_attn.o_proj", "input")
    assert found.after.startswith("model.layers.0.self_attn.")
    assert found.rows == 1


def test_a_step_over_a_cache_is_compared_with_the_end_of_a_sequence():
    model, ids = model_of("qwen3_moe"), tokens(1, 20)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :17], past_key_values=cache, use_cache=True)
    step = traced(model, ids[:, 17:], past_key_values=cache, use_cache=True)
    whole = traced(model, ids)
    assert first_difference(whole, step) is None
    with pytest.raises(UsageError, match="in common"):
        first_difference(whole, Trace(model).stop())


def test_other_dtypes_differ_at_the_start():
    ids = tokens(1, 5)
    narrow, wide = (traced(model_of("qwen3", dtype), ids) for dtype in ("bfloat16", "float32"))
    found = first_difference(narrow, wide)
    assert (found.module, found.after) == ("model.embed_tokens", "model.embed_tokens input")
    assert found.largest != found.largest

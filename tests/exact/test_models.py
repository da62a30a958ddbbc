"""Whole models: a token has one log-probability, whatever it is computed beside."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers import DynamicCache

from primeblocks.errors import UnsupportedError
from primeblocks.exact import batch_invariant
from primeblocks.losses import grpo_loss
from primeblocks.replay import impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models

FAMILIES = ("qwen3_moe", "qwen3", "glm4_moe", "deepseek_v3", "mixtral", "olmoe", "minimax_m2")


def model_of(family, dtype="float32"):
    return tiny_models.build(family, num_layers=2, dtype=dtype, hidden=64, init_std=0.2).eval()


def tokens(*shape):
    return torch.randint(4, 512, shape, generator=torch.Generator().manual_seed(1))


def logits(model, ids, **more):
    with torch.no_grad(), batch_invariant():
        return model(input_ids=ids, **{"use_cache": False} | more).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_in_a_batch_cut_packed_and_padded(family, dtype, full):
    if dtype == "float32" and family not in FAMILIES[:2] and not full:
        pytest.skip("the other families run in float32 with --full, and in test_exact_ranks")
    model, ids = model_of(family, dtype), tokens(3, 45)
    whole = logits(model, ids)
    assert torch.equal(logits(model, ids[1:2]), whole[1:2])
    assert torch.equal(logits(model, ids[:, :20]), whole[:, :20])
    packed = torch.cat([ids[0, :40], ids[1, :7], ids[2]])[None]
    at = torch.cat([torch.arange(n) for n in (40, 7, 45)])[None]
    found = logits(model, packed, position_ids=at)[0].split([40, 7, 45])
    assert all(torch.equal(a, b[: len(a)]) for a, b in zip(found, whole, strict=True))
    padded = torch.nn.functional.pad(ids[:, :20], (9, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids[:, :20]), (9, 0))
    at = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=at)
    assert torch.equal(found[:, 9:], whole[:, :20])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_over_a_cache_in_pieces(family):
    model, ids = model_of(family, "bfloat16"), tokens(1, 45)
    cache, found = DynamicCache(config=model.config), []
    for piece in ids.split([33, *([1] * 5), 7], dim=1):
        found.append(logits(model, piece, past_key_values=cache, use_cache=True))
    assert torch.equal(torch.cat(found, 1), logits(model, ids))


def test_imposed_routes_change_no_bit():
    model, ids = model_of("qwen3_moe", "bfloat16"), tokens(3, 45)
    with record(routers(model)) as tape:
        whole = logits(model, ids)
    with impose(routers(model), tape.routes.split([45] * 3)[1]):
        assert torch.equal(logits(model, ids[1:2]), whole[1:2])


def test_adapters_that_a_trainer_merges_are_the_merged_weights():
    """An engine without LoRA, which gets the merged weights, computes the trainer's bits."""

    class Adapter(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.up, self.down = (
                torch.nn.Parameter(0.1 * torch.ones(shape, dtype=weight.dtype))
                for shape in ((len(weight), 4), (4, weight.shape[1]))
            )

        def forward(self, weight):
            return weight + self.up @ self.down

    model, engine = model_of("qwen3_moe", "bfloat16"), model_of("qwen3_moe", "bfloat16")
    ids, place = tokens(2, 20), "model.layers.0.self_attn.q_proj"
    plain, layer = logits(model, ids), model.get_submodule(place)
    register_parametrization(layer, "weight", Adapter(layer.weight))
    with batch_invariant():
        engine.load_state_dict({f"{place}.weight": layer.weight}, strict=False)
    found = logits(model, ids)
    assert not torch.equal(found, plain)
    assert torch.equal(found[1:], logits(engine, ids[1:]))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_are_those_of_the_same_computation(inside, checkpoints):
    model, ids = model_of("qwen3_moe"), tokens(2, 40)
    model = model.double().train()
    model.set_experts_implementation("eager")  # torch has no grouped products of float64.

    def gradients(backward_inside, context):
        model.zero_grad()
        with context():
            scores = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            loss = scores[:, :-1].gather(-1, ids[:, 1:, None]).mean()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    plain = gradients(True, torch.enable_grad)
    if checkpoints:
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), batch_invariant())}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    found = gradients(inside, batch_invariant)
    # The router's softmax is in float32.
    assert (found - plain).norm() <= 1e3 * torch.finfo().eps * plain.norm()


def test_a_step_of_grpo_is_a_plain_policy_gradient():
    """Where engine and trainer agree to the bit, the ratio is 1 and nothing is clipped."""
    model, ids = model_of("qwen3_moe").train(), tokens(4, 30)
    advantages = torch.randn(4, 29, generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(advantages, dtype=torch.bool)

    def logprobs(rows):
        with batch_invariant():
            scores = model(input_ids=rows, use_cache=False).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, rows[:, 1:, None])[..., 0]

    with torch.no_grad():
        sampled = torch.cat([logprobs(row[None]) for row in ids])

    def gradients(loss):
        model.zero_grad()
        loss(logprobs(ids)).backward()
        return [each.grad for each in model.parameters()]

    corrected = gradients(lambda each: grpo_loss(each, sampled, advantages, mask=mask).sum)
    plain = gradients(lambda each: -(each * advantages).sum())
    assert all(map(torch.equal, corrected, plain))


def test_attention_in_other_words_is_refused():
    model = model_of("qwen3_moe")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match="attn_implementation"):
        logits(model, tokens(1, 9))

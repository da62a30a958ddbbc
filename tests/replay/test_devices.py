"""On each device: imposing changes no bit, and what is measured or kept is the CPU's."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from primeblocks.contrib import index_replay as indices
from primeblocks.contrib.adapters.transformers import indexers
from primeblocks.replay import compare, impose, measure_mismatch, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.sampling import kept_logprobs, kept_tokens
from primeblocks.testing import tiny_models
from primeblocks.testing.oracles import assert_close_float64
from tests.contrib import test_indices_hooks


def step(model, tokens):
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    logits.log_softmax(-1).gather(-1, tokens[..., None]).mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe"])
def test_own_routes_change_no_bit(family, device):
    model = tiny_models.build(family, num_layers=3, hidden=64, init_std=0.1).to(device).train()
    # Index-adds of the grouped kernels would otherwise differ from run to run.
    model.set_experts_implementation("eager")
    tokens = torch.randint(4, 512, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    found = routers(model)
    with record(found) as tape:
        logits, gradients = step(model, tokens)
    with impose(found, tape.routes), record(found) as again:
        replayed, gradients_replayed = step(model, tokens)
    assert compare(tape.routes, again.routes).same_order == 1.0
    assert torch.equal(replayed, logits)
    assert all(map(torch.equal, gradients_replayed, gradients))


def test_gates_and_plausible_experts_are_replayed(device, toy, inputs, foreign):
    model, inputs, routes = toy("sigmoid").float().to(device), inputs.float().to(device), foreign()
    with impose(model.routers, routes), record(model.routers, gates=True) as tape:
        wanted = model(inputs)
    for gates in (tape.gates, torch.tensor(tape.gates, device=device, requires_grad=True)):
        with impose(model.routers, routes, gates=gates):
            assert torch.equal(model(inputs), wanted)
    rates = []
    for place in (device, "cpu"):
        with impose(model.to(place).routers, routes, min_score_ratio=1.0) as imposed:
            model(inputs.to(place))
        rates.append(imposed.replacement_rates)
    assert rates[0] == rates[1]


def test_selections_of_another_model_are_imposed(device):
    trainer, tokens = test_indices_hooks._model(), test_indices_hooks._tokens(2).to(device)
    engine = test_indices_hooks._other(trainer).to(device)
    trainer.to(device)
    with indices.record(indexers(engine)) as tape:
        wanted = test_indices_hooks._logits(engine, tokens)
    assert not torch.allclose(test_indices_hooks._logits(trainer, tokens), wanted)
    with indices.impose(indexers(trainer), tape.indices):
        assert torch.equal(test_indices_hooks._logits(trainer, tokens), wanted)


def test_mismatch_and_kept_tokens_are_those_of_the_cpu(device):
    generator = torch.Generator().manual_seed(0)
    # Far apart, so that sums in another order keep the same ids.
    logits = torch.stack([torch.randperm(64, generator=generator) for _ in range(5)]).double() / 4
    kept = [kept_tokens(logits.to(place), top_k=20, top_p=0.9) for place in ("cpu", device)]
    assert np.array_equal(kept[0].ids, kept[1].ids)
    assert np.array_equal(kept[0].offsets, kept[1].offsets)
    found = []
    for place in ("cpu", device):
        leaf = logits.to(place).requires_grad_()
        logprobs = kept_logprobs(leaf, leaf.argmax(-1), kept[0])
        found.append([logprobs.detach(), *torch.autograd.grad(logprobs.sum(), leaf)])
    assert_close_float64([x.cpu() for x in found[1]], found[0])
    mask = torch.tensor([True, True, False, True, True])
    wanted, there = (
        asdict(
            measure_mismatch(
                trainer_logprobs=(logprobs - 0.5).to(place),
                rollout_logprobs=logprobs.to(place),
                mask=mask.to(place),
            )
        )
        for place in ("cpu", device)
    )
    assert there.keys() == wanted.keys()
    assert there["k3"] == pytest.approx(wanted["k3"], rel=1e-12)
    assert there["tokens"] == wanted["tokens"] == 4

"""Imposing on each device: the upload, and that a model's own routes change no bit."""

import pytest
import torch

from primeblocks.replay import compare, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models


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

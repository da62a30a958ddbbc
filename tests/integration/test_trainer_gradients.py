"""The trainer of the example: FSDP2, shared experts and imposed routes together, on two ranks."""

import numpy as np
import pytest
import torch

from primeblocks import parallel, replay
from primeblocks.losses import grpo_loss
from primeblocks.losses.advantages import group_advantages
from primeblocks.testing import ranks, tiny_models

SIZES = {"num_layers": 2, "hidden": 64, "num_experts": 4, "top_k": 2, "vocab": 64}
LENGTHS = (9, 14, 5, 11)  # tokens of each sample; ranks get unequal shares of them
PROMPT = 3


def samples():
    generator = np.random.default_rng(0)
    tokens = [generator.integers(4, 64, length) for length in LENGTHS]
    logprobs = [-generator.random(length - PROMPT) for length in LENGTHS]
    rows = [generator.random((n, 2, 4)).argsort(-1)[..., :2] for n in LENGTHS]
    routes = [
        # The last sampled token has no row.
        replay.Routes.from_array(r[:-1], num_experts=4, layer_ids=(0, 1)).with_missing(after=1)
        for r in rows
    ]
    advantages = group_advantages(torch.tensor([[1.0, 0.0], [0.25, 0.5]]).double()).flatten()
    return list(zip(tokens, logprobs, routes, advantages.tolist(), strict=True))


def contribution(model, mine, way=replay.impose):
    """The loss of some samples, summed over their tokens; its backward runs under their routes."""
    from primeblocks.replay.adapters.transformers import routers

    width = max(len(tokens) for tokens, *_ in mine)
    tokens = torch.zeros(len(mine), width, dtype=torch.long)
    rollout = torch.zeros(len(mine), width - 1, dtype=torch.float64)
    mask = torch.zeros(len(mine), width - 1, dtype=torch.bool)
    advantages = torch.zeros(len(mine), width - 1, dtype=torch.float64)
    for i, (row, logprobs, _, advantage) in enumerate(mine):
        tokens[i, : len(row)] = torch.from_numpy(row)
        rollout[i, PROMPT - 1 : len(row) - 1] = torch.from_numpy(logprobs)
        mask[i, PROMPT - 1 : len(row) - 1] = True
        advantages[i] = advantage
    routes = replay.Routes.join([routes for _, _, routes, _ in mine], pad_to=width)
    found, rows = routers(model), {}
    if way is replay.follow:
        rows = {"routed_experts": routes.tensor(batch=len(mine))}
    with way(model, found) if rows else way(found, routes):
        logits = model(input_ids=tokens, use_cache=False, **rows).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = grpo_loss(logprobs, rollout, advantages, mask=mask)
        yield loss
        # The caller's backward has run by now, inside the context.


def gradients_on_this_rank(shares, way):
    """What a rank of the gang returns: every gradient in full, and the clipped norm."""
    from primeblocks.parallel.adapters.transformers import parallelize

    rank = torch.distributed.get_rank()
    model = tiny_models.build("qwen3_moe", dtype=torch.float64, **SIZES).train()
    meshes = parallel.plan_mesh(world_size=2, expert=2).build("cpu")
    parallelize(model, meshes)
    mine = [samples()[i] for i in shares[rank]]
    for loss in contribution(model, mine, way):
        count = parallel.global_token_count(loss.tokens, meshes)
        (loss.sum / count).backward()
    norm = parallel.clip_grad_norm_(model.parameters(), 1e9, meshes=meshes)
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {name: grad.numpy() for name, grad in whole.items()}, float(norm)


def gradients_on_one_rank():
    model = tiny_models.build("qwen3_moe", dtype=torch.float64, **SIZES).train()
    model.set_experts_implementation("eager")  # the default kernel knows no float64
    for loss in contribution(model, samples()):
        (loss.sum / loss.tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return {name: p.grad.numpy() for name, p in model.named_parameters()}, float(norm)


@pytest.mark.parametrize("way", [replay.impose, replay.follow])
@pytest.mark.parametrize("shares", [((0, 2), (1, 3)), ((0,), (1, 2, 3))], ids=["even", "uneven"])
def test_gradients_equal_those_of_one_rank(shares, way):
    expected, expected_norm = gradients_on_one_rank()
    for gradients, norm in ranks.run(gradients_on_this_rank, shares, way, world_size=2):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            scale = np.abs(expected[name]).max()
            assert np.abs(gradient - expected[name]).max() <= 1e-12 * scale, name
        assert norm == pytest.approx(expected_norm, rel=1e-12)

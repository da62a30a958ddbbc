import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from primeblocks.replay import Routes, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import ranks, tiny_models

LENGTHS = (6, 9)  # Tokens by rank: ragged.


def _model(checkpoint):
    model = tiny_models.build(
        "gpt_oss", dtype="float64", num_layers=2, hidden=32, vocab=32, init_std=0.3
    ).train()
    model.set_experts_implementation("eager")  # The grouped kernel refuses float64.
    if checkpoint is not None:
        kwargs = {"use_reentrant": checkpoint}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


def _batch(rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(4, 32, (1, LENGTHS[rank]), generator=generator)
    draws = torch.rand(LENGTHS[rank], 2, 8, generator=generator)
    missing = torch.zeros(LENGTHS[rank], dtype=torch.bool)
    missing[-1] = True
    routes = Routes.from_array(
        draws.topk(2).indices.numpy(), num_experts=8, layer_ids=[0, 1], missing=missing.numpy()
    )
    return tokens, routes


def _backward(model, tokens):
    out = model(input_ids=tokens, use_cache=False).logits
    out.log_softmax(-1).gather(-1, tokens[..., None]).sum().backward()


def _sharded_gradients(checkpoint, shard_routers):
    model = _model(checkpoint)
    for layer in model.model.layers:
        if shard_routers:
            fully_shard(layer.mlp.router)
        fully_shard(layer)
    fully_shard(model)
    tokens, routes = _batch(dist.get_rank())
    found = routers(model)
    with impose(found, routes), record(found) as tape:
        _backward(model, tokens)
    known = ~routes.missing
    followed = (tape.routes.experts[known] == routes.experts[known]).all()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor().numpy()
    return bool(followed), gradients


@pytest.mark.parametrize("checkpoint", [None, False, True])
@pytest.mark.parametrize("shard_routers", [False, True])
def test_sharded_gradients_equal_the_one_rank_ones(checkpoint, shard_routers):
    results = ranks.run(_sharded_gradients, checkpoint, shard_routers, world_size=2)
    model = _model(None)
    for rank in range(2):
        tokens, routes = _batch(rank)
        with impose(routers(model), routes):
            _backward(model, tokens)
    for followed, gradients in results:
        assert followed
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert name not in gradients
                continue
            # FSDP2 averages over its two ranks.
            found = 2 * torch.from_numpy(gradients[name])
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)

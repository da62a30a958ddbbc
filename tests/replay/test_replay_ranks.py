"""Replay on several ranks: expert parallelism x FSDP2, against themselves and against one rank.

The blocks meet here and only here: `parallel` shards a model of transformers, `replay` imposes.
A new way to split tokens over ranks is one more entry of `ORDERS`; attention over split sequences
is in `test_replay_context`.
"""

from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from primeblocks.layout import local_part
from primeblocks.parallel import fully_shard_moe, plan_mesh, plan_sequence
from primeblocks.parallel.experts import AllToAllDispatcher
from primeblocks.replay import Routes, follow, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import ranks
from tests.replay.conftest import HIDDEN, TOP_K, VOCABULARY, float64_model

LAYERS, EXPERTS = 2, 12
MICRO_BATCHES = 2
FAMILIES = ("gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "olmoe")
CHECKPOINTS = (None, False, True)
# World sizes with their degrees; what is left over is FSDP2.
MESHES = [(2, {"expert": 2}), (3, {"expert": 3}), (4, {"expert": 2}), (4, {"expert": 4})]


def _model(family, checkpoint=None):
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS}
    return float64_model(family, checkpoint=checkpoint, **sizes)


def _gpt_oss_experts(module, dispatcher, hidden_states, router_indices, routing_weights):
    """As the module's own forward, on the local experts."""
    sent = dispatcher.dispatch(
        hidden_states, routing_weights, router_indices, num_experts=module.num_experts
    )
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    weights = zip(*(local_part(getattr(module, n)).unbind() for n in names), strict=True)
    out = [
        module._apply_gate(rows @ w_in + b_in) @ w_out + b_out
        for rows, (w_in, b_in, w_out, b_out) in zip(
            sent.tokens.split(sent.counts.tolist()), weights, strict=True
        )
    ]
    return dispatcher.combine(torch.cat(out), sent)


def _parallelize(model, degrees):
    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    if getattr(model, "config", None) is None or model.config.model_type == "gpt_oss":
        layers = model.layers if isinstance(model, Blocks) else model.model.layers
        experts = [getattr(layer, "mlp", layer).experts for layer in layers]
        dispatcher = AllToAllDispatcher(meshes.expert.get_group())
        for module in experts:
            module.forward = partial(_gpt_oss_experts, module, dispatcher)
        fully_shard_moe(model, meshes, layers=layers, experts=experts)
    else:
        from primeblocks.parallel.adapters.transformers import parallelize

        parallelize(model, meshes)
    return model


def _tokens(rank, micro):
    """Ragged by rank and by micro-batch."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return torch.randint(4, VOCABULARY, (1, 5 + 4 * rank + 3 * micro), generator=generator)


def _foreign(tokens, seed, layers=LAYERS):
    """Choices that no router made; every fifth is missing."""
    generator = torch.Generator().manual_seed(seed)
    return Routes.from_array(
        torch.rand(tokens, layers, EXPERTS, generator=generator).topk(TOP_K).indices.numpy(),
        num_experts=EXPERTS,
        layer_ids=range(layers),
        missing=np.arange(tokens) % 5 == 4,
    )


def _loss(model, tokens, **rows):
    logits = model(input_ids=tokens, use_cache=False, **rows).logits
    return logits, logits.log_softmax(-1).gather(-1, tokens[..., None]).sum()


@contextmanager
def _following(found, routes):
    """Imposed, and seen to be."""
    with impose(found, routes), record(found) as tape:
        yield tape
    known = ~routes.missing
    assert np.array_equal(tape.routes.experts[known], routes.experts[known])


def _accumulate(model, rank, contexts):
    """Logits of each micro-batch; gradients accumulate in the model."""
    seen = []
    for micro, context in enumerate(contexts):
        with context:
            logits, loss = _loss(model, _tokens(rank, micro))
            loss.backward()
        seen.append(logits.detach())
    return seen


def _in_flight(model, rank, contexts):
    """The same, all forwards before the one backward."""
    seen = []
    for micro, context in enumerate(contexts):
        with context:
            seen.append(_loss(model, _tokens(rank, micro)))
    torch.stack([loss for _, loss in seen]).sum().backward()
    return [logits.detach() for logits, _ in seen]


def _by_argument(model, rank, found):
    """As in flight, under any checkpoint: each call brings the rows of `_contexts`."""
    with follow(model, found):
        seen = []
        for micro in range(MICRO_BATCHES):
            tokens = _tokens(rank, micro)
            rows = _foreign(tokens.numel(), seed=10 * rank + micro).tensor()
            seen.append(_loss(model, tokens, routed_experts=rows))
        # One by one: FSDP2 with reentrant checkpoints loses gradients of two in one, replay or not.
        for _, loss in seen:
            loss.backward()
    return [logits.detach() for logits, _ in seen]


def _ways(checkpoint):
    """With checkpointing, backward belongs into the context."""
    return [_accumulate, _in_flight] if checkpoint is None else [_accumulate]


def _outcome(model, way, contexts):
    model.zero_grad()
    logits = way(model, dist.get_rank(), contexts)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    local = {n: grad.to_local().clone() for n, grad in grads.items()}
    return [*logits, *local.values()], list(local)


def _same_bits(one, other):
    assert one[1] == other[1]
    return all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def _own_routes(model, found):
    for micro in range(MICRO_BATCHES):
        with torch.no_grad(), record(found) as tape:
            _loss(model, _tokens(dist.get_rank(), micro))
        yield tape.routes


def _replay_own(families, degrees, checkpoints):
    """Where imposing the model's own routes changes a bit, or imposing foreign ones does not."""
    wrong = []
    for family, checkpoint in product(families, checkpoints):
        model = _parallelize(_model(family, checkpoint), degrees)
        found = routers(model)
        own = list(_own_routes(model, found))
        foreign = [
            _foreign(routes.tokens, seed=7).select_layers(routes.layer_ids) for routes in own
        ]
        for way in _ways(checkpoint):
            plain = _outcome(model, way, [nullcontext() for _ in own])
            same = _outcome(model, way, [_following(found, routes) for routes in own])
            other = _outcome(model, way, [_following(found, routes) for routes in foreign])
            if not _same_bits(plain, same) or _same_bits(plain, other):
                wrong.append((family, checkpoint, way.__name__))
    return wrong


@pytest.mark.parametrize(("world_size", "degrees"), MESHES, ids=str)
def test_own_routes_change_no_bit(world_size, degrees, full):
    """On two ranks with one kind of checkpoint, on three with all: no code knows both."""
    if world_size == 4 and not full:
        pytest.skip("four ranks: --full. Foreign routes run on four ranks")
    families, checkpoints = FAMILIES, (False,)
    if world_size > 2:
        families, checkpoints = ("qwen3_moe",), CHECKPOINTS
    run = _replay_own, families, degrees, CHECKPOINTS if full else checkpoints
    assert ranks.run(*run, world_size=world_size) == [[]] * world_size


def _contexts(found, rank):
    sizes = [_tokens(rank, micro).numel() for micro in range(MICRO_BATCHES)]
    return [_following(found, _foreign(n, seed=10 * rank + micro)) for micro, n in enumerate(sizes)]


def _one_rank(family, world_size):
    """Logits by rank, and gradients of all ranks' micro-batches, from one model on one rank."""
    model = _model(family)
    found = routers(model)
    logits = [_accumulate(model, rank, _contexts(found, rank)) for rank in range(world_size)]
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _error(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


def _replay_foreign(family, degrees):
    """The largest error against one rank, by checkpointing and way."""
    rank = dist.get_rank()
    logits, grads = _one_rank(family, dist.get_world_size())
    errors = {}
    for checkpoint in CHECKPOINTS:
        model = _model(family, checkpoint)
        if dist.get_world_size() == 2:  # Routers may be sharded themselves.
            for layer in model.model.layers:
                fully_shard(layer.mlp.router)
        _parallelize(model, degrees)
        found = routers(model)
        for way in [*_ways(checkpoint), _by_argument]:
            model.zero_grad()
            given = found if way is _by_argument else _contexts(found, rank)
            seen = way(model, rank, given)
            worst = [_error(a, b) for a, b in zip(seen, logits[rank], strict=True)]
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == (name not in grads), name
                if parameter.grad is not None:
                    worst.append(_error(parameter.grad.full_tensor(), grads[name]))
            errors[checkpoint, way.__name__] = max(worst)
    return errors


@pytest.mark.parametrize(("world_size", "degrees"), MESHES, ids=str)
def test_foreign_routes_equal_one_rank(world_size, degrees, full):
    if degrees == {"expert": 4} and not full:
        pytest.skip("experts on four ranks: --full. Four ranks run with experts on two")
    for errors in ranks.run(_replay_foreign, "gpt_oss", degrees, world_size=world_size):
        assert len(errors) == 7
        assert max(errors.values()) < 1e-12, errors


class Blocks(nn.Module):
    """The experts of a model without its attention: nothing but what treats tokens one by one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layer.mlp for layer in _model("gpt_oss").model.layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def _planned(order, chunk_tokens, tokens, rank, size):
    documents = [11, 1, 0, tokens - 12]
    plan = plan_sequence(documents, ranks=size, order=order, chunk_tokens=chunk_tokens)
    return plan.indices(rank).numpy()


def _shuffled(tokens, rank, size):
    return np.random.default_rng(0).permutation(tokens)[rank::size]


ORDERS = {
    "balanced": partial(_planned, "balanced", 3),
    "large blocks": partial(_planned, "balanced", 16),  # Of four ranks one has no token.
    "contiguous": partial(_planned, "contiguous", 1),
    "zigzag": partial(_planned, "zigzag", 1),
    "shuffled": _shuffled,
}


def _split_all(degrees):
    return {order: _split(order, degrees) for order in ORDERS}


def _split(order, degrees):
    """Each rank runs its part of the tokens under its part of the routes."""
    tokens = 37
    routes = _foreign(tokens, seed=3)
    x = torch.randn(1, tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator())
    whole = Blocks()
    found = routers(whole)
    with impose(found, routes), record(found) as tape:
        wanted = whole(x)
        wanted.square().sum().backward()
    index = ORDERS[order](tokens, dist.get_rank(), dist.get_world_size())
    model = _parallelize(Blocks(), degrees)
    with _following(routers(model), routes.take(index)) as own:
        y = model(x[:, index])
        y.square().sum().backward()
    errors = [_error(y, wanted[:, index])] if len(index) else []
    for name, parameter in model.named_parameters():
        errors.append(_error(parameter.grad.full_tensor(), whole.get_parameter(name).grad))
    return index, own.routes, tape.routes, max(errors)


def test_any_split_of_the_tokens_equals_one_rank():
    results = ranks.run(_split_all, {"expert": 2}, world_size=4)
    for order in ORDERS:
        indices, parts, wholes, errors = zip(*(each[order] for each in results), strict=True)
        index = np.concatenate(indices)
        assert sorted(index) == list(range(37)), order
        # What ranks record, missing tokens' own choices included, joins to what one rank records.
        assert Routes.join(parts).take(np.argsort(index)) == wholes[0], order
        assert max(errors) < 1e-12, order

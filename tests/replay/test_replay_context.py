"""Replay where sequences are split: routes follow the plan of their tokens, and one rank judges."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.replay import Routes, follow, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import ranks
from primeblocks.testing.oracles import max_relative_error
from tests.parallel.test_transformers_families import (
    ATTENTIONS,
    DOCUMENTS,
    EXPERTS,
    TOP_K,
    Float64,
    _loss,
    _model,
    _tokens,
)

FAMILIES = ("deepseek_v3", "gpt_oss")
MESHES = [(2, {"context": 2}), (4, {"context": 2, "expert": 2})]
CASES = [  # Whose routes, and by what; order, attention, reentrant checkpointing.
    ("own", None, "balanced", "ring", False),
    ("foreign", impose, "balanced", "ulysses", None),
    ("foreign", follow, "contiguous", "ulysses", False),
    ("foreign", impose, "zigzag", "ring", None),
    ("foreign", impose, "contiguous", "ring", False),
    ("foreign", follow, "balanced", "ring", True),
]


def _checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.get_decoder().layers:  # No mode is on in backward, where layers run again.
        layer.forward = partial(_in_float64, layer.forward)


def _in_float64(forward, *args, **kwargs):
    with Float64():
        return forward(*args, **kwargs)


def _foreign(found, batch):
    """Choices that no router made; every fifth is missing."""
    layer_ids = [router.layer_id for router in found]
    generator = torch.Generator().manual_seed(batch)
    draws = torch.rand(sum(DOCUMENTS), len(layer_ids), EXPERTS, generator=generator)
    return Routes.from_array(
        draws.topk(TOP_K).indices.numpy(),
        num_experts=EXPERTS,
        layer_ids=layer_ids,
        missing=np.arange(len(draws)) % 5 == 4,
    )


def _step(model, inputs, labels, routes, way):
    """Logits, loss and what the routers did; `routes` of None leave them their own choices."""
    found = routers(model)
    imposed = nullcontext()
    if way is impose:
        imposed = impose(found, routes)
    elif way is follow:
        imposed, inputs = follow(model, found), {**inputs, "routed_experts": routes.tensor()}
    with imposed, record(found) as tape:
        logits = model(**inputs).logits[0]
        loss = _loss(logits, labels)
        loss.backward()
    if routes is not None:
        known = ~routes.missing
        assert np.array_equal(tape.routes.experts[known], routes.experts[known])
    return logits.detach(), loss.detach(), tape.routes


def _one_rank(model, batch, routes):
    """Each document alone, under its own rows."""
    tokens = _tokens(batch).split(DOCUMENTS)
    rows = [None] * len(tokens) if routes is None else routes.split(DOCUMENTS)
    logits, losses, seen = zip(
        *(
            _step(
                model,
                {"input_ids": document[None], "use_cache": False},
                torch.cat([document[1:], torch.tensor([-100])]),
                own,
                None if own is None else impose,
            )
            for document, own in zip(tokens, rows, strict=True)
        ),
        strict=True,
    )
    return torch.cat(logits), torch.stack(losses).sum(), Routes.join(seen)


def _split(model, meshes, plan, routes, way):
    """All documents in one row: this rank's tokens under their rows, joined afterwards."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    group = meshes.context.get_group()
    tokens = _tokens(meshes.batch.get_local_rank())
    logits, loss, seen = _step(
        model,
        local_inputs(tokens, sequence=plan, group=group),
        plan.split(plan.labels(tokens), group=group),
        None if routes is None else routes.take(plan.indices(group.rank())),
        way,
    )
    parts = [None] * plan.ranks
    dist.all_gather_object(parts, seen, group=group)
    dist.all_reduce(loss, group=group)
    whole = Routes.join(parts).take(plan.row_of_token)
    return plan.join(logits, group=group), loss, whole


def _error(model, whole, found, wanted):
    """The largest relative error of logits, loss and gradients; choices must be the same."""
    assert found[2] == wanted[2]
    worst = [max_relative_error(a, b) for a, b in zip(found[:2], wanted[:2], strict=True)]
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            worst.append(max_relative_error(parameter.grad.full_tensor(), other.grad))
    return max(worst)


def _compare(family, degrees):
    """By case: the error against one rank."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    batch, errors, one_rank = meshes.batch.get_local_rank(), {}, {}
    for whose in ("own", "foreign"):
        whole = _model(family)
        routes = [
            _foreign(routers(whole), b) if whose == "foreign" else None
            for b in range(meshes.plan.batch)
        ]
        with Float64():
            wanted = [_one_rank(whole, b, rows) for b, rows in enumerate(routes)]
        one_rank[whose] = whole, routes[batch], wanted[batch]
    for whose, way, order, attention, checkpoint in CASES:
        whole, routes, wanted = one_rank[whose]
        model = _model(family)
        if checkpoint is not None:
            _checkpointed(model, checkpoint)
        parallelize(model, meshes, attention=ATTENTIONS[attention])
        plan = plan_sequence(DOCUMENTS, ranks=meshes.plan.context, order=order, chunk_tokens=3)
        with Float64():
            found = _split(model, meshes, plan, routes, way)
        errors[whose, way, order, attention, checkpoint] = _error(model, whole, found, wanted)
    return errors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "degrees"), MESHES, ids=str)
def test_split_routes_equal_one_rank(family, world_size, degrees, full):
    if (world_size == 4) != (family == FAMILIES[0]) and not full:
        pytest.skip("each family on one of the meshes; all on both: --full")
    for errors in ranks.run(_compare, family, degrees, world_size=world_size):
        assert len(errors) == len(CASES)
        assert max(errors.values()) < 1e-12, errors

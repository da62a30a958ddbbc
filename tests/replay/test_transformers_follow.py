"""Routes as an argument of transformers' models, whose own forwards hand it on to the layers."""

import pytest
import torch

from primeblocks.replay import compare, follow, impose, record
from primeblocks.replay.adapters import transformers as adapter
from tests.replay.test_transformers_routers import (
    FAMILIES,
    TOKENS,
    build,
    checkpointed,
    foreign_routes,
)


def loss(model, **kwargs):
    logits = model(input_ids=TOKENS, use_cache=False, **kwargs).logits
    return logits.log_softmax(-1).gather(-1, TOKENS[..., None]).mean()


def gradients(model, *losses):
    model.zero_grad()
    for value in losses:
        value.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_micro_batches_in_flight_have_the_bits_of_impose(family):
    model = build(family)
    routers = adapter.routers(model)
    both = [foreign_routes(routers), foreign_routes(routers, seed=6)]
    model.zero_grad()
    for routes in both:
        with impose(routers, routes):
            loss(model).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    # What a family's own code has to do with it is whether its forward hands rows on.
    for use_reentrant in (None, False, True) if family == "qwen3_moe" else (False,):
        checkpointed(model, use_reentrant)
        with follow(model, routers):
            with record(routers) as tape:
                first = loss(model, routed_experts=both[0].tensor(batch=2))
            second = loss(model, routed_experts=both[1].tensor(batch=2))
            found = gradients(model, first, second)
        assert compare(both[0], tape.routes).same_order == 1
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found), use_reentrant
    with follow(model, routers):
        plain = gradients(model, loss(model))
    assert not all(torch.equal(found[name], plain[name]) for name in plain)

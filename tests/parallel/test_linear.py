"""Recurrences and convolutions over a split sequence against loops over whole documents."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.linear.kernels import chunk_gated_delta_rule, chunk_state_space
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.parallel.bodies import in_turns
from tests.parallel.linear_cases import CASES, delta_inputs, drawn, space_inputs

ORDERS = ["balanced", "contiguous", "zigzag"]
PACKINGS = [[37, 6], [5, 1, 0, 14, 2], [0, 3, 1, 1, 9, 0], [2], [0]]


def _cotangent(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _split(jobs):
    """For each (case, document lengths, order): this rank's output and gradients."""
    group = dist.group.WORLD
    results = []
    for name, lengths, order in jobs:
        plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=4)
        own = plan.indices(group.rank())
        inputs, by_token = drawn(name, plan.tokens)
        leaves = [x[own] if i < by_token else x for i, x in enumerate(inputs)]
        with torch.inference_mode():  # A plan that was used so serves a step as well.
            CASES[name][2](*leaves, sequence=plan, group=group)
        leaves = [x.requires_grad_() for x in leaves]
        out = CASES[name][2](*leaves, sequence=plan, group=group)
        out.backward(_cotangent((plan.tokens, *out.shape[1:]))[own])
        for shared in leaves[by_token:]:
            dist.all_reduce(shared.grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return results


@cache
def _whole(name, lengths):
    inputs, _ = drawn(name, sum(lengths))
    leaves = [x.requires_grad_() for x in inputs]
    out = CASES[name][3](*leaves, lengths)
    if out.requires_grad:
        out.backward(_cotangent(out.shape))
    zero = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [out.detach(), *zero]


def _assert_equal_one_rank(jobs, world_size):
    found = ranks.run(_split, jobs, world_size=world_size)
    for index, (name, lengths, order) in enumerate(jobs):
        expected = _whole(name, tuple(lengths))
        by_token = 1 + drawn(name, 0)[1]
        plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=4)
        for rank, results in enumerate(found):
            own = plan.indices(rank)
            assert_close_float64(results[index][:by_token], [x[own] for x in expected[:by_token]])
            assert_close_float64(results[index][by_token:], expected[by_token:])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, full):
    jobs = [(name, lengths, order) for name in CASES for lengths in PACKINGS for order in ORDERS]
    _assert_equal_one_rank(in_turns(jobs, world_size, full), world_size)


@settings(max_examples=settings().max_examples // 20)
@given(
    world_size=st.integers(2, 4),
    packings=st.lists(strategies.ragged_lengths(max_items=5), min_size=2, max_size=2),
    order=st.sampled_from(ORDERS),
)
def test_any_packing_equals_one_rank(world_size, packings, order):
    jobs = [(name, lengths, order) for name in CASES for lengths in packings]
    _assert_equal_one_rank(jobs, world_size)


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 30),
    chunk_size=st.integers(1, 12),
    generator=strategies.generators(),
    data=st.data(),
)
def test_chunks_equal_single_tokens(tokens, chunk_size, generator, data):
    delta, space = delta_inputs(tokens, generator), space_inputs(tokens, generator)
    q, k, v, g, beta = (x.unsqueeze(0) for x in delta)
    cut = data.draw(st.integers(1, tokens))
    state = None
    outs = []
    for part in (slice(cut), slice(cut, None)):
        if q[:, part].shape[1]:
            out, state = chunk_gated_delta_rule(
                q[:, part], k[:, part], v[:, part], g=g[:, part], beta=beta[:, part],
                initial_state=state, chunk_size=chunk_size,
            )  # fmt: skip
            outs.append(out[0])
    assert_close_float64(torch.cat(outs), reference.gated_delta_rule(*delta, [tokens]))
    x, dt, B, C, A, _ = space
    out, _ = chunk_state_space(x[None], dt[None], A, B[None], C[None], chunk_size=chunk_size)
    assert_close_float64(out[0], reference.state_space(x, dt, A, B, C, None, [tokens]))


def _poisoned():
    group = dist.group.WORLD
    plan = plan_sequence([9, 8], ranks=group.size(), order="zigzag")
    own, found = plan.indices(group.rank()), {}
    for name, (_, _, function, _) in CASES.items():
        inputs, by_token = drawn(name, plan.tokens)
        inputs[0][4] = torch.nan
        local = [x[own] if i < by_token else x for i, x in enumerate(inputs)]
        out = function(*local, sequence=plan, group=group)
        found[name] = out.isfinite().flatten(1).all(1)
    return found


def test_nan_stays_in_its_document():
    plan = plan_sequence([9, 8], ranks=2, order="zigzag")
    found = ranks.run(_poisoned)
    for name in CASES:
        fine = torch.cat([by_name[name] for by_name in found])[plan.row_of_token]
        assert fine[:4].all()
        assert not fine[4]
        assert fine[9:].all()


# In the second packing a rank has whole documents alone.
ROUNDED = [
    (name, lengths, order)
    for name in ("delta", "space")
    for lengths, order in (([40, 3, 53], "zigzag"), ([64, 32], "contiguous"))
]


def test_bfloat16_is_as_precise_as_the_loops():
    found = ranks.run(_rounded, world_size=3)
    for at, (name, lengths, order) in enumerate(ROUNDED):
        plan = plan_sequence(lengths, ranks=3, order=order)
        ours = torch.cat([by_case[at] for by_case in found])[plan.row_of_token]
        low = [x.bfloat16() for x in drawn(name, plan.tokens)[0]]
        naive = CASES[name][3](*low, lengths)
        exact = CASES[name][3](*(x.double() for x in low), lengths)
        assert ours.dtype == torch.bfloat16
        assert_as_precise(ours, naive=naive, exact=exact)


def test_a_bias_is_cast_to_the_dtype_of_the_weight(one_rank):
    (x, weight, bias), _ = drawn("conv", 5)
    where = {"sequence": plan_sequence([5], ranks=1), "group": one_rank}
    x, weight, bias = x.bfloat16(), weight.float(), bias.bfloat16()
    found = [CASES["conv"][2](x, weight, each, **where) for each in (bias, bias.float())]
    assert torch.equal(*found)


def _rounded():
    group, found = dist.group.WORLD, []
    for name, lengths, order in ROUNDED:
        plan = plan_sequence(lengths, ranks=group.size(), order=order)
        inputs, by_token = drawn(name, plan.tokens)
        own = plan.indices(group.rank())
        local = [(x[own] if i < by_token else x).bfloat16() for i, x in enumerate(inputs)]
        found.append(CASES[name][2](*local, sequence=plan, group=group))
    return found

"""Recurrences and convolutions over a split sequence against loops over whole documents."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.linear import cut_runs, scan_states
from primeblocks.parallel.linear.kernels import chunk_gated_delta_rule, chunk_state_space
from primeblocks.parallel.linear.recurrence import run_batches
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
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
def test_equal_to_one_rank(world_size):
    jobs = [(name, lengths, order) for name in CASES for lengths in PACKINGS for order in ORDERS]
    _assert_equal_one_rank(jobs, world_size)


@settings(max_examples=5)
@given(
    world_size=st.integers(2, 4),
    packings=st.lists(strategies.ragged_lengths(max_items=5), min_size=2, max_size=2),
    order=st.sampled_from(ORDERS),
)
def test_any_packing_equals_one_rank(world_size, packings, order):
    jobs = [(name, lengths, order) for name in CASES for lengths in packings]
    _assert_equal_one_rank(jobs, world_size)


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


@given(
    lengths=strategies.ragged_lengths(max_length=40),
    ranks_=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
)
def test_batches_hold_each_token_once(lengths, ranks_, order):
    plan = plan_sequence(lengths, ranks=ranks_, order=order, chunk_tokens=4)
    for rank in range(ranks_):
        tokens = plan.indices(rank)
        batches = run_batches(plan, rank)
        parts = [part for (part,) in batches.split([tokens])]
        assert torch.equal(batches.join(parts), tokens)
        # Neighbours inside each batch, and the cut runs where `cut_places` says.
        assert all((part.diff(dim=1) == 1).all() for part in parts)
        starts = [int(run[0]) for part in parts[batches.whole :] for run in part]
        cut = [run.start for run in cut_runs(plan, rank)]
        assert [starts[place] for place in batches.cut_places] == cut


def _scan(lengths, order, scalar):
    """States that this rank's runs start from, and what one backward leaves in the summaries."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=2)
    generator = torch.Generator().manual_seed(group.rank())
    runs, heads = len(cut_runs(plan, group.rank())), 2
    shapes = [(runs, heads, 3, 2, 2), (runs, heads) if scalar else (runs, heads, 3, 3)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    leaves = [x.requires_grad_() for x in leaves]
    states = scan_states(*leaves, sequence=plan, group=group)
    cotangent = torch.randn(states.shape, generator=generator, dtype=torch.float64)
    states.backward(cotangent)
    return [x.detach() for x in leaves], cotangent, states.detach(), [x.grad for x in leaves]


def _chain(plan, updates, transitions):
    """The same, one run after the other."""
    runs = [(r.start, rank, i) for rank in range(plan.ranks) for i, r in _numbered(plan, rank)]
    states = [[None] * len(own) for own in updates]
    starts = {run.document for rank in range(plan.ranks) for run in plan.runs(rank)}
    for start, rank, i in sorted(runs):
        if start in starts:
            state = torch.zeros_like(updates[rank][i])
        states[rank][i] = state
        transition, update = transitions[rank][i], updates[rank][i]
        moved = (
            torch.einsum("h,hdef->hdef", transition, state)
            if transition.ndim == 1
            else torch.einsum("hcd,hdef->hcef", transition, state)
        )
        state = moved + update
    return states


def _numbered(plan, rank):
    return list(enumerate(cut_runs(plan, rank)))


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("order", ["balanced", "zigzag"])
def test_states_are_those_of_a_chain(order, scalar):
    lengths = [11, 3, 6]
    plan = plan_sequence(lengths, ranks=3, order=order, chunk_tokens=2)
    found = ranks.run(_scan, lengths, order, scalar, world_size=3)
    leaves = [[x.clone().requires_grad_() for x in one] for one, *_ in found]
    states = _chain(plan, *zip(*leaves, strict=True))
    sums = [
        (state * cotangent).sum()
        for own, (_, cotangents, *_) in zip(states, found, strict=True)
        for state, cotangent in zip(own, cotangents, strict=True)
    ]
    torch.stack(sums).sum().backward()
    for own, inputs, (*_, ours, grads) in zip(states, leaves, found, strict=True):
        assert_close_float64(ours, torch.stack(own).detach())
        assert_close_float64(grads, [x.grad for x in inputs])


def _poisoned(name):
    group = dist.group.WORLD
    plan = plan_sequence([9, 8], ranks=group.size(), order="zigzag")
    inputs, by_token = drawn(name, plan.tokens)
    inputs[0][4] = torch.nan
    own = plan.indices(group.rank())
    local = [x[own] if i < by_token else x for i, x in enumerate(inputs)]
    return CASES[name][2](*local, sequence=plan, group=group).isfinite().flatten(1).all(1)


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_in_its_document(name):
    plan = plan_sequence([9, 8], ranks=2, order="zigzag")
    fine = torch.cat(ranks.run(_poisoned, name, world_size=2))[plan.row_of_token]
    assert fine[:4].all()
    assert not fine[4]
    assert fine[9:].all()


@pytest.mark.parametrize("name", ["delta", "space"])
# In the second packing a rank has whole documents alone.
@pytest.mark.parametrize(("lengths", "order"), [([40, 3, 53], "zigzag"), ([64, 32], "contiguous")])
def test_bfloat16_is_as_precise_as_the_loops(name, lengths, order):
    found = ranks.run(_rounded, name, lengths, order, world_size=3)
    plan = plan_sequence(lengths, ranks=3, order=order)
    ours = torch.cat(found)[plan.row_of_token]
    low = [x.bfloat16() for x in drawn(name, plan.tokens)[0]]
    naive = CASES[name][3](*low, lengths)
    exact = CASES[name][3](*(x.double() for x in low), lengths)
    assert ours.dtype == torch.bfloat16
    assert_as_precise(ours, naive=naive, exact=exact)


def _rounded(name, lengths, order):
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order)
    inputs, by_token = drawn(name, plan.tokens)
    own = plan.indices(group.rank())
    local = [(x[own] if i < by_token else x).bfloat16() for i, x in enumerate(inputs)]
    return CASES[name][2](*local, sequence=plan, group=group)

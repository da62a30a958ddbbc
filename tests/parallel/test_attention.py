"""Ring and Ulysses attention against plain masked attention on one rank."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel import plan_sequence, reference, ring_attention, ulysses_attention
from primeblocks.parallel.attention.kernel import Kernel
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64

ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
ORDERS = ["balanced", "contiguous", "zigzag"]
PACKINGS = [[19], [7, 1, 0, 9, 4], [2]]
# heads, key heads, head_dim, value_dim: plain, grouped, one key head, other widths, odd numbers.
HEADS = [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 4), (3, 3, 4, 6), (12, 4, 2, 2)]


def _inputs(tokens, heads, *, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    q_heads, key_heads, head_dim, value_dim = heads
    shapes = [(q_heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)]
    drawn = [torch.randn(tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn.append(torch.randn(q_heads, generator=generator, dtype=torch.float64))
    return [x.to(dtype) for x in drawn]


def _cotangent(tokens, heads):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, heads[0], heads[3], generator=generator, dtype=torch.float64)


def _split_attention(names, lengths, order, heads, rules, with_sinks, dtype=torch.float64):
    """By name: this rank's output and gradients; sinks last, where there are any."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, block_tokens=3)
    own = plan.indices(group.rank())
    results = {}
    for name in names:
        *qkv, sinks = _inputs(plan.tokens, heads, dtype=dtype)
        leaves = [x[own].requires_grad_() for x in qkv]
        sinks = sinks.requires_grad_() if with_sinks else None
        out = ATTENTIONS[name](*leaves, sequence=plan, group=group, sinks=sinks, **rules)
        out.backward(_cotangent(plan.tokens, heads)[own].to(dtype))
        grads = [leaf.grad for leaf in leaves]
        if with_sinks:
            dist.all_reduce(sinks.grad)
            grads.append(sinks.grad)
        results[name] = [out.detach(), *grads]
    return results


def _whole(lengths, heads, rules, with_sinks):
    *qkv, sinks = (x.requires_grad_() for x in _inputs(sum(lengths), heads))
    out = reference.attention(*qkv, lengths, sinks=sinks if with_sinks else None, **rules)
    out.backward(_cotangent(sum(lengths), heads))
    leaves = [*qkv, sinks] if with_sinks else qkv
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _assert_equal_one_rank(world_size, lengths, order, heads, rules, with_sinks):
    found = ranks.run(
        _split_attention, list(ATTENTIONS), lengths, order, heads, rules, with_sinks,
        world_size=world_size,
    )  # fmt: skip
    expected = _whole(lengths, heads, rules, with_sinks)
    plan = plan_sequence(lengths, ranks=world_size, order=order, block_tokens=3)
    for rank, by_name in enumerate(found):
        own = plan.indices(rank)
        for results in by_name.values():
            assert_close_float64(results[:4], [x[own] for x in expected[:4]])
            assert_close_float64(results[4:], expected[4:])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, order):
    for lengths, heads in zip(PACKINGS, HEADS, strict=False):
        _assert_equal_one_rank(world_size, lengths, order, heads, {}, False)


@settings(max_examples=12)
@given(
    world_size=st.integers(2, 4),
    lengths=strategies.ragged_lengths(max_items=5),
    order=st.sampled_from(ORDERS),
    heads=st.sampled_from(HEADS),
    rules=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 5}, {"scale": 0.3}]),
    with_sinks=st.booleans(),
)
def test_any_packing_equals_one_rank(world_size, lengths, order, heads, rules, with_sinks):
    _assert_equal_one_rank(world_size, lengths, order, heads, rules, with_sinks)


def test_long_documents_and_windows():
    lengths = [300, 41, 500]
    for rules in ({"window": 7}, {"window": 200}, {}):
        _assert_equal_one_rank(3, lengths, "zigzag", (2, 1, 8, 8), rules, True)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bfloat16_is_as_precise_as_plain_attention(name):
    lengths, heads = [150, 33, 73], (4, 2, 16, 16)
    found = ranks.run(
        _split_attention, [name], lengths, "zigzag", heads, {}, False, torch.bfloat16, world_size=3
    )
    plan = plan_sequence(lengths, ranks=3, order="zigzag", block_tokens=3)
    rows = plan.row_of_token
    *qkv, _ = (x.requires_grad_() for x in _inputs(256, heads, dtype=torch.bfloat16))
    naive = _naive(*qkv, lengths)
    naive.backward(_cotangent(256, heads).bfloat16())
    rounded = [x.detach().double().requires_grad_() for x in qkv]
    exact = reference.attention(*rounded, lengths)
    exact.backward(_cotangent(256, heads).bfloat16().double())
    for index, (theirs, right) in enumerate(
        [(naive, exact), *((a.grad, b.grad) for a, b in zip(qkv, rounded, strict=True))]
    ):
        ours = torch.cat([by_name[name][index] for by_name in found])[rows]
        assert_as_precise(ours, naive=theirs.detach(), exact=right.detach())


def _naive(q, k, v, lengths):
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    out = []
    for document in parts:
        one_q, one_k, one_v = (x.transpose(0, 1) for x in document)
        every_k, every_v = (x.repeat_interleave(2, 0) for x in (one_k, one_v))
        scores = one_q @ every_k.transpose(1, 2) * q.shape[2] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append((weights @ every_v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_plain_matrices_compute_what_the_fused_kernel_does(kind, key_heads):
    q, k, v, _ = _inputs(9, (4, key_heads, 8, 6))
    grad = _cotangent(9, (4, key_heads, 8, 6))
    mask = None
    if kind == "masked":
        mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(2)) < 0.4
        mask[3] = False
    kernel = Kernel(kind == "causal", mask, 0.4)
    out, lse = kernel.forward(q, k, v)
    pad = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    plain_out, plain_lse = kernel._plain(*pad)
    seen = lse[:, 0] > -torch.inf
    assert torch.equal(seen, torch.ones(9, dtype=torch.bool) if mask is None else mask.any(1))
    assert_close_float64(out[seen], plain_out[0].transpose(0, 1)[seen])
    assert_close_float64(lse, plain_lse[0].transpose(0, 1))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    fused = kernel.backward(grad, q, k, v, out, lse)
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v, out)]
    plain = kernel._plain_backward(*heads_first, lse.transpose(0, 1).unsqueeze(0))
    assert_close_float64(list(fused), [x[0].transpose(0, 1) for x in plain])


def _bad_arguments(change, name):
    """What rank 1 alone does wrong is an error on both."""
    group = dist.group.WORLD
    rank = group.rank()
    plan = plan_sequence([6, 2], ranks=2, order="contiguous")
    q, k, v = (x[plan.indices(rank)] for x in _inputs(8, (4, 2, 4, 4))[:3])
    arguments = {"sequence": plan, "group": group}
    if rank == 1:
        q, k, v, arguments = change(q, k, v, arguments)
    try:
        ATTENTIONS[name](q, k, v, **arguments)
    except (PlanError, RankError, ShapeError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    # The group still works.
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()


def _fewer_tokens(q, k, v, arguments):
    return q[:-1], k[:-1], v[:-1], arguments


def _other_dtype(q, k, v, arguments):
    return q.float(), k.float(), v.float(), arguments


def _more_heads(q, k, v, arguments):
    return q.repeat(1, 2, 1), k.repeat(1, 2, 1), v.repeat(1, 2, 1), arguments


def _other_plan(q, k, v, arguments):
    plan = plan_sequence([7, 1], ranks=2, order="contiguous")
    return q, k, v, arguments | {"sequence": plan}


def _odd_heads(q, k, v, arguments):
    return q[:, :3], k, v, arguments


def _flat(q, k, v, arguments):
    return q.flatten(1), k, v, arguments


def _no_gradient(q, k, v, arguments):
    return q.requires_grad_(), k, v, arguments


def _bad_window(q, k, v, arguments):
    return q, k, v, arguments | {"window": 0}


def _bad_sinks(q, k, v, arguments):
    return q, k, v, arguments | {"sinks": torch.zeros(3, dtype=torch.float64)}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(
    ("change", "here", "there"),
    [
        (_fewer_tokens, "ShapeError: the plan gives this rank 4 tokens", "rank 1 .*ShapeError"),
        (_other_dtype, r"bytes an element must be equal.*\[8, 4\]", r"\[8, 4\]"),
        (_more_heads, r"q dim 1 must be equal on all ranks; by rank it is \[4, 8\]", r"\[4, 8\]"),
        (_other_plan, "PlanError: plan must be equal", "PlanError: plan must be equal"),
        (_odd_heads, "ShapeError: q and k need one head_dim", "rank 1 .* refused"),
        (_flat, r"ShapeError: needs \[local_tokens, heads, head_dim\]", "rank 1 .* refused"),
        (_no_gradient, r"requires_grad must be equal .* it is \[0, 1\]", r"\[0, 1\]"),
        (_bad_window, "PlanError: a window needs causal=True", "PlanError: a window"),
        (_bad_sinks, r"ShapeError: needs one sink a head, \[4\]; got \(3,\)", "rank 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_ranks_mistake_is_an_error_on_all(name, change, here, there):
    (said_there, sum_there), (said_here, sum_here) = ranks.run(_bad_arguments, change, name)
    assert re.search(here, said_here), said_here
    assert re.search(there, said_there), said_there
    assert sum_here == sum_there == 2.0


def _wrong_group():
    plan = plan_sequence([9], ranks=2)
    q, k, v, _ = _inputs(3, (2, 2, 4, 4))
    with pytest.raises(PlanError, match="planned for 2 ranks; the group has 3"):
        ring_attention(q, k, v, sequence=plan, group=dist.group.WORLD)


def test_a_group_of_another_size_is_refused():
    ranks.run(_wrong_group, world_size=3)

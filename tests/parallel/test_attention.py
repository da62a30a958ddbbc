"""Ring and Ulysses attention against plain masked attention on one rank."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import (
    FlexKernel,
    RectangleKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.parallel.attention.rectangles import FusedRectangle
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


def _split_attention(*arguments):
    return _split_in(dist.group.WORLD, *arguments)


def _split_in(
    group, names, lengths, order, heads, rules, with_sinks, dtype=torch.float64, *, strided=False
):
    """By name: this rank's output and gradients; sinks last, where there are any."""
    lie = _columns if strided else torch.Tensor.contiguous
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    own = plan.indices(group.rank())
    results = {}
    for name in names:
        *qkv, sinks = _inputs(plan.tokens, heads, dtype=dtype)
        leaves = [lie(x[own]).requires_grad_() for x in qkv]
        sinks = sinks.requires_grad_() if with_sinks else None
        out = ATTENTIONS[name](*leaves, sequence=plan, group=group, sinks=sinks, **rules)
        out.backward(lie(_cotangent(plan.tokens, heads)[own].to(dtype)))
        grads = [leaf.grad for leaf in leaves]
        if with_sinks:
            dist.all_reduce(sinks.grad, group=group)
            grads.append(sinks.grad)
        results[name] = [out.detach(), *grads]
    return results


def _columns(x):
    """The same numbers, those of a head far apart."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


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
    _assert_equal_whole(found, lengths, order, heads, rules, with_sinks)


def _assert_equal_whole(found, lengths, order, heads, rules, with_sinks):
    expected = _whole(lengths, heads, rules, with_sinks)
    plan = plan_sequence(lengths, ranks=len(found), order=order, chunk_tokens=3)
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


@pytest.mark.parametrize(
    ("heads", "rules"),
    [
        ((12, 4, 2, 2), {"causal": False}),  # Ranks whose query heads share key heads unevenly.
        ((10, 5, 4, 4), {"window": 5}),  # And one with an odd number of them for two.
        ((2, 2, 4, 6), {"scale": 0.3}),  # More ranks than heads.
    ],
    ids=str,
)
def test_rules(heads, rules):
    _assert_equal_one_rank(3, PACKINGS[1], "balanced", heads, rules, True)


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
@pytest.mark.parametrize(("rules", "with_sinks"), [({}, False), ({"window": 60}, True)], ids=str)
def test_bfloat16_is_as_precise_as_plain_attention(name, rules, with_sinks):
    """Many runs a rank, so that what is added up in bfloat16 by mistake is added up often."""
    lengths, heads = [150, 33, 73], (4, 2, 16, 16)
    arguments = (lengths, "balanced", heads, rules, with_sinks, torch.bfloat16)
    found = ranks.run(_split_attention, [name], *arguments, world_size=3)
    plan = plan_sequence(lengths, ranks=3, chunk_tokens=3)
    parts = zip(*(by_name[name][:4] for by_name in found), strict=True)
    ours = [torch.cat(part)[plan.row_of_token] for part in parts] + found[0][name][4:]
    naive = _step(_naive, lengths, heads, rules, with_sinks, torch.bfloat16)
    exact = _step(reference.attention, lengths, heads, rules, with_sinks, torch.float64)
    for got, theirs, right in zip(ours, naive, exact, strict=True):
        assert_as_precise(got, naive=theirs, exact=right)


def _step(attention, lengths, heads, rules, with_sinks, dtype):
    """Output and gradients of one rank, for numbers that bfloat16 has."""
    leaves = [x.to(dtype).requires_grad_() for x in _inputs(256, heads, dtype=torch.bfloat16)]
    leaves = leaves if with_sinks else leaves[:3]
    out = attention(*leaves[:3], lengths, sinks=leaves[3] if with_sinks else None, **rules)
    out.backward(_cotangent(256, heads).bfloat16().to(dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _naive(q, k, v, lengths, *, window=10**6, sinks=None):
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    out = []
    for document in parts:
        one_q, one_k, one_v = (x.transpose(0, 1) for x in document)
        every_k, every_v = (x.repeat_interleave(2, 0) for x in (one_k, one_v))
        scores = one_q @ every_k.transpose(1, 2) * q.shape[2] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril().triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            more = sinks[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, more], dim=2)
        weights = scores.softmax(-1)[..., : one_v.shape[1]]
        out.append((weights @ every_v).transpose(0, 1))
    return torch.cat(out)


def _by_group():
    """Ranks 0 and 2, 1 and 3: not the whole world, and not neighbours."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    lengths, heads = PACKINGS[rank % 2], HEADS[rank % 2]
    return _split_in(groups[rank % 2], list(ATTENTIONS), lengths, "zigzag", heads, {}, True)


def test_groups_inside_the_world():
    found = ranks.run(_by_group, world_size=4)
    for which in (0, 1):
        _assert_equal_whole(found[which::2], PACKINGS[which], "zigzag", HEADS[which], {}, True)


def _strided(lengths, order):
    """Numbers of a head that do not lie side by side, in queries, keys, values and gradients."""
    arguments = (list(ATTENTIONS), lengths, order, HEADS[1], {}, False)
    lie, inner = [], FusedRectangle.backward

    def backward(kernel, grad, *more):
        lie.append(grad.is_contiguous())  # As kernels for GPUs ask for; this one copes.
        return inner(kernel, grad, *more)

    with mock.patch.object(FusedRectangle, "backward", backward):
        found = _split_in(dist.group.WORLD, *arguments, strided=True)
    assert all(lie)
    return found


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])  # One run a rank, and several.
def test_any_strides(order):
    lengths = PACKINGS[order == "zigzag"]
    found = ranks.run(_strided, lengths, order)
    _assert_equal_whole(found, lengths, order, HEADS[1], {}, False)


def _strided_in_turn(kernel):
    """On one rank, where nothing is copied in order to travel."""
    plan = plan_sequence(PACKINGS[1], ranks=1)
    qkv, found = _inputs(plan.tokens, HEADS[1])[:3], []
    for strided in range(3):
        leaves = [(_columns(x) if at == strided else x).detach() for at, x in enumerate(qkv)]
        leaves = [x.requires_grad_() for x in leaves]
        out = ring_attention(*leaves, sequence=plan, group=dist.group.WORLD, kernel=kernel)
        out.backward(_cotangent(plan.tokens, HEADS[1]))
        found.append([out.detach(), *(x.grad for x in leaves)])
    return found


@pytest.mark.parametrize("kernel", [RectangleKernel(), FlexKernel(tile_tokens=4)], ids=["", "flex"])
def test_strides_of_each_on_one_rank(kernel):
    expected = _whole(PACKINGS[1], HEADS[1], {}, False)
    for results in ranks.run(_strided_in_turn, kernel, world_size=1)[0]:
        assert_close_float64(results, expected)


def _frozen(names):
    """Gradients where some inputs want none: by name of the attention and of the leaves."""
    group = dist.group.WORLD
    plan = plan_sequence(PACKINGS[1], ranks=group.size(), order="zigzag")
    own = plan.indices(group.rank())
    found = {}
    for name, attention in ATTENTIONS.items():
        for wanted in names:
            qkv = dict(zip("qkv", _inputs(plan.tokens, HEADS[1])[:3], strict=True))
            leaves = {x: value[own].requires_grad_(x in wanted) for x, value in qkv.items()}
            out = attention(*leaves.values(), sequence=plan, group=group)
            out.backward(_cotangent(plan.tokens, HEADS[1])[own])
            found[name, wanted] = [leaf.grad for leaf in leaves.values()]
    return found


def test_inputs_without_gradients():
    for rank, found in enumerate(ranks.run(_frozen, ["q", "k", "v", "kv"])):
        own = plan_sequence(PACKINGS[1], ranks=2, order="zigzag").indices(rank)
        expected = [x[own] for x in _whole(PACKINGS[1], HEADS[1], {}, False)[1:]]
        for (_, wanted), grads in found.items():
            named = zip("qkv", expected, strict=True)
            assert_close_float64(grads, [x if which in wanted else None for which, x in named])


def _block(x, attend):
    """Two attentions side by side: in the backward both are ready at once."""
    ring, ulysses = (
        attend(name, x, *((x * n)[:, part] for n, part in ((2, slice(2)), (3, slice(2, None)))))
        for name in ATTENTIONS
    )
    return ring + 2 * ulysses


def _in_one_graph():
    """Two such blocks, plain and recomputed; then the same graph once more."""
    group = dist.group.WORLD
    plan = plan_sequence(PACKINGS[1], ranks=group.size(), order="balanced", chunk_tokens=2)
    own = plan.indices(group.rank())

    def attend(name, q, k, v):
        return ATTENTIONS[name](q, k, v, sequence=plan, group=group)

    found = []
    for again in (None, False, True):  # use_reentrant
        x = _inputs(plan.tokens, HEADS[0])[0][own].requires_grad_()
        y = x
        for _ in range(2):
            y = (
                _block(y, attend)
                if again is None
                else checkpoint(_block, y, attend, use_reentrant=again)
            )
        grad = _cotangent(plan.tokens, HEADS[0])[own]
        y.backward(grad, retain_graph=again is None)
        found.append([y.detach(), x.grad.clone()])
        if again is None:
            y.backward(grad)
            assert_close_float64(x.grad, 2 * found[0][1])
    return found


def test_several_attentions_in_one_graph():
    def attend(name, q, k, v):
        return reference.attention(q, k, v, PACKINGS[1])

    x = _inputs(sum(PACKINGS[1]), HEADS[0])[0].requires_grad_()
    y = _block(_block(x, attend), attend)
    y.backward(_cotangent(len(x), HEADS[0]))
    plan = plan_sequence(PACKINGS[1], ranks=3, order="balanced", chunk_tokens=2)
    for rank, found in enumerate(ranks.run(_in_one_graph, world_size=3)):
        own = plan.indices(rank)
        for results in found:
            assert_close_float64(results, [y.detach()[own], x.grad[own]])


def _twice():
    plan = plan_sequence([5], ranks=1)
    q, k, v, _ = _inputs(5, HEADS[0])
    out = ring_attention(q.requires_grad_(), k, v, sequence=plan, group=dist.group.WORLD)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_second_derivative_is_refused():
    ranks.run(_twice, world_size=1)

"""Ring and Ulysses attention, by every kernel, against plain masked attention on one rank."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from benchmarks.parallel_parts import plain_flash
from primeblocks.errors import UnsupportedError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import (
    FlexKernel,
    RectangleKernel,
    VarlenKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.parallel.bodies import in_turns

ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
KERNELS = {
    "rectangles": RectangleKernel(),
    "flex": FlexKernel(tile_tokens=4, recompute=False),
    "recompute": FlexKernel(tile_tokens=4, recompute=True),
    # Plain torch, not flash attention.
    "varlen": VarlenKernel(operators=(plain_flash.forward, plain_flash.backward)),
}
ORDERS = ["balanced", "contiguous", "zigzag"]
PACKINGS = [[19], [7, 1, 0, 9, 4], [2]]
# heads, key heads, head_dim, value_dim: plain, grouped, one key head, other widths, odd numbers.
HEADS = [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 4), (3, 3, 4, 6), (12, 4, 2, 2)]
# Of one width, as flash attention needs it. The last are uneven in Ulysses attention.
FLASH_HEADS = [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 4, 4), (12, 4, 2, 2)]


@dataclass(frozen=True)
class Job:
    lengths: list[int]
    order: str
    heads: tuple[int, int, int, int]
    rules: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    kernel: str = "rectangles"
    names: tuple[str, ...] = tuple(ATTENTIONS)
    dtype: torch.dtype = torch.float64

    def plan(self, ranks):
        return plan_sequence(self.lengths, ranks=ranks, order=self.order, chunk_tokens=3)


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


def _columns(x):
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def _split(jobs, group=None):
    """By job and name: this rank's output and gradients, of sinks last, or why it is refused."""
    group = dist.group.WORLD if group is None else group
    return [{name: _one(job, name, group) for name in job.names} for job in jobs]


def _one(job, name, group):
    plan = job.plan(group.size())
    own = plan.indices(group.rank())
    *qkv, sinks = _inputs(plan.tokens, job.heads, dtype=job.dtype)
    leaves = [x[own].requires_grad_() for x in qkv]
    sinks = sinks.requires_grad_() if job.sinks else None
    rules = {"sequence": plan, "group": group, "sinks": sinks, "kernel": KERNELS[job.kernel]}
    try:
        out = ATTENTIONS[name](*leaves, **rules, **job.rules)
    except UnsupportedError as error:
        return str(error)
    out.backward(_cotangent(plan.tokens, job.heads)[own].to(job.dtype))
    grads = [leaf.grad for leaf in leaves]
    if job.sinks:
        dist.all_reduce(sinks.grad, group=group)
        grads.append(sinks.grad)
    return [out.detach(), *grads]


def _whole(job):
    *qkv, sinks = (x.requires_grad_() for x in _inputs(sum(job.lengths), job.heads))
    out = reference.attention(*qkv, job.lengths, sinks=sinks if job.sinks else None, **job.rules)
    out.backward(_cotangent(sum(job.lengths), job.heads))
    leaves = [*qkv, sinks] if job.sinks else qkv
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _assert_equal_one_rank(world_size, jobs):
    found = ranks.run(_split, jobs, world_size=world_size)
    for at, job in enumerate(jobs):
        _assert_equal_whole([by_job[at] for by_job in found], job)


def _assert_equal_whole(found, job):
    expected, plan = _whole(job), job.plan(len(found))
    for rank, by_name in enumerate(found):
        own = plan.indices(rank)
        for results in by_name.values():
            assert not isinstance(results, str), (job, results)
            assert_close_float64(results[:4], [x[own] for x in expected[:4]])
            assert_close_float64(results[4:], expected[4:])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, full):
    jobs = [Job(*pair, heads) for pair, heads in _pairs(PACKINGS, ORDERS, HEADS)]
    of_flex = zip(PACKINGS, ORDERS, HEADS[1:], strict=False)
    jobs += [Job(*case, kernel="flex") for case in of_flex]
    cases = _pairs([*PACKINGS, [5, 5, 30, 2, 8]], ORDERS[1:], FLASH_HEADS)
    jobs += [Job(*pair, heads, sinks=True, kernel="varlen") for pair, heads in cases]
    _assert_equal_one_rank(world_size, in_turns(jobs, world_size, full))


def _pairs(packings, orders, heads):
    """Each packing, which has heads of its own, in each order."""
    paired = zip(packings, heads, strict=False)
    return [((lengths, order), own) for lengths, own in paired for order in orders]


def test_rules():
    rules = [
        ((12, 4, 2, 2), {"causal": False}),  # Ranks whose query heads share key heads unevenly.
        ((10, 5, 4, 4), {"window": 5}),  # And one with an odd number of them for two.
        ((4, 2, 4, 6), {"window": 5, "softcap": 2.0}),
        ((2, 2, 4, 6), {"scale": 0.3, "softcap": 1.5}),  # More ranks than heads.
    ]
    jobs = [
        Job(PACKINGS[1], "balanced", *case, True, kernel)
        for case in rules
        for kernel in ("rectangles", "flex")
    ]
    jobs.append(Job(PACKINGS[1], "balanced", *rules[1], True, "recompute"))
    long = [{"window": 7}, {"window": 200}, {}]
    jobs += [Job([300, 41, 500], "zigzag", (2, 1, 8, 8), each, True) for each in long]
    _assert_equal_one_rank(3, jobs)


def test_flash_attention_takes_every_order_in_part():
    """Windows in contiguous order, in zigzag up to a rank's tokens, and whole documents.

    And all of Ulysses attention.
    """
    of = {"kernel": "varlen", "sinks": True}
    # Inside a rank, across one cut and across both, and longer than any document.
    jobs = [
        Job(lengths, "contiguous", FLASH_HEADS[1], {"window": window}, **of)
        for window in (1, 5, 14, 40)
        for lengths in ([41], [7, 1, 0, 9, 24])
    ]
    jobs += [
        Job([60], "zigzag", FLASH_HEADS[1], {"window": window}, names=("ring",), **of)
        for window in (6, 20)
    ]
    jobs += [
        Job([19, 1, 7], "balanced", FLASH_HEADS[1], rules, names=("ulysses",), **of)
        for rules in ({}, {"window": 5})
    ]
    # In the second packing rows that take part have others between them, in zigzag.
    jobs += [
        Job(lengths, order, FLASH_HEADS[3], {"causal": False}, **of)
        for lengths in ([7, 1, 0, 9, 4], [12, 4, 29, 3, 12])
        for order in ORDERS
    ]
    _assert_equal_one_rank(3, jobs)
    wide = Job([60], "zigzag", FLASH_HEADS[1], {"window": 25}, kernel="varlen", names=("ring",))
    ((first,), *others) = ranks.run(_split, [wide], world_size=3)
    assert "order='contiguous'" in first["ring"]
    assert others == [[first]] * 2


@settings(max_examples=settings().max_examples // 12)
@given(
    world_size=st.integers(2, 4),
    lengths=strategies.ragged_lengths(max_items=5),
    order=st.sampled_from(ORDERS),
    heads=st.sampled_from(FLASH_HEADS),
    rules=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 5}, {"scale": 0.3}]),
    sinks=st.booleans(),
)
def test_any_packing_equals_one_rank(world_size, lengths, order, heads, rules, sinks):
    """Flash attention is equal, or refused on all ranks alike."""
    jobs = [Job(lengths, order, heads, rules, sinks, kernel) for kernel in ("rectangles", "varlen")]
    found = ranks.run(_split, jobs, world_size=world_size)
    for at, job in enumerate(jobs):
        results = [by_job[at] for by_job in found]
        said = results[0]["ring"]
        if job.kernel == "varlen" and isinstance(said, str):
            assert {by_name.pop("ring") for by_name in results} == {said}
            short = rules.get("window", 0) <= sum(lengths) // world_size
            assert order == "balanced" or (order == "zigzag" and not short)
        _assert_equal_whole(results, job)


def test_bfloat16_is_as_precise_as_plain_attention():
    """Many runs a rank, so that what is added up in bfloat16 by mistake is added up often."""
    windowed = {"window": 60}
    plain = [{}, {"softcap": 2.0}]
    cases = [("balanced", rules, False, "rectangles") for rules in plain]
    cases += [("contiguous", windowed, True, "varlen")]
    cases += [("balanced", windowed, True, kernel) for kernel in list(KERNELS)[:3]]
    jobs = [
        Job([150, 33, 73], order, (4, 2, 16, 16), *more, dtype=torch.bfloat16)
        for order, *more in cases
    ]
    found = ranks.run(_split, jobs, world_size=3)
    for at, job in enumerate(jobs):
        naive = _step(_naive, job, torch.bfloat16)
        exact = _step(reference.attention, job, torch.float64)
        for name in ATTENTIONS:
            of_ranks = [by_job[at][name] for by_job in found]
            parts = zip(*(results[:4] for results in of_ranks), strict=True)
            ours = [torch.cat(part)[job.plan(3).row_of_token] for part in parts]
            for got, theirs, right in zip(ours + of_ranks[0][4:], naive, exact, strict=True):
                assert_as_precise(got, naive=theirs, exact=right)


def _step(attention, job, dtype):
    """Output and gradients of one rank, for numbers that bfloat16 has."""
    leaves = [x.to(dtype).requires_grad_() for x in _inputs(256, job.heads, dtype=torch.bfloat16)]
    leaves = leaves if job.sinks else leaves[:3]
    sinks = leaves[3] if job.sinks else None
    out = attention(*leaves[:3], job.lengths, sinks=sinks, **job.rules)
    out.backward(_cotangent(256, job.heads).bfloat16().to(dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _naive(q, k, v, lengths, *, window=10**6, softcap=None, sinks=None):
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    out = []
    for document in parts:
        one_q, one_k, one_v = (x.transpose(0, 1) for x in document)
        every_k, every_v = (x.repeat_interleave(2, 0) for x in (one_k, one_v))
        scores = one_q @ every_k.transpose(1, 2) * q.shape[2] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
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
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    which = dist.get_rank() % 2
    return _split([_of_group(which)], groups[which])


def _of_group(which):
    return Job(PACKINGS[which], "zigzag", HEADS[which], sinks=True)


def test_groups_inside_the_world():
    found = ranks.run(_by_group, world_size=4)
    for which in (0, 1):
        _assert_equal_whole([results[0] for results in found[which::2]], _of_group(which))


STRIDED = Job(PACKINGS[1], "zigzag", HEADS[1])


class _Contiguous:
    """A kernel that sees that gradients are contiguous, as kernels for GPUs ask for."""

    def __init__(self, kernel):
        self.kernel, self.forward = kernel, kernel.forward

    def backward(self, grad, *tensors, hop):
        assert grad.is_contiguous()
        return self.kernel.backward(grad, *tensors, hop=hop)


def _strided_in_turn():
    """Numbers of a head that are far apart, in queries, keys, values and gradients."""
    plan, found = STRIDED.plan(dist.get_world_size()), []
    own = plan.indices(dist.get_rank())
    qkv = [x[own] for x in _inputs(plan.tokens, STRIDED.heads)[:3]]
    rules = {"sequence": plan, "group": dist.group.WORLD}
    for kernel in map(_Contiguous, KERNELS.values()):
        for strided in range(3):
            leaves = [(_columns(x) if at == strided else x).detach() for at, x in enumerate(qkv)]
            leaves = [x.requires_grad_() for x in leaves]
            out = ring_attention(*leaves, kernel=kernel, **rules)
            out.backward(_columns(_cotangent(plan.tokens, STRIDED.heads)[own]))
            found.append([out.detach(), *(x.grad for x in leaves)])
    return own, found


@pytest.mark.parametrize("world_size", [1, 2])  # On one rank nothing is copied in order to travel.
def test_any_strides(world_size):
    for own, found in ranks.run(_strided_in_turn, world_size=world_size):
        for results in found:
            assert_close_float64(results, [x[own] for x in _whole(STRIDED)])


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

"""FlexAttention as kernel of a hop: exact, one launch a hop, lists of blocks from the plan."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.parallel_parts import launches
from primeblocks.errors import CapacityError, PlanError, RankError, UnsupportedError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import (
    AttentionSpec,
    FlexKernel,
    RectangleKernel,
    latent_ring_attention,
    latent_ulysses_attention,
)
from primeblocks.parallel.attention.flex import _NAMES
from primeblocks.parallel.attention.tiles import tile_lists
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.parallel.test_attention import (
    ATTENTIONS,
    HEADS,
    ORDERS,
    PACKINGS,
    _assert_equal_whole,
    _cotangent,
    _inputs,
    _naive,
    _split_in,
    _step,
)

CPU = torch.device("cpu")


def _with_flex(lengths, order, heads, rules, with_sinks, more, dtype=torch.float64):
    kernel = FlexKernel(**{"tile_tokens": 4} | more)
    rules = rules | {"kernel": kernel}
    world = dist.group.WORLD
    return _split_in(world, list(ATTENTIONS), lengths, order, heads, rules, with_sinks, dtype)


def _assert_equal_one_rank(world_size, lengths, order, heads, rules, with_sinks, **more):
    arguments = (lengths, order, heads, rules, with_sinks)
    found = ranks.run(_with_flex, *arguments, more, world_size=world_size)
    _assert_equal_whole(found, *arguments)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size):
    for order, lengths, heads in zip(ORDERS, PACKINGS, HEADS[1:], strict=False):
        _assert_equal_one_rank(world_size, lengths, order, heads, {}, False)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("heads", "rules"),
    [
        ((12, 4, 2, 2), {"causal": False}),  # Ranks whose query heads share key heads unevenly.
        ((10, 5, 4, 4), {"window": 5}),
        ((2, 2, 4, 6), {"scale": 0.3, "softcap": 1.5}),  # More ranks than heads.
    ],
    ids=str,
)
def test_rules(heads, rules, recompute):
    _assert_equal_one_rank(3, PACKINGS[1], "balanced", heads, rules, True, recompute=recompute)


@settings(max_examples=4)
@given(
    world_size=st.integers(2, 4),
    lengths=strategies.ragged_lengths(max_items=5),
    order=st.sampled_from(ORDERS),
    heads=st.sampled_from(HEADS),
    rules=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 5}, {"softcap": 2.0}]),
    with_sinks=st.booleans(),
)
def test_any_packing_equals_one_rank(world_size, lengths, order, heads, rules, with_sinks):
    _assert_equal_one_rank(world_size, lengths, order, heads, rules, with_sinks)


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_is_as_precise_as_plain_attention(recompute):
    lengths, heads, rules = [150, 33, 73], (4, 2, 16, 16), {"window": 60}
    arguments = (lengths, "balanced", heads, rules, True)
    more = {"tile_tokens": 16, "recompute": recompute}
    found = ranks.run(_with_flex, *arguments, more, torch.bfloat16, world_size=3)
    plan = plan_sequence(lengths, ranks=3, chunk_tokens=3)
    naive = _step(_naive, lengths, heads, rules, True, torch.bfloat16)
    exact = _step(reference.attention, lengths, heads, rules, True, torch.float64)
    for name in ATTENTIONS:
        parts = zip(*(by_name[name][:4] for by_name in found), strict=True)
        ours = [torch.cat(part)[plan.row_of_token] for part in parts] + found[0][name][4:]
        for got, theirs, right in zip(ours, naive, exact, strict=True):
            assert_as_precise(got, naive=theirs, exact=right)


def _hops(lengths, world_size, order, *, chunk_tokens=3, **rules):
    plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=chunk_tokens)
    spec = AttentionSpec(plan, **{"causal": True, "scale": 1.0} | rules)
    return [spec.hop(a, b) for a in range(world_size) for b in range(world_size)]


def _dense(hop):
    """`[queries, keys]`: who sees whom, from places and documents."""
    plan, spec = hop.spec.plan, hop.spec
    place, key = plan.indices(hop.query_rank)[:, None], plan.indices(hop.key_rank)
    start, key_start = plan.document_starts(hop.query_rank), plan.document_starts(hop.key_rank)
    seen = start[:, None] == key_start
    if spec.causal:
        seen = seen & (key <= place)
    return seen if spec.window is None else seen & (place - key < spec.window)


@settings(max_examples=40)
@given(
    lengths=strategies.ragged_lengths(max_items=6),
    world_size=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
    rules=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 6}]),
    block=st.integers(1, 6),
)
def test_lists_are_those_of_create_block_mask(lengths, world_size, order, rules, block):
    for hop in _hops(lengths, world_size, order, **rules):
        seen = _dense(hop)
        assert hop.pairs == seen.sum()
        if not hop.pairs:
            continue
        lists = tile_lists(hop, CPU, block, 1 << 20)
        rows, columns = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])
        assert torch.equal((columns >= lists.first[rows]) & (columns < lists.last[rows]), seen)

        def mask(batch, head, query, key, seen=seen):
            return seen[query, key]

        right = create_block_mask(mask, None, None, *seen.shape, device="cpu", BLOCK_SIZE=block)
        for name, list_ in zip(_NAMES, lists[:-2], strict=True):
            found, expected = list_, getattr(right, name)
            if name.endswith("indices"):  # Behind those that are counted stands anything.
                count = getattr(right, name.replace("indices", "num_blocks"))
                listed = torch.arange(expected.shape[-1]) < count.unsqueeze(-1)
                assert found.shape == expected.shape
                found, expected = found[listed], expected[listed]
            assert found.dtype == torch.int32
            assert torch.equal(found, expected), name


def _bytes_kept(plan):
    leaves, total = [plan.__dict__.get("_kept", {})], 0
    while leaves:
        x = leaves.pop()
        if isinstance(x, torch.Tensor | np.ndarray):
            total += x.nbytes
        elif isinstance(x, dict | tuple):
            leaves += x.values() if isinstance(x, dict) else x
            total += 0 if isinstance(x, dict) else 64 + 8 * len(x)
        else:
            total += 32
    return total


@pytest.mark.parametrize("kernel", [FlexKernel(), RectangleKernel()], ids=["flex", "rectangles"])
def test_what_is_planned_lives_as_long_as_the_plan(kernel):
    """At 131,072 tokens on 8 ranks in under 4 MiB, which 300 plans once made 440 MB of."""
    gone = []
    for _ in range(3):
        hops = _hops([131_072], 8, "balanced", chunk_tokens=128)[-8:]
        tensors = [torch.empty(16_384, heads, 64, device="meta") for heads in (2, 1, 1)]
        tensors = [x.bfloat16() for x in tensors]
        for hop in hops[:2] if isinstance(kernel, RectangleKernel) else hops:
            out, lse = kernel.forward(*tensors, hop=hop)
            kernel.backward(out, *tensors, out, lse, hop=hop)
        plan = hops[0].spec.plan
        once = _bytes_kept(plan)
        assert once < 4 << 20
        kernel.forward(*tensors, hop=hops[0])
        assert _bytes_kept(plan) == once
        gone.append(weakref.ref(plan))
        del plan, hops, hop
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_lists_over_their_bound_are_refused():
    (hop,) = _hops([4096], 1, "contiguous")
    lists = tile_lists(hop, CPU, 128, 1 << 20)
    size = sum(x.nbytes for x in lists)
    for kernel in (FlexKernel(list_bytes=size - 1), FlexKernel(list_bytes=1, tile_tokens=256)):
        x = torch.empty(4096, 1, 16, device="meta")
        with pytest.raises(CapacityError, match=f"tile_tokens={2 * kernel.tile_tokens}"):
            kernel.forward(x, x, x, hop=hop)
    assert tile_lists(hop, CPU, 128, size) is not None


def _too_small():
    """Lists that are too large on one rank alone, and ranks without tokens or heads."""
    group, latents, up = dist.group.WORLD, torch.randn(301, 7), torch.randn(1, 8, 5)
    ragged = plan_sequence([301], ranks=2, chunk_tokens=256)
    alone = plan_sequence([1], ranks=2, order="contiguous")
    assert (ragged.counts, alone.counts) == ((256, 45), (0, 1))
    for plan, limit in ((ragged, 10_000), (alone, 10)):
        q = torch.randn(plan.counts[group.rank()], 1, 6)
        operands = [(a, (q, q, q)) for a in ATTENTIONS.values()]
        operands += [
            (a, (q, latents[: len(q)], up))
            for a in (latent_ring_attention, latent_ulysses_attention)
        ]
        for attention, tensors in operands:
            for check in (True, False):
                kernel = FlexKernel(tile_tokens=8, list_bytes=limit)
                with pytest.raises(CapacityError, match="list_bytes"):
                    attention(*tensors, sequence=plan, group=group, kernel=kernel, check=check)
            kernel = FlexKernel(tile_tokens=8, list_bytes=limit if group.rank() else 1 << 20)
            with pytest.raises(CapacityError if group.rank() else RankError, match="list_bytes"):
                attention(*tensors, sequence=plan, group=group, kernel=kernel)


def test_lists_that_one_rank_cannot_hold_are_refused_on_all():
    ranks.run(_too_small)


def test_wrong_arguments_are_refused():
    for wrong in ({"tile_tokens": 0}, {"list_bytes": 0}):
        with pytest.raises(PlanError, match="at least 1"):
            FlexKernel(**wrong)


def _compiled():
    """Count compilations, traced as for a GPU and computed densely, of 12 plans."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=counter, fullgraph=True)
    kernel, heads = FlexKernel(tile_tokens=4, recompute=False, compile=compiled), (4, 2, 8, 6)
    for tokens in range(20, 44, 2):
        lengths = [tokens // 3, tokens - tokens // 3]
        rules = {"window": 9 if tokens % 4 else None}
        (hop,) = _hops(lengths, 1, "contiguous", **rules)
        qkv, grad = _inputs(tokens, heads)[:3], _cotangent(tokens, heads)
        out, lse = kernel.forward(*qkv, hop=hop)
        found = [out, *kernel.backward(grad, *qkv, out, lse, hop=hop)]
        leaves = [x.clone().requires_grad_() for x in qkv]
        right = reference.attention(*leaves, lengths, scale=1.0, **rules)
        right.backward(grad)
        assert_close_float64(found, [right.detach(), *(x.grad for x in leaves)])
    return counter.frame_count


def test_few_compilations_serve_every_plan():
    """Two of forward, two of backward: the first plan, and all others."""
    (count,) = ranks.run(_compiled, world_size=1)
    assert 2 <= count <= 4


@pytest.mark.parametrize(("tokens", "rank"), [(2048, 0), (131_072, 7)])
def test_one_launch_a_hop(tokens, rank):
    """At most 200 launches a layer on 8 ranks, forward and backward, whatever the length."""
    plan = plan_sequence([tokens], ranks=8)
    forward, backward = launches.count(plan, rank, FlexKernel(recompute=False))
    assert forward.operators["flex_attention"] == backward.operators["flex_attention_backward"] == 8
    # Besides: five a merge, one cast, one change of logarithms a hop.
    assert launches.launches_of(forward.operators) <= 8 + 8 + 7 * 5 + 2
    assert launches.launches_of(backward.operators) <= 8 * 2 + 8 + 8 * 3 + 6
    assert not forward.host_reads
    assert not backward.host_reads
    again = launches.count(plan, rank, FlexKernel(recompute=True))
    assert sum(launches.launches_of(step.operators) for step in again) <= 230


def test_float64_has_no_compiled_kernel(monkeypatch):
    kernel = FlexKernel()
    monkeypatch.setattr("primeblocks.parallel.attention.flex._DENSE", ())
    (hop,) = _hops([8], 1, "contiguous")
    with pytest.raises(UnsupportedError, match="RectangleKernel"):
        kernel.forward(*_inputs(8, HEADS[0])[:3], hop=hop)

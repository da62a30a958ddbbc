"""FlexAttention as kernel of a hop: one launch a hop, lists of blocks from the plan."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.parallel_parts import launches
from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import AttentionSpec, FlexKernel, RectangleKernel
from primeblocks.parallel.attention.flex import _NAMES, tile_lists
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.bodies import each
from tests.parallel.test_attention import HEADS, ORDERS, _cotangent, _inputs

CPU = torch.device("cpu")


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


@settings(max_examples=20)
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
        lists = tile_lists(hop, CPU, block)
        rows, columns = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])
        first, last = (x[rows] for x in lists.mask)
        assert torch.equal((columns >= first) & (columns < last), seen)

        def mask(batch, head, query, key, seen=seen):
            return seen[query, key]

        right = create_block_mask(mask, None, None, *seen.shape, device="cpu", BLOCK_SIZE=block)
        for name, list_ in zip(_NAMES, lists[:-1], strict=True):
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
    for _ in range(2):
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
    assert [ref() for ref in gone] == [None] * 2


def test_wrong_arguments_are_refused():
    with pytest.raises(PlanError, match="at least 1"):
        FlexKernel(tile_tokens=0)


# Documents, and those that they continue.
FORKED = [5, 4, 1, 6, 0, 3, 1, 7], [-1, 0, 1, 1, 0, 4, 0, -1]


def _compiled(parents):
    """Count compilations, traced as for a GPU and computed densely, of five plans."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=counter, fullgraph=True)
    kernel, heads = FlexKernel(tile_tokens=4, recompute=False, compile=compiled), (4, 2, 8, 6)
    for more in range(5):
        lengths, rules = [*FORKED[0], 4 * more], {"window": 9 if more % 2 else None}
        tree = None if parents is None else [*parents, -1]
        plan = plan_sequence(lengths, ranks=1, order="contiguous", parents=tree)
        hop = AttentionSpec(plan, causal=True, scale=1.0, **rules).hop(0, 0)
        qkv, grad = _inputs(plan.tokens, heads)[:3], _cotangent(plan.tokens, heads)
        out, lse = kernel.forward(*qkv, hop=hop)
        found = [out, *kernel.backward(grad, *qkv, out, lse, hop=hop)]
        leaves = [x.clone().requires_grad_() for x in qkv]
        right = reference.attention(*leaves, lengths, scale=1.0, parents=tree, **rules)
        right.backward(grad)
        assert_close_float64(found, [right.detach(), *(x.grad for x in leaves)])
    return counter.frame_count


def test_few_compilations_serve_every_plan():
    """Two of forward, two of backward: the first plan, and all others."""
    (counts,) = ranks.run(each, _compiled, [(None,), (FORKED[1],)], world_size=1)
    assert all(2 <= count <= 4 for count in counts)


def test_one_launch_a_hop():
    """At most 200 launches a layer on 8 ranks, forward and backward."""
    plan, rank = plan_sequence([131_072], ranks=8), 7
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

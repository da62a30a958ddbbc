"""Segments of hops against dense masks; torch's operators by their schemas, and launches."""

import gc
import inspect
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from benchmarks.parallel_parts import launches, plain_flash
from primeblocks.errors import UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import AttentionSpec, VarlenKernel
from primeblocks.parallel.attention.varlen import check_segments, segments_of
from primeblocks.testing import strategies
from tests.parallel.test_flex import _bytes_kept, _dense, _hops

ATEN = torch.ops.aten
CPU = torch.device("cpu")
ORDERS = ["balanced", "contiguous", "zigzag"]
# Of torch 2.11.0, from its `include/ATen/ops/*_ops.h`.
OLDEST = {
    "forward": (
        "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, "
        "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, bool return_debug_mask, *, float? scale=None, "
        "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, "
        "Tensor? alibi_slopes=None) -> (Tensor output, Tensor softmax_logsumexp, "
        "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "backward": (
        "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, "
        "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) -> "
        "(Tensor, Tensor, Tensor)"
    ),
}


def _seen_by(found, queries, keys):
    """`[queries, keys]`: what flash attention lets see what, one pair after the other."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    q_rows, k_rows = (
        torch.arange(n)[rows].tolist() for n, rows in ((queries, found.queries), (keys, found.keys))
    )
    q, k = found.query_starts.tolist(), found.key_starts.tolist()
    assert (q[0], q[-1], k[0], k[-1]) == (0, len(q_rows), 0, len(k_rows))
    assert sorted(set(k_rows)) == k_rows
    left, right = (found.most_keys if side < 0 else side for side in (found.left, found.right))
    limited = found.left >= 0 or found.right >= 0
    for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False):
        assert 0 < b - a <= found.most_queries
        assert 0 < d - c <= found.most_keys
        for i in range(a, b):
            for j in range(c, d):
                behind = (i - a) + (d - c) - (b - a) - (j - c)
                seen[q_rows[i], k_rows[j]] = not limited or -right <= behind <= left
    return seen


def _always_has_segments(order, tokens, world_size, rules):
    if rules.get("causal", True) is False or world_size == 1 or order == "contiguous":
        return True
    return order == "zigzag" and rules.get("window", 0) <= tokens // world_size


@settings(max_examples=150)
@given(
    lengths=strategies.ragged_lengths(max_items=5, max_length=30),
    world_size=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
    rules=st.sampled_from(
        [{}, {"causal": False}, {"window": 1}, {"window": 2}, {"window": 6}, {"window": 23}]
    ),
    chunk_tokens=st.sampled_from([3, 30]),
)
def test_segments_see_what_hops_do(lengths, world_size, order, rules, chunk_tokens):
    refused = False
    for hop in _hops(lengths, world_size, order, chunk_tokens=chunk_tokens, **rules):
        if not hop.pairs:
            continue
        seen = _dense(hop)
        try:
            found = segments_of(hop, CPU)
        except UnsupportedError:
            refused = True
            continue
        assert torch.equal(_seen_by(found, *seen.shape), seen)
        assert found.causal == (found.left == -1 and found.right == 0)
    assert not (refused and _always_has_segments(order, sum(lengths), world_size, rules))
    plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=chunk_tokens)
    spec = AttentionSpec(plan, **{"causal": True, "scale": 1.0} | rules)
    if refused:
        with pytest.raises(UnsupportedError, match=r"Use kernel=FlexKernel\(\)"):
            check_segments(spec)
    else:
        check_segments(spec)


def test_few_segments_are_found():
    """One a document, and one where a window crosses to another rank's keys."""
    lengths = [50, 1, 1, 1, 47]
    for window, counts in ((None, 5), (20, 5), (1, 1)):
        (hop,) = _hops(lengths, 1, "contiguous", window=window)
        assert len(segments_of(hop, CPU).query_starts) - 1 == counts
    hops = _hops([100], 4, "contiguous", window=60)
    for hop in hops:
        if hop.pairs:
            assert len(segments_of(hop, CPU).query_starts) == 2


def test_a_window_that_leaves_short_documents_behind():
    """More queries than keys: the limit to the right, which is none, must not cut any off."""
    plan = plan_sequence([97, 103], ranks=2, order="contiguous")
    found = segments_of(AttentionSpec(plan, causal=True, scale=1.0, window=95).hop(1, 0), CPU)
    assert plan.counts == (100, 100)
    assert found.query_starts.tolist() == [0, 94]
    assert found.key_starts.tolist() == [0, 3]
    assert (found.most_keys, found.left, found.right) == (94, 0, -1)


def test_what_is_planned_lives_as_long_as_the_plan():
    gone = []
    for _ in range(2):
        plan = plan_sequence([90_000, 41_072], ranks=8, order="zigzag")
        spec = AttentionSpec(plan, causal=True, scale=1.0)
        check_segments(spec)
        for rank in range(8):
            hop = spec.hop(7, rank)
            if hop.pairs:
                segments_of(hop, CPU)
        once = _bytes_kept(plan)
        assert once < 4 << 20
        assert segments_of(spec.hop(7, 0), CPU) is segments_of(spec.hop(7, 0), CPU)
        assert _bytes_kept(plan) == once
        gone.append(weakref.ref(plan))
        del plan, spec, hop
    gc.collect()
    assert [ref() for ref in gone] == [None] * 2


class _Recorded:
    """Plain torch, and what it was called with."""

    def __init__(self):
        self.calls = []

    def forward(self, *args, **named):
        self.calls.append(("forward", args, named))
        return plain_flash.forward(*args, **named)

    def backward(self, *args, **named):
        self.calls.append(("backward", args, named))
        return plain_flash.backward(*args, **named)


def _calls():
    """Calls of hops of all kinds: rows taken by slice and by index, windows, grouped heads."""
    found = _Recorded()
    kernel = VarlenKernel(operators=(found.forward, found.backward))
    for order, rules in (("zigzag", {}), ("contiguous", {"window": 9}), ("zigzag", {"window": 4})):
        for hop in _hops([17, 3, 44], 3, order, **rules):
            plan = hop.spec.plan
            q = torch.randn(plan.counts[hop.query_rank], 4, 16).bfloat16()
            k = torch.randn(plan.counts[hop.key_rank], 2, 16).bfloat16()
            if hop.pairs:
                out, lse = kernel.forward(q, k, k, hop=hop)
                kernel.backward(out, q, k, k, out, lse, hop=hop)
    return found.calls


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_torchs_operators_take_the_calls(device):
    """Fake tensors get the shapes and dtypes of plain torch; nothing is computed."""
    calls = _calls()
    assert {bool(named["window_size_left"] + 1) for _, _, named in calls} == {False, True}
    for which, args, named in calls:
        expected = getattr(plain_flash, which)(*args, **named)
        operator = getattr(ATEN, f"_flash_attention_{which}")
        with FakeTensorMode(allow_non_fake_inputs=False):
            there = tree_map_only(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device),
                args,
            )
            found = operator(*there, **named)
        shown = 2 if which == "forward" else 3
        for ours, theirs in zip(found[:shown], expected[:shown], strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.device.type == device


@pytest.mark.parametrize("which", OLDEST)
def test_schemas_are_those_that_calls_are_written_for(which):
    """What torch 2.11 took is taken; plain torch has the same arguments in the same order."""
    installed = getattr(ATEN, f"_flash_attention_{which}").default._schema
    oldest = torch._C.parse_schema(OLDEST[which])
    assert installed.is_backward_compatible_with(oldest)
    parameters = inspect.signature(getattr(plain_flash, which)).parameters.values()
    by_place = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    by_name = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert by_place == [x.name for x in oldest.arguments if not x.kwarg_only]
    assert by_name <= {x.name for x in oldest.arguments if x.kwarg_only}


@pytest.mark.parametrize(("order", "rank"), [("zigzag", 7), ("zigzag", 0), ("contiguous", 7)])
def test_one_call_a_hop(order, rank):
    """131,072 tokens on 8 ranks, on meta tensors, by torch's operators themselves."""
    plan = plan_sequence([131_072], ranks=8, order=order)
    forward, backward = launches.count(plan, rank, VarlenKernel())
    assert forward.operators["_flash_attention_forward"] == 8
    assert backward.operators["_flash_attention_backward"] == 8
    steps = (forward, backward)
    assert sum(launches.launches_of(step.operators) for step in steps) <= 200
    assert not forward.host_reads
    assert not backward.host_reads

"""Flash attention on packed sequences: segments of hops against dense masks, torch's operators
on fake tensors, launches, and refusals. `test_attention.py` compares its results.
"""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_map_only

from benchmarks.parallel_parts import launches, plain_flash
from primeblocks.errors import RankError, UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import (
    AttentionSpec,
    VarlenKernel,
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
)
from primeblocks.parallel.attention.varlen import check_segments, segments_of
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.test_attention import ATTENTIONS, KERNELS, ORDERS
from tests.parallel.test_flex import _dense, _hops

ATEN = torch.ops.aten
CPU = torch.device("cpu")


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


@pytest.mark.parametrize(("order", "rank"), [("zigzag", 7), ("contiguous", 7)])
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


HALF = torch.bfloat16
# The order and the rules; of the tensors head_dim, value_dim, dtype and device; and what is said.
REFUSED = [
    (
        "zigzag",
        {"softcap": 2.0},
        (8, 8, HALF, "cpu"),
        r"does not support softcap; got 2\. Use kernel=FlexKernel",
    ),
    ("zigzag", {}, (8, 16, HALF, "cpu"), "as wide as keys; got 16 and 8"),
    ("zigzag", {}, (8, 8, torch.float32, "cpu"), r"bfloat16 and float16; got torch\.float32"),
    ("zigzag", {}, (264, 264, HALF, "cpu"), "at most 256; got 264"),
    ("zigzag", {}, (12, 12, HALF, "cpu"), "multiple of 8.* got 12"),
    ("zigzag", {}, (8, 8, HALF, "cpu"), "needs CUDA; got a tensor on cpu"),
    ("balanced", {}, (8, 8, HALF, "meta"), "order='balanced' with window=None"),
    ("zigzag", {"window": 400}, (8, 8, HALF, "meta"), "order='zigzag' with window=400"),
]


def _refused():
    """Told alike on all ranks before anything is sent, with `check` and without."""
    group, found = dist.group.WORLD, []
    for order, rules, (head_dim, value_dim, dtype, device), _ in REFUSED:
        plan = plan_sequence([1000], ranks=group.size(), order=order)
        tokens, told = plan.counts[group.rank()], set()
        q = torch.zeros(tokens, 4, head_dim, dtype=dtype, device=device)
        v = torch.zeros(tokens, 2, value_dim, dtype=dtype, device=device)
        where = {"sequence": plan, "group": group, "kernel": VarlenKernel()}
        for attention in ATTENTIONS.values() if device == "cpu" else [ring_attention]:
            for check in (True, False) if device == "cpu" else (False,):
                with pytest.raises(UnsupportedError) as error:
                    attention(q, q[:, :2], v, check=check, **where, **rules)
                told.add(str(error.value))
        found.append(told)
    return found


def test_what_it_does_not_take_is_refused_on_all_ranks():
    found = ranks.run(_refused, world_size=3)
    assert found[0] == found[1] == found[2]
    for (*_, said), (told,) in zip(REFUSED, found[0], strict=True):
        assert re.search(said, told), told


def test_rocm_is_refused(monkeypatch):
    """Where torch 2.11 returns the lse in another layout."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    spec = AttentionSpec(plan_sequence([8], ranks=1), causal=True, scale=1.0)
    x = torch.zeros(8, 1, 8, dtype=HALF, device="meta")
    with pytest.raises(UnsupportedError, match="needs CUDA"):
        VarlenKernel().forward(x, x, x, hop=spec.hop(0, 0))


def _latents():
    """Keys of 6 numbers and values of 4: expanded heads are of two widths."""
    plan = plan_sequence([9], ranks=2, order="contiguous")
    tokens = plan.counts[dist.get_rank()]
    q, latents, up = torch.zeros(tokens, 1, 6), torch.zeros(tokens, 7), torch.zeros(1, 8, 5)
    where = {"sequence": plan, "group": dist.group.WORLD, "kernel": KERNELS["varlen"]}
    for attention in (latent_ring_attention, latent_ulysses_attention):
        with pytest.raises(UnsupportedError, match="got 4 and 6"):
            attention(q, latents, up, **where)


def _by_one():
    """A rank alone has another kernel, or has tokens where the others have none."""
    group = dist.group.WORLD
    plan = plan_sequence([1], ranks=2, order="contiguous")
    q = torch.zeros(plan.counts[group.rank()], 1, 8)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        ring_attention(q, q, q, sequence=plan, group=group, kernel=VarlenKernel(), check=False)
    kernel = VarlenKernel() if group.rank() else None
    with pytest.raises(UnsupportedError if group.rank() else RankError, match="bfloat16"):
        ring_attention(q, q, q, sequence=plan, group=group, kernel=kernel)


def _both():
    _latents()
    _by_one()


def test_latents_of_another_width_are_refused_and_ranks_without_tokens_are_told():
    ranks.run(_both)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (3, 5), (1, 4), (5, 3)])
def test_plain_torch_aligns_as_torch_says(queries, keys):
    """`causal_lower_right` is torch's own word for it; a query without keys has an lse of +inf."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = draw(queries, 2, 8), draw(keys, 2, 8), draw(keys, 2, 8)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys)]
    out, lse, *_ = plain_flash.forward(
        q, k, v, *starts, queries, keys, 0.0, True, False,
        scale=0.5, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    seen = causal_lower_right(queries, keys)._materialize("cpu")
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.5).masked_fill(~seen, -torch.inf)
    assert_close_float64(lse, scores.logsumexp(-1).masked_fill(~seen.any(1), torch.inf))
    weights = scores.softmax(-1).nan_to_num()
    assert_close_float64(out, torch.einsum("hqk,khd->qhd", weights, v))

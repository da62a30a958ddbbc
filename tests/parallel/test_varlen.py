"""Attention by flash attention on packed sequences, which plain torch stands in for, exactly."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

from benchmarks.parallel_parts import plain_flash
from primeblocks.errors import RankError, UnsupportedError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import (
    AttentionSpec,
    VarlenKernel,
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
)
from primeblocks.parallel.attention.varlen import segments_of
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.parallel.test_attention import (
    ATTENTIONS,
    PACKINGS,
    _assert_equal_whole,
    _columns,
    _cotangent,
    _inputs,
    _naive,
    _split_in,
    _step,
    _whole,
)

# Plain torch, not flash attention.
PLAIN = VarlenKernel(operators=(plain_flash.forward, plain_flash.backward))
ORDERS = ["contiguous", "zigzag"]
# heads, key heads, head_dim, value_dim: plain, grouped, one key head, uneven in Ulysses.
HEADS = [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 4, 4), (12, 4, 2, 2)]


def _with_varlen(names, lengths, order, heads, rules, with_sinks, dtype=torch.float64):
    """What `_split_in` returns, or what was said when it was refused."""
    rules = rules | {"kernel": PLAIN}
    try:
        return _split_in(dist.group.WORLD, names, lengths, order, heads, rules, with_sinks, dtype)
    except UnsupportedError as error:
        return str(error)


def _assert_equal_one_rank(
    world_size, lengths, order, heads, rules, with_sinks, names=tuple(ATTENTIONS)
):
    arguments = (lengths, order, heads, rules, with_sinks)
    found = ranks.run(_with_varlen, names, *arguments, world_size=world_size)
    _assert_equal_whole(found, *arguments)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, order):
    for lengths, heads in zip([*PACKINGS, [5, 5, 30, 2, 8]], HEADS, strict=True):
        _assert_equal_one_rank(world_size, lengths, order, heads, {}, True)


@pytest.mark.parametrize(
    ("world_size", "window"), [(2, 5), (3, 1), (3, 2), (3, 14), (3, 40), (4, 14)]
)
def test_windows_of_a_contiguous_order(world_size, window):
    """Inside a rank, across one cut and across several, and longer than any document."""
    for lengths in ([41], [7, 1, 0, 9, 24]):
        rules = {"window": window}
        _assert_equal_one_rank(world_size, lengths, "contiguous", HEADS[1], rules, True)


def test_windows_of_a_zigzag_order_up_to_a_ranks_tokens():
    for window in (6, 20):
        _assert_equal_one_rank(3, [60], "zigzag", HEADS[1], {"window": window}, True, ["ring"])
    arguments = ([60], "zigzag", HEADS[1], {"window": 25}, False)
    said = ranks.run(_with_varlen, ["ring"], *arguments, world_size=3)
    assert len(set(said)) == 1
    assert "order='contiguous'" in said[0]


def test_ulysses_attention_takes_every_order():
    for rules in ({}, {"window": 5}):
        arguments = ([19, 1, 7], "balanced", HEADS[1], rules, True, ["ulysses"])
        _assert_equal_one_rank(3, *arguments)


@pytest.mark.parametrize("order", [*ORDERS, "balanced"])
def test_whole_documents(order):
    """In the second packing rows that take part have others between them, in zigzag."""
    for lengths in ([7, 1, 0, 9, 4], [12, 4, 29, 3, 12]):
        _assert_equal_one_rank(3, lengths, order, HEADS[3], {"causal": False}, True)


@settings(max_examples=8)
@given(
    world_size=st.integers(2, 4),
    lengths=strategies.ragged_lengths(max_items=5),
    order=st.sampled_from([*ORDERS, "balanced"]),
    heads=st.sampled_from(HEADS),
    rules=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 5}, {"scale": 0.3}]),
    with_sinks=st.booleans(),
)
def test_any_packing_equals_one_rank_or_is_refused_on_all(
    world_size, lengths, order, heads, rules, with_sinks
):
    arguments = (lengths, order, heads, rules, with_sinks)
    for name in ATTENTIONS:
        found = ranks.run(_with_varlen, [name], *arguments, world_size=world_size)
        if isinstance(found[0], str):
            assert set(found) == {found[0]}
            assert name == "ring"
            short = rules.get("window", 0) <= sum(lengths) // world_size
            assert order == "balanced" or (order == "zigzag" and not short)
        else:
            _assert_equal_whole(found, *arguments)


def test_bfloat16_is_as_precise_as_plain_attention():
    lengths, heads, rules = [150, 33, 73], (4, 2, 16, 16), {"window": 60}
    arguments = (lengths, "contiguous", heads, rules, True)
    found = ranks.run(_with_varlen, list(ATTENTIONS), *arguments, torch.bfloat16, world_size=3)
    plan = plan_sequence(lengths, ranks=3, order="contiguous")
    naive = _step(_naive, lengths, heads, rules, True, torch.bfloat16)
    exact = _step(reference.attention, lengths, heads, rules, True, torch.float64)
    for name in ATTENTIONS:
        parts = zip(*(by_name[name][:4] for by_name in found), strict=True)
        ours = [torch.cat(part)[plan.row_of_token] for part in parts] + found[0][name][4:]
        for got, theirs, right in zip(ours, naive, exact, strict=True):
            assert_as_precise(got, naive=theirs, exact=right)


def _strided():
    """On one rank, where nothing is copied in order to travel: numbers of a head far apart."""
    plan, rules = plan_sequence(PACKINGS[1], ranks=1), {"kernel": PLAIN}
    leaves = [_columns(x).detach().requires_grad_() for x in _inputs(plan.tokens, HEADS[1])[:3]]
    out = ring_attention(*leaves, sequence=plan, group=dist.group.WORLD, **rules)
    out.backward(_columns(_cotangent(plan.tokens, HEADS[1])))
    return [out.detach(), *(x.grad for x in leaves)]


def test_any_strides():
    (found,) = ranks.run(_strided, world_size=1)
    assert_close_float64(found, _whole(PACKINGS[1], HEADS[1], {}, False))


HALF = torch.bfloat16
# The order and the rules; of the tensors head_dim, value_dim, dtype and device; and what is said.
REFUSED = [
    ("zigzag", {"softcap": 2.0}, (8, 8, HALF, "cpu"), r"no softcap; got 2\. Use kernel=FlexKernel"),
    ("zigzag", {}, (8, 16, HALF, "cpu"), "as wide as keys; got 16 and 8"),
    ("zigzag", {}, (8, 8, torch.float32, "cpu"), r"bfloat16 and float16; got torch\.float32"),
    ("zigzag", {}, (264, 264, HALF, "cpu"), "256 at the most; got 264"),
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
    where = {"sequence": plan, "group": dist.group.WORLD, "kernel": PLAIN}
    for attention in (latent_ring_attention, latent_ulysses_attention):
        with pytest.raises(UnsupportedError, match="got 4 and 6"):
            attention(q, latents, up, **where)


def test_latents_of_another_width_are_refused():
    ranks.run(_latents)


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


def test_ranks_without_tokens_are_told_too():
    ranks.run(_by_one)


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


def test_kinds_of_hops():
    """One causal segment a document on a rank's own keys, whole ones on those of others."""
    spec = AttentionSpec(plan_sequence([10, 90], ranks=2, order="zigzag"), causal=True, scale=1.0)
    own, far = (segments_of(spec.hop(0, rank), torch.device("cpu")) for rank in (0, 1))
    assert own.query_starts.tolist() == own.key_starts.tolist() == [0, 10, 50]
    assert own.causal
    # Rank 0 has 0-24 and 75-99, rank 1 25-74: the late queries see all keys, early ones none.
    assert (far.queries, far.keys) == (slice(25, 50), slice(0, 50))
    assert (far.query_starts.tolist(), far.key_starts.tolist()) == ([0, 25], [0, 50])
    assert (far.left, far.right, far.causal) == (-1, -1, False)
    # Rank 1 has 10-19 and 40-49, rank 0 0-9 and 50-59.
    whole = plan_sequence([12, 4, 29, 3, 12], ranks=3, order="zigzag")
    spec = AttentionSpec(whole, causal=False, scale=1.0)
    there, back = (segments_of(spec.hop(*pair), torch.device("cpu")) for pair in ((1, 0), (0, 1)))
    assert there.queries.tolist() == back.keys.tolist() == [0, 1, 18, 19]
    assert there.keys == back.queries == slice(0, 20)

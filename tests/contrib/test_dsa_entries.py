"""Entries of neighbouring tokens over a split sequence, and what they send."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.contrib.dsa_rules.entries import (
    gated_mean,
    plan_entries,
    tokens_and_entries,
    windows,
)
from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention.dsa import gather_tokens
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_close_float64, assert_same_bits

ORDERS = ["balanced", "contiguous", "zigzag"]
# Of one token, shorter than a window, empty, a window exactly, cut by every order.
PACKING = [11, 1, 3, 26, 0, 4, 9]


def _windows(lengths, ratio):
    """Places of the tokens of each window, and of its document's first token."""
    found = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        for first in range(start, start + length - length % ratio, ratio):
            found.append((start, list(range(first, first + ratio))))
    return found


@settings(max_examples=settings().max_examples // 3)
@given(
    lengths=strategies.ragged_lengths(max_length=30),
    ratio=st.integers(1, 7),
    world_size=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
    chunk_tokens=st.integers(1, 9),
)
def test_each_window_has_one_owner(lengths, ratio, world_size, order, chunk_tokens):
    """The rank of its last token; ids of tokens and entries share one plan."""
    plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=chunk_tokens)
    entries = plan_entries(plan, ratio)
    wanted = _windows(lengths, ratio)
    assert entries.tokens == len(wanted)
    both = tokens_and_entries(plan, entries)
    for rank in range(world_size):
        own = set(plan.indices(rank).tolist())
        owned = [e for e, (_, tokens) in enumerate(wanted) if tokens[-1] in own]
        assert entries.indices(rank).tolist() == owned
        first = [wanted[e][1][0] - wanted[e][0] for e in owned]
        assert (entries.positions(rank) * ratio).tolist() == first
        rows = [*plan.indices(rank).tolist(), *(plan.tokens + e for e in owned)]
        assert both.indices(rank).tolist() == rows


def _hidden(tokens):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, 2, 3, generator=generator, dtype=torch.float64)


RULES = ((4, 0), (4, 4), (13, 3))  # The last over three ranks and more.


def _split_all(order):
    return [_split(PACKING, order, *rules) for rules in RULES]


def _split(lengths, order, ratio, overlap):
    """The windows of all ranks, those that are present, and the gradient of all tokens."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    entries = plan_entries(plan, ratio)
    x = _hidden(plan.tokens)[plan.indices(group.rank())].requires_grad_()
    found, present = windows(x, sequence=plan, group=group, ratio=ratio, overlap=overlap)
    slope = _slope(plan.tokens, entries.tokens, overlap + ratio)
    found.backward(slope[entries.indices(group.rank())])
    whole = gather_tokens(found, present, sequence=entries, group=group)
    return [*whole, *gather_tokens(x.grad, sequence=plan, group=group)]


def _slope(tokens, entries, width):
    """Whole numbers, whose sums are exact; other ones where a token stands twice."""
    generator = torch.Generator().manual_seed(tokens + 1)
    return torch.randint(-9, 10, (entries, width, 2, 3), generator=generator).double()


def _assert_equal_loops(found, lengths, ratio, overlap):
    x = _hidden(sum(lengths))
    wanted = _windows(lengths, ratio)
    slope = _slope(len(x), len(wanted), overlap + ratio)
    rows = torch.zeros(len(wanted), overlap + ratio, 2, 3, dtype=torch.float64)
    present = torch.zeros(rows.shape[:2], dtype=torch.bool)
    grad = torch.zeros_like(x)
    for e, (document, tokens) in enumerate(wanted):
        for column, place in enumerate(range(tokens[0] - overlap, tokens[-1] + 1)):
            if place >= document:
                rows[e, column], present[e, column] = x[place], True
                grad[place] += slope[e, column]
    for of_rank in found:
        for a, b in zip(of_rank, (rows, present, grad), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("world_size", "order"), [(3, "balanced"), (4, "contiguous")])
def test_windows_equal_loops(world_size, order):
    by_rank = ranks.run(_split_all, order, world_size=world_size)
    for (ratio, overlap), found in zip(RULES, zip(*by_rank, strict=True), strict=True):
        _assert_equal_loops(found, PACKING, ratio, overlap)


def _gathered():
    group = dist.group.WORLD
    for tokens in (0, 1, 2):
        plan = plan_sequence([tokens], ranks=group.size(), chunk_tokens=1)
        parts = torch.arange(3 * tokens).view(tokens, 3).bfloat16(), torch.ones(tokens, 2).double()
        own = plan.indices(group.rank())
        found = gather_tokens(*(x[own] for x in parts), sequence=plan, group=group)
        for a, b in zip(found, parts, strict=True):
            assert_same_bits(a, b)


def test_one_row_of_several_dtypes_is_gathered():
    """And none: such a row is contiguous wherever it begins."""
    ranks.run(_gathered, world_size=2)


def _received_all(cases):
    return [_received(*case) for case in cases]


def _received(lengths, order, ratio, overlap):
    """By direction: tokens that this rank receives from others, in each exchange."""
    group, received = dist.group.WORLD, []
    original = dist.all_to_all_single

    def counted(out, x, receive, send, group):
        received.append(sum(receive) - receive[group.rank()])
        return original(out, x, receive, send, group=group)

    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    x = _hidden(plan.tokens)[plan.indices(group.rank())].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        found, _ = windows(x, sequence=plan, group=group, ratio=ratio, overlap=overlap)
        forward = list(received)
        found.sum().backward()
    return forward, received[len(forward) :]


def test_only_the_tokens_that_a_rank_lacks_are_sent():
    world_size, ratio, order = 3, 4, "zigzag"
    plan = plan_sequence(PACKING, ranks=world_size, order=order, chunk_tokens=3)
    entries = plan_entries(plan, ratio)
    cases = [(PACKING, order, ratio, overlap) for overlap in (0, ratio)]
    by_rank = ranks.run(_received_all, cases, world_size=world_size)
    for (*_, overlap), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        wanted, bounds = [], []
        for rank in range(world_size):
            needed = set()
            for e in entries.indices(rank).tolist():
                document, tokens = _windows(PACKING, ratio)[e]
                needed |= set(range(max(document, tokens[0] - overlap), tokens[-1] + 1))
            wanted.append(len(needed - set(plan.indices(rank).tolist())))
            bounds.append((ratio - 1 + overlap) * len(plan.runs(rank)))
        assert any(wanted)
        assert all(some <= most for some, most in zip(wanted, bounds, strict=True))
        assert [forward for forward, _ in found] == [[some] for some in wanted]
        assert sum(sum(backward) for _, backward in found) == sum(wanted)


def test_windows_that_are_whole_send_nothing():
    cases = [
        ([8, 8, 8], "contiguous", 4, 4),
        ([8, 9, 7, 6, 6], "contiguous", 12, 2),  # Nor does the end of a document without a window.
    ]
    assert ranks.run(_received_all, cases, world_size=3) == [[([], [])] * 2] * 3


def test_gated_means_equal_loops():
    generator = torch.Generator().manual_seed(0)
    values, gates, slope = (
        torch.randn(5, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    present = torch.ones(5, 6, dtype=torch.bool)
    present[0, :3], present[3, :4] = False, False
    leaves = [values.clone().requires_grad_(), gates.clone().requires_grad_()]
    found = gated_mean(*leaves, present)
    found.backward(slope[:, 0])
    for e in range(5):
        x, g = (part[e][present[e]].requires_grad_() for part in (values, gates))
        mean = ((g.exp() / g.exp().sum(0)) * x).sum(0)
        mean.backward(slope[e, 0])
        assert_close_float64(found[e], mean)
        for leaf, part in zip(leaves, (x, g), strict=True):
            assert_close_float64(leaf.grad[e][present[e]], part.grad)
            assert not leaf.grad[e][~present[e]].any()


def _refusals():
    group = dist.group.WORLD
    plan = plan_sequence([4, 6], ranks=2, order="contiguous")
    good = {"x": torch.zeros(5, 2), "sequence": plan, "group": group, "ratio": 3}
    for error, said, wrong in [
        (ShapeError, "this rank 5 tokens", {"x": torch.zeros(4, 2)}),
        (ShapeError, "x must be a tensor", {"x": None}),
        (PlanError, "ratio must be at least 1; got 0", {"ratio": 0}),
        (PlanError, "overlap must be at least 0", {"overlap": -1}),
        (PlanError, "sequence must be a SequencePlan", {"sequence": [4, 6]}),
        (PlanError, "overlap must be equal on all ranks", {"overlap": group.rank()}),
    ]:
        with pytest.raises(error, match=said):
            windows(**(good | wrong))


def test_what_does_not_fit_is_refused():
    ranks.run(_refusals, world_size=2)
    plan = plan_sequence([7, 2], ranks=2)
    for ratio in (0, -1):
        with pytest.raises(PlanError, match="ratio must be at least 1"):
            plan_entries(plan, ratio)
    with pytest.raises(PlanError, match="tokens are planned for 2 ranks, entries for 3"):
        tokens_and_entries(plan, plan_entries(plan_sequence([7, 2], ranks=3), 2))
    with pytest.raises(ShapeError, match=r"present \[entries, window\]; got"):
        gated_mean(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(2, 4, dtype=torch.bool))

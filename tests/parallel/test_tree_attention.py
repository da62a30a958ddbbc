"""Attention where documents fork: each token sees its ancestors, as in separate rollouts."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.parallel import linear, plan_sequence, reference
from primeblocks.parallel.attention import (
    AttentionSpec,
    FlexKernel,
    RectangleKernel,
    VarlenKernel,
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
    ulysses_attention,
)
from primeblocks.parallel.attention.flex import tile_lists
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.bodies import in_turns
from tests.parallel.test_flex import FORKED

ORDERS = ["balanced", "contiguous", "zigzag"]
ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
KERNELS = {"rectangle": RectangleKernel, "flex": lambda: FlexKernel(tile_tokens=4)}
# A trunk of five with three branches, one of which forks; an empty branch, and branches of a token.
LENGTHS, PARENTS = FORKED


@st.composite
def trees(draw):
    """Lengths and parents in preorder."""
    lengths, parents, path = [], [], []
    for document in range(draw(st.integers(1, 8))):
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        lengths.append(draw(st.sampled_from([0, 1, 1, 2, 3, 5, 9])))
        path.append(document)
    return lengths, parents


def _paths(lengths, parents):
    """By token the places that it sees, itself last; plainly."""
    return reference._paths(lengths, parents)


def _leaves(lengths, parents):
    """Paths that no other one goes on with."""
    paths = [tuple(path) for path in _paths(lengths, parents)]
    inner = {path[:-1] for path in paths}
    return [path for path in paths if path not in inner]


def _qkv(tokens, seed=0, dims=((4, 8), (2, 8), (2, 6))):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, *dim, generator=g, dtype=torch.float64) for dim in dims]


def _sinks():
    return torch.linspace(-1, 1, 4, dtype=torch.float64)


@settings(max_examples=20)
@given(tree=trees(), window=st.sampled_from([None, 1, 3]), with_sinks=st.booleans())
def test_the_reference_equals_separate_rollouts(tree, window, with_sinks):
    """Outputs, and all gradients: those of a shared token are the sums over its rollouts."""
    lengths, parents = tree
    leaves = _leaves(lengths, parents)
    sinks = _sinks() if with_sinks else None
    rules = {"window": window, "sinks": sinks}
    found, wanted = _qkv(sum(lengths)), _qkv(sum(lengths))
    for x in (*found, *wanted):
        x.requires_grad_()
    out = reference.attention(*found, lengths, parents=parents, **rules)
    total, expected = out.new_zeros(()), out.new_zeros(())
    for i, leaf in enumerate(leaves):
        path = torch.tensor(leaf)
        alone = reference.attention(*(x[path] for x in wanted), [len(leaf)], **rules)
        assert torch.allclose(out[path], alone, rtol=0, atol=1e-12)
        weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(i)).double()
        total, expected = total + (out[path] * weight).sum(), expected + (alone * weight).sum()
    if leaves:
        total.backward()
        expected.backward()
        for one, other in zip(found, wanted, strict=True):
            assert_close_float64(one.grad, other.grad)


def _dense(hop):
    """`[queries, keys]`: who sees whom, from paths."""
    plan, spec = hop.spec.plan, hop.spec
    paths = _paths(plan.document_lengths, plan.parents or [-1] * len(plan.document_lengths))
    seen = torch.zeros(plan.tokens, plan.tokens, dtype=torch.bool)
    for place, path in enumerate(paths):
        seen[place, path[-(spec.window or plan.tokens) :]] = True
    return seen[plan.indices(hop.query_rank)][:, plan.indices(hop.key_rank)]


@settings(max_examples=settings().max_examples // 4)
@given(
    tree=trees(),
    world_size=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
    window=st.sampled_from([None, 1, 2, 6]),
    tile=st.integers(1, 6),
)
def test_hops_tiles_and_kernels_follow_the_tree(tree, world_size, order, window, tile):
    lengths, parents = tree
    plan = plan_sequence(
        lengths, ranks=world_size, order=order, chunk_tokens=3, parents=iter(parents)
    )
    spec = AttentionSpec(plan, causal=True, scale=0.3, window=window)
    q, k, v = _qkv(plan.tokens)
    for query_rank, key_rank in np.ndindex(world_size, world_size):
        hop = spec.hop(query_rank, key_rank)
        seen = _dense(hop)
        assert hop.pairs == seen.sum()
        own, far = plan.indices(query_rank), plan.indices(key_rank)
        if not len(own) or not len(far):
            continue
        if plan.parents is not None:
            _assert_tiles(hop, seen, tile)
        scores = torch.einsum("qhd,khd->hqk", q[own], k[far].repeat_interleave(2, 1)) * 0.3
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1).T
        weights = scores.softmax(-1).nan_to_num()
        expected = torch.einsum("hqk,khd->qhd", weights, v[far].repeat_interleave(2, 1))
        for kernel in (RectangleKernel(), FlexKernel(tile_tokens=tile)):
            out, found = kernel.forward(q[own], k[far], v[far], hop=hop)
            assert torch.allclose(out, expected, rtol=0, atol=1e-12)
            assert torch.allclose(found, lse, rtol=0, atol=1e-12)


def _assert_tiles(hop, seen, tile):
    lists = tile_lists(hop, torch.device("cpu"), tile)
    shape = [-(-n // tile) for n in seen.shape]
    kinds = []
    for counts, tiles in ((lists.key_counts, lists.key_tiles), (lists.full_key_counts, lists[3])):
        dense = torch.zeros(shape, dtype=torch.bool)
        for row, count in enumerate(counts[0, 0].tolist()):
            dense[row, tiles[0, 0, row, :count].tolist()] = True
        kinds.append(dense)
    some, full = kinds
    padded = torch.zeros([n * tile for n in shape], dtype=torch.bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    by_tile = padded.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).transpose(1, 2).flatten(2)
    assert torch.equal(full, by_tile.all(-1))
    assert not (by_tile.any(-1) & ~some & ~full).any()
    assert not (some & full).any()
    if hop.spec.window is None and hop.spec.plan.ranks == 1:
        assert torch.equal(some | full, by_tile.any(-1))  # None is listed in vain.


def _step(attention, lengths, parents, rules, with_sinks):
    leaves = [*_qkv(sum(lengths)), *([_sinks()] if with_sinks else [])]
    for x in leaves:
        x.requires_grad_()
    named = {"sinks": leaves[3]} if with_sinks else {}
    out = attention(*leaves[:3], **rules, **named)
    out.backward(_cotangent(out))
    return [out.detach(), *(x.grad for x in leaves)]


def _cotangent(out):
    g = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=g, dtype=out.dtype)


def _split(cases):
    return [_by_kernel(*case) for case in cases]


def _by_kernel(order, rules, with_sinks):
    group, found = dist.group.WORLD, {}
    plan = plan_sequence(LENGTHS, ranks=group.size(), order=order, chunk_tokens=3, parents=PARENTS)
    for name, attention in ATTENTIONS.items():
        for of, kernel in KERNELS.items():
            if (name, of) == ("ulysses", "flex") and order != "balanced":
                continue
            leaves = [x[plan.indices(group.rank())].requires_grad_() for x in _qkv(plan.tokens)]
            sinks = _sinks().requires_grad_() if with_sinks else None
            out = attention(
                *leaves, sequence=plan, group=group, sinks=sinks, kernel=kernel(), **rules
            )
            whole = plan.join(out, group=group)
            (whole * _cotangent(whole)).sum().backward()
            # Each rank's copy of the sum counts once.
            grads = [plan.join(x.grad, group=group) / group.size() for x in leaves]
            if sinks is not None:
                dist.all_reduce(sinks.grad)
                grads.append(sinks.grad / group.size())
            found[name, of] = [whole.detach(), *grads]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_equal_one(world_size, full):
    cases = [("balanced", {}, True), ("zigzag", {"window": 4}, True), ("contiguous", {}, False)]
    cases = in_turns(cases, world_size, full)
    found = ranks.run(_split, cases, world_size=world_size)
    for at, (_, rules, with_sinks) in enumerate(cases):
        plain = partial(reference.attention, document_lengths=LENGTHS, parents=PARENTS, **rules)
        wanted = _step(plain, LENGTHS, PARENTS, {}, with_sinks)
        for by_case in found:
            for got in by_case[at].values():
                assert_close_float64(got, wanted)


def _latents():
    group, found = dist.group.WORLD, []
    plan = plan_sequence(LENGTHS, ranks=group.size(), chunk_tokens=3, parents=PARENTS)
    g = torch.Generator().manual_seed(2)
    q, latents, up = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((plan.tokens, 4, 6), (plan.tokens, 7), (4, 9, 5))
    )
    expanded = torch.einsum("tl,hol->tho", latents[:, :5], up)
    shared = latents[:, None, 5:].expand(-1, 4, -1)
    k, v = torch.cat([expanded[..., :4], shared], -1), expanded[..., 4:]
    wanted = reference.attention(q, k, v, LENGTHS, parents=PARENTS)
    own = plan.indices(group.rank())
    for attention in (latent_ring_attention, latent_ulysses_attention):
        out = attention(q[own], latents[own], up, sequence=plan, group=group)
        found.append(float((out - wanted[own]).abs().max()))
    return found


def test_latents_follow_the_tree():
    assert max(max(found) for found in ranks.run(_latents, world_size=3)) < 1e-12


def test_positions_are_depths_and_labels_are_refused():
    plan = plan_sequence(LENGTHS, ranks=2, parents=PARENTS, chunk_tokens=3)
    depths = [len(path) - 1 for path in _paths(LENGTHS, PARENTS)]
    for rank in range(2):
        assert plan.positions(rank).tolist() == [depths[i] for i in plan.indices(rank)]
    assert plan.whole.positions(0).tolist() == depths
    with pytest.raises(PlanError, match=r"TreePlan\.held"):
        plan.labels(torch.arange(plan.tokens))
    assert plan != plan_sequence(LENGTHS, ranks=2, chunk_tokens=3)
    flat = plan_sequence(LENGTHS, ranks=2, chunk_tokens=3, parents=[-1] * len(LENGTHS))
    assert flat == plan_sequence(LENGTHS, ranks=2, chunk_tokens=3)
    assert plan.fingerprint != flat.fingerprint


@pytest.mark.parametrize("parents", [[-1, 1], [0, -1], [-1, 0, -1, 0], [-1, -1, 0, -2]])
def test_parents_that_are_not_in_preorder_are_refused(parents):
    with pytest.raises(PlanError, match="preorder"):
        plan_sequence([2] * len(parents), ranks=1, parents=parents)


def _refused():
    group = dist.group.WORLD
    plan = plan_sequence([3, 2, 2], ranks=group.size(), parents=[-1, 0, 0])
    q, k, v = (x[plan.indices(group.rank())] for x in _qkv(7))
    where = {"sequence": plan, "group": group}
    weight = torch.ones(4, 2, dtype=torch.float64)
    x = q[..., 0]
    found = []
    for call in (
        lambda: ring_attention(q, k, v, causal=False, **where),
        lambda: ulysses_attention(q, k, v, kernel=_OwnKernel(), **where),
        lambda: ulysses_attention(q, k, v, kernel=VarlenKernel(), **where),
        lambda: linear.causal_conv1d(x, weight, None, **where),
        lambda: linear.gated_delta_rule(q, q, q, x, x, **where),
    ):
        try:
            call()
        except (UnsupportedError, PlanError, RankError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class _OwnKernel(RectangleKernel):
    """A kernel that reads one range of keys a query."""

    def forward(self, q, k, v, *, hop):
        hop.seen_rows()


def test_what_does_not_follow_forks_says_so():
    for found in ranks.run(_refused, world_size=2):
        assert len(found) == 5
        for words, text in zip(
            ["causal=False", "kernel=FlexKernel", "no mask for documents that fork"]
            + ["Recurrences, convolutions"] * 2,
            found,
            strict=True,
        ):
            assert text.startswith("UnsupportedError")
            assert words in text

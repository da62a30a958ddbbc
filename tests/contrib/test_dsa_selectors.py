"""Selectors over ranks against the modules of transformers on one rank."""

from functools import cache
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from primeblocks.contrib.dsa_rules.selectors import (
    TopEntries,
    TopPools,
    TopTiles,
    all_entries,
)
from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention.dsa import IndexerInputs, index_scores, select
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter, assert_close_float64, assert_same_bits
from tests.contrib.dsa_models import HIDDEN, MODELS, Place, StableTopK, as_computed

# Of one token, shorter than a window and than k, cut by every order, empty; as long as a window.
PACKING = (11, 1, 3, 26, 0, 4, 9)
# In whole numbers and quarters of them every score is exact, and many are equal.
CASES = [(name, integers) for name in MODELS for integers in (False, True)]


def _inputs(tokens, integers):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    grad = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    if integers:
        hidden = hidden.mul(2).round().clamp(-2, 2)
    dtype = torch.float32 if integers else torch.float64
    return hidden.to(dtype), grad.to(dtype)


def _split_all(packings, order, chunk_bytes):
    return [_split(lengths, order, chunk_bytes) for lengths in packings]


def _split(lengths, order, chunk_bytes):
    """By case: indices, keys of all, output, gradients of hidden states and of parameters."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    own = plan.indices(group.rank())
    return [_split_case(*case, plan, own, group, chunk_bytes) for case in CASES]


def _split_case(name, integers, plan, own, group, chunk_bytes):
    hidden, grad = (x[own] for x in _inputs(plan.tokens, integers))
    hidden.requires_grad_()
    with as_computed(hidden.dtype):
        model = MODELS[name](hidden.dtype, integers=integers)
        out, indices, keys = model.split(
            hidden, sequence=plan, group=group, chunk_bytes=chunk_bytes
        )
        out.backward(grad)
    of_parameters = _gradients(model)
    for x in of_parameters.values():
        dist.all_reduce(x)
    return indices, keys, [out.detach(), hidden.grad], of_parameters


def _gradients(model):
    return {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in model.attention.named_parameters()
    }


@cache
def _whole(name, integers, lengths):
    """The lists of all queries, output and gradients, document by document."""
    hidden, grad = _inputs(sum(lengths), integers)
    hidden.requires_grad_()
    chosen, outs = [], []
    with as_computed(hidden.dtype), StableTopK():
        model = MODELS[name](hidden.dtype, integers=integers)
        starts = accumulate(lengths, initial=0)
        entries = accumulate((length // model.ratio for length in lengths), initial=0)
        for length, start, entry in zip(lengths, starts, entries, strict=False):
            if not length:
                continue
            found = []
            hook = model.chooser.register_forward_hook(lambda *x, into=found: into.append(x[2]))
            outs.append(model.whole(hidden[None, start : start + length])[0])
            hook.remove()
            chosen += model.ids(found[0], Place(start, entry, sum(lengths)))
        out = torch.cat(outs)
        out.backward(grad)
    return chosen, [out.detach(), hidden.grad], _gradients(model)


def _listed(indices):
    """The ids of each row and group, which must be compact."""
    assert indices.dtype == torch.int32
    lists = [[[i for i in row if i >= 0] for row in rows] for rows in indices.tolist()]
    width = indices.shape[2]
    assert indices.tolist() == [[r + [-1] * (width - len(r)) for r in rows] for rows in lists]
    return lists


def _assert_equal_one_rank(found, lengths, order):
    plan = plan_sequence(lengths, ranks=len(found), order=order, chunk_tokens=3)
    for case, (name, integers) in enumerate(CASES):
        chosen, expected, of_parameters = _whole(name, integers, lengths)
        for rank, of_rank in enumerate(found):
            indices, keys, results, ours = of_rank[case]
            own = plan.indices(rank)
            assert _listed(indices) == [chosen[t] for t in own.tolist()]
            assert ours.keys() == of_parameters.keys()
            compared = [*results, *ours.values()]
            wanted = [*(x[own] for x in expected), *of_parameters.values()]
            if not integers:
                assert_close_float64(compared, wanted)
                continue
            # Scores are exact, softmax is not; of a token alone nothing depends on q.
            for a, b in zip(compared, wanted, strict=True):
                assert (a - b).norm() <= 1e-6 * max(1.0, b.norm())
            if keys is not None:
                assert_same_bits(keys, found[0][case][1])


@pytest.mark.parametrize(("world_size", "order"), [(3, "balanced"), (4, "contiguous")])
def test_equal_to_transformers(world_size, order):
    """Lists in every row; in float64 the output and gradients too. Ranks may have no tokens."""
    packings = PACKING, (1, 1, 1)
    found = ranks.run(_split_all, packings, order, 300, world_size=world_size)
    for lengths, of_ranks in zip(packings, zip(*found, strict=True), strict=True):
        _assert_equal_one_rank(of_ranks, lengths, order)


def test_the_models_choose_and_lists_tie():
    """Otherwise the comparisons above would see little."""
    for name, integers in CASES:
        chosen, (out, grad), of_parameters = _whole(name, integers, PACKING)
        longest = max(len(row) for rows in chosen for row in rows)
        assert longest < 26
        assert out.std() > 0.01
        assert grad.std() > 0.01
        assert sum(bool(x.any()) for x in of_parameters.values()) >= 4


def _drawn(tokens, candidates, heads, seed):
    """Whole numbers, so that loops and products agree to the bit."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, heads, 3), (candidates, 3), (tokens, heads)
    return [torch.randint(-2, 3, shape, generator=generator).double() for shape in shapes]


SELECTORS = {
    "pools": (TopPools(64, 4, chunk_bytes=1 << 18), 4),
    "entries": (TopEntries(16, 4, 48, chunk_bytes=1 << 18), 4),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_take_the_memory_of_a_chunk_and_the_host_waits_for_nothing(name):
    """4,096 tokens on four ranks: the matrix of scores would take 16 MiB, a chunk 256 KiB."""
    selector, ratio = SELECTORS[name]
    plan = plan_sequence([4096], ranks=4, order="contiguous")
    generator = torch.Generator().manual_seed(0)
    shapes = (1024, 2, 8), (1024, 2), (4096 // ratio, 8)
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    # Not by `select`, whose operator shows nothing of its inside.
    rules = {"sequence": plan, "rank": 3, "scores": index_scores}
    selector.select(*operands, **rules)  # What is kept for the next layer.
    with StepCounter() as step, torch.no_grad():
        indices = selector.select(*operands, **rules)
    assert not step.host_reads
    # Beside the result: lists of pools, tiles or entries, and a chunk.
    lists = 1024 * 16 * 4
    assert (1 << 16) < step.peak_bytes - indices.nbytes <= lists + (1 << 18)


def test_nan_is_selected():
    plan = plan_sequence([40], ranks=1)
    q, keys, weights = _drawn(40, 40, 1, 0)
    keys[5] = torch.nan
    for selector, ratio, wanted in (
        (TopPools(4, 4), 4, [20, 21, 22, 23]),  # Entry 5.
        (TopTiles(2, 4), 1, [4, 5, 6, 7]),  # Token 5.
        (TopEntries(1, 4, 3), 4, [45]),
    ):
        rows = 40 // ratio
        indexer = IndexerInputs(q, keys[:rows], weights)
        found = select(indexer, keys[:rows], selector=selector, sequence=plan, rank=0)
        assert set(wanted) <= set(found[39, 0].tolist())


@pytest.mark.parametrize(("local", "chunk_bytes"), [(0, 1), (0, 1 << 20), (2, 300)])
def test_tiles_equal_loops(local, chunk_bytes):
    lengths, size, wanted = (4, 23), 3, []
    q, keys, weights = _drawn(sum(lengths), sum(lengths), 2, 0)
    for start, p in [(0, p) for p in range(4)] + [(4, p) for p in range(23)]:
        t, own = start + p, p // size
        for dots in (keys[start : t + 1] @ q[t].T * weights[t]).T.tolist():
            best = [max(dots[at : at + size]) for at in range(0, p + 1, size)]
            best = [torch.inf if i > own - local else score for i, score in enumerate(best)]
            tiles = sorted(sorted(range(own + 1), key=lambda i: (-best[i], i))[:2])
            wanted.append([start + i for tile in tiles for i in range(p + 1) if i // size == tile])
    plan = plan_sequence(lengths, ranks=1)
    selector = TopTiles(2, size, local, chunk_bytes)
    found = select(IndexerInputs(q, keys, weights), keys, selector=selector, sequence=plan, rank=0)
    assert [ids for lists in _listed(found) for ids in lists] == wanted


def _engine(q, k, weights):
    return index_scores(q, k, weights)


def test_what_does_not_fit_is_refused():
    plan = plan_sequence([7, 2], ranks=1)
    q, keys, weights = _drawn(9, 9, 2, 0)
    indexer = IndexerInputs(q, keys, weights)
    for selector, said in (
        (TopPools(4, 2), "the 4 entries of 2 tokens of all ranks need q"),
        (TopEntries(1, 3, 2), "the 2 entries of 3 tokens"),
        (TopTiles(2, 2), "the 9 tokens"),
    ):
        with pytest.raises(ShapeError, match=said):
            select(indexer, keys[:3], selector=selector, sequence=plan, rank=0)
        few = IndexerInputs(q[:8], keys, weights[:8])
        with pytest.raises(ShapeError, match="this rank's 9 tokens"):
            select(few, keys, selector=selector, sequence=plan, rank=0)
    with pytest.raises(UnsupportedError, match="without a ReLU"):
        select(indexer, keys, selector=TopTiles(2, 2), sequence=plan, rank=0, scores=_engine)
    for wrong in (
        lambda: TopPools(3, 4),
        lambda: TopPools(4, 0),
        lambda: TopTiles(2, 4, 3),
        lambda: TopTiles(0, 4, 0),
        lambda: TopEntries(0, 4, 4),
        lambda: TopEntries(4, 4, -1),
        lambda: all_entries(plan, 0, ratio=0, window=2),
        lambda: all_entries(plan, 0, ratio=2, window=-1),
    ):
        with pytest.raises(PlanError, match="needs|must be at least"):
            wrong()

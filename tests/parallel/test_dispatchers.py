"""Dispatchers against plain loops: every slot reaches its expert, every result its token."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel import (
    AllToAllDispatcher,
    LocalDispatcher,
    OncePerRankDispatcher,
    TokenDispatcher,
    grouped_swiglu,
    reference,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_as_precise

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 2, 5, 3
SHARED = {"all_to_all": AllToAllDispatcher, "once_per_rank": OncePerRankDispatcher}


def _batch(tokens, *, seed, num_experts=EXPERTS, top_k=TOP_K):
    """Expert 1 is never chosen; a token may choose an expert twice."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64)
    scores = torch.rand(tokens, top_k, generator=g, dtype=torch.float64)
    ids = torch.randint(num_experts, (tokens, top_k), generator=g)
    return x, scores, ids.where(ids != 1, 0)


def _weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g, dtype=torch.float64)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g, dtype=torch.float64)
    return gate_up, down


def _gradients(function, *inputs, seed):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    g = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=g, dtype=torch.float64))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


slots = {
    "tokens": st.integers(0, 9),
    "top_k": st.integers(1, 4),
    "seed": st.integers(0, 999),
    "alignment": st.sampled_from([1, 4]),
}


@given(**slots)
def test_combine_undoes_dispatch(tokens, top_k, seed, alignment):
    x, scores, ids = _batch(tokens, seed=seed, top_k=top_k)
    gates = scores / scores.sum(1, keepdim=True)
    dispatcher = LocalDispatcher(alignment=alignment)
    sent = dispatcher.dispatch(x, gates, ids, num_experts=EXPERTS)
    torch.testing.assert_close(dispatcher.combine(sent.tokens, sent), x, rtol=1e-12, atol=1e-12)


@given(**slots)
def test_every_slot_reaches_its_expert_once(tokens, top_k, seed, alignment):
    _, scores, ids = _batch(tokens, seed=seed, top_k=top_k)
    x = torch.arange(1, tokens + 1, dtype=torch.float64).unsqueeze(1)
    dispatcher = LocalDispatcher(alignment=alignment)
    sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
    assert all(count % alignment == 0 for count in sent.counts)
    found = []
    for expert, rows in enumerate(sent.tokens[:, 0].split(sent.counts.tolist())):
        used = rows.count_nonzero()
        assert len(rows) - used < alignment
        assert (rows[used:] == 0).all()
        found += [(expert, int(token)) for token in rows[:used]]
    assert found == sorted((int(ids[t, k]), t + 1) for t in range(tokens) for k in range(top_k))


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_local_experts_match_the_reference(tokens, alignment):
    x, scores, ids = _batch(tokens, seed=1)

    def ours(x, scores, gate_up, down):
        dispatcher = LocalDispatcher(alignment=alignment)
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
        return dispatcher.combine(grouped_swiglu(sent.tokens, sent.counts, gate_up, down), sent)

    found = _gradients(ours, x, scores, *_weights(), seed=2)
    _assert_equal(found, _loops(x, scores, ids, seed=2))


def _loops(x, scores, ids, seed):
    def loops(x, scores, gate_up, down):
        out = reference.experts(x, ids, scores, gate_up, down)
        # Without tokens the loops touch nothing, and autograd would find no gradient at all.
        return out + 0 * (gate_up.sum() + down.sum() + x.sum() + scores.sum())

    return _gradients(loops, x, scores, *_weights(), seed=seed)


def _share(whole, rank):
    share = EXPERTS // dist.get_world_size()
    return whole[rank * share : (rank + 1) * share]


def _shared_experts(name, alignment, tokens_by_rank, seed):
    rank = dist.get_rank()
    x, scores, ids = _batch(tokens_by_rank[rank], seed=seed + rank)
    dispatcher = SHARED[name](dist.group.WORLD, alignment=alignment)
    assert isinstance(dispatcher, TokenDispatcher)

    def ours(x, scores, gate_up, down):
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
        assert sent.counts.shape == (EXPERTS // dist.get_world_size(),)
        assert int(sent.counts.sum()) == sent.tokens.shape[0]
        assert all(count % alignment == 0 for count in sent.counts)
        return dispatcher.combine(grouped_swiglu(sent.tokens, sent.counts, gate_up, down), sent)

    gate_up, down = (_share(w, rank) for w in _weights())
    return _gradients(ours, x, scores, gate_up, down, seed=seed - rank)


def _check_against_one_rank(name, tokens_by_rank, seed, alignment=1):
    size = len(tokens_by_rank)
    got = ranks.run(_shared_experts, name, alignment, tokens_by_rank, seed, world_size=size)
    each = []
    for rank, tokens in enumerate(tokens_by_rank):
        each.append(_loops(*_batch(tokens, seed=seed + rank), seed=seed - rank))
    for mine, want in zip(got, each, strict=True):
        _assert_equal(mine[:3], want[:3])
    for i in (3, 4):
        whole = torch.cat([mine[i] for mine in got])
        _assert_equal([whole], [sum(grads[i] for grads in each)])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    "tokens_by_rank", [(4, 7), (0, 3), (5, 0, 2), (3, 1, 0, 6), (0, 0, 0)], ids=str
)
def test_shared_experts_match_one_rank(name, tokens_by_rank):
    _check_against_one_rank(name, tokens_by_rank, seed=5, alignment=1 + 3 * (5 in tokens_by_rank))


@settings(max_examples=8)
@given(
    name=st.sampled_from(sorted(SHARED)),
    tokens_by_rank=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    seed=st.integers(9, 99),
    alignment=st.sampled_from([1, 8]),
)
def test_any_ragged_batch_matches_one_rank(name, tokens_by_rank, seed, alignment):
    _check_against_one_rank(name, tokens_by_rank, seed, alignment)


def _dispatched_order(name):
    """Rows carry (source rank, token), every token chooses every expert."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([[rank, t] for t in range(3)], dtype=torch.float64)
    ids = torch.arange(2 * size).repeat(3, 1)
    dispatcher = SHARED[name](dist.group.WORLD)
    sent = dispatcher.dispatch(x, torch.ones(ids.shape), ids, num_experts=2 * size)
    return sent.tokens.tolist()


@pytest.mark.parametrize("name", SHARED)
def test_rows_of_an_expert_keep_the_order_of_the_one_rank_batch(name):
    in_order = [[source, token] for source in range(3) for token in range(3)]
    assert ranks.run(_dispatched_order, name, world_size=3) == [in_order * 2] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_precise_as_scatter(dtype):
    """Against the plain way: multiply by the scores, add up with index_add."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=g).to(dtype)
    ids = torch.rand(64, EXPERTS, generator=g).topk(8).indices
    scores, grad = torch.rand(64, 8, generator=g), torch.randn(64, 128, generator=g).to(dtype)

    def plain(x, scores):
        order = ids.flatten().argsort(stable=True)
        rows = x[order // 8] * scores.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // 8, rows)

    def ours(x, scores):
        sent = LocalDispatcher().dispatch(x, scores, ids, num_experts=EXPERTS)
        return LocalDispatcher().combine(sent.tokens, sent)

    def outcome(function, to):
        leaves = [leaf.to(to).clone().requires_grad_() for leaf in (x, scores)]
        out = function(*leaves)
        out.backward(grad.to(to))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for got, naive, exact in zip(
        outcome(ours, dtype), outcome(plain, dtype), outcome(plain, torch.float64), strict=True
    ):
        assert_as_precise(got, naive=naive, exact=exact)


BAD_INPUTS = {
    "ShapeError: .*the layer has experts 0 to 11": {"ids": torch.tensor([[0, 12]])},
    r"ShapeError: .*lie in \[-1, 0\]": {"ids": torch.tensor([[0, -1]])},
    "ShapeError: .*must be integers; got torch.float32": {"ids": torch.zeros(1, 2)},
    r"ShapeError: .*expert_ids \(2, 2\) differ": {
        "ids": torch.zeros(2, 2).long(),
        "x": torch.zeros(2, 5),
    },
    r"ShapeError: .*got \(1, 1, 5\)": {"x": torch.zeros(1, 1, 5)},
    r"ShapeError: .*got \(3, 5\) and \(1, 2\)": {"x": torch.zeros(3, 5)},
    "ShapeError: 1 of 2 scores are NaN": {"scores": torch.tensor([[1.0, torch.nan]])},
    "ShapeError: 2 of 2 scores are NaN or infinite": {"scores": torch.full((1, 2), torch.inf)},
}
# What only a group can get wrong.
BAD_LAYERS = {
    "PlanError: 7 experts cannot be shared equally by 2 ranks": {"num_experts": 7},
    r"PlanError: num_experts must be equal .* it is \[12, 14\]": {"num_experts": 14},
    r"PlanError: hidden must be equal .* it is \[5, 6\]": {"x": torch.zeros(1, 6)},
    r"PlanError: bytes an element must be equal .* it is \[4, 8\]": {
        "x": torch.zeros(1, HIDDEN).double()
    },
    r"PlanError: requires_grad must be equal .* it is \[0, 1\]": {
        "x": torch.zeros(1, HIDDEN).requires_grad_()
    },
    r"PlanError: top_k must be equal .* it is \[2, 3\]": {
        "ids": torch.zeros(1, 3).long(),
        "scores": torch.ones(1, 3),
    },
}


def _dispatch(dispatcher, *, x=None, ids=None, scores=None, num_experts=EXPERTS):
    x = torch.zeros(1, HIDDEN) if x is None else x
    ids = torch.zeros(1, 2, dtype=torch.int64) if ids is None else ids
    scores = torch.ones(1, 2) if scores is None else scores
    return dispatcher.dispatch(x, scores, ids, num_experts=num_experts)


def _said(dispatcher, **bad):
    try:
        _dispatch(dispatcher, **bad)
    except (PlanError, RankError, ShapeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("said", BAD_INPUTS)
def test_bad_slots_are_refused(said):
    assert re.match(said, _said(LocalDispatcher(), **BAD_INPUTS[said]))


def _refusals(name):
    """Rank 1 alone makes the mistake."""
    dispatcher = SHARED[name](dist.group.WORLD)
    wrong = dist.get_rank() == 1
    found = {}
    for said, bad in (BAD_INPUTS | BAD_LAYERS).items():
        found[said] = _said(dispatcher, **(bad if wrong else {}))
        # Nothing was sent before the refusal: the group still works.
        assert _dispatch(dispatcher).counts.sum() == 4 * (not wrong)
    return found


@pytest.mark.parametrize("name", SHARED)
def test_one_ranks_mistake_is_an_error_on_all(name):
    there, here = ranks.run(_refusals, name)
    for said, text in here.items():
        assert re.match(said, text), text
        if " must be equal " in said:
            assert there[said] == text
        else:
            assert there[said].startswith("RankError: rank 1 of the group refused its arguments: ")
            assert text[:300] in there[said]


def _unchecked():
    dispatcher = AllToAllDispatcher(dist.group.WORLD, check=False)
    with pytest.raises(ShapeError, match="must be integers"):
        _dispatch(dispatcher, ids=torch.zeros(1, 2))
    return _dispatch(dispatcher, scores=torch.full((1, 2), torch.nan)).counts.tolist()


def test_without_check_shapes_alone_are_looked_at():
    assert ranks.run(_unchecked) == [[4, 0, 0, 0, 0, 0], [0] * 6]


def _outsider():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(PlanError, match="this rank is not in the group"):
            AllToAllDispatcher(group)


def test_a_rank_outside_the_group_is_refused():
    ranks.run(_outsider)


def test_outputs_must_fit_the_dispatched_rows():
    sent = _dispatch(LocalDispatcher())
    with pytest.raises(ShapeError, match=r"each of 2 slots; got \(3, 5\)"):
        LocalDispatcher().combine(torch.zeros(3, HIDDEN), sent)


def test_alignment_must_be_positive():
    with pytest.raises(PlanError, match="at least 1 row; got 0"):
        LocalDispatcher(alignment=0)

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import (
    AllToAllDispatcher,
    GroupedExperts,
    LocalDispatcher,
    TokenDispatcher,
    grouped_swiglu,
    reference,
)
from primeblocks.testing import ranks

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 5, 3


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


@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), seed=st.integers(0, 999))
def test_combine_undoes_dispatch(tokens, top_k, seed):
    x, scores, ids = _batch(tokens, seed=seed, top_k=top_k)
    gates = scores / scores.sum(1, keepdim=True)
    sent = LocalDispatcher().dispatch(x, gates, ids, num_experts=EXPERTS)
    out = LocalDispatcher().combine(sent.tokens, sent)
    torch.testing.assert_close(out, x, rtol=1e-12, atol=1e-12)


@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), seed=st.integers(0, 999))
def test_every_slot_reaches_its_expert_once(tokens, top_k, seed):
    _, scores, ids = _batch(tokens, seed=seed, top_k=top_k)
    x = torch.arange(tokens, dtype=torch.float64).unsqueeze(1)
    sent = LocalDispatcher().dispatch(x, scores, ids, num_experts=EXPERTS)
    expert_of_row = torch.arange(EXPERTS).repeat_interleave(sent.counts)
    got = list(zip(expert_of_row.tolist(), sent.tokens[:, 0].int().tolist(), strict=True))
    assert got == sorted((int(ids[t, k]), t) for t in range(tokens) for k in range(top_k))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_local_experts_match_the_reference(tokens):
    x, scores, ids = _batch(tokens, seed=1)

    def ours(x, scores, gate_up, down):
        sent = LocalDispatcher().dispatch(x, scores, ids, num_experts=EXPERTS)
        y = grouped_swiglu(sent.tokens, sent.counts, gate_up, down)
        return LocalDispatcher().combine(y, sent)

    def loops(x, scores, gate_up, down):
        return reference.experts(x, ids, scores, gate_up, down)

    got = _gradients(ours, x, scores, *_weights(), seed=2)
    if tokens == 0:  # The loops touch nothing then; ours still gives zeros.
        assert all(torch.equal(g, torch.zeros_like(g)) for g in got)
    else:
        _assert_equal(got, _gradients(loops, x, scores, *_weights(), seed=2))


def test_an_expert_without_rows_gets_a_zero_gradient():
    x, scores, ids = _batch(4, seed=3)
    module = GroupedExperts(
        EXPERTS, HIDDEN, INTERMEDIATE, dispatcher=LocalDispatcher(), dtype=torch.float64
    )
    module(x, ids, scores).sum().backward()
    for parameter in module.parameters():
        assert torch.equal(parameter.grad[1], torch.zeros_like(parameter.grad[1]))
        assert parameter.grad[int(ids[0, 0])].abs().sum() > 0


def _share(whole, rank):
    share = EXPERTS // dist.get_world_size()
    return whole[rank * share : (rank + 1) * share]


def _shared_experts(tokens_by_rank, seed):
    rank = dist.get_rank()
    x, scores, ids = _batch(tokens_by_rank[rank], seed=seed + rank)
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    assert isinstance(dispatcher, TokenDispatcher)

    def ours(x, scores, gate_up, down):
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
        assert sent.counts.shape == (EXPERTS // dist.get_world_size(),)
        assert int(sent.counts.sum()) == sent.tokens.shape[0]
        return dispatcher.combine(grouped_swiglu(sent.tokens, sent.counts, gate_up, down), sent)

    gate_up, down = (_share(w, rank) for w in _weights())
    return _gradients(ours, x, scores, gate_up, down, seed=seed - rank)


def _one_rank(tokens_by_rank, seed):
    """What each rank should get, and the weights' gradients of all."""
    each = []
    for rank, tokens in enumerate(tokens_by_rank):
        x, scores, ids = _batch(tokens, seed=seed + rank)

        def loops(x, scores, gate_up, down, ids=ids):
            out = reference.experts(x, ids, scores, gate_up, down)
            return out + 0 * (gate_up.sum() + down.sum() + x.sum() + scores.sum())

        each.append(_gradients(loops, x, scores, *_weights(), seed=seed - rank))
    return each, [sum(grads[i] for grads in each) for i in (3, 4)]


def _check_against_one_rank(tokens_by_rank, seed):
    size = len(tokens_by_rank)
    got = ranks.run(_shared_experts, tokens_by_rank, seed, world_size=size)
    each, weights = _one_rank(tokens_by_rank, seed)
    for mine, want in zip(got, each, strict=True):
        _assert_equal(mine[:3], want[:3])
    for i, want in enumerate(weights):
        _assert_equal([torch.cat([mine[3 + i] for mine in got])], [want])


@pytest.mark.parametrize("tokens_by_rank", [(4, 7), (0, 3), (5, 0, 2), (0, 0, 0)], ids=str)
def test_shared_experts_match_one_rank(tokens_by_rank):
    _check_against_one_rank(tokens_by_rank, seed=5)


@settings(max_examples=4, deadline=None)
@given(tokens_by_rank=st.lists(st.integers(0, 6), min_size=2, max_size=3), seed=st.integers(9, 99))
def test_any_ragged_batch_matches_one_rank(tokens_by_rank, seed):
    _check_against_one_rank(tokens_by_rank, seed)


def _dispatched_order():
    """Rows carry (source rank, token): 1 expert a rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([[rank, t] for t in range(3)], dtype=torch.float64)
    ids = torch.arange(2 * size).repeat(3, 1)
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    sent = dispatcher.dispatch(x, torch.ones(ids.shape), ids, num_experts=2 * size)
    return sent.tokens.tolist()


def test_rows_of_an_expert_keep_the_order_of_the_one_rank_batch():
    in_order = [[source, token] for source in range(3) for token in range(3)]
    assert ranks.run(_dispatched_order, world_size=3) == [in_order * 2] * 3


BAD_INPUTS = {
    "the layer has experts 0 to 5": {"ids": torch.tensor([[0, 6]])},
    r"lie in \[-1, 0\]": {"ids": torch.tensor([[0, -1]])},
    "must be integers; got torch.float32": {"ids": torch.zeros(1, 2)},
    r"expert_ids \(2, 2\) differ": {"ids": torch.zeros(2, 2).long(), "x": torch.zeros(2, 5)},
    r"got \(1, 1, 5\)": {"x": torch.zeros(1, 1, 5)},
    r"got \(3, 5\) and \(1, 2\)": {"x": torch.zeros(3, 5)},
}


def _dispatch(dispatcher, *, x=None, ids=None):
    x = torch.zeros(1, HIDDEN) if x is None else x
    ids = torch.zeros(1, 2, dtype=torch.int64) if ids is None else ids
    return dispatcher.dispatch(x, torch.ones(1, 2), ids, num_experts=EXPERTS)


@pytest.mark.parametrize("said", BAD_INPUTS)
def test_bad_slots_are_refused(said):
    with pytest.raises(ShapeError, match=said):
        _dispatch(LocalDispatcher(), **BAD_INPUTS[said])


def _refusals():
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    for said, bad in BAD_INPUTS.items():
        with pytest.raises(ShapeError, match=said):
            _dispatch(dispatcher, **bad)
    x, scores, ids = torch.zeros(1, 2), torch.ones(1, 1), torch.zeros(1, 1).long()
    with pytest.raises(PlanError, match="7 experts cannot be shared equally by 2 ranks"):
        dispatcher.dispatch(x, scores, ids, num_experts=7)
    # Nothing was sent before a refusal: the group still works.
    return _dispatch(dispatcher).counts.tolist()


def test_bad_slots_are_refused_before_anything_is_sent():
    assert ranks.run(_refusals, world_size=2) == [[4, 0, 0], [0, 0, 0]]


def test_outputs_must_fit_the_dispatched_rows():
    sent = _dispatch(LocalDispatcher())
    with pytest.raises(ShapeError, match=r"each of 2 slots; got \(3, 5\)"):
        LocalDispatcher().combine(torch.zeros(3, HIDDEN), sent)


def test_counts_must_add_up():
    gate_up, down = _weights()
    tokens = torch.zeros(3, HIDDEN, dtype=torch.float64)
    with pytest.raises(ShapeError, match="add up to 6; tokens has 3 rows"):
        grouped_swiglu(tokens, torch.ones(EXPERTS, dtype=torch.int64), gate_up, down)

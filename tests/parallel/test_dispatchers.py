"""Dispatchers against plain loops: every slot reaches its expert, every result its token."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from primeblocks.parallel import reference
from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    LocalDispatcher,
    OncePerRankDispatcher,
    TokenDispatcher,
    grouped_swiglu,
)
from primeblocks.parallel.experts.permute import map_rows, unpermute
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_as_precise, max_relative_error

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


def _loops(x, scores, ids, seed):
    def loops(x, scores, gate_up, down):
        out = reference.experts(x, ids, scores, gate_up, down)
        # Without tokens the loops touch nothing, and autograd would find no gradient at all.
        return out + 0 * (gate_up.sum() + down.sum() + x.sum() + scores.sum())

    return _gradients(loops, x, scores, *_weights(), seed=seed)


def _share(whole, rank):
    share = EXPERTS // dist.get_world_size()
    return whole[rank * share : (rank + 1) * share]


def _of_each(body, *arguments):
    return [body(name, *arguments) for name in SHARED]


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


def _check_against_one_rank(tokens_by_rank, seed, alignment=1):
    arguments = (_shared_experts, alignment, tokens_by_rank, seed)
    found = ranks.run(_of_each, *arguments, world_size=len(tokens_by_rank))
    each = []
    for rank, tokens in enumerate(tokens_by_rank):
        each.append(_loops(*_batch(tokens, seed=seed + rank), seed=seed - rank))
    for got in zip(*found, strict=True):  # By dispatcher.
        for mine, want in zip(got, each, strict=True):
            _assert_equal(mine[:3], want[:3])
        for i in (3, 4):
            whole = torch.cat([mine[i] for mine in got])
            _assert_equal([whole], [sum(grads[i] for grads in each)])


@pytest.mark.parametrize("tokens_by_rank", [(0, 3), (5, 0, 2), (3, 1, 0, 6), (0, 0, 0)], ids=str)
def test_shared_experts_match_one_rank(tokens_by_rank):
    _check_against_one_rank(tokens_by_rank, seed=5, alignment=1 + 3 * (5 in tokens_by_rank))


@settings(max_examples=settings().max_examples // 30)
@given(
    tokens_by_rank=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    seed=st.integers(9, 99),
    alignment=st.sampled_from([1, 8]),
)
def test_any_ragged_batch_matches_one_rank(tokens_by_rank, seed, alignment):
    _check_against_one_rank(tokens_by_rank, seed, alignment)


def _dispatched_order(name):
    """Rows carry (source rank, token), every token chooses every expert."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([[rank, t] for t in range(3)], dtype=torch.float64)
    ids = torch.arange(2 * size).repeat(3, 1)
    dispatcher = SHARED[name](dist.group.WORLD)
    sent = dispatcher.dispatch(x, torch.ones(ids.shape), ids, num_experts=2 * size)
    return sent.tokens.tolist()


def test_rows_of_an_expert_keep_the_order_of_the_one_rank_batch():
    in_order = [[source, token] for source in range(3) for token in range(3)]
    assert ranks.run(_of_each, _dispatched_order, world_size=3) == [[in_order * 2] * 2] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_precise_as_scatter(dtype):
    """Against the plain way: multiply by the scores, add up with index_add."""
    g = torch.Generator().manual_seed(0)
    tokens = 100  # 800 slots: more than are looked at in one part.
    x = torch.randn(tokens, 128, generator=g).to(dtype)
    ids = torch.rand(tokens, EXPERTS, generator=g).topk(8).indices
    scores, grad = torch.rand(tokens, 8, generator=g), torch.randn(x.shape, generator=g).to(dtype)

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

    found, right = outcome(ours, dtype), outcome(plain, torch.float64)
    for got, naive, exact in zip(found, outcome(plain, dtype), right, strict=True):
        assert_as_precise(got, naive=naive, exact=exact)
    # Gates are float32 as a rule, and so are the products that make their gradient.
    gates = scores.clone().requires_grad_()
    ours(x, gates).backward(grad)
    assert gates.grad.dtype == torch.float32
    assert max_relative_error(gates.grad, right[2]) < 1e-5


def _three(**arguments):
    """Every dispatcher, over the ranks that run this."""
    shared = [made(dist.group.WORLD, **arguments) for made in SHARED.values()]
    return [LocalDispatcher(**arguments), *shared]


def _there_and_back(dispatcher, x, scores, ids, num_experts=EXPERTS):
    sent = dispatcher.dispatch(x, scores, ids, num_experts=num_experts)
    return dispatcher.combine(sent.tokens, sent)


def _integers_and_strides():
    x, scores, ids = _batch(6, seed=dist.get_rank())
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for dispatcher in _three(alignment=4):
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            for lie in (torch.Tensor.contiguous, lambda t: t.t().contiguous().t()):
                leaves = [lie(leaf.clone()).requires_grad_() for leaf in (x, scores)]
                # 8 bits cannot hold the number of a rank's experts, 256.
                out = _there_and_back(dispatcher, *leaves, lie(ids).to(dtype), num_experts=512)
                out.backward(lie(grad))
                sums = scores.sum(1, keepdim=True)
                of_scores = (x * grad).sum(1, keepdim=True).expand(scores.shape)
                _assert_equal(
                    [out.detach(), *(leaf.grad for leaf in leaves)],
                    [x * sums, grad * sums, of_scores],
                )


def test_any_integers_and_strides():
    ranks.run(_integers_and_strides)


def _many_experts():
    """More than an int16 counts; the first ids of either rank's share, and the last ones."""
    many, x = 40_000, torch.arange(1.0, 9.0).view(4, 2)
    ids = torch.tensor([[39_999, 0], [20_000, 19_999], [129, 39_871], [5, 39_999]])
    for dispatcher in _three():
        sent = dispatcher.dispatch(x, torch.ones(4, 2), ids, num_experts=many)
        sources = 1 if isinstance(dispatcher, LocalDispatcher) else 2
        own = dist.get_rank() * 20_000 if sources == 2 else 0
        everyones, chosen = x.repeat(sources, 1), ids.repeat(sources, 1).flatten()
        by_expert = everyones[chosen.argsort(stable=True) // 2]
        counts = torch.bincount(chosen, minlength=many)
        before, own_counts = counts[:own].sum(), counts[own : own + len(sent.counts)]
        assert torch.equal(sent.counts, own_counts)
        assert torch.equal(sent.tokens, by_expert[before : before + own_counts.sum()])
        _assert_equal([dispatcher.combine(sent.tokens, sent)], [2 * x])


def test_many_experts():
    ranks.run(_many_experts)


def _in_one_graph():
    """Two layers, plain and recomputed, and the plain graph once more."""
    x, scores, ids = _batch((3, 0, 5)[dist.get_rank()], seed=dist.get_rank())
    sums = scores.sum(1, keepdim=True)
    for dispatcher in _three():
        for again in (None, False, True):  # use_reentrant
            leaf = x.clone().requires_grad_()
            out = leaf
            for _ in range(2):
                layer = (dispatcher, out, scores, ids)
                out = (
                    _there_and_back(*layer)
                    if again is None
                    else checkpoint(_there_and_back, *layer, use_reentrant=again)
                )
            out.sum().backward(retain_graph=again is None)
            _assert_equal([out.detach(), leaf.grad], [x * sums**2, (sums**2).expand(x.shape)])
            if again is None:
                out.sum().backward()
                _assert_equal([leaf.grad], [2 * (sums**2).expand(x.shape)])


def test_layers_in_one_graph():
    ranks.run(_in_one_graph, world_size=3)


def _saved(function):
    """What autograd keeps, as hooks see it: those of recomputation and offloading."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


def test_rows_are_kept_for_the_gradient_of_scores_alone():
    x, scores, ids = _batch(7, seed=0)
    x.requires_grad_()
    kept = _saved(lambda: _there_and_back(LocalDispatcher(), x, scores, ids))
    assert not any(t.shape[1:] == (HIDDEN,) for t in kept)
    assert sum(t.dtype == torch.int64 and len(t) == ids.numel() for t in kept) >= 4
    scores.requires_grad_()
    kept = _saved(lambda: _there_and_back(LocalDispatcher(), x, scores, ids))
    assert [t.shape for t in kept].count((ids.numel(), HIDDEN)) == 1


def test_low_bits_of_gates_count_beside_rows_of_low_precision():
    """In bfloat16 both gates are 1, and the rows would cancel."""
    row_map = map_rows(torch.tensor([0, 0]), tokens=1)
    rows = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16)
    gates = torch.tensor([1 + 2**-12, 1.0])
    assert unpermute(rows, row_map, gates).tolist() == [[2**-12]]
    compiled = torch.compile(unpermute, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="function `disable` .* not be traced"):
        compiled(rows, row_map, gates)

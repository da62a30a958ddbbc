"""The DeepEP adapter, against a FAKE deep_ep. DeepEP itself needs GPUs and is not run here."""

import gc
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from primeblocks.contrib.adapters.deep_ep import buffer_dispatcher, elastic_dispatcher, exchange
from primeblocks.errors import (
    ClosedError,
    PlanError,
    RankError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from primeblocks.parallel import reference
from primeblocks.parallel.experts import TokenDispatcher
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.contrib import fake_deep_ep

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 3, 8, 3


def _fake(*, float64=True):
    """Put the FAKE where deep_ep would be. float64 is for exactness; DeepEP has none."""
    sys.modules["deep_ep"] = fake_deep_ep
    rows, scores = (torch.float64,) * 2 if float64 else (torch.bfloat16, torch.float32)
    exchange.ROWS, exchange.SCORES = fake_deep_ep.ROWS, fake_deep_ep.WEIGHTS = rows, scores


def _build(kind, *, alignment=1, **changed):
    group = dist.group.WORLD
    if kind == "elastic":
        sizes = {"max_tokens": 9, "hidden": HIDDEN, "top_k": TOP_K, "alignment": alignment}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            return elastic_dispatcher(group, **sizes | changed)
    return buffer_dispatcher(group, hidden=HIDDEN, alignment=alignment, **changed)


def _batch(tokens, *, seed):
    """Expert 1 is never chosen, no token chooses an expert twice, nothing is contiguous."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64)
    scores = torch.rand(tokens, TOP_K, generator=g, dtype=torch.float64)
    ids = torch.rand(tokens, EXPERTS - 1, generator=g).argsort(1)[:, :TOP_K]
    ids = (ids + (ids >= 1)).int()
    return tuple(t.t().contiguous().t() for t in (x, scores, ids))


def _weights():
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g, dtype=torch.float64)
    return gate_up, torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g, dtype=torch.float64)


def _experts(sent, gate_up, down):
    """Each expert on its run of rows. What it makes of padding is NaN: nobody may read it."""
    out = []
    for rows, w_in, w_out in zip(
        sent.tokens.split(sent.counts.tolist()), gate_up, down, strict=True
    ):
        gate, up = (rows @ w_in.T).chunk(2, dim=1)
        y = (F.silu(gate) * up) @ w_out.T
        padding = (rows == 0).all(1, keepdim=True)
        out.append(y.masked_fill(padding, float("nan")))
    return torch.cat(out)


def _gradients(function, *inputs, seed):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    g = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _share(whole):
    share = EXPERTS // dist.get_world_size()
    return whole[dist.get_rank() * share :][:share]


def _on_ranks(kind, tokens_by_rank, seed, alignment):
    _fake()
    rank = dist.get_rank()
    x, scores, ids = _batch(tokens_by_rank[rank], seed=seed + rank)
    ids = ids.byte()
    with _build(kind, alignment=alignment) as dispatcher:
        assert isinstance(dispatcher, TokenDispatcher)

        def ours(x, scores, gate_up, down):
            sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
            assert sent.counts.dtype == torch.int64
            assert sent.counts.device.type == "cpu"
            assert (sent.counts % alignment == 0).all()
            assert int(sent.counts.sum()) == len(sent.tokens)
            return dispatcher.combine(_experts(sent, gate_up, down), sent)

        return _gradients(ours, x, scores, *map(_share, _weights()), seed=seed - rank)


def _on_one_rank(tokens_by_rank, seed):
    """What each rank should get: output, gradients of x and scores, gradients of all weights."""
    for rank, tokens in enumerate(tokens_by_rank):
        x, scores, ids = _batch(tokens, seed=seed + rank)

        def loops(x, scores, gate_up, down, ids=ids):
            out = reference.experts(x, ids, scores, gate_up, down)
            return out + 0 * (gate_up.sum() + down.sum() + x.sum() + scores.sum())

        yield _gradients(loops, x, scores, *_weights(), seed=seed - rank)


MATCHES = [
    ("elastic", (7, 0, 2), 1),
    ("elastic", (3, 0, 9, 1), 128),
    ("elastic", (0, 0), 1),
    ("buffer", (4, 0, 9, 1), 4),
    ("buffer", (0, 1), 1),
]
SEED = 5


@pytest.mark.parametrize(("kind", "tokens_by_rank", "alignment"), MATCHES, ids=str)
def test_with_a_fake_deep_ep_ranks_match_one_rank(kind, tokens_by_rank, alignment):
    got = _found(len(tokens_by_rank), str((kind, tokens_by_rank, alignment)))
    want = list(_on_one_rank(tokens_by_rank, SEED))
    for ours, theirs in zip(got, want, strict=True):
        assert_close_float64(ours[:3], theirs[:3])
    for i in (3, 4):
        assert_close_float64(torch.cat([ours[i] for ours in got]), sum(each[i] for each in want))


def _two_layers(kind):
    """The same dispatcher twice, the first layer's handle known to autograd alone."""
    _fake()
    gc.freeze()  # Else each collection walks all that a rank has imported.
    x, scores, ids = _batch(6, seed=dist.get_rank())
    x.requires_grad_(), scores.requires_grad_()
    with _build(kind) as dispatcher:
        out = x
        for _ in range(2):
            sent = dispatcher.dispatch(out, scores, ids, num_experts=EXPERTS)
            out = dispatcher.combine(3 * sent.tokens, sent)
            ids = (ids + 5) % EXPERTS
            del sent
            gc.collect()
        out.sum().backward()  # A stride of 0.
    total = 3 * scores.detach().sum(1, keepdim=True)
    assert_close_float64(out.detach(), total**2 * x.detach())
    assert_close_float64(x.grad, (total**2).expand_as(x))
    assert_close_float64(
        scores.grad, (6 * total * x.detach().sum(1, keepdim=True)).expand_as(scores)
    )


@pytest.mark.parametrize("kind", ["elastic", "buffer"])
def test_with_a_fake_deep_ep_handles_live_until_backward(kind):
    _found(2, f"layers {kind}")


def _recomputed():
    _fake()
    x, scores, ids = _batch(9, seed=dist.get_rank())
    with _build("elastic") as dispatcher:

        def ours(x, scores, gate_up, down):
            sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
            return dispatcher.combine(_experts(sent, gate_up, down), sent)

        def again(*inputs):
            return checkpoint(ours, *inputs, use_reentrant=False, preserve_rng_state=False)

        inputs = x, scores, *map(_share, _weights())
        want, got = (_gradients(layer, *inputs, seed=4) for layer in (ours, again))
    assert_close_float64(got, want)


def test_with_a_fake_deep_ep_a_recomputed_forward_has_the_same_gradients():
    _found(2, "recomputed")


def _in_bfloat16():
    _fake(float64=False)
    x, scores, ids = _batch(9, seed=3)
    gate_up, down = _weights()
    low = [x.bfloat16(), scores.float(), gate_up.bfloat16(), down.bfloat16()]
    with _build("elastic", alignment=8) as dispatcher:

        def ours(x, scores, gate_up, down):
            sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
            return dispatcher.combine(_experts(sent, gate_up, down), sent)

        got = _gradients(ours, *low[:2], *map(_share, low[2:]), seed=4)

    def naive(x, scores, gate_up, down):
        gate, up = torch.einsum("th,tkih->tki", x, gate_up[ids]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[ids])
        return (y * scores.bfloat16().unsqueeze(2)).sum(1)

    plain = _gradients(naive, *low, seed=4)
    exact = _gradients(
        lambda x, scores, *w: reference.experts(x, ids, scores, *w),
        *(t.double() for t in low),
        seed=4,
    )
    for i, dtype in enumerate((torch.bfloat16, torch.bfloat16, torch.float32)):
        assert got[i].dtype == dtype
        # A row is rounded once more when the ranks' sums are added.
        assert_as_precise(got[i], naive=plain[i], exact=exact[i])


def test_with_a_fake_deep_ep_bfloat16_is_as_precise_as_the_naive_layer():
    _found(2, "bfloat16")


BAD_BATCHES = {
    "sums rows of torch.bfloat16; x is torch.float32": {"x": torch.zeros(1, 8)},
    r"x must be \[rows, 8\]; got \(1, 16\)": {"x": torch.zeros(1, 16).bfloat16()},
    r"got \(1, 8\) and \(2, 3\)": {"ids": torch.zeros(2, 3).long()},
    r"scores \(1, 2\) and expert_ids \(1, 3\) differ": {"scores": torch.ones(1, 2)},
    r"are between 0 and 12, but the layer has experts 0 to 11": {"ids": torch.tensor([[0, 12, 1]])},
    r"are between -1 and 1": {"ids": torch.tensor([[0, -1, 1]])},
    "chose an expert twice": {"ids": torch.tensor([[4, 2, 4]])},
    "0 choices per token": {"ids": torch.zeros(1, 0).long(), "scores": torch.zeros(1, 0)},
    "1 of 3 scores are NaN": {"scores": torch.tensor([[1, 1, float("nan")]])},
    "13 experts cannot be shared equally by 2 ranks": {"num_experts": 13},
}
TOO_MUCH = {
    "10 tokens exceed max_tokens=9": {
        "x": torch.zeros(10, 8).bfloat16(),
        "scores": torch.ones(10, 3),
        "ids": torch.tensor([[0, 1, 11]] * 10),
    },
    "4 choices per token; the buffer has room for 1 to 3": {
        "ids": torch.tensor([[0, 1, 2, 3]]),
        "scores": torch.ones(1, 4),
    },
}


def _refusals(kind):
    _fake(float64=False)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    good = {"x": x, "scores": torch.ones(1, 3), "ids": torch.tensor([[0, 1, 11]])}
    with _build(kind) as dispatcher:

        def dispatch(x, scores, ids, num_experts=EXPERTS):
            return dispatcher.dispatch(x, scores, ids, num_experts=num_experts)

        for said, bad in (BAD_BATCHES | (TOO_MUCH if kind == "elastic" else {})).items():
            wrong = good | bad if dist.get_rank() == 1 else good
            with pytest.raises(UsageError if dist.get_rank() == 1 else RankError, match=said):
                dispatch(**wrong)
        # Nothing was sent before a refusal: the group still works.
        sent = dispatch(**good)
        for bad, error, said in (
            (torch.ones(5, HIDDEN).bfloat16(), ShapeError, r"each of \d slots; got \(5, 8\)"),
            (sent.tokens[:, :2], ShapeError, r"y must be \[rows, 8\]; got \(\d, 2\)"),
            (sent.tokens.float(), UnsupportedError, "y is torch.float32"),
        ):
            with pytest.raises(error, match=said):
                dispatcher.combine(bad, sent)
        out = dispatcher.combine(sent.tokens, sent)
        buffer = dispatcher._buffer._buffer
    dispatcher.close()
    assert not buffer.alive
    for call in (lambda: dispatch(**good), lambda: dispatcher.combine(sent.tokens, sent)):
        with pytest.raises(ClosedError, match="Dispatcher was closed"):
            call()
    return torch.equal(out, 3 * x)


@pytest.mark.parametrize("kind", ["elastic", "buffer"])
def test_with_a_fake_deep_ep_bad_input_on_one_rank_is_an_error_on_all(kind):
    assert _found(2, f"refusals {kind}") == [True, True]


def _sizes_and_dtypes():
    _fake(float64=False)
    x, scores, ids = _batch(2, seed=0)
    with (
        _build("elastic", max_tokens=4 + dist.get_rank()) as dispatcher,
        pytest.raises(PlanError, match=r"max_tokens must be equal on all ranks; .*\[4, 5\]"),
    ):
        dispatcher.dispatch(x.bfloat16(), scores, ids, num_experts=EXPERTS)
    with (
        _build("elastic", check=False) as dispatcher,
        pytest.raises(UnsupportedError, match="x is torch.float64"),
    ):
        dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)


def test_with_a_fake_deep_ep_ranks_agree_on_the_buffer_and_dtypes_are_checked_always():
    _found(2, "sizes and dtypes")


def _three_ranks():
    _fake()
    with pytest.raises(UnsupportedError, match="fill_uninitialized_memory = False"):
        elastic_dispatcher(dist.group.WORLD, max_tokens=1, hidden=8, top_k=1)
    with pytest.raises(UnsupportedError, match="no settings for 3 ranks: Unsupported number"):
        _build("buffer")


def test_with_a_fake_deep_ep_a_size_without_settings_is_refused():
    _found(3, "no settings")


# By world size: names of bodies, each with its arguments.
BODIES = {
    2: {
        "layers elastic": (_two_layers, "elastic"),
        "layers buffer": (_two_layers, "buffer"),
        "recomputed": (_recomputed,),
        "bfloat16": (_in_bfloat16,),
        "refusals elastic": (_refusals, "elastic"),
        "refusals buffer": (_refusals, "buffer"),
        "sizes and dtypes": (_sizes_and_dtypes,),
    },
    3: {"no settings": (_three_ranks,)},
    4: {},
}
for _kind, _tokens, _alignment in MATCHES:
    _case = str((_kind, _tokens, _alignment))
    BODIES[len(_tokens)][_case] = (_on_ranks, _kind, _tokens, SEED, _alignment)


def _run_all(size):
    return {name: body(*args) for name, (body, *args) in BODIES[size].items()}


@cache
def _gang(size):
    return ranks.run(_run_all, size, world_size=size)


def _found(size, name):
    """What a body returned on each rank. One gang of each size runs all bodies."""
    return [told[name] for told in _gang(size)]

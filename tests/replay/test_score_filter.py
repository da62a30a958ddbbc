import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.replay.router import keep_scored

EXPERTS = 6


def loops(scores, own, replayed, ratio):
    """The definition, a row and a slot at a time."""
    rows, replaced = [], 0
    for row_scores, mine, theirs in zip(scores, own, replayed, strict=True):
        weakest = min(row_scores[expert] for expert in mine)
        keep = [row_scores[expert] >= ratio * weakest for expert in theirs]
        taken = {expert for expert, kept in zip(theirs, keep, strict=True) if kept}
        spare = [e for e in sorted(mine, key=lambda e: -row_scores[e]) if e not in taken]
        rows.append([e if kept else spare.pop(0) for e, kept in zip(theirs, keep, strict=True)])
        replaced += keep.count(False)
    return rows, replaced


@pytest.mark.parametrize("kind", ["softmax", "renormalised", "chosen", "sigmoid"])
@given(
    top_k=st.integers(1, EXPERTS),
    ratio=st.sampled_from([1e-3, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_the_filter_is_its_definition(toy, kind, top_k, ratio, seed):
    router = toy(kind, layers=1).routers[0]
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(5, EXPERTS, dtype=torch.float64, generator=generator)
    bias = router.bias if kind == "sigmoid" else 0
    own = (logits + bias).topk(top_k).indices
    if seed % 2:  # Routers need not sort.
        own = own.flip(1)
    draws = torch.rand(5, EXPERTS, generator=generator)
    replayed = draws.topk(top_k).indices
    scores = logits.sigmoid() if kind == "sigmoid" else logits.exp()
    rows, replaced = keep_scored(router, (logits,), own, replayed, ratio=ratio)
    wanted, count = loops(scores.tolist(), own.tolist(), replayed.tolist(), ratio)
    assert rows.tolist() == wanted
    assert replaced.item() == count
    assert all(len(set(row)) == top_k for row in rows.tolist())


def test_own_choices_are_kept_and_far_ones_replaced_by_the_best_free(toy):
    router = toy("softmax", layers=1).routers[0]
    logits = torch.log(torch.tensor([[1e-6, 1.0, 4.0, 2.0, 1e-7, 3.0]], dtype=torch.float64))
    own = torch.tensor([[5, 2]])  # Scores 3 and 4, not in order.
    for replayed, ratio, wanted in (
        ([5, 2], 1.0, [5, 2]),
        ([3, 1], 0.5, [3, 2]),  # 2 is not far below 3, 1 is.
        ([1, 5], 0.5, [2, 5]),
        ([4, 0], 0.5, [2, 5]),
        ([4, 0], 1e-9, [4, 0]),
    ):
        rows, count = keep_scored(router, (logits,), own, torch.tensor([replayed]), ratio=ratio)
        assert rows.tolist() == [wanted]
        assert count.item() == np.sum(np.array(replayed) != wanted)


def test_nothing_is_kept_for_a_backward(toy, monkeypatch):
    router = toy("sigmoid", layers=1).routers[0]
    logits = torch.randn(4, EXPERTS, dtype=torch.float64, requires_grad=True)
    modes = []

    def gates(output, experts):
        modes.append(torch.is_grad_enabled())
        return output[0].sigmoid().gather(1, experts)

    monkeypatch.setattr(router, "gates", gates)
    keep_scored(router, (logits,), logits.topk(2).indices, (-logits).topk(2).indices, ratio=1.0)
    assert modes == [False]

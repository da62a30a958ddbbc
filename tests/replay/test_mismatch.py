import math

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UsageError
from primeblocks.replay import Routes, compare, measure_mismatch
from primeblocks.replay.mismatch import Mismatch, exact_kl


def test_estimators_by_hand():
    trainer = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -3.0, -9.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -2.5, 5.0], [-0.6, -2.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    found = measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout, mask=mask, worst=2)
    deltas = [0.0, 0.5, 0.1, -1.0]
    k3 = [math.exp(d) - 1 - d for d in deltas]
    mean = sum(k3) / 4
    assert found.k1 == pytest.approx(-sum(deltas) / 4)
    assert found.k2 == pytest.approx(sum(d * d for d in deltas) / 8)
    assert found.k3 == pytest.approx(mean)
    assert found.k3_standard_error == pytest.approx(
        math.sqrt(sum((k - mean) ** 2 for k in k3) / 4) / 2
    )
    assert found.max_k3 == pytest.approx(max(k3))
    assert found.ratio_tail == 0.5
    assert found.ratio_tails == {0.1: 0.75, 0.2: 0.5, 0.5: 0.5, 1.0: 0.0}
    assert found.tokens == 4
    first, second = found.worst
    assert first.position == (1, 1)
    assert (first.trainer, first.rollout, first.k3) == pytest.approx((-3.0, -2.0, k3[3]))
    assert second.position == (0, 1)


def test_close_models_keep_their_digits():
    rollout = torch.full((4,), -2.0, dtype=torch.float64)
    found = measure_mismatch(trainer_logprobs=rollout + 1e-9, rollout_logprobs=rollout)
    assert found.k3 == pytest.approx(5e-19, rel=1e-3, abs=0)
    assert measure_mismatch(trainer_logprobs=rollout, rollout_logprobs=rollout).max_k3 == 0.0


def test_low_precision_inputs_are_widened_first():
    rollout = torch.full((3,), -2.0, dtype=torch.bfloat16)
    found = measure_mismatch(trainer_logprobs=rollout, rollout_logprobs=rollout.float() - 2**-10)
    assert found.k1 == -(2**-10)


def test_masked_tokens_may_hold_anything_and_others_must_be_finite():
    trainer = torch.tensor([-1.0, math.nan, -2.0])
    rollout = torch.tensor([-1.0, -1.0, -2.0])
    assert (
        measure_mismatch(
            trainer_logprobs=trainer,
            rollout_logprobs=rollout,
            mask=torch.tensor([True, False, True]),
        ).tokens
        == 2
    )
    with pytest.raises(UsageError, match=r"\[1\] are not finite"):
        measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout)
    with pytest.raises(UsageError, match="excludes all tokens"):
        measure_mismatch(
            trainer_logprobs=trainer,
            rollout_logprobs=rollout,
            mask=torch.zeros(3, dtype=torch.bool),
        )
    with pytest.raises(ShapeError, match=r"\[3\] and rollout \[2\]"):
        measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout[:2])
    with pytest.raises(ShapeError, match=r"mask has shape \[2\]"):
        measure_mismatch(
            trainer_logprobs=trainer, rollout_logprobs=rollout, mask=torch.ones(2, dtype=torch.bool)
        )


def test_pooled_parts_equal_one_measurement():
    generator = torch.Generator().manual_seed(3)
    trainer, rollout = -torch.randn(2, 40, dtype=torch.float64, generator=generator).abs()
    whole = measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout, worst=4)
    cuts = [(0, 5), (5, 6), (6, 40)]
    parts = [
        measure_mismatch(trainer_logprobs=trainer[a:b], rollout_logprobs=rollout[a:b], worst=4)
        for a, b in cuts
    ]
    pooled = Mismatch.pool(parts)
    for name in ("k1", "k2", "k3", "k3_standard_error", "max_k3", "ratio_tail", "tokens"):
        assert getattr(pooled, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    assert pooled.ratio_tails == pytest.approx(whole.ratio_tails)
    places = [(cuts[part][0] + at,) for part, at in (token.position for token in pooled.worst)]
    assert places == [token.position for token in whole.worst]
    with pytest.raises(UsageError, match="cannot pool an empty list"):
        Mismatch.pool([])


def test_exact_kl_by_hand_and_against_torch():
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = torch.randn(
        2, 3, 4, 9, dtype=torch.float64, generator=generator
    ).log_softmax(-1)
    each = torch.nn.functional.kl_div(trainer, rollout, log_target=True, reduction="none").sum(-1)
    assert exact_kl(trainer_logprobs=trainer, rollout_logprobs=rollout) == pytest.approx(
        each.mean().item(), rel=1e-12
    )
    mask = torch.arange(12).reshape(3, 4) % 3 == 0
    assert exact_kl(trainer_logprobs=trainer, rollout_logprobs=rollout, mask=mask) == pytest.approx(
        each[mask].mean().item()
    )


def test_exact_kl_leaves_out_what_the_engine_excludes():
    half = math.log(0.5)
    rollout = torch.tensor([[half, half, -math.inf]])
    trainer = torch.tensor([[math.log(0.4), math.log(0.4), math.log(0.2)]])
    assert exact_kl(trainer_logprobs=trainer, rollout_logprobs=rollout) == pytest.approx(
        math.log(0.5 / 0.4)
    )
    assert exact_kl(trainer_logprobs=rollout, rollout_logprobs=rollout) == 0
    excluded = torch.tensor([[half, half, math.nan]])
    for ours, engines in ((rollout, trainer), (excluded, rollout), (rollout, excluded)):
        with pytest.raises(UsageError, match="not finite"):
            exact_kl(trainer_logprobs=ours, rollout_logprobs=engines)
    with pytest.raises(UsageError, match="excludes all positions"):
        exact_kl(
            trainer_logprobs=trainer,
            rollout_logprobs=rollout,
            mask=torch.zeros(1, dtype=torch.bool),
        )
    with pytest.raises(ShapeError, match="both be"):
        exact_kl(trainer_logprobs=trainer[:, :2], rollout_logprobs=rollout)
    with pytest.raises(ShapeError, match=r"mask has shape \[2\]"):
        exact_kl(
            trainer_logprobs=trainer, rollout_logprobs=rollout, mask=torch.ones(2, dtype=torch.bool)
        )


def test_arrays_are_taken_as_they_come():
    trainer, rollout = -np.random.default_rng(0).random((2, 3, 5)) - 0.1
    mask = np.arange(15).reshape(3, 5) % 4 != 0
    rollout.flags.writeable = mask.flags.writeable = False  # as in a Rollout
    tensors = [torch.tensor(array) for array in (trainer, rollout, mask)]
    for a, b, kept in (
        (trainer, rollout, mask),
        (tensors[0], rollout, mask),
        (trainer.astype(">f8"), tensors[1], tensors[2]),
        (trainer[::-1, ::-1][::-1, ::-1], rollout, mask[::-1][::-1]),
    ):
        found = measure_mismatch(trainer_logprobs=a, rollout_logprobs=b, mask=kept)
        assert found.k3 == np.mean((np.expm1(trainer - rollout) - trainer + rollout)[mask])
    kl = exact_kl(trainer_logprobs=trainer, rollout_logprobs=tensors[1], mask=mask[:, 1])
    assert kl == exact_kl(
        trainer_logprobs=tensors[0], rollout_logprobs=rollout, mask=tensors[2][:, 1]
    )


@pytest.mark.parametrize("side", ["trainer_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("measure", [measure_mismatch, exact_kl])
def test_what_is_no_log_probability_is_refused(measure, side):
    sides = {
        name: torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.0, -3.0]])
        for name in ("trainer_logprobs", "rollout_logprobs")
    }
    sides[side][1, 2] = 2.0**-10  # Rounding may reach above 0.
    measure(**sides)
    with pytest.raises(UsageError, match=rf"{side} at \[0, 0\] is 1: .* not above 0"):
        measure(**sides | {side: -sides[side]})
    sides[side][1, 2] = 0.25
    with pytest.raises(UsageError, match=rf"{side} at \[1, 2\] is 0.25: .* not above 0"):
        measure(**sides)
    shape = sides[side].shape if measure is measure_mismatch else (2,)
    counts = torch.tensor([[True], [False]]).expand(2, 3)[:, : 3 if len(shape) > 1 else 1]
    measure(**sides, mask=counts.reshape(shape))
    for wrong in (sides[side].long(), np.zeros((2, 3), np.int64)):
        with pytest.raises(ShapeError, match=f"{side} must be a floating tensor or array"):
            measure(**sides | {side: wrong})
    for mask in (torch.ones(shape), np.ones(shape, np.int8)):
        with pytest.raises(ShapeError, match=r"mask must be a bool tensor .* Pass mask > 0"):
            measure(**sides, mask=mask)


def test_nothing_to_compare_is_refused_by_name():
    x = torch.zeros(2, 0)
    with pytest.raises(ShapeError, match="both be"):
        exact_kl(trainer_logprobs=x, rollout_logprobs=x)
    with pytest.raises(UsageError, match="excludes all tokens"):
        measure_mismatch(trainer_logprobs=x, rollout_logprobs=x)
    with pytest.raises(UsageError, match="worst must not be negative; got -1"):
        measure_mismatch(trainer_logprobs=x.sum(1), rollout_logprobs=x.sum(1), worst=-1)


def make(experts, missing=None):
    missing = None if missing is None else np.array(missing)
    return Routes.from_array(np.array(experts), num_experts=8, layer_ids=[2, 5], missing=missing)


def test_agreement_is_of_sets_and_leaves_missing_tokens_out():
    a = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]]
    b = [[[1, 0], [2, 4]], [[4, 5], [7, 6]], [[2, 3], [2, 3]]]
    found = compare(make(a), make(b, [False, False, True]))
    assert found.by_layer == {2: 1.0, 5: 0.5}
    assert found.overall == 0.75
    assert found.tokens == 2
    assert found.same_order == 0.25
    assert found.whole_tokens == 0.5
    assert found.first_difference == {2: 0.0, 5: 0.5}
    whole = compare(make(a), make(b))
    for column, layer in enumerate([2, 5]):
        chosen = ([row[column] for row in side] for side in (a, b))
        same = [set(x) == set(y) for x, y in zip(*chosen, strict=True)]
        assert whole.by_layer[layer] == sum(same) / 3


def test_masked_tokens_are_not_compared():
    a = make([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]])
    b = make([[[0, 1], [2, 3]], [[4, 6], [6, 5]], [[2, 1], [0, 1]]])
    found = compare(a, b, mask=torch.tensor([True, True, False]))
    assert found.by_layer == {2: 0.5, 5: 0.5}
    assert found.first_difference == {2: 0.5, 5: 0.0}
    assert found.tokens == 2
    with pytest.raises(ShapeError, match=r"mask has shape \[2\], expected \[3\]"):
        compare(a, b, mask=np.ones(2, bool))


def test_recordings_that_cannot_be_compared_are_refused():
    routes = make([[[0, 1], [2, 3]]])
    with pytest.raises(ShapeError, match="not recordings of the same"):
        compare(routes, routes.select_layers([5]))
    with pytest.raises(ShapeError, match="not recordings of the same"):
        compare(routes, routes.select_layers([5, 2]))
    with pytest.raises(ShapeError, match="do not share a known token"):
        compare(routes, make([[[0, 1], [2, 3]]], [True]))

"""Losses and weights against plain loops in float64, gradients by formula."""

import inspect
import math

import pytest
import torch

from primeblocks.async_loop.losses import aipo_loss, group_advantages, grpo_loss, importance_weights
from primeblocks.errors import ShapeError, UsageError


def inputs(seed=0, shape=(3, 7)):
    generator = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    rollout = trainer + torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    return trainer.requires_grad_(), rollout, advantages, mask


def each(*tensors):
    return zip(*(t.detach().flatten().tolist() for t in tensors), strict=True)


def test_grpo_is_the_clipped_surrogate():
    trainer, rollout, advantages, mask = inputs()
    loss = grpo_loss(trainer, rollout, advantages, mask=mask, clip_low=0.2, clip_high=0.3)
    loss.sum.backward()
    total, gradients, clipped = 0.0, [], 0
    for p, q, a, kept in each(trainer, rollout, advantages, mask):
        ratio = math.exp(p - q)
        bounded = min(max(ratio, 0.8), 1.3)
        total -= min(ratio * a, bounded * a) if kept else 0.0
        stopped = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.8)
        gradients.append(0.0 if stopped or not kept else -ratio * a)
        clipped += stopped and kept
    assert loss.sum.item() == pytest.approx(total, rel=1e-12)
    assert trainer.grad.flatten().tolist() == pytest.approx(gradients, rel=1e-12)
    assert (loss.tokens, loss.clipped) == (int(mask.sum()), clipped)
    assert clipped > 0


def test_aipo_truncates_one_side_and_keeps_every_gradient():
    trainer, rollout, advantages, mask = inputs()
    loss = aipo_loss(trainer, rollout, advantages, mask=mask, max_ratio=1.5)
    loss.sum.backward()
    total, gradients, clipped = 0.0, [], 0
    for p, q, a, kept in each(trainer, rollout, advantages, mask):
        weight = min(math.exp(p - q), 1.5)
        total -= weight * a * p if kept else 0.0
        gradients.append(-weight * a if kept else 0.0)
        clipped += kept and math.exp(p - q) > 1.5
    assert loss.sum.item() == pytest.approx(total, rel=1e-12)
    assert trainer.grad.flatten().tolist() == pytest.approx(gradients, rel=1e-12)
    assert loss.clipped == clipped > 0


@pytest.mark.parametrize("loss", [grpo_loss, aipo_loss])
def test_sums_do_not_depend_on_how_the_batch_is_split(loss):
    trainer, rollout, advantages, mask = inputs()
    whole = loss(trainer, rollout, advantages, mask=mask)
    parts = [
        loss(trainer[rows], rollout[rows], advantages[rows], mask=mask[rows])
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(part.sum for part in parts).item() == pytest.approx(whole.sum.item(), rel=1e-12)
    assert sum(part.tokens for part in parts) == whole.tokens


@pytest.mark.parametrize("loss", [grpo_loss, aipo_loss])
@pytest.mark.parametrize("padding", [float("nan"), float("inf"), -1e30])
def test_padding_never_leaks(loss, padding):
    trainer, rollout, advantages, mask = inputs()
    clean = loss(trainer, rollout, advantages, mask=mask).sum
    dirty = rollout.masked_fill(~mask, padding)
    own = trainer.detach().masked_fill(~mask, padding).requires_grad_()
    unused = advantages.masked_fill(~mask, padding)
    for p, q, a in ((trainer, dirty, advantages), (own, dirty, unused)):
        p.grad = None
        loss_value = loss(p, q, a, mask=mask).sum
        loss_value.backward()
        assert loss_value.item() == clean.item()
        assert p.grad.isfinite().all()
        assert p.grad[~mask].eq(0).all()


# What a user meets: pytest alone checks annotations before.
UNCHECKED = {loss: inspect.unwrap(loss) for loss in (grpo_loss, aipo_loss)}


@pytest.mark.parametrize("loss", UNCHECKED.values(), ids=["grpo", "aipo"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": lambda x: x[:, 0]}, r"advantages \[4\] .* \[4, 4\] .*expand_as"),
        ({"rollout_logprobs": lambda x: x[0]}, r"rollout_logprobs \[4\]"),
        ({"rollout_logprobs": lambda x: x[..., None]}, r"rollout_logprobs \[4, 4, 1\]"),
        ({"advantages": lambda x: x.mean()}, r"advantages \[\]"),
        ({"mask": lambda x: x[0]}, r"mask \[4\]"),
        ({"mask": lambda x: x.double()}, r"mask must be bool; got torch.float64. Pass mask.bool"),
        ({"mask": lambda x: x.int()}, "mask must be bool; got torch.int32"),
        ({"advantages": lambda x: x.long()}, "advantages must be floating; got torch.int64"),
        ({"rollout_logprobs": lambda x: x.numpy()}, "must be a torch.Tensor; got ndarray"),
        ({"advantages": lambda x: x.to("meta")}, "advantages is on meta"),
    ],
)
def test_what_would_be_broadcast_is_refused(loss, change, message):
    trainer, rollout, advantages, mask = inputs(shape=(4, 4))
    operands = {"rollout_logprobs": rollout, "advantages": advantages, "mask": mask}
    for name, changed in change.items():
        operands[name] = changed(operands[name])
    with pytest.raises(ShapeError, match=message):
        loss(trainer, **operands)


def test_parts_of_losses_check_shapes_too():
    weights, advantages = inspect.unwrap(importance_weights), inspect.unwrap(group_advantages)
    x = torch.zeros(4, 4)
    with pytest.raises(ShapeError, match=r"rollout_logprobs \[4\] and trainer_logprobs \[4, 4\]"):
        weights(x, x[0])
    with pytest.raises(ShapeError, match=r"rollout_logprobs must be floating; got torch.int64"):
        weights(x, x.long())
    for rewards in (x[0], x[None], x.long(), x[:, :0]):
        with pytest.raises(ShapeError, match=r"\[groups, members\]; got torch"):
            advantages(rewards)
    assert advantages(x[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    "clips", [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)]
)
def test_clips_out_of_range_are_refused(clips):
    trainer, rollout, advantages, mask = inputs()
    with pytest.raises(UsageError, match="clip_low"):
        grpo_loss(trainer, rollout, advantages, mask=mask, clip_low=clips[0], clip_high=clips[1])
    with pytest.raises(UsageError, match="max_ratio"):
        aipo_loss(trainer, rollout, advantages, mask=mask, max_ratio=math.nan)


def test_weights_are_bounded_and_masked():
    trainer = torch.tensor([0.0, 0.5, 500.0, -500.0], dtype=torch.float64)
    rollout = torch.zeros(4, dtype=torch.float64)
    truncated = importance_weights(trainer, rollout, max_ratio=2.0)
    assert truncated.tolist() == pytest.approx([1.0, math.exp(0.5), 2.0, 0.0], abs=1e-12)
    masked = importance_weights(trainer, rollout, beyond="mask", max_ratio=2.0)
    assert masked.tolist() == pytest.approx([1.0, math.exp(0.5), 0.0, 0.0], abs=1e-12)
    with pytest.raises(UsageError, match=r"0\.5"):
        importance_weights(trainer, rollout, max_ratio=0.5)


def test_advantages_are_centred_in_their_group():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.2]])
    advantages = group_advantages(rewards)
    assert advantages.sum(dim=1).abs().max() < 1e-6
    assert advantages[0].std(correction=0) == pytest.approx(1.0, rel=1e-3)
    assert advantages[1].tolist() == [0.0] * 4
    assert group_advantages(rewards, normalise=False)[0].tolist() == [0.5, -0.5, 0.0, 0.0]

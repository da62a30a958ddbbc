"""Distance between trainer and engine, in probabilities and in choices of experts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ShapeError, UsageError
from .router import check_routes
from .routes import Routes

__all__ = [
    "Agreement",
    "Mismatch",
    "TokenMismatch",
    "compare",
    "exact_kl",
    "measure_mismatch",
]

_TAILS = (0.1, 0.2, 0.5, 1.0)
_CHUNK = 1 << 22  # Elements that are converted to float64 at a time.
_ROWS = 1 << 12  # Sets compared at a time, so that they stay in the cache.
# Rounding in float32 may raise a log-probability of 0 to this value if logits are below 8192.
_ROUNDING = 2.0**-10


@dataclass(frozen=True)
class TokenMismatch:
    """The position of one token in the input, with its two log-probabilities and its k3."""

    position: tuple[int, ...]
    trainer: float
    rollout: float
    k3: float


@dataclass(frozen=True)
class Mismatch:
    """Estimates of KL(rollout || trainer) on sampled tokens, in nats per token.

    With ratio `r = p_trainer / p_rollout`: `k1 = -log r` (unbiased, noisy), `k2 = (log r)^2 / 2`
    (biased, never negative), `k3 = r - 1 - log r` (unbiased, never negative).
    """

    k1: float
    k2: float
    k3: float
    k3_standard_error: float
    max_k3: float
    ratio_tail: float
    """Fraction of tokens with |r - 1| > 0.2. Beyond 0.2, clipped losses start to drop tokens."""
    ratio_tails: dict[float, float]
    """The same fraction for several thresholds."""
    tokens: int
    worst: tuple[TokenMismatch, ...]
    """Tokens with the largest k3, the worst first."""

    @staticmethod
    def pool(parts: Iterable[Mismatch]) -> Mismatch:
        """Combine the measurements of all ranks into one measurement of all tokens.

        First gather the measurements of all ranks. Local. In the result, the position of each worst
        token begins with the index of its measurement in `parts`.

        Raises:
            UsageError: `parts` is empty.
        """
        parts = list(parts)
        if not parts:
            raise UsageError(
                "cannot pool an empty list. Pass the measurements of at least one rank."
            )
        tokens = sum(part.tokens for part in parts)
        k3 = sum(part.tokens * part.k3 for part in parts) / tokens
        # Add the squared deviations of each part from its mean, and of the means from the total.
        squares = sum(
            part.tokens * (part.tokens * part.k3_standard_error**2 + (part.k3 - k3) ** 2)
            for part in parts
        )
        placed = [
            TokenMismatch((index, *token.position), token.trainer, token.rollout, token.k3)
            for index, part in enumerate(parts)
            for token in part.worst
        ]
        most = max(len(part.worst) for part in parts)

        def mean(values: Iterable[float]) -> float:
            weighted = zip(parts, values, strict=True)
            return sum(part.tokens * value for part, value in weighted) / tokens

        tails = {
            threshold: mean(part.ratio_tails[threshold] for part in parts) for threshold in _TAILS
        }
        return Mismatch(
            k1=mean(part.k1 for part in parts),
            k2=mean(part.k2 for part in parts),
            k3=k3,
            k3_standard_error=(squares / tokens) ** 0.5 / tokens**0.5,
            max_k3=max(part.max_k3 for part in parts),
            ratio_tail=tails[0.2],
            ratio_tails=tails,
            tokens=tokens,
            worst=tuple(heapq.nlargest(most, placed, key=lambda token: token.k3)),
        )


@torch.no_grad()
def measure_mismatch(
    *,
    trainer_logprobs: torch.Tensor | np.ndarray,
    rollout_logprobs: torch.Tensor | np.ndarray,
    mask: torch.Tensor | np.ndarray | None = None,
    worst: int = 8,
) -> Mismatch:
    """Compare log-probabilities of the same sampled tokens, in float64.

    Both arguments must be log-probabilities under the distribution from which the engine sampled,
    after temperature, top-k and top-p (see `kept_logprobs`). Local. Computes on the trainer's
    device. To measure over all ranks, gather the results of the ranks and `pool` them. A rank
    without a token that counts must not call this function. Gather None from it instead.

    Args:
        trainer_logprobs: the trainer's log-probabilities, floating, of any shape.
        rollout_logprobs: the engine's log-probabilities, of the shape of `trainer_logprobs`.
        mask: bool of the shape of `trainer_logprobs`, True where a token counts. Leave out prompt
            and padding.
        worst: the largest length of `Mismatch.worst`, which lists the tokens with the largest k3.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: no token counts, or `worst` is negative. Also raised if a log-probability that
            counts is not finite, or exceeds 0 by more than rounding.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    trainer = _floating("trainer_logprobs", trainer_logprobs)
    rollout = _floating("rollout_logprobs", rollout_logprobs).to(trainer.device)
    if trainer.shape != rollout.shape:
        raise ShapeError(
            f"trainer {list(trainer.shape)} and rollout {list(rollout.shape)}"
            " log-probabilities differ in shape"
        )
    counts = _mask_of(mask, trainer.shape, trainer.device)
    positions = counts.nonzero()
    if not len(positions):
        raise UsageError("the mask excludes all tokens. Pass a mask with at least one True.")
    if worst < 0:
        raise UsageError(f"worst must not be negative; got {worst}")
    trainer, rollout = trainer[counts].double(), rollout[counts].double()
    log_ratio = trainer - rollout
    if not log_ratio.isfinite().all():
        place = positions[int((~log_ratio.isfinite()).nonzero()[0])].tolist()
        raise UsageError(f"the log-probabilities at {place} are not finite; mask this token out")
    for name, side in (("trainer_logprobs", trainer), ("rollout_logprobs", rollout)):
        _check_not_positive(name, side, positions)
    return _mismatch_of(trainer, rollout, positions, worst)


@torch.no_grad()
def exact_kl(
    *,
    trainer_logprobs: torch.Tensor | np.ndarray,
    rollout_logprobs: torch.Tensor | np.ndarray,
    mask: torch.Tensor | np.ndarray | None = None,
) -> float:
    """Return KL(rollout || trainer) over the whole vocabulary, as a mean in nats per token.

    The result is not an estimate, because it uses the probabilities of the whole vocabulary. Ids
    that the engine's top-k or top-p excludes have the value -inf in `rollout_logprobs`, and do not
    count. Local. Computes in float64 on the trainer's device.

    Args:
        trainer_logprobs: the trainer's log-probabilities, floating `[..., vocab]`, normalised.
        rollout_logprobs: the engine's log-probabilities, of the shape of `trainer_logprobs`.
        mask: bool `[...]`, True where a position counts.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: no position counts, a value is NaN, or a value exceeds 0 by more than rounding.
            Also raised if the trainer gives probability 0 to a token that the engine could sample.
    """
    trainer = _floating("trainer_logprobs", trainer_logprobs)
    rollout = _floating("rollout_logprobs", rollout_logprobs).to(trainer.device)
    if rollout.shape != trainer.shape or not trainer.shape or not trainer.shape[-1]:
        raise ShapeError(
            f"trainer {list(trainer.shape)} and rollout {list(rollout.shape)}"
            " must both be [..., vocab]"
        )
    counts = _mask_of(mask, trainer.shape[:-1], trainer.device)
    positions = counts.nonzero()
    if not len(positions):
        raise UsageError("the mask excludes all positions. Pass a mask with at least one True.")
    if mask is not None:
        rollout, trainer = rollout[counts], trainer[counts]
    vocab = trainer.shape[-1]
    rollout, trainer = rollout.reshape(-1, vocab), trainer.reshape(-1, vocab)
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    step = max(1, _CHUNK // vocab)
    for places, ours, theirs in zip(
        positions.split(step), rollout.split(step), trainer.split(step), strict=True
    ):
        log_p, log_q = ours.double(), theirs.double()
        _check_not_positive("rollout_logprobs", log_p, places)
        _check_not_positive("trainer_logprobs", log_q, places)
        terms = log_p.exp() * (log_p - log_q)
        # A token with probability 0 in the rollout is never sampled: 0 * inf counts as 0.
        total += torch.where((log_p == -torch.inf) & ~log_q.isnan(), 0.0, terms).sum()
    if not total.isfinite():
        raise UsageError(
            "the KL is not finite: a log-probability is NaN, or the trainer excludes a token that"
            " the engine could sample. Compare both after the engine's own top-k and top-p."
        )
    return total.item() / len(rollout)


def _mismatch_of(
    trainer: torch.Tensor, rollout: torch.Tensor, positions: torch.Tensor, worst: int
) -> Mismatch:
    log_ratio = trainer - rollout
    # expm1 keeps the digits that exp(x) - 1 loses for close models.
    k3 = torch.expm1(log_ratio) - log_ratio
    top = k3.topk(min(worst, len(k3))).indices
    distance = torch.expm1(log_ratio).abs()
    tails = {threshold: (distance > threshold).double().mean().item() for threshold in _TAILS}
    return Mismatch(
        k1=-log_ratio.mean().item(),
        k2=log_ratio.square().mean().item() / 2,
        k3=k3.mean().item(),
        k3_standard_error=k3.std(correction=0).item() / len(k3) ** 0.5,
        max_k3=k3.max().item(),
        ratio_tail=tails[0.2],
        ratio_tails=tails,
        tokens=len(k3),
        worst=tuple(
            TokenMismatch(tuple(positions[i].tolist()), *values)
            for i, *values in zip(
                top.tolist(),
                trainer[top].tolist(),
                rollout[top].tolist(),
                k3[top].tolist(),
                strict=True,
            )
        ),
    )


def _floating(name: str, values: Any) -> torch.Tensor:
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        # A copy, because torch warns about read-only arrays, and rollouts have such arrays.
        return torch.from_numpy(values.astype(np.float64))
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = getattr(values, "dtype", type(values).__name__)
        raise ShapeError(f"{name} must be a floating tensor or array; got {kind}")
    return values


def _mask_of(mask: Any, shape: torch.Size, device: torch.device) -> torch.Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(mask, torch.Tensor | np.ndarray) or mask.dtype not in (torch.bool, np.bool_):
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise ShapeError(f"mask must be a bool tensor or array; got {kind}. Pass mask > 0.")
    if tuple(mask.shape) != tuple(shape):
        raise ShapeError(f"mask has shape {list(mask.shape)}, expected {list(shape)}")
    own = torch.from_numpy(mask.copy()) if isinstance(mask, np.ndarray) else mask
    return own.to(device)


def _check_not_positive(name: str, values: torch.Tensor, positions: torch.Tensor) -> None:
    """Refuse `values [tokens, ...]` above 0 plus rounding. `positions` are `[tokens, dims]`."""
    if values.numel() and values.max() > _ROUNDING:
        place = (values > _ROUNDING).nonzero()[0]
        raise UsageError(
            f"{name} at {[*positions[place[0]].tolist(), *place[1:].tolist()]} is "
            f"{values[tuple(place)].item():.4g}: a log-probability is not above 0. Pass the "
            "result of log-softmax, not logits or probabilities."
        )


@dataclass(frozen=True)
class Agreement:
    """Rates at which two recordings chose the same experts. A set of experts has no order."""

    overall: float
    """Fraction of (token, layer) pairs with equal sets of experts."""
    by_layer: dict[int, float]
    """For each layer id, the fraction of tokens with equal sets of experts."""
    same_order: float
    """Fraction of (token, layer) pairs with the same experts in the same slots."""
    whole_tokens: float
    """Fraction of tokens with equal sets of experts in every layer."""
    first_difference: dict[int, float]
    """By layer id, the fraction of tokens whose sets differ there, and in no earlier layer."""
    tokens: int
    """The number of compared tokens. On both sides they are neither missing nor padding."""


def compare(a: Routes, b: Routes, *, mask: np.ndarray | None = None) -> Agreement:
    """Compare two recordings of the same tokens. Local.

    Args:
        mask: bool `[tokens]`, True where a token counts. Tokens that `pad` added never count.

    Raises:
        UsageError: `a` or `b` is not `Routes`.
        ShapeError: `a` and `b` have different layers, a different top_k, or different numbers of
            tokens or experts. Also raised if no token that counts has known routes in both, or if
            the shape of the mask is not `[tokens]`.
    """
    check_routes(a=a, b=b)
    if a.experts.shape != b.experts.shape or (a.num_experts, a.layer_ids) != (
        b.num_experts,
        b.layer_ids,
    ):
        raise ShapeError(f"{a} and {b} are not recordings of the same tokens and layers")
    known = ~(a.missing | b.missing | a.padding | b.padding)
    if mask is not None:
        mask = np.asarray(mask, dtype=np.bool_)
        if mask.shape != known.shape:
            raise ShapeError(f"mask has shape {list(mask.shape)}, expected [{a.tokens}]")
        known &= mask
    if not known.any():
        raise ShapeError(f"{a} and {b} do not share a known token that the mask keeps")
    tokens = int(known.sum())
    rows = [routes.experts[known].reshape(-1, a.top_k) for routes in (a, b)]
    same = _same_sets(*rows).reshape(tokens, -1)
    before = np.logical_and.accumulate(same, axis=1)
    first = np.diff(np.pad(~before, ((0, 0), (1, 0))).astype(np.int8), axis=1)
    return Agreement(
        overall=float(same.mean()),
        by_layer=dict(zip(a.layer_ids, same.mean(axis=0).tolist(), strict=True)),
        same_order=float((rows[0] == rows[1]).all(axis=-1).mean()),
        whole_tokens=float(before[:, -1].mean()),
        first_difference=dict(zip(a.layer_ids, first.mean(axis=0).tolist(), strict=True)),
        tokens=tokens,
    )


def _same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool `[rows]`: True where two `[rows, top_k]` name the same ids, in any order."""
    same = np.empty(len(a), dtype=np.bool_)
    for begin in range(0, len(a), _ROWS):
        piece = slice(begin, begin + _ROWS)
        is_equal = a[piece].T.copy()[:, None] == b[piece].T.copy()
        same[piece] = is_equal.any(0).all(0) & is_equal.any(1).all(0)
    return same

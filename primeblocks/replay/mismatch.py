"""How far the trainer is from the engine: probabilities and routes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ShapeError, UsageError
from .routes import Routes

__all__ = ["Agreement", "Mismatch", "TokenMismatch", "compare", "measure_mismatch"]


@dataclass(frozen=True)
class TokenMismatch:
    """One token: its place in the input, both log-probabilities, its k3."""

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
    """Fraction of tokens with |r - 1| > 0.2, where a clipped loss starts to drop them."""
    tokens: int
    worst: tuple[TokenMismatch, ...]
    """Tokens with the largest k3, the worst first."""


@torch.no_grad()
def measure_mismatch(
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    worst: int = 8,
) -> Mismatch:
    """Compare log-probabilities of the same sampled tokens, in float64.

    Both must be of the distribution that was sampled from (temperature, top-p). Local; for a
    figure over ranks gather the log-probabilities first.

    Args:
        trainer_logprobs: any shape.
        rollout_logprobs: the same shape, from the engine that sampled.
        mask: True where a token counts, same shape; prompt and padding are left out.
        worst: how many of the worst tokens to name.

    Raises:
        ShapeError: shapes differ.
        UsageError: no token is left, or one that counts is not finite.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    if trainer_logprobs.shape != rollout_logprobs.shape:
        raise ShapeError(
            f"trainer {list(trainer_logprobs.shape)} and rollout {list(rollout_logprobs.shape)}"
            " log-probabilities differ in shape"
        )
    if mask is None:
        mask = torch.ones_like(trainer_logprobs, dtype=torch.bool)
    elif mask.shape != trainer_logprobs.shape:
        raise ShapeError(f"mask {list(mask.shape)} for {list(trainer_logprobs.shape)} tokens")
    mask = mask.bool()
    positions = mask.nonzero()
    if not len(positions):
        raise UsageError("no token counts: the mask leaves none")
    trainer, rollout = trainer_logprobs[mask].double(), rollout_logprobs[mask].double()
    log_ratio = trainer - rollout
    if not log_ratio.isfinite().all():
        place = positions[int((~log_ratio.isfinite()).nonzero()[0])].tolist()
        raise UsageError(f"the log-probabilities at {place} are not finite; mask this token out")
    # expm1 keeps the digits that exp(x) - 1 would lose for close models.
    k3 = torch.expm1(log_ratio) - log_ratio
    top = k3.topk(min(worst, len(k3))).indices
    return Mismatch(
        k1=-log_ratio.mean().item(),
        k2=log_ratio.square().mean().item() / 2,
        k3=k3.mean().item(),
        k3_standard_error=k3.std(correction=0).item() / len(k3) ** 0.5,
        max_k3=k3.max().item(),
        ratio_tail=(torch.expm1(log_ratio).abs() > 0.2).double().mean().item(),
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


@dataclass(frozen=True)
class Agreement:
    """How often two sides chose the same set of experts, in any order."""

    overall: float
    """Fraction of (token, layer) pairs."""
    by_layer: dict[int, float]
    """The same for each layer id."""
    tokens: int
    """Tokens compared: those missing on neither side."""


def compare(a: Routes, b: Routes) -> Agreement:
    """Compare two recordings of the same tokens. Local.

    Raises:
        ShapeError: they differ in tokens, layers, experts or top_k, or share no known token.
    """
    if a.experts.shape != b.experts.shape or (a.num_experts, a.layer_ids) != (
        b.num_experts,
        b.layer_ids,
    ):
        raise ShapeError(f"{a} and {b} are not recordings of the same tokens and layers")
    known = ~(a.missing | b.missing)
    if not known.any():
        raise ShapeError(f"no token is known to both {a} and {b}")
    sides = (np.sort(routes.experts[known], axis=-1) for routes in (a, b))
    same = np.equal(*sides).all(axis=-1)
    by_layer = dict(zip(a.layer_ids, same.mean(axis=0).tolist(), strict=True))
    return Agreement(overall=float(same.mean()), by_layer=by_layer, tokens=int(known.sum()))

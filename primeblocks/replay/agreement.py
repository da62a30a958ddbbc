"""How often two sides chose the same experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeError
from .routes import Routes
from .sets import same_sets

__all__ = ["Agreement", "compare"]


@dataclass(frozen=True)
class Agreement:
    """How often two sides chose the same set of experts, in any order."""

    overall: float
    """Fraction of (token, layer) pairs."""
    by_layer: dict[int, float]
    """The same for each layer id."""
    same_order: float
    """Fraction of pairs with the same experts in the same slots."""
    whole_tokens: float
    """Fraction of tokens that agree in every layer."""
    first_difference: dict[int, float]
    """By layer id, the fraction of tokens that differ there and nowhere before."""
    tokens: int
    """Tokens compared: those missing, or padding, on neither side."""


def compare(a: Routes, b: Routes, *, mask: np.ndarray | None = None) -> Agreement:
    """Compare two recordings of the same tokens. Local.

    Args:
        mask: bool `[tokens]`, True where a token counts. What `pad` added never does.

    Raises:
        ShapeError: they differ in tokens, layers, experts or top_k, or share no known token.
    """
    if a.experts.shape != b.experts.shape or (a.num_experts, a.layer_ids) != (
        b.num_experts,
        b.layer_ids,
    ):
        raise ShapeError(f"{a} and {b} are not recordings of the same tokens and layers")
    known = ~(a.missing | b.missing | a.padding | b.padding)
    if mask is not None:
        if mask.shape != known.shape:
            raise ShapeError(f"mask {list(mask.shape)} for {a.tokens} tokens")
        known &= mask.astype(np.bool_)
    if not known.any():
        raise ShapeError(f"no token that counts is known to both {a} and {b}")
    tokens = int(known.sum())
    rows = [routes.experts[known].reshape(-1, a.top_k) for routes in (a, b)]
    same = same_sets(*rows).reshape(tokens, -1)
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

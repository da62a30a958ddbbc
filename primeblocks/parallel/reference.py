"""The mixture-of-experts layer on one rank in float64, as plain loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["experts"]


def experts(
    x: Float[Tensor, "tokens hidden"],
    expert_ids: Int[Tensor, "tokens top_k"],
    scores: Float[Tensor, "tokens top_k"],
    gate_up: Float[Tensor, "experts gate_and_up hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
) -> Float[Tensor, "tokens hidden"]:
    """What `GroupedExperts` computes, one token and one choice after the other. Local.

    Differentiable; returns float64.
    """
    x, scores, gate_up, down = (t.double() for t in (x, scores, gate_up, down))
    intermediate = down.shape[2]
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for choice in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, choice])
            both = gate_up[expert] @ x[token]
            gate, up = both[:intermediate], both[intermediate:]
            row = row + scores[token, choice] * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x.new_zeros(x.shape)

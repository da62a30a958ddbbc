"""What the block computes, on one rank in float64, as plainly as it can be said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["attention", "experts"]


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


def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens key_heads head_dim"],
    v: Float[Tensor, "tokens key_heads value_dim"],
    document_lengths: Sequence[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "tokens heads value_dim"]:
    """What `ring_attention` and `ulysses_attention` compute: all scores, masked. Local.

    Differentiable; returns float64.
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    document = torch.arange(len(document_lengths)).repeat_interleave(torch.tensor(document_lengths))
    place = torch.arange(len(document))
    behind = place[:, None] - place
    seen = document[:, None] == document
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (behind < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        more = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, more], dim=2)
    weights = scores.softmax(-1)[..., : v.shape[1]]
    return (weights @ v).transpose(0, 1)

"""Attention over a split sequence by passing keys and values around a ring."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...groups import outside_graphs
from ..sequence import SequencePlan
from .hops import Hops, attend
from .inputs import checked
from .kernel import AttentionKernel, AttentionSpec

__all__ = ["ring_attention"]


@outside_graphs
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    kernel: AttentionKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Attention inside each document of a sequence that is split over `group`.

    Each rank keeps its queries; keys and values travel from neighbour to neighbour while the
    attention to those at hand is computed, in one call of `kernel` a hop. Takes any order of
    tokens, any mix of documents, ragged and empty ranks. Differentiable. Collective: (ranks - 1) x
    (k, v) bytes are sent and received by each rank; the backward sends these again, and their
    gradients in the dtype of sums, once around.

    Args:
        q: `[local_tokens, heads, head_dim]`, rotary embedding applied.
        k: `[local_tokens, key_heads, head_dim]`; key_heads divides heads.
        v: `[local_tokens, key_heads, value_dim]`.
        sequence: the plan of which rank holds which tokens; equal on all ranks.
        causal: a token sees itself and those before it; otherwise its whole document.
        scale: of the scores; default: head_dim ** -0.5.
        window: a token sees itself and the `window - 1` before it; None for all.
        sinks: `[heads]`, the score of one more key a head, whose value is zero.
        kernel: who computes a hop; default: `RectangleKernel()`, on every device.
        check: agree on shapes, dtypes and the plan first, so that a mistake on one rank is an
            error on all and not a wait. One small collective, which a GPU has to wait for.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit each other or the plan.
        PlanError: the group does not fit the plan, or ranks hold different plans.
        RankError: another rank refused its arguments.

    Source: arXiv:2310.01889.
    """
    q, k, v, scale, kernel = checked(
        "ring_attention", q, k, v, sinks, sequence=sequence, group=group, causal=causal,
        scale=scale, window=window, kernel=kernel, check=check,
    )  # fmt: skip
    spec = AttentionSpec(sequence, causal=causal, scale=scale, window=window)
    return attend(Hops(spec, kernel, 1, v.shape[2], group), sinks, q, k, v)

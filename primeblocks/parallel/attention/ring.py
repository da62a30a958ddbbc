"""Attention over a split sequence by passing keys and values around a ring."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...groups import outside_graphs
from ..sequence import SequencePlan
from .hops import Hops, attend
from .inputs import checked
from .kernel import AttentionKernel

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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: AttentionKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Attention inside each document of a sequence that is split over `group`.

    Each rank keeps its queries; keys and values travel from neighbour to neighbour while the
    attention to those at hand is computed, in one call of `kernel` per hop. Takes any order of
    tokens, any mix of documents, ragged and empty ranks. Differentiable. Collective: (ranks - 1) x
    (k, v) bytes are sent and received by each rank; the backward sends these again, and their
    gradients in the dtype of sums, once around.

    Args:
        q: `[local_tokens, heads, head_dim]`, rotary embedding applied. All may have a batch as
            first dim, whose rows have one plan; that costs a copy of each.
        k: `[local_tokens, key_heads, head_dim]`; key_heads divides heads.
        v: `[local_tokens, key_heads, value_dim]`.
        sequence: the plan of which rank holds which tokens; equal on all ranks.
        causal: a token sees itself and those before it; otherwise its whole document.
        scale: of the scores; default: head_dim ** -0.5.
        window: a token sees itself and the `window - 1` before it; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
        sinks: `[heads]`, the score of one more key a head, whose value is zero.
        kernel: computes a hop; default: on CUDA `VarlenKernel()` where it takes the call,
            which `order="balanced"` seldom lets it; otherwise `RectangleKernel()`.
        check: agree on shapes, dtypes and the plan first, so that a mistake on one rank is an
            error on all and not a wait. One small collective, which a GPU has to wait for.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit each other or the plan.
        PlanError: the group does not fit the plan, or ranks hold different plans.
        CapacityError: the kernel is too small for some rank.
        UnsupportedError: the kernel does not take the plan, the rules, the dtype or the device.
        RankError: another rank refused its arguments.

    Source: arXiv:2310.01889.
    """
    given = checked(
        "ring_attention", q, k, v, sinks, sequence=sequence, group=group, causal=causal,
        scale=scale, window=window, softcap=softcap, kernel=kernel, check=check,
        whole=False,
    )  # fmt: skip
    hops = Hops(given.spec, given.kernel, 1, given.v.shape[2], group)
    return given.unfold(attend(hops, given.sinks, given.q, given.k, given.v))

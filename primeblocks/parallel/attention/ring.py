"""Attention over a split sequence: keys and values travel around a ring of ranks."""

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
    """Attend inside each document of a sequence that is split over `group`.

    Each rank keeps its queries. Keys and values travel from neighbour to neighbour. Meanwhile
    `kernel` computes attention to the keys that have arrived, in one call per hop. Takes any order
    of tokens and any mix of documents. Ranks may have different numbers of tokens, also zero.
    Differentiable.

    Collective: each rank sends and receives (ranks - 1) times the bytes of k and v. The backward
    sends k and v again, and their gradients once around the ring in float32, or float64 for
    float64.

    Args:
        q: `[local_tokens, heads, head_dim]`, with rotary embedding applied. q, k and v may have a
            batch as first dim, whose rows share the plan. A batch costs one copy of each tensor.
        k: `[local_tokens, key_heads, head_dim]`. key_heads divides heads.
        v: `[local_tokens, key_heads, value_dim]`.
        sequence: the plan of the sequence, equal on all ranks.
        causal: a token sees itself and earlier tokens. If False, it sees its whole document.
        scale: factor of the scores. Default: head_dim ** -0.5.
        window: a token sees itself and the `window - 1` tokens before it. None means no limit.
        softcap: scores become `softcap * tanh(score / softcap)`. With None, scores stay unchanged.
        sinks: `[heads]`, the score of one more key per head, whose value is zero.
        kernel: computes a hop. Default: on CUDA `VarlenKernel()` if it supports the call,
            otherwise `RectangleKernel()`. `VarlenKernel` supports few calls with
            `order="balanced"`.
        check: agree on shapes, dtypes and the plan first, so that a mistake on one rank raises on
            all ranks instead of hanging. This is one small collective, and makes the host wait for
            a GPU.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit each other or the plan.
        PlanError: the group does not fit the plan, or ranks have different plans.
        UnsupportedError: the kernel does not support the plan, the rules, the dtype or the device.
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

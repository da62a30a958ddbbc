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
    """Compute attention inside each document of a sequence that is split over `group`.

    Each rank keeps its queries, and sends keys and values to the next rank of a ring. In each hop,
    one call of `kernel` computes attention to the keys of one rank, while the next keys arrive. The
    function supports every order of tokens and every mix of documents. Ranks may have different
    numbers of tokens, also zero. Differentiable.

    The call is collective. If all ranks have equally many tokens, each rank sends and receives
    (ranks - 1) times the bytes of its k and v. The backward sends k and v again, and sends their
    gradients once around the ring in float32, or in float64 for float64 operands.

    Args:
        q: `[local_tokens, heads, head_dim]`, with rotary embedding applied. The operands q, k and v
            may have a first dim for a batch. All rows of a batch share the plan. For a batch of
            several rows, the function makes one copy of each operand.
        k: `[local_tokens, key_heads, head_dim]`, where key_heads must divide heads.
        v: `[local_tokens, key_heads, value_dim]`.
        sequence: the plan of the sequence, equal on all ranks.
        causal: with `causal=True`, a token sees only itself and earlier tokens. With
            `causal=False`, a token sees its whole document.
        scale: the factor by which scores are multiplied. Default: `head_dim ** -0.5`.
        window: a token sees only itself and the previous `window - 1` tokens. A window needs
            `causal=True`. `window=None` means no window.
        softcap: scores become `softcap * tanh(score / softcap)`. With `softcap=None`, scores stay
            unchanged.
        sinks: `[heads]`, for each head the score of an additional key with a value of zero.
        kernel: the kernel that computes a hop. On CUDA, the default is `VarlenKernel()` if
            `VarlenKernel` supports the call. Otherwise, the default is `RectangleKernel()`. For a
            plan with `order="balanced"`, `VarlenKernel` seldom supports the call.
        check: first compare shapes, dtypes and plans of all ranks, so that a mistake on one rank
            raises an error on all ranks instead of hanging. The comparison is one small collective,
            and makes the host wait for a GPU.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit together, or do not fit the plan.
        PlanError: `group` does not fit the plan, or ranks have different plans. Also raised if
            `scale`, `softcap`, `window` or `kernel` is not valid.
        UnsupportedError: the kernel does not support the plan, an argument, the dtype or the
            device. Also raised for `causal=False` if the plan has `parents`.
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

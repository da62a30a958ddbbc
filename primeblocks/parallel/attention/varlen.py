"""Flash attention on packed sequences as the kernel of a hop, where the order of tokens allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .kernel import AttentionSpec, Hop
from .segments import Segments, check_segments, segments_of

__all__ = ["VarlenKernel"]

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256
# On the second nothing is computed, which shows shapes and counts launches.
_DEVICES = ("cuda", "meta")


class VarlenKernel:
    """`AttentionKernel` by torch's flash attention on packed sequences: one call of it each.

    Run on one H100, one rank's share at a time. A hop is cut into segments, each some queries and
    the keys that these alone see (`cut_segments`). With `order="contiguous"` every hop
    has them, with `"zigzag"` all up to a window of tokens / ranks, and in Ulysses attention all;
    `"balanced"` seldom has. Key heads are not repeated. Nothing is compiled, and
    the host reads nothing.

    Calls the operators under `torch.nn.attention.varlen.varlen_attn`, whose backward takes the
    output and the `lse` of all hops. Its gradients of keys are rounded to the dtype of q in each
    hop.

    Args:
        operators: forward and backward to call instead, with arguments and results of
            `torch.ops.aten._flash_attention_forward` and `_backward`. Devices, dtypes and widths
            are theirs to refuse. For tests where there is no GPU.

    Raises:
        UnsupportedError: in a call, a hop without segments; a softcap; values of another width;
            and, by torch's operators, another dtype than bfloat16 and float16, a head_dim that is
            over 256 or no multiple of 8, another device than CUDA.

    Source: arXiv:2307.08691.
    """

    def __init__(
        self, *, operators: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    ) -> None:
        self.operators = operators

    def check(self, spec: AttentionSpec, q: Tensor, value_dim: int) -> None:
        """Refuse a call, on all ranks alike. Local.

        Raises:
            UnsupportedError: see the class.
        """
        if spec.softcap is not None:
            raise UnsupportedError(
                f"torch's flash attention has no softcap; got {spec.softcap:g}. Use "
                "kernel=FlexKernel()."
            )
        if value_dim != q.shape[2]:
            raise UnsupportedError(
                f"flash attention needs values as wide as keys; got {value_dim} and "
                f"{q.shape[2]}. Use kernel=RectangleKernel(), or pad them with zeros."
            )
        if self.operators is None:
            _check_operators(q)
        check_segments(spec)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        self.check(hop.spec, q, v.shape[2])
        found, run = segments_of(hop, q.device), self.operators or _of_torch()
        out, lse, *_ = run[0](
            _taken(q, found.queries),
            _taken(k, found.keys),
            _taken(v, found.keys),
            *_sizes(found),
            False,
            **_mask(found, hop),
        )
        return (
            _placed(out, found.queries, len(q)),
            _placed(lse.transpose(0, 1), found.queries, len(q), -torch.inf),
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        found, run = segments_of(hop, q.device), self.operators or _of_torch()
        # Without dropout no random state is read.
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = run[1](
            _taken(grad, found.queries),
            _taken(q, found.queries),
            _taken(k, found.keys),
            _taken(v, found.keys),
            _taken(out, found.queries),
            # The kernel does not look at its strides.
            _taken(lse, found.queries).transpose(0, 1).contiguous(),
            *_sizes(found),
            random,
            random.new_empty(0),
            **_mask(found, hop),
        )
        return (
            _placed(dq, found.queries, len(q)),
            _placed(dk, found.keys, len(k)),
            _placed(dv, found.keys, len(v)),
        )


def _of_torch() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def _check_operators(q: Tensor) -> None:
    width = q.shape[2]
    if q.dtype not in _DTYPES:
        raise UnsupportedError(
            f"torch's flash attention takes bfloat16 and float16; got {q.dtype}. Cast, or use "
            "kernel=RectangleKernel()."
        )
    if width > _WIDEST or width % 8:
        raise UnsupportedError(
            f"torch's flash attention needs a head_dim that is a multiple of 8, {_WIDEST} at the "
            f"most; got {width}. Pad with zeros and pass scale, or use kernel=RectangleKernel()."
        )
    # On ROCm torch 2.11 returns the lse in another layout.
    if q.device.type not in _DEVICES or torch.version.hip is not None:
        raise UnsupportedError(
            f"VarlenKernel needs CUDA; got a tensor on {q.device}. Use kernel=RectangleKernel()."
        )


def _sizes(found: Segments) -> tuple[Any, ...]:
    """Starts of segments, the longest ones, no dropout, and whether the mask is causal."""
    most = found.most_queries, found.most_keys
    return found.query_starts, found.key_starts, *most, 0.0, found.causal


def _mask(found: Segments, hop: Hop) -> dict[str, Any]:
    return {
        "scale": hop.spec.scale,
        "window_size_left": found.left,
        "window_size_right": found.right,
    }


def _taken(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows that take part, the numbers of a head side by side."""
    part = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    return part if part.ndim < 3 or part.stride(2) == 1 else part.contiguous()


def _placed(part: Tensor, rows: slice | Tensor, total: int, others: float = 0.0) -> Tensor:
    """Put rows back where they were taken from."""
    if len(part) == total:
        return part
    whole = part.new_full((total, *part.shape[1:]), others)
    if isinstance(rows, slice):
        whole[rows] = part
        return whole
    return whole.index_copy_(0, rows, part)

"""FlexAttention as the kernel of a hop: one launch for any order, documents and window.

FlexAttention reads lists of the tiles of a hop's attention matrix. The plan gives these lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...errors import PlanError, UnsupportedError
from .kernel import Hop
from .tiles import tile_lists

__all__ = ["FlexKernel"]

# From this version on torch compiles FlexAttention's backward itself: pytorch#178357.
_BACKWARD_ALONE = "2.13"
# torch's names of the lists of tiles, in their order.
_NAMES = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)
# On these devices torch computes densely, which is the reference of its kernels.
_DENSE = ("cpu", "meta")


class FlexKernel:
    """An `AttentionKernel` that calls torch's compiled FlexAttention, one launch each way.

    Tiles that no query sees are skipped. Tiles that every query sees whole are computed without a
    mask. Key heads are not repeated. Keep one object, because it holds the compiled functions.

    On a CPU torch computes all scores densely, `[heads, queries, keys]`, and exactly in float64.
    That is meant for tests.

    Args:
        tile_tokens: queries and keys of a tile, a multiple of 128 on a GPU. Lists of tiles of 128
            take 1 MiB per 32,768 queries and 32,768 keys.
        recompute: in backward, run the forward of a hop again and differentiate it, also with
            respect to its `lse`. Otherwise FlexAttention's own backward gets the `lse` of all hops.
            The sum is the same, for seven matrix products instead of five. None: recompute if torch
            is older than 2.13, which cannot compile that backward itself. A softcap always
            recomputes.
        compile: the function that compiles. None: `torch.compile`, or no compilation on a CPU.
        options: `kernel_options` of FlexAttention.

    Source: arXiv:2412.05496.
    """

    def __init__(
        self,
        *,
        tile_tokens: int = 128,
        recompute: bool | None = None,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if tile_tokens < 1:
            raise PlanError(f"tile_tokens must be at least 1; got {tile_tokens}.")
        older = TorchVersion(torch.__version__) < TorchVersion(_BACKWARD_ALONE)
        self.tile_tokens = tile_tokens
        self.recompute = older if recompute is None else recompute
        self.options = dict(options or {})
        self._compile = compile

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        run: Callable[..., Any] = self._compiled_forward if self._compiles(q) else _dense_forward
        out, lse = run(q, k, v, *self._rules(hop, q.device))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        # torch 2.13 cannot differentiate a change of scores in a backward of its own.
        if self.recompute or hop.spec.softcap is not None:
            return self._differentiated(grad, q, k, v, out, lse, hop)
        run: Callable[..., Any] = self._compiled_backward if self._compiles(q) else _backward
        dq, dk, dv = run(grad, q, k, v, out, lse, *self._rules(hop, q.device))
        return dq, dk, dv

    def _differentiated(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate a hop's contribution to `out` and `lse` of all hops. With
        `weight = exp(own_lse - lse)` the output is the sum of `weight * own_out` over hops.
        """
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            own_out, own_lse = self.forward(*leaves, hop=hop)
        weight = (own_lse.detach() - lse).exp()
        of_lse = weight * (grad * (own_out.detach() - out)).sum(-1)
        of_out = (grad * weight.unsqueeze(-1)).to(own_out.dtype)
        dq, dk, dv = torch.autograd.grad(
            (own_out, own_lse), leaves, (of_out, of_lse.to(own_lse.dtype))
        )
        return dq, dk, dv

    def _rules(self, hop: Hop, device: torch.device) -> tuple[Any, ...]:
        from torch.nn.attention.flex_attention import BlockMask

        counts = hop.spec.plan.counts
        lists = tile_lists(hop, device, self.tile_tokens)
        named: dict[str, Any] = dict(zip(_NAMES, lists, strict=False))
        mask = BlockMask(
            seq_lengths=(counts[hop.query_rank], counts[hop.key_rank]),
            BLOCK_SIZE=(self.tile_tokens, self.tile_tokens),
            mask_mod=(_seen if len(lists.mask) == 2 else _seen_in_tree)(*lists.mask),
            **named,
        )
        return mask, hop.spec.scale, hop.spec.softcap, self.options

    def _compiles(self, q: Tensor) -> bool:
        if self._compile is None and q.device.type in _DENSE:
            return False
        if q.dtype == torch.float64 and q.device.type not in _DENSE:
            raise UnsupportedError(
                "FlexAttention's kernels have no float64. Use kernel=RectangleKernel()."
            )
        return True

    @cached_property
    def _compiled_forward(self) -> Callable[..., Any]:
        return (self._compile or _whole_graph)(_forward)

    @cached_property
    def _compiled_backward(self) -> Callable[..., Any]:
        return (self._compile or _whole_graph)(_backward)


def _whole_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    # Beyond its limit of compilations torch would compute densely, and run out of memory.
    return torch.compile(function, fullgraph=True)


def _seen(first: Tensor, last: Tensor) -> Callable[..., Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key < last[query])

    return seen


def _seen_in_tree(
    place: Tensor, least: Tensor, key_place: Tensor, key_end: Tensor, key_depth: Tensor
) -> Callable[..., Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = place[query]
        inside = (key_place[key] <= at) & (at < key_end[key])
        return inside & (key_depth[key] >= least[query])

    return seen


def _capped(softcap: float | None) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return capped


# Compiled functions transpose tensors themselves, because torch guards on the base of a view.
def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.squeeze(0).transpose(0, 1) for x in tensors)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, v = _heads_first(q, k, v)
    attend: Any = flex_attention
    out, more = attend(
        q, k, v, _capped(softcap), mask, scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True), kernel_options=options,
    )  # fmt: skip
    return _tokens_first(out, more.lse)


def _dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Call FlexAttention's operator directly, because the documented function would compile."""
    out, lse, _ = torch.ops.higher_order.flex_attention(
        *_heads_first(q, k, v), _capped(softcap), mask.as_tuple(), scale, options, (), ()
    )
    return _tokens_first(out, lse * math.log(2))


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Any,
    scale: float,
    softcap: None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    grad, q, k, v, out, lse = _heads_first(grad, q, k, v, out, lse)
    # The operator's logarithms have base 2, and its kernel ignores their strides.
    lse = (lse / math.log(2)).contiguous()
    dq, dk, dv, _ = torch.ops.higher_order.flex_attention_backward(
        q, k, v, out, lse, grad, None, _capped(softcap), None, mask.as_tuple(), scale, options,
        (), (),
    )  # fmt: skip
    return _tokens_first(dq, dk, dv)

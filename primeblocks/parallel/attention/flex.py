"""FlexAttention as the kernel of a hop: one launch for any order, documents and window.

FlexAttention reads lists of the tiles of a hop's attention matrix, which come from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...errors import CapacityError, PlanError, UnsupportedError
from ..sequence import SequencePlan, kept_on_plan
from .kernel import AttentionSpec, Hop, seen_rows

__all__ = ["FlexKernel", "TileLists", "tile_lists"]

# From this version on torch compiles FlexAttention's backward by itself: pytorch#178357.
_BACKWARD_ALONE = "2.13"
# What torch calls the lists of tiles, in their order.
_NAMES = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)
# Here torch computes it densely, which is the reference of its kernels.
_DENSE = ("cpu", "meta")


class FlexKernel:
    """`AttentionKernel` by torch's FlexAttention, compiled: one launch forward, one backward.

    Blocks that no query sees are skipped. Blocks that every query sees whole are computed without a
    mask. Key heads are not repeated. Keep one object: it holds the compiled functions.

    On a CPU torch computes all scores densely, `[heads, queries, keys]`, and in float64 exactly;
    that is for tests.

    Args:
        tile_tokens: queries and keys of a block, a multiple of 128 on a GPU.
        list_bytes: the most that the lists of one plan, query rank and window may take.
        recompute: in backward run the forward of a hop again, and differentiate it with respect to
            its `lse` too, instead of giving FlexAttention's backward the `lse` of all hops. The
            same sum, for two products of matrices more than five. None: where torch is older than
            2.13, which cannot compile that backward by itself. Always so with a softcap.
        compile: what compiles a function; None for `torch.compile`, but nothing on a CPU.
        options: `kernel_options` of FlexAttention.

    Raises:
        PlanError: a number under 1.

    Source: arXiv:2412.05496.
    """

    def __init__(
        self,
        *,
        tile_tokens: int = 128,
        list_bytes: int = 256 << 20,
        recompute: bool | None = None,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if min(tile_tokens, list_bytes) < 1:
            raise PlanError(
                f"tile_tokens and list_bytes must be at least 1; got {tile_tokens}, {list_bytes}."
            )
        older = TorchVersion(torch.__version__) < TorchVersion(_BACKWARD_ALONE)
        self.tile_tokens, self.list_bytes = tile_tokens, list_bytes
        self.recompute = older if recompute is None else recompute
        self.options = dict(options or {})
        self._compile = compile

    def check(self, spec: AttentionSpec, q: Tensor, value_dim: int) -> None:
        """Refuse a call, on all ranks alike. Local.

        Raises:
            CapacityError: lists of tiles of the rank with the most tokens take over `list_bytes`.
        """
        _check_lists(spec.plan, self.tile_tokens, self.list_bytes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        run: Callable[..., Any] = self._compiled_forward if self._compiles(q) else _dense_forward
        out, lse = run(q, k, v, *self._rules(hop, q.device))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        # torch 2.13 cannot differentiate what becomes of scores in a backward by itself.
        if self.recompute or hop.spec.softcap is not None:
            return self._differentiated(grad, q, k, v, out, lse, hop)
        run: Callable[..., Any] = self._compiled_backward if self._compiles(q) else _backward
        dq, dk, dv = run(grad, q, k, v, out, lse, *self._rules(hop, q.device))
        return dq, dk, dv

    def _differentiated(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate a hop, as what it adds to `out` and `lse` of all hops. With
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
        """Mask, scale, softcap and options of one hop."""
        from torch.nn.attention.flex_attention import BlockMask

        lists = tile_lists(hop, device, self.tile_tokens, self.list_bytes)
        *listed, first, last = lists
        named: dict[str, Any] = dict(zip(_NAMES, listed, strict=True))
        mask = BlockMask(
            seq_lengths=(len(first), hop.spec.plan.counts[hop.key_rank]),
            BLOCK_SIZE=(self.tile_tokens, self.tile_tokens),
            mask_mod=_seen(first, last),
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
    # Past its limit of compilations torch would compute densely otherwise, out of memory.
    return torch.compile(function, fullgraph=True)


def _seen(first: Tensor, last: Tensor) -> Callable[..., Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key < last[query])

    return seen


def _capped(softcap: float | None) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return capped


# Compiled functions turn tensors themselves: torch watches what a view that it is given is of.
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
    """Call FlexAttention as torch documents it; for compilers."""
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
    """Call the operator under it: the documented function would compile."""
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
    # The operator's logarithms are of base 2; its kernel does not look at their strides.
    lse = (lse / math.log(2)).contiguous()
    dq, dk, dv, _ = torch.ops.higher_order.flex_attention_backward(
        q, k, v, out, lse, grad, None, _capped(softcap), None, mask.as_tuple(), scale, options,
        (), (),
    )  # fmt: skip
    return _tokens_first(dq, dk, dv)


class TileLists(NamedTuple):
    """The tiles of one hop, int32; `[1, 1, rows of tiles, ...]` except the last two.

    In "full" tiles every query sees every key, in the others some do. Each row of tiles has a count
    and its columns, ascending, and behind them the columns that do not count. Each column of tiles
    has the same. The last two, `[queries]`, are the rows of keys that a query sees.
    """

    key_counts: Tensor
    key_tiles: Tensor
    full_key_counts: Tensor
    full_key_tiles: Tensor
    query_counts: Tensor
    query_tiles: Tensor
    full_query_counts: Tensor
    full_query_tiles: Tensor
    first: Tensor
    last: Tensor


def tile_lists(hop: Hop, device: torch.device, tile_tokens: int, limit_bytes: int) -> TileLists:
    """Return the lists of one hop, on the device. Local; planned once for all hops of a rank.

    They live as long as the plan, at most `limit_bytes` for each query rank, window and `causal`.

    Raises:
        CapacityError: those of some rank would take more.
    """
    spec = hop.spec
    _check_lists(spec.plan, tile_tokens, limit_bytes)
    every = _of_rank(spec.plan, hop.query_rank, spec.causal, spec.window, tile_tokens, device)
    return every[hop.key_rank]


def _check_lists(plan: SequencePlan, tile_tokens: int, limit_bytes: int) -> None:
    # All lists of the queries of one rank, that with the most.
    queries = max(plan.counts)
    rows, need = -(-queries // tile_tokens), 0
    for keys in plan.counts:
        columns = -(-keys // tile_tokens)
        need += 4 * 2 * (rows + columns + 2 * rows * columns + queries)
    if need > limit_bytes:
        raise CapacityError(
            f"lists of tiles of {tile_tokens} tokens take {need} bytes for {plan.tokens} "
            f"tokens on {plan.ranks} ranks, over {limit_bytes}. Use "
            f"FlexKernel(tile_tokens={2 * tile_tokens}) or a larger list_bytes."
        )


@kept_on_plan
def _of_rank(
    plan: SequencePlan,
    query_rank: int,
    causal: bool,
    window: int | None,
    tile_tokens: int,
    device: torch.device,
) -> tuple[TileLists, ...]:
    """By rank of keys, the lists. One copy to the device brings all."""
    by_rank = []
    for rank in range(plan.ranks):
        first, last = seen_rows(plan, query_rank, rank, causal, window)
        by_rank.append(_plan_lists(first, last, plan.counts[rank], tile_tokens))
    arrays = [x.ravel() for lists in by_rank for x in lists]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    parts = iter(there.split([x.size for x in arrays]))
    return tuple(
        # Tensors of their own: torch compiles anew where a view begins elsewhere.
        TileLists(*(next(parts).view(x.shape).clone() for x in lists))
        for lists in by_rank
    )


def _plan_lists(
    first: np.ndarray, last: np.ndarray, keys: int, tile_tokens: int
) -> list[np.ndarray]:
    """Arrays in the order of `TileLists`, from the rows of keys that each query sees. Pure.

    Each query adds one to the tiles of its interval, by differences along the row of tiles.
    """
    rows, columns = -(-len(first) // tile_tokens), -(-keys // tile_tokens)
    seeing = first < last
    row = np.arange(len(first)) // tile_tokens
    touched, whole = (np.zeros((rows, columns + 1), np.int32) for _ in range(2))
    inside = -(-first // tile_tokens), last // tile_tokens
    for counts, low, high, where in (
        (touched, first // tile_tokens, (last - 1) // tile_tokens + 1, seeing),
        (whole, *inside, inside[0] < inside[1]),
    ):
        np.add.at(counts, (row[where], low[where]), 1)
        np.add.at(counts, (row[where], high[where]), -1)
    full = whole.cumsum(1)[:, :columns] == tile_tokens
    partial = (touched.cumsum(1)[:, :columns] > 0) & ~full
    return [*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T), first, last]


def _listed(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By row a count, and the columns that count before those that do not."""
    count = dense.sum(1, dtype=np.int32)
    columns = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return count[None, None], columns[None, None]

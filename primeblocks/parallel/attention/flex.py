"""FlexAttention as the kernel of a hop: one launch for any order, documents and window.

FlexAttention reads lists of the tiles of a hop's attention matrix. The plan determines these lists.
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

from ...errors import UnsupportedError, check_counts
from ..sequence import SequencePlan, kept_on_plan
from .kernel import Hop, seen_rows

__all__ = ["FlexKernel", "TileLists", "tile_lists"]

# From this version on torch can compile FlexAttention's backward alone: pytorch#178357.
_BACKWARD_ALONE = "2.13"
# torch's names of the lists of tiles, in their order.
_NAMES = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)
# On these devices torch computes all scores densely, as a reference for its kernels.
_DENSE = ("cpu", "meta")


class FlexKernel:
    """An `AttentionKernel` that calls torch's compiled FlexAttention.

    Forward and backward of a hop are one call each. Tiles in which no query sees a key are skipped.
    Tiles in which every query sees every key are computed without a mask. A key head that several
    query heads share is not copied. Reuse one `FlexKernel` object, because the object stores the
    compiled functions.

    On a CPU, torch stores all scores `[heads, queries, keys]`, and computes float64 operands in
    float64. Use the kernel on a CPU only for tests.

    Args:
        tile_tokens: the number of queries and keys in a tile, a multiple of 128 on a GPU. With
            tiles of 128, torch's lists of tiles (`BlockMask`) use 1 MiB for a hop of 32,768 queries
            and 32,768 keys.
        recompute: with `recompute=True`, backward runs the forward of a hop again, and
            differentiates the hop's output and `lse`. With `recompute=False`, FlexAttention's own
            backward uses the `lse` of all hops. Both give the same gradients, except for rounding.
            Recomputing needs seven matrix products instead of five. With `recompute=None`, the
            kernel recomputes if torch is older than 2.13, because older versions cannot compile the
            backward alone. A call with a softcap always recomputes.
        compile: the function that compiles FlexAttention. With `compile=None`, the kernel uses
            `torch.compile` on a GPU, and does not compile on a CPU.
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
        check_counts(tile_tokens=tile_tokens)
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
        # torch 2.13 cannot compute the backward alone if a softcap changes the scores.
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
                "FlexAttention's kernels do not support float64. Use kernel=RectangleKernel()."
            )
        return True

    @cached_property
    def _compiled_forward(self) -> Callable[..., Any]:
        return (self._compile or _whole_graph)(_forward)

    @cached_property
    def _compiled_backward(self) -> Callable[..., Any]:
        return (self._compile or _whole_graph)(_backward)


def _whole_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    # After too many compilations torch would compute densely and lack memory. `fullgraph` raises.
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


class TileLists(NamedTuple):
    """The tiles of one hop, int32, `[1, 1, rows of tiles, ...]`, and the mask inside of tiles.

    In "full" tiles every query sees every key. In the other tiles some queries see some keys. Each
    row of tiles has a count and as many ascending columns, followed by columns that are ignored.
    Likewise each column of tiles has a count and rows.

    The mask is two tensors `[queries]`: the first row of keys that a query sees, and the row after
    the last one. If documents fork, the mask is the places and the least depths of queries, then
    the places, the ends and the depths of keys. A query sees a key exactly if
    `key_place <= place < key_end` and the key's depth is at least the query's least depth. Some
    listed tiles may lack such a pair.
    """

    key_counts: Tensor
    key_tiles: Tensor
    full_key_counts: Tensor
    full_key_tiles: Tensor
    query_counts: Tensor
    query_tiles: Tensor
    full_query_counts: Tensor
    full_query_tiles: Tensor
    mask: tuple[Tensor, ...]


def tile_lists(hop: Hop, device: torch.device, tile_tokens: int) -> TileLists:
    """Return the lists of one hop, on the device. The first call plans all hops of a rank. Local.

    The lists live as long as the plan. They take 16 bytes per tile of the attention matrix of this
    rank's queries. The mask takes 8 bytes per query and hop. If documents fork, it takes 12 more
    bytes per key.
    """
    spec = hop.spec
    every = _of_rank(spec.plan, hop.query_rank, spec.causal, spec.window, tile_tokens, device)
    return every[hop.key_rank]


@kept_on_plan
def _of_rank(
    plan: SequencePlan,
    query_rank: int,
    causal: bool,
    window: int | None,
    tile_tokens: int,
    device: torch.device,
) -> tuple[TileLists, ...]:
    by_rank = []
    for rank in range(plan.ranks):
        if plan.parents is not None:
            by_rank.append(_plan_tree_lists(plan, query_rank, rank, window, tile_tokens))
            continue
        first, last = seen_rows(plan, query_rank, rank, causal, window)
        by_rank.append(_plan_lists(first, last, plan.counts[rank], tile_tokens))
    arrays = [x.ravel() for lists in by_rank for x in lists]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    parts, found = iter(there.split([x.size for x in arrays])), []
    for lists in by_rank:
        # Separate tensors: torch compiles anew for a view that begins at another offset.
        moved = [next(parts).view(x.shape).clone() for x in lists]
        found.append(TileLists._make([*moved[:8], tuple(moved[8:])]))
    return tuple(found)


def _plan_lists(
    first: np.ndarray, last: np.ndarray, keys: int, tile_tokens: int
) -> list[np.ndarray]:
    """Return eight lists and the mask, from the rows of keys that each query sees. Pure.

    A cumulative sum along the row of tiles counts the queries of each tile. Each query adds 1 at
    the first tile of its interval, and -1 after the last.
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
    return [*_all_listed(partial, full), first, last]


def _plan_tree_lists(
    plan: SequencePlan, query_rank: int, key_rank: int, window: int | None, tile_tokens: int
) -> list[np.ndarray]:
    """Return eight lists and the mask if documents fork. Pure.

    The extremes of a tile's queries and keys show whether all its queries see all its keys, and
    whether some query may see a key.
    """
    depths, ends = plan.ancestry.depths, plan.ancestry.ends
    place, key = (plan.indices(rank).numpy() for rank in (query_rank, key_rank))
    least = np.zeros_like(place) if window is None else depths[place] - window + 1
    key_end, key_depth = ends[key], depths[key]
    (first, last), (lowest, highest) = (_extremes(x, tile_tokens) for x in (place, least))
    (first_key, last_key), (first_end, last_end), (shallow, deep) = (
        _extremes(x, tile_tokens) for x in (key, key_end, key_depth)
    )
    full = (
        (last_key <= first[:, None]) & (last[:, None] < first_end) & (shallow >= highest[:, None])
    )
    # Tiles at the border have fewer tokens than FlexAttention reads from a full tile.
    full[len(place) // tile_tokens :] = False
    full[:, len(key) // tile_tokens :] = False
    some = (first_key <= last[:, None]) & (first[:, None] < last_end) & (deep >= lowest[:, None])
    more = (place, least, key, key_end, key_depth)
    return [*_all_listed(some & ~full, full), *(x.astype(np.int32) for x in more)]


def _extremes(x: np.ndarray, tile_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, len(x), tile_tokens)
    if not len(x):
        return x, x
    return np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)


def _all_listed(partial: np.ndarray, full: np.ndarray) -> list[np.ndarray]:
    return [*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T)]


def _listed(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row a count, and its counted columns before the other columns."""
    count = dense.sum(1, dtype=np.int32)
    columns = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return count[None, None], columns[None, None]

"""A dispatcher on `deep_ep.Buffer`, DeepEP 1.2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import UnsupportedError
from . import exchange
from .exchange import MAX_TOP_K, DeepEpDispatcher, Received, check_sizes
from .package import load_deep_ep

__all__ = ["buffer_dispatcher"]

_NEEDED = {
    "Buffer": ("group", "num_nvl_bytes", "num_rdma_bytes", "explicitly_destroy"),
    "Buffer.get_dispatch_config": ("num_ranks",),
    "Buffer.get_combine_config": ("num_ranks",),
    "Buffer.get_dispatch_layout": ("topk_idx", "num_experts"),
    "Buffer.dispatch": (
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "config",
    ),
    "Buffer.combine": ("x", "handle", "topk_weights", "config"),
    "Buffer.destroy": (),
    "Config.get_nvl_buffer_size_hint": (),
    "Config.get_rdma_buffer_size_hint": (),
}


def buffer_dispatcher(
    group: dist.ProcessGroup, *, hidden: int, alignment: int = 1, check: bool = True
) -> DeepEpDispatcher:
    """Build a dispatcher on DeepEP 1.2. Collective.

    The dispatcher runs DeepEP's high-throughput kernels, with the settings that DeepEP recommends
    for the size of the group. A rank may dispatch any number of tokens. If a rank does not make a
    collective call, the other ranks wait until DeepEP's deadline of 100 s passes. The rows of an
    expert keep the order of arrival.

    Args:
        group: the ranks that share the experts. Rank r owns share r of the experts. The group has
            2, 4 or 8 ranks, or a larger number of ranks for which DeepEP has settings.
        hidden: the number of values in a row, a multiple of 8.
        alignment: the rows of each expert are padded with zero rows to a multiple of `alignment`.
            The FP8 kernel `DeepGemm` needs an `alignment` of 128 rows.
        check: as for `AllToAllDispatcher`. If `check` is False, ids or scores out of range make the
            results undefined.

    Raises:
        MissingPackageError: deep_ep is not installed.
        UnsupportedError: the import of deep_ep fails, the adapter does not support the installed
            version, or deep_ep has no settings for the number of ranks.
        ShapeError: `hidden` is not a positive multiple of 8.
        PlanError: `alignment` is below 1.

    Source: github.com/deepseek-ai/DeepEP, version 1.2.1.
    """
    check_sizes(group, hidden=hidden, alignment=alignment)
    deep_ep = load_deep_ep(_NEEDED, written_for="DeepEP 1.2")
    ranks, row_bytes = group.size(), hidden * exchange.ROWS.itemsize
    try:
        dispatching = deep_ep.Buffer.get_dispatch_config(ranks)
        combining = deep_ep.Buffer.get_combine_config(ranks)
    except AssertionError as error:
        raise UnsupportedError(f"DeepEP has no settings for {ranks} ranks: {error}") from error
    configs = dispatching, combining
    buffer = deep_ep.Buffer(
        group,
        num_nvl_bytes=max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs),
        num_rdma_bytes=max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs),
        explicitly_destroy=True,
    )
    ids_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)  # DeepEP 2 still ships Buffer.
    return DeepEpDispatcher(
        _LegacyBuffer(buffer, ids_dtype, dispatching, combining),
        group,
        hidden=hidden,
        top_k=MAX_TOP_K,
        max_tokens=None,
        alignment=alignment,
        check=check,
    )


class _LegacyBuffer:
    def __init__(self, buffer: Any, ids_dtype: Any, dispatching: Any, combining: Any) -> None:
        self._buffer, self._ids_dtype = buffer, ids_dtype
        # Kept, because DeepEP's defaults follow a static that any caller may set, and a handle fits
        # only the number of multiprocessors that it was made with.
        self._dispatching, self._combining = dispatching, combining

    def send(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> Received:
        ids = expert_ids.to(self._ids_dtype).contiguous()
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            ids, num_experts
        )
        rows, row_ids, gates, counts, handle, _ = self._buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=scores,
            config=self._dispatching,
        )
        return Received(rows, gates, row_ids, counts, handle)

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        return self._buffer.dispatch(x, handle=handle, config=self._dispatching)[0]

    def sum_back(
        self, rows: Tensor, scores: Tensor | None, handle: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows, handle, topk_weights=scores, config=self._combining)[:2]

    def close(self) -> None:
        self._buffer.destroy()

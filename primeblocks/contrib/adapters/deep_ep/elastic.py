"""A dispatcher on `deep_ep.ElasticBuffer`, DeepEP 2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from ....errors import PlanError, UnsupportedError
from .exchange import MAX_TOP_K, DeepEpDispatcher, Received, check_sizes
from .package import load_deep_ep

__all__ = ["elastic_dispatcher"]

_NEEDED = {
    "topk_idx_t": (),
    "EPHandle": ("num_sms", "num_recv_tokens_per_expert_list"),
    "ElasticBuffer": (
        "group",
        "num_max_tokens_per_rank",
        "hidden",
        "num_topk",
        "deterministic",
        "explicitly_destroy",
    ),
    "ElasticBuffer.dispatch": (
        "x",
        "topk_idx",
        "topk_weights",
        "num_experts",
        "num_sms",
        "handle",
    ),
    "ElasticBuffer.combine": ("x", "handle", "topk_weights"),
    "ElasticBuffer.destroy": (),
}


def elastic_dispatcher(
    group: dist.ProcessGroup,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    alignment: int = 1,
    num_sms: int = 0,
    check: bool = True,
) -> DeepEpDispatcher:
    """Build a dispatcher on DeepEP 2. Collective.

    The dispatcher uses DeepEP's compact layout, because only the compact layout supports backward.
    The rows of an expert are sorted by source rank, token and choice.
    If a rank does not make a collective call, the other ranks wait until DeepEP's deadlines pass.
    The deadlines are 300 s on the host and 100 s on the device.

    Args:
        group: the ranks that share the experts, as a process group with NCCL. Rank r owns share r
            of the experts.
        max_tokens: the largest number of tokens that a rank dispatches. Pass the same value on all
            ranks. `max_tokens` sets the size of the buffer.
        hidden: the number of values in a row, a multiple of 8.
        top_k: the largest number of experts per token, at most 32. `top_k` also sets the size of
            the buffer.
        alignment: the rows of each expert are padded with zero rows to a multiple of `alignment`.
            The FP8 kernel `DeepGemm` needs an `alignment` of 128 rows.
        num_sms: the number of multiprocessors that communicate. If `num_sms` is 0, DeepEP derives
            the number from bandwidths.
        check: as for `AllToAllDispatcher`. If `check` is False, DeepEP's kernel aborts when an id
            is out of range or a token chose an expert twice.

    Raises:
        MissingPackageError: deep_ep is not installed.
        UnsupportedError: the import of deep_ep fails, the adapter does not support the installed
            version, or torch fills uninitialized memory.
        ShapeError: `hidden` is not a positive multiple of 8.
        PlanError: `max_tokens`, `top_k` or `alignment` is out of range.

    Source: github.com/deepseek-ai/DeepEP, version 2.1.
    """
    check_sizes(group, hidden=hidden, alignment=alignment)
    if max_tokens < 1 or not 1 <= top_k <= MAX_TOP_K:
        raise PlanError(
            f"max_tokens must be at least 1 and top_k from 1 to {MAX_TOP_K}; "
            f"got {max_tokens} and {top_k}."
        )
    deep_ep = load_deep_ep(_NEEDED, written_for="DeepEP 2.1")
    fills = getattr(deterministic, "fill_uninitialized_memory", False)
    if fills and torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "DeepEP does not run while torch.use_deterministic_algorithms(True) fills memory. Set "
            "torch.utils.deterministic.fill_uninitialized_memory = False."
        )
    buffer = deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=max_tokens,
        hidden=hidden,
        num_topk=top_k,
        deterministic=True,  # A recomputed forward must receive rows in the same order.
        explicitly_destroy=True,
    )
    return DeepEpDispatcher(
        _ElasticBuffer(buffer, deep_ep.topk_idx_t, num_sms),
        group,
        hidden=hidden,
        top_k=top_k,
        max_tokens=max_tokens,
        alignment=alignment,
        check=check,
    )


class _ElasticBuffer:
    def __init__(self, buffer: Any, ids_dtype: Any, num_sms: int) -> None:
        self._buffer, self._ids_dtype, self._num_sms = buffer, ids_dtype, num_sms

    def send(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> Received:
        rows, ids, gates, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=expert_ids.to(self._ids_dtype).contiguous(),
            topk_weights=scores,
            num_experts=num_experts,
            num_sms=self._num_sms,
        )
        return Received(rows, gates, ids, handle.num_recv_tokens_per_expert_list, handle)

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        # Given a handle, DeepEP would derive num_sms from a num_experts that it does not yet know.
        return self._buffer.dispatch(x, handle=handle, num_sms=handle.num_sms)[0]

    def sum_back(
        self, rows: Tensor, scores: Tensor | None, handle: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows, handle, topk_weights=scores)[:2]

    def close(self) -> None:
        self._buffer.destroy()

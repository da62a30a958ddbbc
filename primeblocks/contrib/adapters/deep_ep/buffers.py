"""Dispatchers on DeepEP's two classes of buffers, with a check of every name that they call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from ....errors import MissingPackageError, PlanError, UnsupportedError
from . import exchange
from .exchange import MAX_TOP_K, DeepEpDispatcher, Received, check_sizes

__all__ = ["buffer_dispatcher", "elastic_dispatcher"]

# Dotted names inside of deep_ep, each with the parameters that are passed.
_ELASTIC = {
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
_LEGACY = {
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


def elastic_dispatcher(
    group: dist.ProcessGroup,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    alignment: int = 1,
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
    deep_ep = _load(_ELASTIC, "DeepEP 2.1")
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
        _ElasticBuffer(buffer, deep_ep.topk_idx_t),
        group,
        hidden=hidden,
        top_k=top_k,
        max_tokens=max_tokens,
        alignment=alignment,
        check=check,
    )


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
    deep_ep = _load(_LEGACY, "DeepEP 1.2")
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


class _ElasticBuffer:
    def __init__(self, buffer: Any, ids_dtype: Any) -> None:
        self._buffer, self._ids_dtype = buffer, ids_dtype

    def send(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> Received:
        rows, ids, gates, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=expert_ids.to(self._ids_dtype).contiguous(),
            topk_weights=scores,
            num_experts=num_experts,
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


def _load(needed: Mapping[str, Sequence[str]], known_version: str) -> Any:
    """Import deep_ep, and check that it has the names and parameters that a dispatcher needs."""
    try:
        package = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise _broken(error) from error
        raise MissingPackageError(
            "deep_ep", remedy="Build it as https://github.com/deepseek-ai/DeepEP says."
        ) from error
    except Exception as error:  # It compares NCCL libraries and starts a compiler: anything fails.
        raise _broken(error) from error
    if missing := [gap for name in needed for gap in _gaps(package, name, needed[name])]:
        version = getattr(package, "__version__", "of unknown version")
        raise UnsupportedError(
            f"deep_ep {version} lacks {', '.join(missing)}. This adapter was written for "
            f"{known_version}. Install that version."
        )
    return package


def _broken(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"deep_ep is installed but its import fails with {type(error).__name__}: {error}"
    )


def _gaps(package: Any, name: str, parameters: Sequence[str]) -> Iterator[str]:
    found = package
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        yield name
    elif parameters:
        has = inspect.signature(found).parameters
        yield from (f"{name}({parameter}=)" for parameter in parameters if parameter not in has)

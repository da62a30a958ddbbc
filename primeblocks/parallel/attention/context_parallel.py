"""Attention over a split sequence for layers that call torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointFunction

from ...errors import PlanError, ShapeError, UnsupportedError, UsageError
from ...groups import agreed
from ..sequence import SequencePlan, check_plan
from .ring import ring_attention

__all__ = ["ContextParallel"]


class ContextParallel(TorchFunctionMode):
    """A `with` block in which `F.scaled_dot_product_attention` attends over the whole sequence.

    Layers do not need the plan or the group. A layer passes this rank's tensors
    `[batch, heads, local_tokens, head_dim]` with rotary embedding applied, and the block calls
    `attention` instead of torch's function. Each call is collective, because `attention` is
    collective. All rows of a batch share the plan.

    You may enter a `ContextParallel` several times. If blocks are nested, the innermost block
    applies. A block applies only in the thread that entered the block.

    Checkpointed layers run again in backward, and need the block in this second run. Call
    `checkpoint(..., use_reentrant=False, context_fn=ContextParallel.checkpoint_contexts)`. Without
    `context_fn`, torch raises CheckpointError, because the second run saves other tensors than the
    first run. Compile layers inside of `checkpoint`: in a compiled `checkpoint`, torch ignores the
    block.

    Args:
        sequence: the plan of the sequence, equal on all ranks.
        attention: `ring_attention`, `ulysses_attention`, or a function with their signature, such
            as `functools.partial(ring_attention, kernel=kernel)`.
        causal: the value that calls must pass as `is_causal`. With `causal=False`, a token sees its
            whole document.
        check: as in `ring_attention`. With `check=True`, a call that the block refuses raises an
            error on all ranks.

    Raises:
        PlanError: `group` does not fit the plan, or `attention` is not a function. Also raised if a
            call passes a mask, dropout, or an `is_causal` that differs from `causal`.
        ShapeError: tensors of a call have wrong dims or token counts. Also raised if a call without
            `enable_gqa` has different numbers of query heads and key heads.
        UnsupportedError: a call comes from `nn.MultiheadAttention`, or from a reentrant checkpoint.
    """

    def __init__(
        self,
        sequence: SequencePlan,
        *,
        group: dist.ProcessGroup,
        attention: Callable[..., Tensor] = ring_attention,
        causal: bool = True,
        check: bool = True,
    ) -> None:
        super().__init__()
        check_plan(sequence, group, trees=causal)
        if isinstance(attention, type) or not callable(attention):
            raise PlanError(
                f"attention must be a function like ring_attention; got {attention!r:.80}."
            )
        self._sequence, self._group, self._attention = sequence, group, attention
        self._causal, self._check = causal, check

    @staticmethod
    def checkpoint_contexts() -> Any:
        """Return contexts for `torch.utils.checkpoint` that restore the current block. Local."""
        found = nullcontext(), nullcontext()
        if has_torch_function((None,)):  # Modes pass the call on, until a block returns contexts.
            found = handle_torch_function(ContextParallel.checkpoint_contexts, ())
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is ContextParallel.checkpoint_contexts:
            return nullcontext(), self
        if func is F.multi_head_attention_forward:
            self._refuse(UnsupportedError(_MULTI_HEAD), *args)
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replace `F.scaled_dot_product_attention`, with its signature."""
        try:
            self._check_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        except UsageError as problem:
            self._refuse(problem, query)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = self._attention(
            q, k, v, sequence=self._sequence, group=self._group, causal=self._causal, scale=scale,
            check=self._check,
        )  # fmt: skip
        return out.transpose(1, 2)

    def _check_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, gqa: bool
    ) -> None:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        if not q.ndim == k.ndim == v.ndim == 4:
            raise ShapeError(
                f"q, k and v must be [batch, heads, local_tokens, head_dim]; got {shapes}."
            )
        if q.shape[1] != k.shape[1] and not gqa:
            raise ShapeError(f"fewer key heads than heads need enable_gqa=True; got {shapes}.")
        if mask is not None:
            raise PlanError(
                "the plan already masks attention; got an attn_mask. Pass attn_mask=None."
            )
        if dropout:
            raise PlanError(
                f"attention over split sequences does not support dropout; got {dropout}. Use 0."
            )
        if bool(causal) != self._causal:
            raise PlanError(
                f"got is_causal={causal}, but ContextParallel has causal={self._causal}. Pass "
                "equal values."
            )
        if not torch.is_grad_enabled() and _is_in_reentrant_checkpoint():
            raise UnsupportedError(
                "a checkpoint with use_reentrant=True would recompute attention without its plan. "
                "Use use_reentrant=False, context_fn=ContextParallel.checkpoint_contexts."
            )

    def _refuse(self, problem: UsageError, *operands: Any) -> None:
        """Raise `problem`. With `check` the ranks that wait in `attention` raise, too."""
        with agreed("ContextParallel", *operands, group=self._group, check=self._check):
            raise problem


_MULTI_HEAD = (
    "nn.MultiheadAttention would attend only to this rank's tokens. Call "
    "F.scaled_dot_product_attention."
)


def _is_in_reentrant_checkpoint() -> bool:
    """Return whether a caller is a reentrant checkpoint, which runs layers again in backward."""
    caller = inspect.currentframe()
    while caller is not None and caller.f_code is not CheckpointFunction.forward.__code__:
        caller = caller.f_back
    return caller is not None

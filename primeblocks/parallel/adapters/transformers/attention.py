"""Attention of transformers over packed and split sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ....errors import PlanError, ShapeError
from ...sequence import SequencePlan

__all__ = ["Context", "install_attention", "sequence_of", "use_attention"]

_IMPLEMENTATION = "primeblocks"


@dataclass(frozen=True)
class Context:
    """The way in which a model's sequences are split.

    Attributes:
        group: the ranks that share a sequence.
        attention: `ring_attention`, `ulysses_attention`, or one with their signature.
    """

    group: dist.ProcessGroup
    attention: Callable[..., Tensor]


def install_attention(model: nn.Module, context: Context) -> None:
    """Let every attention of `model` look beyond this rank's tokens. Local.

    Where a rank holds whole sequences, a call without a plan keeps the model's own attention.
    """
    AttentionInterface.register(_IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    for module in use_attention(_IMPLEMENTATION, model.modules(), context.group):
        module.context_parallel = context


def use_attention(name: str, modules: Iterable[nn.Module], group: dist.ProcessGroup) -> list[Any]:
    """Let modules with a configuration choose a registered attention, and return them. Local.

    Where a rank holds whole sequences, they choose it for calls with a plan.
    """
    found: list[Any] = []
    for module in modules:
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        found.append(module)
        if group.size() == 1:
            choose = partial(_choose, config._attn_implementation, name)
            module.register_forward_pre_hook(choose, with_kwargs=True)
        else:
            config._attn_implementation = name
    return found


def _choose(own: str, other: str, module: Any, args: Any, arguments: dict[str, Any]) -> None:
    """Choose for the module that is about to run, by what it was called with.

    Masks are made in one module and used in others, and a checkpoint runs layers once more
    after another call: no choice outlives its call.
    """
    chosen = own if arguments.get("sequence") is None else other
    if module.config._attn_implementation != chosen:
        module.config._attn_implementation = chosen


def sequence_of(module: Any, arguments: dict[str, Any], batch: int) -> SequencePlan:
    """The plan of the tokens at hand, which the caller gave to the model.

    Raises:
        PlanError: there is none.
        ShapeError: more than one row: documents are packed instead.
    """
    sequence = arguments.get("sequence")
    if not isinstance(sequence, SequencePlan):
        raise PlanError(
            f"{type(module).__name__} attends over split sequences and needs their plan: call "
            "model(**local_inputs(tokens, sequence=plan, group=...))."
        )
    if batch != 1:
        raise ShapeError(f"documents are packed into one row; got a batch of {batch}.")
    return sequence


def _no_mask(*sizes: Any, **arguments: Any) -> None:
    """Make no mask: a plan knows the documents, and `parallelize` has masks refused beside it."""


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Run attention as transformers calls it, on `[batch, heads, tokens, head_dim]`."""
    sequence = sequence_of(module, arguments, query.shape[0])
    if dropout:
        raise PlanError(f"attention over split sequences has no dropout; got {dropout}. Use 0.")
    context: Context = module.context_parallel
    out = context.attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        sequence=sequence,
        group=context.group,
        scale=scaling,
        window=sliding_window,
        sinks=s_aux,
        **({} if softcap is None else {"softcap": softcap}),
    )
    return out.unsqueeze(0), None

"""What convolutions and recurrences over a split sequence demand of their operands."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError, UsageError
from ...groups import agree
from ..sequence import SequencePlan

__all__ = ["check_conv", "check_delta", "check_scan", "check_state_space", "settle"]


def settle(
    problem: UsageError | None,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    check: bool,
    **operands: Tensor | None,
) -> None:
    """Raise this rank's problem; on all ranks if `check`, which also must agree on everything
    but the number of tokens. Collective if `check`, local otherwise.
    """
    if check:
        given = {name: x for name, x in operands.items() if x is not None}
        first = next(iter(given.values()))
        facts = {"plan": sequence.fingerprint, "bytes an element": first.element_size()}
        # A backward that one rank does not run would leave the others waiting.
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given.values())
        facts["requires_grad of any operand"] = int(wanted)
        if problem is None:
            for name, x in given.items():
                facts |= {f"{name} dim {dim}": size for dim, size in enumerate(x.shape) if dim}
        agree(facts, problem=problem, group=group, device=first.device)
    elif problem is not None:
        raise problem


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> ShapeError | None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        return ShapeError(
            f"needs x [tokens, channels] and weight [channels, kernel]; got {_shapes(x, weight)}. "
            "Of an nn.Conv1d, pass weight.squeeze(1)."
        )
    if bias is not None and bias.shape != x.shape[1:]:
        return ShapeError(f"needs one bias a channel, [{x.shape[1]}]; got {_shapes(bias)}.")
    return _check_tokens(x, tokens)


def check_scan(updates: Tensor, transitions: Tensor, runs: int) -> ShapeError | None:
    first, square = updates.shape[:2], updates.shape[2:3] * 2
    fits = transitions.shape == first or (
        len(square) == 2 and transitions.shape == (*first, *square)
    )
    if updates.ndim < 2 or updates.shape[0] != runs or not fits:
        return ShapeError(
            f"needs updates [{runs}, heads, d, ...], one for each run that is a part of a "
            f"document, and transitions [{runs}, heads] or [{runs}, heads, d, d]; "
            f"got {_shapes(updates, transitions)}."
        )
    return None


def check_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tokens: int
) -> ShapeError | None:
    if (
        not (q.ndim == k.ndim == v.ndim == 3)
        or q.shape != k.shape
        or not (k.shape[:2] == v.shape[:2] == g.shape == beta.shape)
    ):
        return ShapeError(
            "needs q, k [tokens, heads, key_dim], v [tokens, heads, value_dim] and g, beta "
            f"[tokens, heads]; got {_shapes(q, k, v, g, beta)}. Repeat grouped heads first, and "
            "leave out the batch."
        )
    return _check_tokens(v, tokens)


def check_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, tokens: int
) -> ShapeError | None:
    shaped = x.ndim == B.ndim == 3 and B.shape == C.shape and B.shape[0] == x.shape[0]
    if (
        not shaped
        or dt.shape != x.shape[:2]
        or x.shape[1] % max(B.shape[1], 1)
        or not all(t is None or t.shape == x.shape[1:2] for t in (A, D))
    ):
        return ShapeError(
            "needs x [tokens, heads, head_dim], dt [tokens, heads], A [heads], B, C [tokens, "
            "groups, state_dim] with groups that divide heads, and D [heads]; got "
            f"{_shapes(x, dt, A, B, C, *([] if D is None else [D]))}. Leave out the batch."
        )
    return _check_tokens(x, tokens)


def _check_tokens(x: Tensor, tokens: int) -> ShapeError | None:
    if x.shape[0] == tokens:
        return None
    return ShapeError(
        f"the plan gives this rank {tokens} tokens; got {x.shape[0]}. Split by the same plan."
    )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)

"""Checks of the operands of convolutions and recurrences over a split sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError
from ...groups import check_tensors, facts_of, settle
from ..sequence import SequencePlan, check_plan

__all__ = [
    "as_they_are",
    "check_conv",
    "check_delta",
    "check_scan",
    "check_state_space",
    "settle_runs",
]

P = ParamSpec("P")
R = TypeVar("R")


def settle_runs(
    call: str,
    look: Callable[[], ShapeError | None],
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    check: bool,
    **operands: Tensor,
) -> None:
    """Raise this rank's problem, on all ranks if `check`. Collective if `check`, else local.

    With `check`, ranks must also agree on everything but the number of tokens.

    Args:
        look: finds the problem, once operands are tensors and the plan fits the group.
        operands: all of them but optional ones that were left out.
    """

    def facts() -> dict[str, object]:
        check_plan(sequence, group)
        check_tensors(**operands)
        odd = {name: x.dtype for name, x in operands.items() if not x.is_floating_point()}
        problem = ShapeError(f"needs floating-point numbers; got {odd}.") if odd else look()
        if problem is not None:
            raise problem
        found: dict[str, object] = {"plan": sequence.fingerprint, "operands": " ".join(operands)}
        for name, x in operands.items():
            found |= facts_of(name, x)
        return found

    settle(call, facts, *operands.values(), group=group, check=check)


def as_they_are(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, which would narrow what is promised in float32."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(next((x.device.type for x in given), "cpu"), enabled=False):
            return function(*args, **kwargs)

    return call


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

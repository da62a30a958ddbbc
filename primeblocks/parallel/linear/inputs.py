"""Checks of the operands of convolutions and recurrences over a split sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError
from ...groups import check_tensors, facts_of
from ..sequence import SequencePlan, check_plan

__all__ = ["as_they_are", "checked_facts", "shapes"]

P = ParamSpec("P")
R = TypeVar("R")


def checked_facts(
    sequence: SequencePlan, group: dist.ProcessGroup, **operands: Tensor
) -> dict[str, object]:
    """Check this rank's arguments, and return the facts that must be equal on all ranks. Local."""
    check_plan(sequence, group)
    check_tensors(**operands)
    odd = {name: x.dtype for name, x in operands.items() if not x.is_floating_point()}
    if odd:
        raise ShapeError(f"all operands must be floating-point; got {odd}.")
    found: dict[str, object] = {"plan": sequence.fingerprint, "operands": " ".join(operands)}
    for name, x in operands.items():
        found |= facts_of(name, x)
    return found


def as_they_are(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, which would narrow sums that are promised in float32."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(next((x.device.type for x in given), "cpu"), enabled=False):
            return function(*args, **kwargs)

    return call


def shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)

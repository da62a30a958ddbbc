"""A `load` for engines that are a torch module or named tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..layout import Layout, local_part
from .manifest import (
    NEVER_ROUNDED,
    Manifest,
    NamedTensors,
    TensorSpec,
    converts,
    describe,
    named_tensors,
)
from .plan import Plan

__all__ = ["InPlace", "load_into"]


def load_into(target: NamedTensors, plan: Plan | Manifest, *, reader: int = 0) -> InPlace:
    """Return a `load` for `Subscriber` that copies each tensor to the target's tensor of that name.

    Local. This call compares names, shapes, boxes and dtypes of target and plan before any load.
    Target and plan must contain the same tensors.

    Args:
        target: a module, for its parameters and persistent buffers, or tensors by name. For a
            DTensor, the reader must want exactly the box that this rank stores.
        plan: the plan of the `Subscriber`. If the subscriber has `convert=`, pass the targets of
            `convert` instead of the plan.
        reader: the number of the reader in the plan.

    Raises:
        PlanError: target and plan differ, a target's dtype cannot store all sent values, or a
            tensor is on the meta device.
    """
    if not isinstance(target, nn.Module):
        target = named_tensors(target)  # An iterator can be read only once.
    held = describe(target)
    sent = plan if isinstance(plan, Manifest) else _of_reader(plan, reader)
    missing, more = held.keys() - sent.keys(), sent.keys() - held.keys()
    if missing or more:
        raise PlanError(
            f"{len(missing)} tensors are not in the plan{_first(missing)}, and {len(more)} "
            f"planned tensors are not in the target{_first(more)}. Pass the planned tensors by "
            "name, or plan with convert=."
        )
    for name, spec in sent.items():
        # A target that stores such a tensor in 16 bits rounds it.
        may_round = name.endswith(NEVER_ROUNDED) and converts(spec.dtype, held[name].dtype)
        takes = may_round or _takes(held[name].dtype, spec.dtype)
        if held[name].layout != spec.layout or not takes:
            raise PlanError(
                f"{name!r} is {held[name].dtype} {held[name].layout} in the target, and "
                f"{spec.dtype} {spec.layout} in the plan. Plan with describe() of this target, or "
                "pass the target's dtype as dtype= to announce()."
            )
    into = InPlace(target, sent)
    into.places()
    return into


class InPlace:
    """A `load` that only copies each tensor, unchanged, into one of the engine's tensors."""

    def __init__(self, target: nn.Module | Mapping[str, Tensor], sent: Manifest) -> None:
        self._target, self._sent = target, sent

    def places(self) -> dict[str, Tensor]:
        """Return the engine's tensors by the names under which weights arrive.

        The result is empty if a tensor has another dtype or shape, or if two tensors share memory.
        """
        places = self._local()
        are_as_sent = all(
            name in places
            and (places[name].dtype, places[name].shape) == (spec.dtype, spec.layout.shard.sizes)
            for name, spec in self._sent.items()
        )
        mine = {name: places[name] for name in self._sent} if are_as_sent else {}
        return {} if _share_memory(mine.values()) else mine

    @torch.no_grad()
    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        places = self._local()
        for name, tensor in tensors:
            if name not in places or places[name].shape != tensor.shape:  # copy_ would broadcast.
                raise PlanError(f"{name!r} changed since load_into(). Call load_into() again.")
            places[name].copy_(tensor)

    def _local(self) -> dict[str, Tensor]:
        # A module may have other tensors at each load.
        places = named_tensors(self._target)
        if empty := [name for name, place in places.items() if place.is_meta]:
            raise PlanError(
                f"{len(empty)} of {len(places)} tensors are on the meta device{_first(empty)}: "
                "these have no memory to load into. Call to_empty() first."
            )
        return {name: local_part(place.detach()) for name, place in places.items()}


def _of_reader(plan: Plan, reader: int) -> Manifest:
    plan.check_reader(reader)
    rows = [
        (name, TensorSpec(plan.target[name].dtype, Layout(plan.target[name].shape, box)))
        for name, boxes in plan.wants[reader].items()
        for box in boxes
    ]
    return Manifest(tuple(rows))


def _share_memory(tensors: Iterable[Tensor]) -> bool:
    """Return whether the span of bytes of one tensor overlaps that of another."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum(
                step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)
            )
            first = tensor.data_ptr()
            spans.append((str(tensor.device), first, first + (last + 1) * tensor.element_size()))
    neighbours = itertools.pairwise(sorted(spans))
    return any(one[0] == after[0] and after[1] < one[2] for one, after in neighbours)


def _takes(held: torch.dtype, sent: torch.dtype) -> bool:
    """Return whether `held` can store every value of `sent`."""
    return held == sent or (converts(sent, held) and torch.promote_types(held, sent) == held)


def _first(names: Iterable[str]) -> str:
    names = sorted(names)
    return f" (first {names[0]!r})" if names else ""

"""The bytes of one version as a reader or writer has them: whole tensors in a blob, or boxes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..errors import PlanError
from ..layout import Shard
from .plan import Plan
from .transports.lease import Lease

__all__ = ["Blob", "Boxes", "Held", "pack", "packed_views"]


class Held(Protocol):
    """The bytes of one version, or of the part of it that one reader wants.

    Attributes:
        stays: whether a reader keeps it after its load: to go back to, and as the base of deltas.
    """

    stays: bool

    def views(self, index: int) -> list[Tensor]:
        """The copies of a bucket, each shaped as its box."""
        ...

    def box(self, name: str, box: Shard) -> Tensor:
        """A box, or a part of one, that the reader wants. A view."""
        ...

    def own(self) -> None:
        """Say that it will be written to. Its views may be written to afterwards."""
        ...

    def close(self) -> None:
        """Let go. Twice is fine."""
        ...


class Blob:
    """All whole tensors in one buffer, at `plan.offsets`."""

    stays = True

    def __init__(
        self, plan: Plan, buffer: UInt8[Tensor, " bytes"], *, lease: Lease | None = None
    ) -> None:
        self._plan, self._buffer, self._lease = plan, buffer, lease
        self._tensors: dict[str, Tensor] = {}

    def views(self, index: int) -> list[Tensor]:
        return [self.box(copy.name, copy.box) for copy in self._plan.buckets[index].copies]

    def box(self, name: str, box: Shard) -> Tensor:
        tensor = self._tensor(name)
        return tensor if box.sizes == tensor.shape else tensor[box.slices]

    def own(self) -> None:
        if self._lease is not None:
            self._lease.own()

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            spec, start = self._plan.target[name], self._plan.offsets[name]
            size = prod(spec.shape) * spec.dtype.itemsize
            self._tensors[name] = (
                self._buffer[start : start + size].view(spec.dtype).view(spec.shape)
            )
        return self._tensors[name]


class Boxes:
    """The boxes that one reader wants, each a tensor of its own in new memory."""

    def __init__(
        self, plan: Plan, reader: int, *, stays: bool, device: torch.device | str = "cpu"
    ) -> None:
        self._plan, self.stays = plan, stays
        self._boxes = {
            name: [
                (box, torch.empty(box.sizes, dtype=plan.target[name].dtype, device=device))
                for box in boxes
            ]
            for name, boxes in plan.wants[reader].items()
        }

    def views(self, index: int) -> list[Tensor]:
        return [self.box(copy.name, copy.box) for copy in self._plan.buckets[index].copies]

    def box(self, name: str, box: Shard) -> Tensor:
        for held, tensor in self._boxes[name]:
            if held == box:
                return tensor
            if held.intersect(box) == box:
                return tensor[box.within(held).slices]
        raise PlanError(f"no wanted box of {name!r} has {box} in it")

    def own(self) -> None:
        """Nothing: nobody else has them."""

    def close(self) -> None:
        """Nothing: the tensors go with their last user."""


def packed_views(plan: Plan, index: int, buffer: UInt8[Tensor, " bytes"]) -> list[Tensor]:
    """The copies of a packed bucket, each shaped as its box."""
    return [
        buffer[c.offset : c.offset + c.bytes].view(plan.target[c.name].dtype).view(c.box.sizes)
        for c in plan.buckets[index].copies
    ]


def pack(plan: Plan, index: int, pieces: Sequence[Tensor]) -> UInt8[Tensor, " bytes"]:
    """A bucket's pieces in a new buffer on the CPU."""
    buffer = torch.empty(plan.buckets[index].bytes, dtype=torch.uint8)
    for view, piece in zip(packed_views(plan, index, buffer), pieces, strict=True):
        view.copy_(piece)
    return buffer

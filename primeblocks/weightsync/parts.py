"""`Parts`: the boxes of local tensors that one trainer rank sends."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from operator import gt
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import PlanError, UnsupportedError
from ..layout import Layout, Shard, local_part
from .convert.conversion import Wiring
from .convert.pieces import Piece, in_place
from .manifest import Manifest, NamedTensors, converts, describe, named_tensors
from .plan import Plan

__all__ = ["Encode", "Encoder", "Parts"]

Encode = Callable[[str, Tensor], Mapping[str, Tensor]]


@runtime_checkable
class Encoder(Protocol):
    """An `Encode` that may return tensors of new names and shapes, and describes these tensors."""

    def __call__(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Encode this rank's part of a parameter, and return the parts of the encoded tensors."""
        ...

    def describe(self, held: Manifest) -> Manifest:
        """Return the manifest of a rank after its parameters are encoded."""
        ...

    def origins(self, held: Manifest) -> Mapping[str, str]:
        """Return, for each encoded tensor, the name of the parameter it is made of."""
        ...


class _Source(NamedTuple):
    """A box of a tensor that a rank holds, or of a tensor encoded from parameter `origin`.

    `is_all` says that the box is all that the rank holds of the tensor, in the same order. `dtype`
    is the dtype in which the box is sent.
    """

    origin: str
    piece: Piece
    held: Layout
    is_all: bool
    dtype: torch.dtype


class Parts:
    """Maps the boxes of a plan to the parameters of one rank.

    The first `refresh` makes the map. A later `refresh` makes it again if a tensor has another
    shape, other placements or another mesh.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: NamedTensors,
        *,
        source: Manifest | None,
        convert: Wiring | None,
        encode: Encode | None,
    ) -> None:
        # An iterator of pairs would be empty when it is read again.
        self._parameters: nn.Module | Mapping[str, Tensor] = (
            parameters if isinstance(parameters, nn.Module) else named_tensors(parameters)
        )
        self.plan, self.rank = plan, rank
        self._source, self._convert, self._encode = source, convert, encode
        self._sources: dict[int, list[_Source]] = {}
        self._placed: dict[str, object] = {}
        self._tensors: dict[str, Tensor] = {}
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})

    def refresh(self) -> None:
        """Read the parameters again. Local. Moves no data.

        Raises:
            PlanError: the parameters do not fit the plan. A tensor is missing or new, has another
                shape, cannot be cast to the plan's dtype, or lacks a box that this rank must send.
        """
        self._tensors = named_tensors(self._parameters)
        self._last = ("", {})
        placed = {name: _place(tensor) for name, tensor in self._tensors.items()}
        if not self._sources or placed != self._placed:
            self._sources = self._map()
            self._placed = placed
        if self._encode is None:
            for source in {s.origin: s for row in self._sources.values() for s in row}.values():
                self._local(source)

    def views(self, index: int) -> tuple[list[Tensor], list[torch.dtype]]:
        """Return a bucket's tensors before the cast, and the dtypes in which they are sent.

        Raises:
            PlanError: the local shape or the dtype of a tensor does not fit the plan.
            UnsupportedError: `encode` returned another name or shape.
        """
        views, dtypes = [], []
        for source in self._sources[index]:
            local = self._local(source)
            views.append(local if source.is_all else source.piece.view(local, source.held.shard))
            dtypes.append(source.dtype)
        return views, dtypes

    def _local(self, source: _Source) -> Tensor:
        # The `Copy`s of one tensor follow each other, so each tensor is encoded once.
        name, made = self._last
        if name != source.origin:
            made = self._made(source.origin)
            self._last = (source.origin, made)
        local = made[source.piece.source]
        have, want = tuple(local.shape), source.held.shard.sizes
        if have != want or not converts(local.dtype, source.dtype):
            raise PlanError(
                f"{source.piece.source!r} is {local.dtype} {have} on rank {self.rank}, but was "
                f"planned as {source.dtype} {want}. Describe the tensors and plan again."
            )
        return local

    def _made(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._tensors:
            raise PlanError(
                f"rank {self.rank} must send {name!r}, but does not hold this tensor. Plan again."
            )
        local = local_part(self._tensors[name].detach())
        if local.is_meta:
            raise PlanError(
                f"{name!r} is on the meta device on rank {self.rank} and has no bytes to send. "
                "Load its weights before you publish."
            )
        if self._encode is None:
            return {name: local}
        encoded = self._encode(name, local)
        shapes = {key: tuple(value.shape) for key, value in encoded.items()}
        if not isinstance(self._encode, Encoder) and shapes != {name: tuple(local.shape)}:
            raise UnsupportedError(
                f"encode made {shapes} of {name!r} with shape {tuple(local.shape)}. It must keep "
                "the name and the shape. For codes and scales, pass fp8.encode_weights()."
            )
        return encoded

    def _map(self) -> dict[int, list[_Source]]:
        held, origins = self._source, dict[str, str]()
        names: Iterable[str] = self._tensors
        if held is None or isinstance(self._encode, Encoder):
            live = describe(self._tensors)
            if isinstance(self._encode, Encoder):
                origins, live = dict(self._encode.origins(live)), self._encode.describe(live)
            names, held = live, live if held is None else held
        self._check_planned(names, held)
        pieces: dict[str, list[Piece]] = {}
        for piece in self._held_pieces(held):
            pieces.setdefault(piece.target, []).append(piece)
        return {
            index: [
                self._find(copy.name, copy.box, pieces, held, origins)
                for copy in self.plan.buckets[index].copies
            ]
            for index in self.plan.of_rank(self.rank)
        }

    def _check_planned(self, names: Iterable[str], held: Manifest) -> None:
        """Refuse tensors that the plan does not know, or that have another global shape in it.

        The known names come from `source`, else from `convert`, else from the plan.
        """
        plan, convert = self.plan, self._convert
        known: Container[str] = {*plan.target, *plan.unsent}
        if self._source is not None:
            known = held
        elif convert is not None:
            known = convert.sources
        new = [name for name in names if name not in known]
        if new:
            raise PlanError(
                f"the plan was made without {len(new)} tensors of rank {self.rank}, such as "
                f"{new[0]!r}: they are new, or were untied. Describe all tensors and plan again, "
                "pass only the tensors of the plan, or pass the plan's convert= or encode=."
            )
        for name, spec in held.items():
            # An Encoder may give a parameter's name to a tensor of another shape.
            live = None if isinstance(self._encode, Encoder) else self._tensors.get(name)
            has_grown = live is not None and any(map(gt, live.shape, spec.shape))  # Since `source`.
            want = plan.target.get(name) if convert is None else None
            if has_grown or (want is not None and want.shape != spec.shape):
                here = spec.shape if live is None else tuple(live.shape)
                planned = spec.shape if want is None else want.shape
                raise PlanError(
                    f"{name!r} is {here} on rank {self.rank}, but was planned as {planned}. "
                    "Describe the tensors and plan again."
                )

    def _held_pieces(self, held: Manifest) -> list[Piece]:
        if self._convert is not None:
            return self._convert.map(held)
        shards = ((name, spec.layout.shard) for name, spec in held.items())
        return [in_place(name, shard) for name, shard in shards if shard.numel]

    def _find(
        self,
        name: str,
        box: Shard,
        pieces: Mapping[str, list[Piece]],
        held: Manifest,
        origins: Mapping[str, str],
    ) -> _Source:
        for piece in pieces.get(name, ()):
            if len(piece.target_box.sizes) == len(box.sizes):
                part = piece.to_target(box)
                if part is not None and part.target_box == box:
                    origin = origins.get(part.source, part.source)
                    layout = held[part.source].layout
                    as_it_lies = part.dims == tuple(range(len(layout.shape)))
                    is_all = as_it_lies and part.source_box == layout.shard
                    dtype = self.plan.target[name].dtype
                    return _Source(origin, part, layout, is_all, dtype)
        found = [piece.target_box for piece in pieces.get(name, ())]
        raise PlanError(
            f"rank {self.rank} must send {box} of {name!r}, but holds "
            f"{found or 'no such tensor'}. Plan again, or pass the plan's convert= or encode=."
        )


def _place(tensor: Tensor) -> object:
    """Return all that a tensor's layout depends on."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, tensor.device_mesh
    return tensor.shape

"""Digests of what an engine process holds: piece by piece, or in the boxes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from ..layout import Layout, local_part
from .convert.conversion import Wiring
from .convert.pieces import whole_piece
from .digest import as_buffer
from .manifest import NamedTensors, named_tensors
from .plan import Copy, Plan

__all__ = [
    "HELD",
    "MULTIPLIED",
    "Look",
    "Observed",
    "Seen",
    "differing",
    "digest_form",
    "digest_tensors",
    "observe",
    "with_aliases",
]

HELD, MULTIPLIED = "held", "multiplied"
# A part that is missing from a fused tensor shows where it is longer than two pieces.
_PIECES, _LEAST_BYTES, _MOST_BYTES = 64, 256, 1 << 16


class Seen(NamedTuple):
    """A tensor in one form that an engine has it in: `HELD`, or as a kernel is `MULTIPLIED` by it.

    What a kernel multiplies by shows but for the sign of zeros and for subnormal numbers.
    """

    way: str
    tensor: Tensor


Look = Callable[[str], Sequence[Seen] | str]
"""Returns all forms in which an engine has a parameter, or why it cannot be seen."""


@dataclass(frozen=True)
class Observed:
    """Digests of what one engine process holds.

    Attributes:
        boxes: for each copy that this reader wants, in the plan's order: way, dtype and digest of
            each form that the engine has it in, none where it is missing; or why it cannot be seen.
        unexpected: parameters that no tensor of the plan leads to.
    """

    plan: str
    reader: int
    boxes: tuple[tuple[tuple[str, str, str], ...] | str, ...]
    unexpected: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return values that travel as JSON."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Observed:
        """Return what `to_json` made."""
        boxes = tuple(
            row if isinstance(row, str) else tuple((str(w), str(t), str(d)) for w, t, d in row)
            for row in raw["boxes"]
        )
        return cls(str(raw["plan"]), int(raw["reader"]), boxes, tuple(raw["unexpected"]))


def observe(
    plan: Plan, held: NamedTensors | Look, *, reader: int = 0, convert: Wiring | None = None
) -> Observed:
    """Digest what an engine holds, in the boxes that a plan cuts it into. Local; one pass.

    Args:
        held: the engine's tensors, by the names that `load` gets or that `convert` leads to; or a
            function that looks one up.
        convert: the wiring of this reader.

    Raises:
        PlanError: the plan has no such reader.
    """
    plan.check_reader(reader)
    extra: tuple[str, ...] = ()
    if isinstance(held, nn.Module) or not callable(held):
        held, extra = _look_into(held, plan.wants[reader] if convert is None else convert.targets)
    rows: list[tuple[tuple[str, str, str], ...] | str] = []
    for index in plan.of_reader(reader):
        for copy in plan.buckets[index].copies:
            found = _forms(plan, reader, copy, held, convert)
            rows.append(found if isinstance(found, str) else tuple(_row(*one) for one in found))
    return Observed(plan.fingerprint(), reader, tuple(rows), extra)


def digest_tensors(tensors: NamedTensors) -> dict[str, tuple[str, ...]]:
    """Return, by name, dtype and shape, then an XXH3-64 of each piece of a tensor. Local.

    A tensor has 64 pieces, of 256 bytes at least and 64 KiB at most.
    """
    return {
        name: tuple(_piece_digests(local_part(tensor.detach())))
        for name, tensor in named_tensors(tensors).items()
    }


def differing(some: Mapping[str, Iterable[str]], other: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    names = dict.fromkeys([*some, *other])
    return [name for name in names if some.get(name) != other.get(name)]


def digest_form(way: str, tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, as they show in this form. Local."""
    tensor = tensor.detach().cpu().contiguous()
    if way == MULTIPLIED:
        tensor = torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0, tensor)
    return xxhash.xxh3_64_hexdigest(as_buffer(tensor))


def with_aliases(source: NamedTensors) -> dict[str, Tensor]:
    """Return tensors by name, tied ones of a module under each of their names. Local."""
    tensors = named_tensors(source)
    if isinstance(source, nn.Module):
        tensors |= dict(source.named_parameters(remove_duplicate=False))
    return tensors


def _piece_digests(tensor: Tensor) -> Iterator[str]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    room = as_buffer(tensor.cpu().contiguous())
    size = max(_LEAST_BYTES, min(_MOST_BYTES, -(-len(room) // _PIECES)))
    for start in range(0, max(1, len(room)), size):
        yield xxhash.xxh3_64_hexdigest(room[start : start + size])


def _row(way: str, tensor: Tensor) -> tuple[str, str, str]:
    return way, str(tensor.dtype).removeprefix("torch."), digest_form(way, tensor)


def _look_into(held: NamedTensors, known: Iterable[str]) -> tuple[Look, tuple[str, ...]]:
    """Return a way to look up tensors, and the names that are not known, nor tied to one."""
    tensors = with_aliases(held)
    places = {tensors[name].data_ptr() for name in known if name in tensors}
    names = [name for name in named_tensors(held) if name not in set(known)]
    extra = tuple(name for name in names if tensors[name].data_ptr() not in places)

    def look(name: str) -> Sequence[Seen]:
        return [Seen(HELD, tensors[name].detach())] if name in tensors else []

    return look, extra


def _forms(
    plan: Plan, reader: int, copy: Copy, look: Look, convert: Wiring | None
) -> Sequence[Seen] | str:
    """Return a box of a tensor that travels, in each form that the engine has it in."""
    whole, box = plan.wants[reader][copy.name][0], copy.box
    pieces = [whole_piece(copy.name, whole.sizes)]
    if convert is None:
        box = box.within(whole)
    else:
        pieces = convert.by_source[copy.name]
    forms: list[Seen] = []
    for piece in pieces:
        part = piece.from_source(box)
        if part is None:
            continue
        found = look(part.target)
        if isinstance(found, str) or not found:
            return found
        shape = whole.sizes if convert is None else convert.targets[part.target].shape
        for index, (way, tensor) in enumerate(found):
            if tuple(tensor.shape) != shape:
                shaped = f"{tuple(tensor.shape)}, not {shape}"
                return [Seen(shaped, torch.empty(0, dtype=tensor.dtype))]
            if index == len(forms):
                forms.append(Seen(way, torch.zeros(box.sizes, dtype=tensor.dtype)))
            room = forms[index].tensor[part.source_box.within(box).slices]
            room.copy_(part.inverse().view(tensor, Layout.whole(shape).shard))
    return forms

"""Digests of the tensors in an engine process, whole or in the boxes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import xxhash
from torch import Tensor, nn

from ..errors import PlanError, TransferError
from ..layout import Layout, Shard, local_part
from .convert.conversion import Wiring
from .convert.pieces import Piece, in_place
from .digest import as_buffer
from .manifest import (
    FLOATS,
    NEVER_ROUNDED,
    NamedTensors,
    as_plan_error,
    box_of,
    named_tensors,
    unwrapped,
)
from .marker import Digests
from .plan import Plan

__all__ = [
    "HELD",
    "MULTIPLIED",
    "UNSEEN",
    "Form",
    "Look",
    "Observed",
    "Seen",
    "are_digests",
    "digest_form",
    "digest_tensors",
    "kept",
    "loadable",
    "observe",
    "only_in",
    "with_aliases",
]

HELD, MULTIPLIED = "held", "multiplied"
UNSEEN = "on the meta device, without elements"


class Seen(NamedTuple):
    """A parameter in one of the forms in which an engine has the parameter.

    If `way` is `HELD`, `tensor` is the parameter itself. If `way` is `MULTIPLIED`, `tensor` is the
    tensor by which a kernel multiplies. The digest of the form `MULTIPLIED` ignores subnormal
    numbers and the sign of zeros.
    """

    way: str
    tensor: Tensor


Look = Callable[[str], Sequence[Seen] | str]
"""Returns all forms in which an engine has a parameter, or why the engine cannot show it."""


class Form(NamedTuple):
    """A box of a sent tensor in one form. If `dtype` is "", `way` says why the box is not shown."""

    box: Shard
    way: str
    dtype: str
    digest: str


@dataclass(frozen=True)
class Observed:
    """Digests of the tensors in one engine process.

    Attributes:
        plan: the fingerprint of the plan.
        reader: the number of this process's reader in the plan.
        forms: a row for each `Copy` in this reader's buckets. A row has a `Form` for each part of
            the `Copy`'s box that this process stores, and for each form of this part.
        unexpected: parameters that this reader does not receive. With `convert`, parameters that
            are not in `convert.targets`.
        absent: wanted tensors with a dim of size 0 that are missing here, or have another shape.
    """

    plan: str
    reader: int
    forms: tuple[tuple[Form, ...], ...]
    unexpected: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        rows = [[[f.box.offsets, f.box.sizes, *f[1:]] for f in row] for row in self.forms]
        return {**vars(self), "forms": rows}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Observed:
        """Return what `to_json` made, or raise PlanError."""
        with as_plan_error("an observation"):
            forms = tuple(
                tuple(Form(box_of(at, size), *map(str, rest)) for at, size, *rest in row)
                for row in raw["forms"]
            )
            for dtype in {form.dtype for row in forms for form in row if form.dtype}:
                torch.empty(0, dtype=getattr(torch, dtype))  # Fails for other names.
            unexpected, absent = (tuple(map(str, raw[key])) for key in ("unexpected", "absent"))
            return cls(str(raw["plan"]), int(raw["reader"]), forms, unexpected, absent)

    def check(self, plan: Plan) -> None:
        """Raise PlanError unless `observe` made this with `plan`, with a row for each `Copy`."""
        if self.plan == plan.fingerprint():
            plan.check_reader(self.reader)
            copies = [c for i in plan.of_reader(self.reader) for c in plan.buckets[i].copies]
            if len(copies) == len(self.forms) and all(
                len(form.box.sizes) == len(copy.box.sizes)
                for row, copy in zip(self.forms, copies, strict=True)
                for form in row
            ):
                return
        raise PlanError(
            f"reader {self.reader} was observed with plan {self.plan}, in {len(self.forms)} "
            f"copies. This plan, {plan.fingerprint()}, has other copies. Attach the engine again "
            "with this plan."
        )


def observe(
    plan: Plan,
    held: NamedTensors | Look,
    *,
    reader: int = 0,
    convert: Wiring | None = None,
    lost: Mapping[str, str] | None = None,
) -> Observed:
    """Digest an engine's tensors, in the boxes of a plan. Local: one pass.

    Args:
        held: the engine's tensors, by the names that `load` gets. With `convert`, these are the
            names of the wiring's targets. Or a `Look`, which looks up one tensor by name.
        convert: the wiring to this process's parameters. Boxes that the wiring does not contain
            belong to other processes.
        lost: as in `Reads`.

    Raises:
        PlanError: the plan has no such reader.
    """
    plan.check_reader(reader)
    extra: tuple[str, ...] = ()
    whole = {name: boxes[0].sizes for name, boxes in plan.wants[reader].items()}
    if convert is not None:
        whole = {name: spec.shape for name, spec in convert.targets.items()}
    if isinstance(held, nn.Module) or not callable(held):
        held, extra = _look_into(held, whole)
    absent = tuple(
        name
        for name, shape in whole.items()
        if 0 in shape and shape not in {one[1].shape for one in held(name) if isinstance(one, Seen)}
    )
    forms: list[tuple[Form, ...]] = []
    for index in plan.of_reader(reader):
        for name, box, *_ in plan.buckets[index].copies:
            if lost and name in lost:
                forms.append((Form(box, lost[name], "", ""),))
                continue
            if convert is None:
                want = plan.wants[reader][name][0]  # The tensor here is only this box.
                pieces = [replace(in_place(name, want), target_box=Layout.whole(want.sizes).shard)]
            else:
                pieces = convert.by_source.get(name, [])
            parts = [part for piece in pieces if (part := piece.from_source(box)) is not None]
            forms.append(tuple(f for part in parts for f in _forms(part, held, whole[part.target])))
    return Observed(plan.fingerprint(), reader, tuple(forms), extra, absent)


def digest_tensors(tensors: NamedTensors) -> Digests:
    """Return the dtype and shape of each tensor, and the digest of its bytes. Local.

    Raises:
        PlanError: a tensor is on the meta device, or `tensors` is not tensors by name.
    """
    found = {}
    for name, tensor in named_tensors(tensors).items():
        mine = local_part(tensor.detach())
        if mine.is_meta:
            raise PlanError(
                f"{name!r} is on the meta device and has no elements. Load its weights."
            )
        found[name] = f"{mine.dtype} {tuple(mine.shape)}", digest_form(HELD, mine)
    return found


def are_digests(held: object) -> TypeGuard[Digests]:
    """Whether a value is a result of `digest_tensors`, or was read from its JSON."""
    rows = held.values() if isinstance(held, Mapping) else ()
    return bool(rows) and all(
        isinstance(row, tuple | list) and row and all(isinstance(one, str) for one in row)
        for row in rows
    )


def loadable(name: str, tensor: Tensor) -> tuple[Sequence[str], ...]:
    """Return the digests that a tensor may have in an engine after a load. Local: one pass each.

    An engine has a tensor as `load` was given it. It may store a tensor of `NEVER_ROUNDED` in any
    dtype of `FLOATS`.
    """
    may_convert = name.endswith(NEVER_ROUNDED) and tensor.dtype in FLOATS
    forms = map(tensor.to, FLOATS) if may_convert else [tensor]
    return tuple(digest_tensors({name: form})[name] for form in forms)


def kept(given: Mapping[str, Container[Sequence[str]]], held: NamedTensors) -> Digests:
    """Return the digests of an engine's tensors after a load.

    Args:
        given: the result of `loadable` for each tensor that `load` was given.

    Raises:
        TransferError: a tensor differs from what `load` was given.
    """
    tensors = named_tensors(held)
    seen = digest_tensors({name: tensors[name] for name in given if name in tensors})
    if lost := [name for name in given if name not in seen or seen[name] not in given[name]]:
        some = ", ".join(map(repr, lost[:3]))
        raise TransferError(
            f"{len(lost)} of {len(given)} tensors, such as {some}, are missing in the engine or "
            "differ from the tensors that load got. Check load= and observe=."
        )
    return seen


def digest_form(way: str, tensor: Tensor) -> str:
    """Return the digest of a tensor in one form (see `Seen`). Local."""
    tensor = tensor.detach().cpu().contiguous()
    if way == MULTIPLIED:
        tensor = torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0, tensor)
    return xxhash.xxh3_64_hexdigest(as_buffer(tensor))


def with_aliases(source: NamedTensors) -> dict[str, Tensor]:
    """Return tensors by name. A module's tied tensors appear under each of their names. Local."""
    tensors = named_tensors(source)
    if isinstance(source, nn.Module):
        owners, known = dict(source.named_modules()), set(map(id, tensors.values()))
        for named in (source.named_parameters, source.named_buffers):
            tied = ((unwrapped(n, owners), one) for n, one in named(remove_duplicate=False))
            tensors |= {name: one for name, one in tied if id(one) in known}
    return tensors


def only_in(some: NamedTensors | Digests, known: Container[str]) -> dict[str, str]:
    """Return the shapes of tensors that are not in `known`, nor tied to a tensor in `known`."""
    if are_digests(some):
        return {name: row[0] for name, row in some.items() if name not in known}
    tensors = cast(NamedTensors, some)
    tied = {_place(one) for name, one in with_aliases(tensors).items() if name in known} - {None}
    return {
        name: str(tuple(one.shape))
        for name, one in named_tensors(tensors).items()
        if name not in known and _place(one) not in tied
    }


def _place(tensor: Tensor) -> object:
    mine = local_part(tensor.detach())
    if mine.is_meta or not mine.numel():
        return None
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()


def _look_into(held: NamedTensors, known: Container[str]) -> tuple[Look, tuple[str, ...]]:
    if not isinstance(held, nn.Module):
        held = named_tensors(held)  # An iterator can be read only once.
    tensors = {name: local_part(one.detach()) for name, one in with_aliases(held).items()}

    def look(name: str) -> Sequence[Seen] | str:
        if name not in tensors:
            return []
        one = tensors[name]
        return UNSEEN if one.is_meta else [Seen(HELD, one)]

    return look, tuple(only_in(held, known))


def _forms(part: Piece, look: Look, shape: tuple[int, ...]) -> Iterator[Form]:
    found = look(part.target)
    if isinstance(found, str):
        yield Form(part.source_box, found, "", "")
        return
    for way, tensor in found:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) == shape:
            view = part.inverse().view(tensor, Layout.whole(shape).shard)
            yield Form(part.source_box, way, dtype, digest_form(way, view))
        else:
            yield Form(part.source_box, f"{tuple(tensor.shape)}, not {shape}", dtype, "")

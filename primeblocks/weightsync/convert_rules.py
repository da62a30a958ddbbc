"""Rules that rename and reshape named tensors and touch no element. Pure.

Names are templates: `{layer}` stands for one part of a name, between dots, `{*head}` for any number
of parts. The same fields stand on both sides, so every rule can be turned around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, TypeVar

import torch

from ..errors import PlanError
from ..layout import Layout, Shard
from .manifest import TensorSpec
from .pieces import NEW, Piece

__all__ = [
    "Rule",
    "crop",
    "drop",
    "fuse",
    "pad",
    "rename",
    "split",
    "stack",
    "transpose",
    "unstack",
]

Shape = tuple[int, ...]
_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Cut:
    """A part of one tensor: its template, its number, its box in the whole, and its dims there."""

    template: int
    number: int
    box: Shard
    dims: Shape

    @property
    def shape(self) -> Shape:
        return tuple(1 if dim == NEW else self.box.sizes[dim] for dim in self.dims)


class Form(Protocol):
    """How one tensor falls into parts, and how long it is if these are the parts."""

    def cuts(self, shape: Shape) -> list[Cut]: ...
    def whole(self, parts: Sequence[Shape]) -> Shape: ...


@dataclass(frozen=True)
class Straight:
    """One part, the whole, its dims in another order (`()` keeps the order)."""

    dims: Shape = ()

    def cuts(self, shape: Shape) -> list[Cut]:
        if self.dims and len(shape) != len(self.dims):
            raise PlanError(f"dims {self.dims} of a transpose do not fit shape {shape}")
        return [Cut(0, 0, _box(shape), self.dims or tuple(range(len(shape))))]

    def whole(self, parts: Sequence[Shape]) -> Shape:
        return tuple(parts[0][self.dims.index(d)] for d in range(len(self.dims))) or parts[0]


@dataclass(frozen=True)
class Sections:
    """One part after the other along `dim`, in proportion to `parts`."""

    dim: int
    parts: tuple[int, ...]

    def cuts(self, shape: Shape) -> list[Cut]:
        size, total = _size(shape, self.dim), sum(self.parts)
        if size % total:
            raise PlanError(
                f"dim {self.dim} of {shape} does not divide into {self.parts}: "
                f"{size} is no multiple of {total}. Give the lengths as parts=."
            )
        starts = [sum(self.parts[:i]) * size // total for i in range(len(self.parts))]
        return [
            Cut(i, 0, _box(shape, self.dim, start, part * size // total), _straight(shape))
            for i, (start, part) in enumerate(zip(starts, self.parts, strict=True))
        ]

    def whole(self, parts: Sequence[Shape]) -> Shape:
        return _with(parts[0], self.dim, sum(_size(part, self.dim) for part in parts))


@dataclass(frozen=True)
class Numbered:
    """As many parts as `dim` is long, without that dim."""

    dim: int

    def cuts(self, shape: Shape) -> list[Cut]:
        dims = tuple(dim for dim in range(len(shape)) if dim != self.dim)
        count = _size(shape, self.dim)
        return [Cut(0, i, _box(shape, self.dim, i, 1), dims) for i in range(count)]

    def whole(self, parts: Sequence[Shape]) -> Shape:
        return (*parts[0][: self.dim], len(parts), *parts[0][self.dim :])


@dataclass(frozen=True)
class Window:
    """One part: of `padded` elements along `dim`, the `size` that begin at `at`."""

    dim: int
    size: int
    padded: int
    at: int

    def cuts(self, shape: Shape) -> list[Cut]:
        if _size(shape, self.dim) != self.padded:
            raise PlanError(f"dim {self.dim} of {shape} is not {self.padded} long")
        return [Cut(0, 0, _box(shape, self.dim, self.at, self.size), _straight(shape))]

    def whole(self, parts: Sequence[Shape]) -> Shape:
        return _with(parts[0], self.dim, self.padded)


@dataclass(frozen=True)
class Gone:
    """No part at all."""

    def cuts(self, shape: Shape) -> list[Cut]:
        return []

    def whole(self, parts: Sequence[Shape]) -> Shape:
        raise AssertionError("nothing is made of no parts")


@dataclass(frozen=True)
class Rule:
    """One step of a conversion: `one` tensor becomes `many`, or backwards. Made by functions.

    A rule that finds no tensor to work on is refused, unless it is `optional`.
    """

    one: str
    many: tuple[str, ...]
    form: Form
    index: str = ""
    backwards: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        for template in self.many:
            if set(_parsed(template)[1]) - {self.index} != set(_parsed(self.one)[1]):
                raise PlanError(f"{self.one!r} and {template!r} need the same fields")
            if self.index and self.index not in _parsed(template)[1]:
                raise PlanError(f"{template!r} lacks the field {{{self.index}}}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Templates of the names that it takes."""
        return self.many if self.backwards else (self.one,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Templates of the names that it makes."""
        return (self.one,) if self.backwards else self.many

    def inverse(self) -> Rule:
        """The rule that undoes this one. What was dropped stays away."""
        if isinstance(self.form, Gone):
            return replace(self, optional=True)
        return replace(self, backwards=not self.backwards)

    def step(self, specs: Mapping[str, TensorSpec]) -> tuple[list[Piece], dict[str, TensorSpec]]:
        """What becomes of tensors: the pieces that move, and all tensors afterwards.

        Raises:
            PlanError: no name matches, names collide, or sizes do not fit.
        """
        matches = {name: fields for name in specs if (fields := _match(self.reads, name))}
        if not matches and not self.optional:
            raise PlanError(
                f"{' or '.join(self.reads)} matches none of {len(specs)} names, such as "
                f"{', '.join(sorted(specs)[:3])}. Correct the template, or give optional=True."
            )
        after = {name: spec for name, spec in specs.items() if name not in matches}
        for name in after:
            if _match(self.writes, name):
                raise PlanError(
                    f"{name!r} is there already and looks as if {' or '.join(self.reads)} had "
                    "made it; the way back would change it. Use a narrower template."
                )
        build = self._join if self.backwards else self._cut
        pieces = []
        for name, spec, moves in build(matches, specs):
            if name in after:
                raise PlanError(f"two tensors would both be named {name!r}. Use a field for each.")
            after[name] = spec
            pieces += moves
        return pieces, after

    def _cut(self, matches: _Matches, specs: Mapping[str, TensorSpec]) -> Iterator[_New]:
        for name, fields in matches.items():
            for part in _about(name, self.form.cuts, specs[name].shape):
                target = self._name(part, fields)
                piece = Piece(name, part.box, target, _box(part.shape), part.dims)
                yield target, _spec(specs[name].dtype, part.shape), [piece]

    def _join(self, matches: _Matches, specs: Mapping[str, TensorSpec]) -> Iterator[_New]:
        groups: dict[str, list[str]] = {}
        for name, fields in matches.items():
            groups.setdefault(_fill(self.one, fields), []).append(name)
        for one, members in groups.items():
            dtypes = {specs[name].dtype for name in members}
            if len(dtypes) > 1:
                kinds = ", ".join(sorted(map(str, dtypes)))
                raise PlanError(f"{one!r} would mix {kinds}. Describe them with one dtype.")
            shapes = {name: specs[name].shape for name in members}
            shape = _about(one, self.form.whole, list(shapes.values()))
            parts = {
                self._name(part, matches[members[0]]): part
                for part in _about(one, self.form.cuts, shape)
            }
            _check_parts(one, {name: part.shape for name, part in parts.items()}, shapes)
            pieces = [
                Piece(one, part.box, name, _box(part.shape), part.dims).inverse()
                for name, part in parts.items()
            ]
            yield one, _spec(dtypes.pop(), shape), pieces

    def _name(self, part: Cut, fields: Mapping[str, str]) -> str:
        return _fill(self.many[part.template], {**fields, self.index: str(part.number)})


# What became of one name: the new name, its shape, what fills it.
_New = tuple[str, TensorSpec, list[Piece]]
# Name -> what the fields of the template stand for.
_Matches = Mapping[str, Mapping[str, str]]


def rename(source: str, target: str, *, optional: bool = False) -> Rule:
    """The same tensor under another name."""
    return Rule(source, (target,), Straight(), optional=optional)


def transpose(names: str, dims: tuple[int, ...], *, optional: bool = False) -> Rule:
    """Dim `i` of the result is dim `dims[i]` of what was there."""
    if sorted(dims) != list(range(len(dims))):
        raise PlanError(f"dims of a transpose are 0 to n-1 in some order; got {dims}")
    return Rule(names, (names,), Straight(dims), optional=optional)


def split(
    source: str,
    targets: Sequence[str],
    *,
    dim: int = 0,
    parts: Sequence[int] = (),
    optional: bool = False,
) -> Rule:
    """One tensor becomes several, cut along `dim`.

    Args:
        parts: lengths or proportions, such as the numbers of query, key and value heads; equal
            parts where none are given.
    """
    parts = tuple(parts) or (1,) * len(targets)
    if len(parts) != len(targets) or min(parts, default=0) < 1:
        raise PlanError(f"parts need a positive number for each of {tuple(targets)}; got {parts}")
    return Rule(source, tuple(targets), Sections(dim, parts), optional=optional)


def fuse(
    sources: Sequence[str],
    target: str,
    *,
    dim: int = 0,
    parts: Sequence[int] = (),
    optional: bool = False,
) -> Rule:
    """Several tensors become one, side by side along `dim`; the inverse of `split`."""
    return split(target, sources, dim=dim, parts=parts, optional=optional).inverse()


def unstack(source: str, target: str, *, index: str, dim: int = 0, optional: bool = False) -> Rule:
    """One tensor becomes as many as `dim` is long, numbered from 0 by the field `index`."""
    return Rule(source, (target,), Numbered(dim), index=index, optional=optional)


def stack(source: str, target: str, *, index: str, dim: int = 0, optional: bool = False) -> Rule:
    """Tensors numbered by the field `index` become one; the inverse of `unstack`."""
    return unstack(target, source, index=index, dim=dim, optional=optional).inverse()


def crop(
    names: str, *, dim: int, size: int, padded: int, at: int = 0, optional: bool = False
) -> Rule:
    """Of `padded` elements along `dim`, keep the `size` that begin at `at`."""
    if not 0 <= at <= at + size <= padded:
        raise PlanError(f"{size} elements from {at} on do not fit into {padded}")
    return Rule(names, (names,), Window(dim, size, padded, at), optional=optional)


def pad(
    names: str, *, dim: int, size: int, padded: int, at: int = 0, optional: bool = False
) -> Rule:
    """Place `size` elements among `padded`, from `at` on; the inverse of `crop`.

    For a padded vocabulary, and for a tensor that is one rank's part of a larger one.
    """
    return crop(names, dim=dim, size=size, padded=padded, at=at, optional=optional).inverse()


def drop(names: str, *, optional: bool = False) -> Rule:
    """Leave tensors out. The conversion lists them; its inverse does not bring them back."""
    return Rule(names, (), Gone(), optional=optional)


@cache
def _parsed(template: str) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """The pattern of a template, its fields, and the text around them."""
    text = re.split(r"\{(\*?\w+)\}", template)
    fields = tuple(field.removeprefix("*") for field in text[1::2])
    if len(set(fields)) != len(fields):
        raise PlanError(f"a field stands twice in {template!r}")
    pattern = re.escape(text[0])
    for field, after in zip(text[1::2], text[2::2], strict=True):
        one = ".+" if field.startswith("*") else r"[^.]+"
        pattern += f"(?P<{field.removeprefix('*')}>{one}){re.escape(after)}"
    return re.compile(pattern), fields, tuple(text[::2])


def _match(templates: Iterable[str], name: str) -> dict[str, str] | None:
    """What the fields stand for in the first template that fits."""
    for template in templates:
        found = _parsed(template)[0].fullmatch(name)
        if found:
            # Never empty, and so true: a name without fields still matches.
            return {"": "", **found.groupdict()}
    return None


def _fill(template: str, fields: Mapping[str, str]) -> str:
    _, names, text = _parsed(template)
    return text[0] + "".join(
        fields[name] + after for name, after in zip(names, text[1:], strict=True)
    )


def _about(name: str, function: Callable[[_A], _B], argument: _A) -> _B:
    try:
        return function(argument)
    except PlanError as error:
        raise PlanError(f"{name!r}: {error}") from None


def _check_parts(one: str, wanted: Mapping[str, Shape], got: Mapping[str, Shape]) -> None:
    if wanted == got:
        return
    missing = [name for name in wanted if name not in got]
    if missing:
        raise PlanError(
            f"{one!r} is made of {len(wanted)} tensors; {len(missing)} are missing, first "
            f"{missing[0]!r}. There are {', '.join(sorted(got)[:3])}. Bind all ranks' manifests."
        )
    odd = next(name for name in got if got[name] != wanted.get(name))
    raise PlanError(
        f"{one!r} needs {odd!r} of shape {wanted.get(odd)}; got {got[odd]}, beside "
        f"{[got[name] for name in sorted(got)[:4]]}. Give the lengths as parts=, or stack alike."
    )


def _size(shape: Shape, dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise PlanError(f"shape {shape} has no dim {dim}")
    return shape[dim]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    _size(shape, dim)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _straight(shape: Shape) -> Shape:
    return tuple(range(len(shape)))


def _box(shape: Shape, dim: int = 0, start: int = 0, size: int | None = None) -> Shard:
    """All of a shape, or `size` elements of a dim."""
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Shard(offsets, shape if size is None else _with(shape, dim, size))


def _spec(dtype: torch.dtype, shape: Shape) -> TensorSpec:
    return TensorSpec(dtype, Layout.whole(shape))

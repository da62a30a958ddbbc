"""Rules that rename and reshape named tensors and touch no element. Pure.

Names are templates: `{layer}` stands for one part of a name, between dots, `{*head}` for any number
of parts. The same fields stand on both sides, so every rule can be turned around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ...errors import PlanError
from ...layout import Layout
from ..manifest import TensorSpec
from .forms import (
    Cut,
    Form,
    Gone,
    Numbered,
    Rounded,
    Sections,
    Shape,
    Share,
    Straight,
    Window,
    box_of,
)
from .names import fields_of, fill, match
from .pieces import Piece

__all__ = [
    "Rule",
    "crop",
    "drop",
    "fuse",
    "pad",
    "rename",
    "round_up",
    "share",
    "split",
    "stack",
    "transpose",
    "unstack",
]

_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Rule:
    """One step of a conversion: `one` tensor becomes `many`, or the reverse. Made by functions.

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
            if fields_of(template) - {self.index} != fields_of(self.one):
                raise PlanError(f"{self.one!r} and {template!r} need the same fields")
            if self.index and self.index not in fields_of(template):
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
        """Return the rule that undoes this one. Dropped tensors do not come back."""
        if isinstance(self.form, Gone):
            return replace(self, optional=True)
        return replace(self, backwards=not self.backwards)

    def step(self, specs: Mapping[str, TensorSpec]) -> tuple[list[Piece], dict[str, TensorSpec]]:
        """Apply the rule: return the pieces that move, and all tensors afterwards.

        Raises:
            PlanError: no name matches, names collide, or sizes do not fit.
        """
        found = {name: fields for name in specs if (fields := match(self.reads, name)) is not None}
        if not found and not self.optional:
            raise PlanError(
                f"{' or '.join(self.reads)} matches none of {len(specs)} names, such as "
                f"{', '.join(sorted(specs)[:3])}. Correct the template, or give optional=True."
            )
        after = {name: spec for name, spec in specs.items() if name not in found}
        for name in after:
            if match(self.writes, name) is not None:
                raise PlanError(
                    f"{name!r} is there already and looks as if {' or '.join(self.reads)} had "
                    "made it: the way back would change it. Use a narrower template."
                )
        pieces = []
        for name, spec, moves in (self._join if self.backwards else self._cut)(found, specs):
            if name in after:
                raise PlanError(f"two tensors would both be named {name!r}. Use a field for each.")
            after[name] = spec
            pieces += moves
        return pieces, after

    def _cut(self, found: _Found, specs: Mapping[str, TensorSpec]) -> Iterator[_New]:
        for name, fields in found.items():
            for part in _about(name, self.form.cuts, specs[name].shape):
                target = self._name(part, fields)
                back = match((self.many[part.template],), target)
                if back is None or fill(self.one, back) != name:
                    raise PlanError(
                        f"{name!r} becomes {target!r}, which does not lead back. Use other fields."
                    )
                piece = Piece(name, part.box, target, box_of(part.shape), part.dims)
                yield target, _spec(specs[name].dtype, part.shape), [piece]

    def _join(self, found: _Found, specs: Mapping[str, TensorSpec]) -> Iterator[_New]:
        groups: dict[str, list[str]] = {}
        for template in self.many:
            for name in found:
                fields = match((template,), name)
                if fields is not None:
                    groups.setdefault(fill(self.one, fields), []).append(name)
        for one, members in groups.items():
            dtypes = {specs[name].dtype for name in members}
            if len(dtypes) > 1:
                kinds = ", ".join(sorted(map(str, dtypes)))
                raise PlanError(f"{one!r} would mix {kinds}. Describe them with one dtype.")
            shapes = {name: specs[name].shape for name in members}
            if not self.index and len(members) != len(self.many):
                wanted = {fill(name, found[members[0]]): () for name in self.many}
                _check_parts(one, wanted, shapes)
            shape, form = _about(one, self.form.whole, list(shapes.values()))
            parts = {self._name(p, found[members[0]]): p for p in _about(one, form.cuts, shape)}
            _check_parts(one, {name: part.shape for name, part in parts.items()}, shapes)
            pieces = [
                Piece(one, part.box, name, box_of(part.shape), part.dims).inverse()
                for name, part in parts.items()
            ]
            yield one, _spec(dtypes.pop(), shape), pieces

    def _name(self, part: Cut, fields: Mapping[str, str]) -> str:
        return fill(self.many[part.template], {**fields, self.index: str(part.number)})


# What became of one name: the new name, its shape, what fills it.
_New = tuple[str, TensorSpec, list[Piece]]
# Name -> what the fields of its template stand for.
_Found = Mapping[str, Mapping[str, str]]


def rename(source: str, target: str, *, optional: bool = False) -> Rule:
    """Give a tensor another name."""
    return Rule(source, (target,), Straight(), optional=optional)


def transpose(names: str, dims: tuple[int, ...], *, optional: bool = False) -> Rule:
    """Reorder dims: dim `i` of the result is dim `dims[i]` of what was there."""
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
    """Cut one tensor into several along `dim`.

    Args:
        parts: lengths or proportions, such as the numbers of query, key and value heads; equal
            parts where none are given.
    """
    lengths = tuple(parts) or (1,) * len(targets)
    if len(lengths) != len(targets) or min(lengths, default=0) < 1:
        raise PlanError(f"needs a positive part for each of {tuple(targets)}; got parts={lengths}")
    return Rule(source, tuple(targets), Sections(dim, lengths), optional=optional)


def fuse(
    sources: Sequence[str],
    target: str,
    *,
    dim: int = 0,
    parts: Sequence[int] | None = (),
    optional: bool = False,
) -> Rule:
    """Join several tensors into one, side by side along `dim`; the inverse of `split`.

    Args:
        parts: as for `split`, and checked; None takes the lengths as they come, and then this rule
            cannot be bound backwards: the way back is `Wiring.inverse()`.
    """
    if parts is None:
        form = Sections(dim, None)
        return Rule(target, tuple(sources), form, backwards=True, optional=optional)
    return split(target, sources, dim=dim, parts=parts, optional=optional).inverse()


def unstack(source: str, target: str, *, index: str, dim: int = 0, optional: bool = False) -> Rule:
    """Cut one tensor into as many as `dim` is long, numbered from 0 by the field `index`."""
    return Rule(source, (target,), Numbered(dim), index=index, optional=optional)


def stack(source: str, target: str, *, index: str, dim: int = 0, optional: bool = False) -> Rule:
    """Join tensors numbered by the field `index` into one; the inverse of `unstack`."""
    return unstack(target, source, index=index, dim=dim, optional=optional).inverse()


def crop(
    names: str, *, dim: int, size: int, padded: int, at: int = 0, optional: bool = False
) -> Rule:
    """Keep the `size` elements that begin at `at`, of `padded` along `dim`."""
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


def share(names: str, *, dim: int, rank: int, ranks: int, optional: bool = False) -> Rule:
    """Keep the part of one rank, where `dim` is dealt out evenly to `ranks`."""
    if not 0 <= rank < ranks:
        raise PlanError(f"rank must be 0 to {ranks - 1}; got {rank}")
    return Rule(names, (names,), Share(dim, rank, ranks), optional=optional)


def round_up(names: str, *, dim: int, multiple: int, optional: bool = False) -> Rule:
    """Pad `dim` to a multiple. It cannot be bound backwards: see `Wiring.inverse()`."""
    if multiple < 1:
        raise PlanError(f"multiple must be positive; got {multiple}")
    return Rule(names, (names,), Rounded(dim, multiple), backwards=True, optional=optional)


def drop(names: str, *, optional: bool = False) -> Rule:
    """Leave tensors out. The conversion lists them; its inverse does not bring them back."""
    return Rule(names, (), Gone(), optional=optional)


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


def _spec(dtype: torch.dtype, shape: Shape) -> TensorSpec:
    return TensorSpec(dtype, Layout.whole(shape))

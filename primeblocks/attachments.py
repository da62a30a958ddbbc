"""Values that travel with a rollout's tokens, are cut where tokens are cut, and joined likewise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ShapeError

__all__ = [
    "Aligned",
    "check_inside",
    "common_tokens",
    "cut_attachments",
    "join_attachments",
    "join_rows",
    "nbytes_of",
    "parts",
    "whole",
]


@dataclass(frozen=True, eq=False)
class Aligned:
    """A value that belongs to tokens `[start, stop)`, counted from the first of the prompt.

    Args:
        value: anything. It stays whole, an image for instance: tokens are not cut inside of it.
        by_token: the value has a row for each of the tokens, routes for instance, and is cut with
            them: an array of numpy, or a tensor.

    Raises:
        ShapeError: the range is empty or begins before 0, or rows and tokens differ in number.
    """

    value: Any
    start: int
    stop: int
    by_token: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ShapeError(f"a value belongs to some tokens; got [{self.start}, {self.stop})")
        if self.by_token and len(self.value) != self.stop - self.start:
            raise ShapeError(
                f"tokens [{self.start}, {self.stop}) need a row each, {self.stop - self.start}; "
                f"got {len(self.value)}"
            )

    @classmethod
    def rows(cls, value: Any, *, start: int = 0) -> Aligned:
        """Return an array or a tensor whose rows belong to the tokens from `start` on."""
        return cls(value, start, start + len(value), by_token=True)

    @property
    def nbytes(self) -> int:
        """Memory of the value, in bytes; of one that tells none, 64."""
        return nbytes_of([self.value])

    def before(self, stop: int) -> Aligned | None:
        """Return the part that belongs to tokens before `stop`: a view, all of it, or None."""
        if self.stop <= stop:
            return self
        if not self.by_token or stop <= self.start:
            return None
        return Aligned(self.value[: stop - self.start], self.start, stop, by_token=True)


def whole(attachments: Mapping[str, Any]) -> Iterable[Aligned]:
    """Return the values that cannot be cut."""
    return (
        each
        for value in attachments.values()
        for each in parts(value)
        if isinstance(each, Aligned) and not each.by_token
    )


def check_inside(attachments: Mapping[str, Any], length: int) -> None:
    """Raise ShapeError if a value belongs to tokens from `length` on."""
    for name, value in attachments.items():
        for each in parts(value):
            if isinstance(each, Aligned) and each.stop > length:
                raise ShapeError(
                    f"{name!r} belongs to tokens [{each.start}, {each.stop}) of {length}"
                )


def cut_attachments(attachments: Mapping[str, Any], stop: int) -> dict[str, Any]:
    """Return what belongs to the tokens before `stop`, and what belongs to none in particular."""
    kept = {}
    for name, value in attachments.items():
        before = [x.before(stop) if isinstance(x, Aligned) else x for x in parts(value)]
        left = tuple(x for x in before if x is not None)
        if isinstance(value, tuple) or left:
            kept[name] = left if isinstance(value, tuple) else left[0]
    return kept


def common_tokens(held: Mapping[str, Any], new: Mapping[str, Any], length: int) -> int:
    """Return how many of the first `length` tokens have the same whole values on both sides.

    An image may change under tokens that stay. Where `new` has none it is taken to be the same;
    others are compared, of one object at once.
    """
    for name, value in new.items():
        known = {(x.start, x.stop): x for x in parts(held.get(name)) if isinstance(x, Aligned)}
        for each in parts(value):
            if isinstance(each, Aligned) and not each.by_token and each.start < length:
                same = known.get((each.start, each.stop))
                if same is None or not _equal(same.value, each.value):
                    length = each.start
    return length


def join_attachments(held: Mapping[str, Any], new: Mapping[str, Any], length: int) -> dict:
    """Return the attachments of a trajectory of `length` tokens and of what came after it.

    Both count tokens from the first of the prompt. Aligned values make a tuple, to which those of
    tokens that are new are added: of rows a copy of what is new. Others replace.

    Raises:
        ShapeError: new rows leave a gap behind those that are held.
    """
    joined = dict(held)
    for name, value in new.items():
        placed = [x for x in parts(value) if isinstance(x, Aligned)]
        for each in placed:
            before = joined.get(name, ())
            if each.by_token:
                joined[name] = (*before, *_rest(before, each, name))
            else:
                joined[name] = (*before, each) if each.start >= length else before
        if not placed:  # An empty tuple says that none are new.
            joined[name] = value if parts(value) else held.get(name, value)
    return joined


def join_rows(attachments: Mapping[str, Any]) -> dict[str, Any]:
    """Return attachments in which rows that were added one after the other are one value."""
    return {
        name: _joined(value)
        if isinstance(value, tuple) and any(getattr(x, "by_token", False) for x in value)
        else value
        for name, value in attachments.items()
    }


def nbytes_of(values: Iterable[Any]) -> int:
    """Return the memory of values, in bytes; of one that tells none, 64."""
    return sum(
        len(x)
        if isinstance(x, bytes)
        else nbytes_of(x)
        if isinstance(x, tuple | list)
        else nbytes_of(x.values())
        if isinstance(x, Mapping)
        else getattr(x, "nbytes", 64)
        for x in values
    )


def parts(value: Any) -> tuple[Any, ...]:
    """Return what an attachment is made of: the values of a tuple, or itself."""
    return value if isinstance(value, tuple) else (value,)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "dtype"):  # Arrays and tensors say it of each element.
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bool((one == other).all())
    return bool(one == other)


def _rest(held: tuple[Aligned, ...], new: Aligned, name: str) -> tuple[Aligned, ...]:
    """Return a copy of the rows behind those that are held."""
    stop = held[-1].stop if held else new.start
    if new.start > stop:
        raise ShapeError(
            f"{name!r} has rows up to token {stop} and from {new.start} on: those of "
            f"{new.start - stop} tokens between are missing. Ask the engine for them."
        )
    if new.stop <= stop:
        return ()
    rows = new.value[stop - new.start :]
    return (
        Aligned.rows(rows.copy() if isinstance(rows, np.ndarray) else rows.clone(), start=stop),
    )


def _joined(rows: tuple[Aligned, ...]) -> Aligned:
    values = [each.value for each in rows]
    if isinstance(values[0], np.ndarray):
        return Aligned.rows(np.concatenate(values), start=rows[0].start)
    import torch  # Rollouts of arrays need none.

    return Aligned.rows(torch.cat(values), start=rows[0].start)

"""Values that belong to tokens of a rollout, and are cut and joined together with the tokens."""

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
    """A value that belongs to tokens `[start, stop)`, counted from the first token of the prompt.

    Args:
        value: any object. If `by_token` is False, the value stays whole, as an image does, and the
            library does not cut a rollout between `start` and `stop`.
        by_token: whether `value` has one row per token, such as routes, and is cut with the tokens.
            With `by_token=True`, `value` must be a numpy array or a tensor.

    Raises:
        ShapeError: the range is empty or begins before 0, or `value` does not have one row per
            token.
    """

    value: Any
    start: int
    stop: int
    by_token: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ShapeError(
                "a value must belong to a range of tokens with 0 <= start < stop; got "
                f"[{self.start}, {self.stop})"
            )
        if self.by_token and len(self.value) != self.stop - self.start:
            raise ShapeError(
                f"tokens [{self.start}, {self.stop}) need {self.stop - self.start} rows, one per "
                f"token; got {len(self.value)}"
            )

    @classmethod
    def rows(cls, value: Any, *, start: int = 0) -> Aligned:
        """Return an `Aligned` of one row per token. The first row belongs to token `start`."""
        return cls(value, start, start + len(value), by_token=True)

    @property
    def nbytes(self) -> int:
        """Memory of the value in bytes, computed with `nbytes_of`."""
        return nbytes_of([self.value])

    def before(self, stop: int) -> Aligned | None:
        """Return the part of the value for tokens before `stop`. Rows are not copied.

        If the part is empty, or if a value with `by_token=False` ends after `stop`, return None.
        """
        if self.stop <= stop:
            return self
        if not self.by_token or stop <= self.start:
            return None
        return Aligned(self.value[: stop - self.start], self.start, stop, by_token=True)


def whole(attachments: Mapping[str, Any]) -> Iterable[Aligned]:
    """Return the `Aligned` values with `by_token=False`, which cannot be cut."""
    return (
        each
        for value in attachments.values()
        for each in parts(value)
        if isinstance(each, Aligned) and not each.by_token
    )


def check_inside(attachments: Mapping[str, Any], length: int) -> None:
    """Raise ShapeError if an attachment belongs to a token after the first `length` tokens."""
    for name, value in attachments.items():
        for each in parts(value):
            if isinstance(each, Aligned) and each.stop > length:
                raise ShapeError(
                    f"attachment {name!r} belongs to tokens [{each.start}, {each.stop}), but there "
                    f"are {length} tokens"
                )


def cut_attachments(attachments: Mapping[str, Any], stop: int) -> dict[str, Any]:
    """Return the attachments of the first `stop` tokens.

    Values that are not `Aligned` stay unchanged.
    """
    kept = {}
    for name, value in attachments.items():
        before = [x.before(stop) if isinstance(x, Aligned) else x for x in parts(value)]
        left = tuple(x for x in before if x is not None)
        if isinstance(value, tuple) or left:
            kept[name] = left if isinstance(value, tuple) else left[0]
    return kept


def common_tokens(held: Mapping[str, Any], new: Mapping[str, Any], length: int) -> int:
    """Return the number of leading tokens, at most `length`, before the first unequal image.

    Two images may have the same token ids. Every `Aligned` value with `by_token=False` is compared
    like an image: first by identity, then by content. Values that only `held` contains are ignored.
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
    """Join the attachments `held` of `length` tokens with the attachments `new` of a continuation.

    Token positions in `held` and `new` start at the first token of the prompt. `Aligned` values of
    one name form a tuple, to which values of new tokens are appended. New rows are copied. A value
    of `new` that is not `Aligned` replaces the value in `held`.

    Raises:
        ShapeError: rows in `new` leave a gap after the rows in `held`.
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
        if not placed:  # An empty tuple has no new values.
            joined[name] = value if parts(value) else held.get(name, value)
    return joined


def join_rows(attachments: Mapping[str, Any]) -> dict[str, Any]:
    """Concatenate the rows of each attachment that consists of several parts."""
    return {
        name: _joined(value)
        if isinstance(value, tuple) and any(getattr(x, "by_token", False) for x in value)
        else value
        for name, value in attachments.items()
    }


def nbytes_of(values: Iterable[Any]) -> int:
    """Return the memory of values in bytes.

    A letter of a text counts as one byte, and a value of unknown size as 64 bytes.
    """
    return sum(
        len(x)
        if isinstance(x, bytes | bytearray | str)
        else nbytes_of(x)
        if isinstance(x, tuple | list)
        else nbytes_of(x.values())
        if isinstance(x, Mapping)
        else getattr(x, "nbytes", 64)
        for x in values
    )


def parts(value: Any) -> tuple[Any, ...]:
    """Return `value` if it is a tuple, else a tuple that contains only `value`."""
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
    if hasattr(one, "dtype"):  # Here == compares each element.
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bool((one == other).all())
    return bool(one == other)


def _rest(held: tuple[Aligned, ...], new: Aligned, name: str) -> tuple[Aligned, ...]:
    """Return a copy of the new rows after the held rows."""
    stop = held[-1].stop if held else new.start
    if new.start > stop:
        raise ShapeError(
            f"attachment {name!r} has rows up to token {stop} and from {new.start} on. Rows of "
            f"the {new.start - stop} tokens between are missing. Ask the engine for them."
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
    import torch  # Rollouts of numpy arrays do not need it.

    return Aligned.rows(torch.cat(values), start=rows[0].start)

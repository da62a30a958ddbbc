"""Documents that continue other documents: depths, subtrees, and the tokens that a token sees.

Documents are in preorder: all documents that continue a document, directly or not, come right after
it. The token at place i sees the token at place j exactly if `j <= i < ends[j]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np

from ..errors import PlanError

__all__ = ["Ancestry"]


@dataclass(frozen=True, eq=False)
class Ancestry:
    """The tree of a sequence's documents.

    Attributes:
        parents: for each document the document that it continues, or -1. None if no document
            continues another.
        starts: int64 `[documents + 1]`, the place where each document begins, then the number of
            tokens.
    """

    parents: tuple[int, ...] | None
    starts: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int] | None) -> Ancestry:
        """Return the tree, or raise PlanError for parents of a wrong number or order. Pure."""
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        if parents is None:
            return cls(None, starts)
        given = [*parents] if isinstance(parents, Iterable) else []
        if len(given) != len(lengths) or not all(isinstance(each, Integral) for each in given):
            raise PlanError(
                f"plan_sequence got {len(given)} parents for {len(lengths)} documents. Give one "
                "whole number for each document, -1 for a root."
            )
        path: list[int] = []  # The last document and the documents that it continues.
        for document, parent in enumerate(given):
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise PlanError(
                    f"plan_sequence got parent {parent} for document {document}, which is not in "
                    "preorder. Put each document after its parent, and all descendants of a "
                    "document directly after it. Or pass TreePlan.parents."
                )
            path.append(document)
        known = tuple(int(each) for each in given)
        return cls(known if max(known, default=-1) >= 0 else None, starts)

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 `[tokens]`: the position of each token, counted from its root."""
        lengths = np.diff(self.starts)
        first = np.zeros(len(lengths), np.int64)
        for document, parent in enumerate(self.parents or ()):
            if parent >= 0:
                first[document] = first[parent] + lengths[parent]
        return np.arange(self.starts[-1]) + np.repeat(first - self.starts[:-1], lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 `[tokens]`: the place after the last token that sees each token."""
        ends = self.starts[1:].copy()
        for document, parent in reversed([*enumerate(self.parents or ())]):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[document])
        return np.repeat(ends, np.diff(self.starts))

    def before(self, place: int, *, least: int = 0) -> list[tuple[int, int]]:
        """Return the tokens before `place`, at a depth of `least` or more, that the token at
        `place` sees, as ascending ranges of places. Pure.
        """
        found: list[tuple[int, int]] = []
        # If several documents begin at one place, only the last of them can have tokens.
        document, stop = int(np.searchsorted(self.starts, place, side="right")) - 1, place
        while document >= 0:
            start = int(self.starts[document])
            if start < stop:
                last = int(self.depths[stop - 1])
                if last < least:
                    break
                first = max(start, stop - 1 - last + least)
                if found and found[-1][0] == stop:
                    stop = found.pop()[1]
                found.append((first, stop))
            document = -1 if self.parents is None else self.parents[document]
            stop = int(self.starts[document + 1])
        return found[::-1]

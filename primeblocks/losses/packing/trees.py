"""Trees of rollouts: positions that several rollouts share become one row.

Rollouts are inserted one after the other into a trie whose nodes are ranges of one rollout's
tokens. A rollout follows a node while tokens, values that belong to tokens, and imposed routes
agree. At the first difference the node is cut in two, and the rollout goes on as a new child. The
nodes in preorder are the segments of a `TreePlan`. A segment is followed by its whole subtree, so
row i sees exactly the rows j <= i whose subtree contains row i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...attachments import Aligned, common_tokens
from ...errors import ShapeError, UsageError
from ...rollout import Rollout

__all__ = ["TreePlan", "plan_trees"]

RULES = ("exact", "first", "own")


@dataclass(frozen=True, eq=False)
class TreePlan:
    """The segments of a forest in preorder, and the row of each token of the rollouts.

    Tokens have the order of `pack`: concatenated rollouts, then padding. A position that rollouts
    share is one row. A segment is a range of rows without a fork. For every array `values` with a
    value per token, pass `values[places]` to the model. In the model's output,
    `hidden[rows[packed.predictors]]` predicts `packed.targets`. Each rollout keeps its own
    log-probabilities, versions, masks and advantages, so trees do not change losses or corrections.

    Attributes:
        segment_lengths: the number of rows in each segment, in preorder.
        parents: for each segment, the segment that it continues, or -1 for a root.
        lengths: the number of tokens in each rollout.
        padding: the number of padding tokens after the last rollout. Padding is a separate root.
        rows: int64 `[tokens]`, the row of each token.
        places: int64 `[rows]`, for each row, the index of the token that gives the row its values.
        differing: bool `[rows]`, True for a shared row if its rollouts recorded different routes.
            With `routes="exact"`, all values are False.
    """

    segment_lengths: tuple[int, ...]
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    padding: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    differing: NDArray[np.bool_]

    def __repr__(self) -> str:
        return (
            f"<TreePlan of {len(self.lengths)} rollouts, {len(self.segment_lengths)} segments, "
            f"{len(self.rows)} tokens in {len(self.places)} rows>"
        )

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64 `[rows]`: the depth of each row, which is the row's position in its rollouts."""
        starts = np.cumsum([0, *self.lengths])
        return self.places - starts[np.searchsorted(starts, self.places, side="right") - 1]

    @property
    def pairs(self) -> tuple[int, int]:
        """The number of pairs of a query and a visible key, in separate rollouts and in trees."""
        separate = sum(n * (n + 1) // 2 for n in (*self.lengths, self.padding))
        return separate, int((self.positions + 1).sum())

    def flops(self) -> tuple[float, float]:
        """FLOPs on separate rollouts and on trees, as `sequence_flops` counts them by default."""
        each, pair = 6.0 * 3.3e9, 12.0 * 48 * 4096
        positions = len(self.rows), len(self.places)
        separate, shared = (
            each * n + pair * seen for n, seen in zip(positions, self.pairs, strict=True)
        )
        return separate, shared

    def table(self) -> str:
        """Return a table that compares positions, pairs, FLOPs and bytes of rollouts and trees.

        The bytes are activations for the backward: one hidden state per layer of Qwen3-30B-A3B, in
        bfloat16.
        """
        positions = len(self.rows), len(self.places)
        found = {
            "positions": positions,
            "pairs": self.pairs,
            "FLOPs": self.flops(),
            "bytes": tuple(n * 48 * 2048 * 2 for n in positions),
        }
        lines = [f"{'':<10}{'separate':>12}{'shared':>12}{'ratio':>8}"]
        for name, (before, after) in found.items():
            shown = (f"{x:,}" if x < 1e9 else f"{x:.4g}" for x in (before, after))
            lines.append(f"{name:<10}{'{:>12}{:>12}'.format(*shown)}{before / (after or 1):>8.2f}")
        return "\n".join(lines)

    def held(self, rows: NDArray[np.int64], predictors: NDArray[np.int64]) -> tuple[NDArray, ...]:
        """Return the completion tokens that the rows of one rank predict. Pure.

        Args:
            rows: the rows of this rank, ascending, such as `sequence.indices(rank).numpy()`.
            predictors: `packed.predictors`.

        Returns:
            Two int64 arrays of equal length: the indices of the completion tokens that `rows`
            predict, and for each of these tokens the index in `rows` of its predictor.
        """
        wanted = self.rows[predictors]
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        found = np.searchsorted(rows, wanted).clip(max=len(rows) - 1)
        completions = np.flatnonzero(rows[found] == wanted)
        return completions, found[completions]

    def distinct(
        self, predictors: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the distinct pairs (predicting row, target), and each token's pair. Pure.

        Three arrays: the rows of the pairs, their targets, and the index of each completion token's
        pair. Compute one log-probability per pair. With the third array `pair`, `logprobs[pair]`
        has one value per token. A pair gets the gradients of all rollouts that train it.

        Args:
            predictors: `packed.predictors`.
            targets: `packed.targets`.
        """
        both = np.stack([self.rows[predictors], targets])
        found, pair = np.unique(both, axis=1, return_inverse=True)
        return found[0], found[1], pair.reshape(-1)


def plan_trees(
    rollouts: Sequence[Rollout],
    *,
    routes: str = "exact",
    imposed: Sequence[Any] | None = None,
    per_token: Sequence[str] = (),
    padding: int = 0,
) -> TreePlan:
    """Share the positions that rollouts have in common. Pure.

    By default, rollouts share a row if their tokens and imposed routes agree up to this row. Values
    of a whole range of tokens, such as `Aligned` images, must also agree if the range begins at or
    before this row. Values that belong to a whole rollout are not compared. The comparison usually
    reads each token only a few times.

    Args:
        rollouts: rollouts of one micro-batch or batch, such as all rollouts of a `Conversation`.
        routes: with "exact", rollouts share a row only if their imposed routes agree up to this
            row. With "first" and "own", rollouts also share rows with different routes. With
            "first", a row has the routes of the first rollout that has routes for the row. With
            "own", you must mark the routes of `differing` rows as missing. The trainer then routes.
        imposed: for each rollout an array with a row per token, or None for a rollout without
            routes. An array may lack the row of the last token. For `replay.Routes` pass
            `value.tensor()[0]`. Default: the attachment "routes".
        per_token: names of other attachments that the model reads, with a row per token. Also
            with "first" and "own", rollouts share a row only if these attachments agree up to this
            row.
        padding: the number of padding tokens, such as `packed.padding` of a pack of these rollouts.

    Raises:
        UsageError: `routes` is unknown, an attachment is missing, or routes are bytes.
        ShapeError: an attachment does not have one row per token of its rollout, its dtype or
            trailing dims differ between rollouts, or `imposed` lacks a rollout.
    """
    if routes not in RULES:
        raise UsageError(f"plan_trees got routes={routes!r}; it takes {', '.join(RULES)}.")
    if imposed is not None and len(imposed) != len(rollouts):
        raise ShapeError(
            f"plan_trees got {len(imposed)} entries in imposed= for {len(rollouts)} rollouts. "
            "Pass one array, or None, for each rollout."
        )
    given = [rollout.attachments.get("routes") for rollout in rollouts]
    chosen = _same_kind(given if imposed is None else imposed, rollouts, "routes")
    compared = [chosen] if routes == "exact" else []
    for name in per_token:
        if name == "routes" and imposed is None:
            continue
        lacking = [i for i, each in enumerate(rollouts) if name not in each.attachments]
        if lacking:
            raise UsageError(f"rollouts {lacking[:8]} have no attachment {name!r}.")
        values = [rollout.attachments[name] for rollout in rollouts]
        compared.append(_same_kind(values, rollouts, name))
    trie = _Trie(rollouts, compared)
    for index in range(len(rollouts)):
        trie.insert(index)
    return _planned(trie, chosen, padding, compare=routes != "exact")


@dataclass(eq=False)
class _Node:
    """Tokens `[start, stop)` of a rollout. `ends` lists the rollouts whose last token is in it."""

    rollout: int
    start: int
    stop: int
    parent: _Node | None
    # By first token. Several children may begin with one token if images or routes differ.
    children: dict[int, list[_Node]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    row: int = 0
    rows_below: int = 0  # Including its own.


class _Trie:
    def __init__(self, rollouts: Sequence[Rollout], compared: list[list[NDArray | None]]) -> None:
        self.tokens = [rollout.tokens for rollout in rollouts]
        self.attachments = [rollout.attachments for rollout in rollouts]
        self.compared = compared
        self.root = _Node(-1, 0, 0, None)

    def insert(self, new: int) -> None:
        node, length = self.root, len(self.tokens[new])
        while True:
            # A node ends before the last token of a rollout that goes on below it.
            alike = node.children.setdefault(int(self.tokens[new][node.stop]), [])
            for child in alike:
                stop = self._agree(child, new)
                if stop > child.start:
                    break
            else:
                alike.append(_Node(new, node.stop, length, node, ends=[new]))
                return
            if stop < min(child.stop, length):
                child = self._cut(child, stop)
            elif stop == child.stop and self._completes(child, new):
                child.rollout = new
            if stop == length:
                child.ends.append(new)
                return
            if stop == child.stop and not child.children:  # No fork: the node grows.
                child.rollout, child.stop = new, length
                child.ends.append(new)
                return
            node = child

    def _agree(self, node: _Node, new: int) -> int:
        """Return the position from which a rollout and a node differ."""
        old, start = node.rollout, node.start
        stop = min(node.stop, len(self.tokens[new]))
        one, other = self.tokens[old], self.tokens[new]
        stop = start + _same(one[start:stop], other[start:stop])
        for rows in self.compared:
            stop = _agreed_rows(rows[old], rows[new], start, stop)
        # common_tokens skips values that only `held` has, so both directions are compared.
        for held, asked in ((old, new), (new, old)):
            stop = common_tokens(self.attachments[held], self.attachments[asked], stop)
        return max(stop, start)

    def _completes(self, node: _Node, new: int) -> bool:
        """Return whether a rollout has a row of the node's last token that the node's own lacks."""
        pairs = ((rows[node.rollout], rows[new]) for rows in self.compared)
        return any(
            own is not None and other is not None and len(own) < node.stop <= len(other)
            for own, other in pairs
        )

    def _cut(self, node: _Node, stop: int) -> _Node:
        """Cut a node in two, and return the upper one. Rollouts that end above move there."""
        assert node.parent is not None
        tokens = self.tokens[node.rollout]
        upper = _Node(node.rollout, node.start, stop, node.parent, {int(tokens[stop]): [node]})
        upper.ends = [i for i in node.ends if len(self.tokens[i]) <= stop]
        node.ends = [i for i in node.ends if len(self.tokens[i]) > stop]
        alike = node.parent.children[int(tokens[node.start])]
        alike[alike.index(node)] = upper
        node.parent, node.start = upper, stop
        return upper


def _planned(trie: _Trie, chosen: list[NDArray | None], padding: int, *, compare: bool) -> TreePlan:
    nodes = [*_preorder(trie.root)]
    index = {id(node): i for i, node in enumerate(nodes)}
    sizes = [node.stop - node.start for node in nodes]
    for node, stop in zip(nodes, np.cumsum(sizes, dtype=np.int64).tolist(), strict=True):
        node.row = stop - (node.stop - node.start)
    lengths = [len(tokens) for tokens in trie.tokens]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    total = sum(sizes)
    rows = np.empty(starts[-1] + padding, np.int64)
    rows[starts[-1] :] = total + np.arange(padding)
    for leaf in nodes:
        for i in leaf.ends:
            node, stop = leaf, lengths[i]
            while node.parent is not None:
                at = starts[i] + node.start
                rows[at : starts[i] + stop] = node.row + np.arange(stop - node.start)
                node, stop = node.parent, node.start
    places = np.empty(total + padding, np.int64)
    places[rows] = np.arange(len(rows))
    # The last write counts: by the first rollout that has the row's routes, or else the row.
    for known in (False, True):
        for i, found in reversed([*enumerate(chosen)]):
            own = np.arange(starts[i], starts[i + 1])
            if known:  # A missing row is -1.
                has = [] if found is None else (found >= 0).all(axis=tuple(range(1, found.ndim)))
                own = own[: len(has)][has]
            places[rows[own]] = own
    parents = [index.get(id(node.parent), -1) for node in nodes]
    if padding:
        sizes, parents = [*sizes, padding], [*parents, -1]
    differing = np.zeros(len(places), np.bool_)
    plan = TreePlan(tuple(sizes), tuple(parents), tuple(lengths), padding, rows, places, differing)
    if compare:
        _mark_differing(plan, chosen, starts)
    return plan


def _mark_differing(
    plan: TreePlan, chosen: list[NDArray | None], starts: NDArray[np.int64]
) -> None:
    """Mark the rows whose routes differ from those of a rollout that shares the row."""
    for i, own in enumerate(chosen):
        rows = plan.rows[starts[i] : starts[i + 1]]
        owners = np.searchsorted(starts, plan.places[rows], side="right") - 1
        cuts = np.flatnonzero(np.diff(owners)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
            other = chosen[owners[start]]
            if owners[start] == i or other is None:
                continue
            part = slice(start, stop if own is None else min(stop, len(own), len(other)))
            plan.differing[rows[part]] |= True if own is None else _unequal(own[part], other[part])


def _preorder(root: _Node) -> Iterator[_Node]:
    """Yield nodes, the child with the largest subtree first, so that long paths stay adjacent."""
    below: list[_Node] = [root]
    for node in below:
        below.extend(child for alike in node.children.values() for child in alike)
    for node in reversed(below):  # Children before their parents.
        node.rows_below += node.stop - node.start
        if node.parent is not None:
            node.parent.rows_below += node.rows_below
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not root:
            yield node
        children = (child for alike in node.children.values() for child in alike)
        stack += sorted(children, key=lambda child: -child.rows_below)[::-1]


def _same(one: NDArray, other: NDArray) -> int:
    """Return the number of equal leading rows."""
    differs = _unequal(one, other)
    return int(differs.argmax()) if differs.any() else len(differs)


def _agreed_rows(one: NDArray | None, other: NDArray | None, start: int, stop: int) -> int:
    """Return the position up to which two rollouts that agree before `start` have equal rows."""
    if one is None or other is None:
        return stop if one is other else start
    known = min(len(one), len(other), stop)
    found = start + _same(one[start:known], other[start:known])
    # A last token without a row predicts nothing, so any row is fine.
    return stop if found >= known else found


def _unequal(one: NDArray, other: NDArray) -> NDArray[np.bool_]:
    return (one != other).any(axis=tuple(range(1, one.ndim)))


def _same_kind(
    values: Sequence[Any], rollouts: Sequence[Rollout], name: str
) -> list[NDArray | None]:
    """Return one row per token for each rollout, as arrays of one dtype and shape."""
    found: list[NDArray | None] = []
    for i, value in enumerate(values):
        start = value.start if isinstance(value, Aligned) else 0
        given = value.value if isinstance(value, Aligned) else value
        if not (given is None or isinstance(given, list | tuple) or hasattr(given, "dtype")):
            raise UsageError(
                f"plan_trees compares {name!r} row by row, but rollout {i} has "
                f"{type(given).__name__}. Pass imposed=[routes.tensor()[0] for each rollout], with "
                "routes=Routes.unpack(value) for bytes."
            )
        rows = None if given is None else np.asarray(given)
        tokens = len(rollouts[i].tokens)
        if rows is not None and (not rows.ndim or start or not tokens - 1 <= len(rows) <= tokens):
            raise ShapeError(
                f"{name!r} of rollout {i} needs a row for each of {tokens} tokens, or for all but "
                f"the last; it has {list(rows.shape)} from token {start} on."
            )
        found.append(rows)
    kinds = {(rows.dtype, rows.shape[1:]) for rows in found if rows is not None}
    if len(kinds) > 1:
        raise ShapeError(
            f"{name!r} must have one type, dtype and row shape; got {sorted(map(str, kinds))}."
        )
    return found

"""Micro-batches of rollouts that share positions. Trees are cut for budget or balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from .plan import Cost, PackingPlan, plan_packing, sequence_flops
from .trees import TreePlan

__all__ = ["plan_tree_packing"]

# Parts of a tree cost at most this share of a rank's mean. The best resulting plan is returned.
_SHARES = (1.0, 0.5, 0.25, 0.125)


def plan_tree_packing(
    trees: TreePlan,
    *,
    ranks: int,
    budget_tokens: int,
    cost: Cost | None = None,
    balance: str = "ranks",
    annealing_steps: int = 300_000,
) -> PackingPlan:
    """Assign rollouts to ranks and micro-batches, and count shared positions once. Pure.

    A tree that exceeds the budget is cut between two neighbouring rollouts. After the cut, both
    parts of the tree compute the positions that the two rollouts share. The function makes several
    plans: one without a limit on the cost of a tree, and others with different limits. Trees of
    several rollouts above the limit are cut in the same way. The result is the plan with the lowest
    cost of the busiest rank. With `balance="steps"`, the function adds the cost of each step's
    busiest rank, and the result is the plan with the lowest sum.

    Args:
        trees: the trees of the whole batch, without padding.
        ranks, budget_tokens, balance, annealing_steps: the arguments of `plan_packing`. The budget
            counts rows, which are distinct positions.
        cost: a function from lengths of sequences to costs, as in `plan_packing`. If a rollout
            shares positions with the previous rollout, the cost of the shared positions is
            subtracted from the rollout's cost.

    Returns:
        A plan whose `micro_batches` contain indices of rollouts. For each rollout, `lengths` counts
        only the positions that no earlier rollout in the micro-batch has. `costs` counts the shared
        positions of a micro-batch once. To get the trees of a micro-batch, call `plan_trees` with
        its rollouts.

    Raises:
        PlanError: the errors of `plan_packing`, or the trees have padding.
    """
    if trees.padding:
        raise PlanError(
            f"plan_tree_packing got trees with {trees.padding} tokens of padding. Plan the whole "
            "batch without padding=, and pad each micro-batch."
        )
    longest = max(trees.lengths, default=0)
    if longest > budget_tokens:
        raise PlanError(
            f"rollout {trees.lengths.index(longest)} has {longest} tokens, but a micro-batch has "
            f"room for {budget_tokens}. Raise budget_tokens, or leave the rollout out."
        )
    leaves = _Leaves(trees, cost or sequence_flops())
    mean = leaves.cost(0, len(leaves.order)) / max(ranks, 1) if len(leaves.order) else 0.0
    found = []
    for share in (np.inf, *_SHARES):
        parts = leaves.parts(budget_tokens, share * mean)
        plan = plan_packing(
            [leaves.tokens(*part) for part in parts],
            ranks=ranks,
            budget_tokens=budget_tokens,
            cost=partial(_as_given, np.array([leaves.cost(*part) for part in parts])),
            balance=balance,
            annealing_steps=annealing_steps,
        )
        found.append(leaves.unfolded(plan, parts))
    return min(found, key=partial(_waits, balance))


def _as_given(costs: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    return costs


def _waits(balance: str, plan: PackingPlan) -> float:
    if balance == "steps":
        return sum(map(max, zip(*plan.costs, strict=True)))
    return max(map(sum, plan.costs))


class _Leaves:
    """Rollouts in the order of their last rows, so that rollouts that share most are neighbours."""

    def __init__(self, trees: TreePlan, cost: Cost) -> None:
        starts = np.cumsum([0, *trees.lengths])
        paths = [trees.rows[a:b] for a, b in pairwise(starts)]
        self.order = sorted(range(len(paths)), key=lambda i: (paths[i][-1], i))
        lengths = np.array([len(paths[i]) for i in self.order], dtype=np.int64)
        shared = [0] + [_common(paths[a], paths[b]) for a, b in pairwise(self.order)]
        self.shared = np.array(shared[: len(lengths)], dtype=np.int64)
        self.lengths = lengths
        self._cost = cost
        self.paid = np.asarray(cost(lengths), dtype=np.float64)
        # A prefix costs as much as a sequence of its length.
        self.saved = np.asarray(cost(self.shared), dtype=np.float64) * (self.shared > 0)
        self._tokens = np.cumsum([0, *(lengths - self.shared)])
        self._costs = np.cumsum([0.0, *(self.paid - self.saved)])

    def tokens(self, start: int, stop: int) -> int:
        """Distinct positions of neighbouring rollouts."""
        return int(self._tokens[stop] - self._tokens[start] + self.shared[start])

    def cost(self, start: int, stop: int) -> float:
        return float(self._costs[stop] - self._costs[start] + self.saved[start])

    def parts(self, budget_tokens: int, most: float) -> list[tuple[int, int]]:
        """Cut the rollouts into trees, and trees until each fits the budget and the cost."""
        ends = [*np.flatnonzero(self.shared == 0).tolist(), len(self.order)]
        stack = [pair for pair in pairwise(ends) if pair[0] < pair[1]]
        found = []
        while stack:
            start, stop = stack.pop()
            over = self.tokens(start, stop) > budget_tokens or self.cost(start, stop) > most
            if over and stop - start > 1:
                stack += self._cut(start, stop)
            else:
                found.append((start, stop))
        return sorted(found)

    def _cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut where the dearer part costs least. Shared positions count in both parts."""
        at = np.arange(start + 1, stop)
        first = self._costs[at] - self._costs[start] + self.saved[start]
        second = self._costs[stop] - self._costs[at] + self.saved[at]
        cut = int(at[np.maximum(first, second).argmin()])
        return [(start, cut), (cut, stop)]

    def unfolded(self, plan: PackingPlan, parts: Sequence[tuple[int, int]]) -> PackingPlan:
        """Replace parts by their rollouts, and count what each rollout adds to its micro-batch."""
        lengths, costs = [0] * len(self.order), []
        batches = []
        for rank in plan.micro_batches:
            held = [sorted(at for part in own for at in range(*parts[part])) for own in rank]
            for own in held:
                for at, shared in zip(own, self._shared_in(own), strict=True):
                    lengths[self.order[at]] = int(self.lengths[at]) - shared
            costs.append(tuple(self._cost_of(own) for own in held))
            batches.append(tuple(tuple(self.order[at] for at in own) for own in held))
        whole = self.cost(0, len(self.order)) / plan.ranks if self.order else 0.0
        return replace(
            plan,
            lengths=tuple(lengths),
            micro_batches=tuple(batches),
            costs=tuple(costs),
            lower_bound=max(whole, float(self.paid.max(initial=0.0))),
        )

    def _shared_in(self, own: list[int]) -> list[int]:
        """Positions that each rollout shares with the rollouts before it."""
        before = pairwise(own)
        return [0, *(int(self.shared[a + 1 : b + 1].min()) for a, b in before)][: len(own)]

    def _cost_of(self, own: list[int]) -> float:
        shared = np.array(self._shared_in(own), dtype=np.int64)
        saved = np.asarray(self._cost(shared), dtype=np.float64) * (shared > 0)
        return float((self.paid[own] - saved).sum()) if own else 0.0


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count

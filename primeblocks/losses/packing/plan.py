"""Plans that assign rollouts to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from .partition import balanced_parts, first_fit_decreasing, lower_bound, within_capacity

__all__ = ["Cost", "PackingPlan", "plan_packing", "sequence_flops"]

Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def sequence_flops(
    *, active_parameters: float = 3.3e9, layers: int = 48, attention_width: int = 4096
) -> Cost:
    """Return a function that computes the training FLOPs of a sequence from its length. Pure.

    The cost of n tokens is `6 * active_parameters * n + 6 * layers * attention_width * n**2`. The
    term with `n**2` is causal softmax attention, and `attention_width` is the number of query heads
    x the head size. `active_parameters` include the output head. The defaults describe
    Qwen3-30B-A3B, where attention costs more than all other computation from 16,800 tokens on.
    """
    each, pair = 6.0 * active_parameters, 6.0 * layers * attention_width

    def cost(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        n = lengths.astype(np.float64)
        return each * n + pair * n * n

    return cost


@dataclass(frozen=True)
class PackingPlan:
    """Micro-batches by rank, the same number on each rank. Equal arguments give equal plans.

    Attributes:
        lengths: the number of tokens in each rollout.
        micro_batches: for each rank and micro-batch, the indices of rollouts. A micro-batch may be
            empty.
        costs: for each rank and micro-batch, the cost in the unit of `plan_packing`'s `cost`.
        lower_bound: a lower bound of the busiest rank's cost in any plan.
    """

    lengths: tuple[int, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...] = field(compare=False)
    lower_bound: float = field(compare=False)

    def __repr__(self) -> str:
        return (
            f"<PackingPlan of {len(self.lengths)} rollouts, {self.ranks} ranks x "
            f"{len(self.micro_batches[0])} micro-batches>"
        )

    @property
    def ranks(self) -> int:
        return len(self.micro_batches)

    @property
    def max_over_mean(self) -> float:
        """The cost of the busiest rank divided by the mean cost. 1 means perfect balance."""
        return self._over_mean(max(map(sum, self.costs)))

    @property
    def bound_over_mean(self) -> float:
        """A lower bound of `max_over_mean`.

        The bound may be above 1, because rollouts are not cut.
        """
        return self._over_mean(self.lower_bound)

    def table(self) -> str:
        """Return one line per rank: rollouts, tokens, fullest micro-batch, cost / mean cost."""
        lines = [f"{'rank':<6}{'rollouts':>9}{'tokens':>10}{'fullest':>9}{'cost/mean':>11}"]
        for rank, own in enumerate(self.micro_batches):
            tokens = [sum(self.lengths[i] for i in part) for part in own]
            cost = self._over_mean(sum(self.costs[rank]))
            count, most = sum(map(len, own)), max(tokens, default=0)
            lines.append(f"{rank:<6}{count:>9}{sum(tokens):>10}{most:>9}{cost:>11.4f}")
        return "\n".join(lines)

    def _over_mean(self, cost: float) -> float:
        mean = sum(map(sum, self.costs)) / self.ranks
        return cost / mean if mean else 1.0


def plan_packing(
    lengths: Sequence[int],
    *,
    ranks: int,
    budget_tokens: int,
    cost: Cost | None = None,
    balance: str = "ranks",
    annealing_steps: int = 300_000,
) -> PackingPlan:
    """Assign rollouts to data-parallel ranks and micro-batches, by tokens and by cost. Pure.

    All ranks get the same number of micro-batches, so that their collectives match. On each rank
    the most expensive micro-batches come first, so that ranks compute micro-batches of similar cost
    at the same time.

    Args:
        lengths: the number of tokens in each rollout, in the same order on all ranks.
        ranks: the number of data-parallel ranks. Count ranks that split
            the same sequences (context parallelism) as one rank.
        budget_tokens: the maximum number of tokens in a micro-batch.
        cost: a function from lengths to costs. The default cost is `sequence_flops()`. For a plan,
            only ratios of costs matter.
        balance: "ranks" gives all ranks similar total costs, and suits ranks that wait for each
            other once per update. First-fit packing decides how many micro-batches a rank needs,
            and all ranks get the largest of these numbers. "steps" uses as many micro-batches as
            first-fit packing of all rollouts needs, rounded up to a multiple of `ranks`. "steps"
            fills the micro-batches evenly, and puts micro-batches of similar cost into one step.
            "steps" suits ranks that wait for each other in every micro-batch, as with FSDP that
            reshards.
        annealing_steps: the number of steps of a search. With "ranks", the search runs if the
            busiest rank costs more than 1 % above `lower_bound`. The search is rarely needed,
            except with few rollouts. A step takes some microseconds, so a search of 300,000 steps
            takes about one second.

    Raises:
        PlanError: a number is out of range, `balance` is unknown, a rollout is empty or above the
            budget, or costs are not finite numbers.
    """
    lengths = [*lengths]
    whole = [*lengths, ranks, budget_tokens]
    if not all(isinstance(n, Integral) for n in whole) or ranks < 1:
        raise PlanError(
            "plan_packing needs lengths, ranks >= 1 and budget_tokens, all whole numbers; got "
            f"ranks={ranks!r}, budget_tokens={budget_tokens!r}, lengths={lengths!r:.80}."
        )
    if balance not in ("ranks", "steps"):
        raise PlanError(f'balance must be "ranks" or "steps"; got {balance!r}.')
    sizes = np.array([int(n) for n in lengths], dtype=np.int64)
    if len(sizes) and not (sizes.min() > 0 and sizes.max() <= budget_tokens):
        at = int(sizes.argmax()) if sizes.max() > budget_tokens else int(sizes.argmin())
        raise PlanError(
            f"rollout {at} has {sizes[at]} tokens, but a micro-batch has room for 1 to "
            f"{budget_tokens}. Raise budget_tokens, or leave the rollout out."
        )
    weights = np.asarray((cost or sequence_flops())(sizes), dtype=np.float64)
    if weights.shape != sizes.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise PlanError(
            f"cost must return one finite number >= 0 for each of {len(sizes)} lengths; got "
            f"{weights.shape}, of which {int(np.isfinite(weights).sum())} are finite."
        )
    dealt = (
        _by_steps(sizes, weights, ranks, budget_tokens)
        if balance == "steps"
        else _by_ranks(sizes, weights, ranks, budget_tokens, annealing_steps)
    )
    return PackingPlan(
        lengths=tuple(sizes.tolist()),
        micro_batches=tuple(tuple(map(tuple, own)) for own in dealt),
        costs=tuple(tuple(float(weights[part].sum()) for part in own) for own in dealt),
        lower_bound=lower_bound(weights, ranks),
    )


def _by_ranks(
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    ranks: int,
    budget_tokens: int,
    annealing_steps: int,
) -> list[list[list[int]]]:
    found = balanced_parts(weights, ranks, annealing_steps=annealing_steps)
    shares = [np.array(part, dtype=np.int64) for part in found]
    needs = [len(first_fit_decreasing(sizes[own].tolist(), budget_tokens)) for own in shares]
    dealt = []
    for own in shares:
        parts = within_capacity(weights[own], sizes[own], max(needs), budget_tokens)
        parts.sort(key=lambda part: -weights[own[part]].sum())
        dealt.append([own[part].tolist() for part in parts])
    return dealt


def _by_steps(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], ranks: int, budget_tokens: int
) -> list[list[list[int]]]:
    steps = -(-len(first_fit_decreasing(sizes.tolist(), budget_tokens)) // ranks)
    parts = within_capacity(weights, sizes, ranks * steps, budget_tokens)
    parts.sort(key=lambda part: -weights[part].sum())
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for step in range(0, len(parts), ranks):
        # The heaviest part of the step goes to the rank with the least load so far.
        for rank, part in zip(load.argsort(kind="stable"), parts[step:], strict=False):
            dealt[rank].append(part)
            load[rank] += weights[part].sum()
    return dealt

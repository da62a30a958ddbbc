"""Copies of hot experts, so that the ranks of an expert group have similar work.

A *physical* expert is room for the weights of one *logical* expert. Several physical experts may
hold the same logical one. The plan is made from counts, on the host. A layer uses it between router
and experts:

    physical = placement.assign(expert_ids, rank=group.rank())
    sent = dispatcher.dispatch(x, scores, physical, num_experts=placement.num_physical)

    gate_up, down = (placement.copies(w, group=group) for w in (own_gate_up, own_down))
    out = dispatcher.combine(grouped_swiglu(sent.tokens, sent.counts, gate_up, down), sent)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from ...errors import PlanError, ShapeError
from ...groups import agreed, all_to_all_rows, check_tensors, facts_of, outside_graphs
from .packing import packed

__all__ = ["Placement", "plan_placement"]

# Far above any count of tokens, far below where sums overflow.
_MOST = 1e100


@dataclass(frozen=True)
class Placement:
    """A plan that gives each physical expert a logical one. Made by `plan_placement`.

    Attributes:
        loads: the tokens of each expert that the plan was made for.
        ranks: the number of ranks. Rank r has the r-th `physical_per_rank` physical experts, and
            owns the r-th `num_experts / ranks` logical experts.
        logical_of_physical: ascending on each rank, and never twice on one rank.
    """

    loads: tuple[float, ...]
    ranks: int
    logical_of_physical: tuple[int, ...]

    def __repr__(self) -> str:
        experts = f"{self.num_experts} experts as {self.num_physical}"
        return f"<Placement of {experts} on {self.ranks} ranks>"

    @property
    def num_experts(self) -> int:
        return len(self.loads)

    @property
    def num_physical(self) -> int:
        return len(self.logical_of_physical)

    @property
    def physical_per_rank(self) -> int:
        return self.num_physical // self.ranks

    @property
    def rank_loads(self) -> tuple[float, ...]:
        """Tokens of each rank, if the experts have the planned loads."""
        pieces = [self.loads[e] / self._copies[e] for e in self.logical_of_physical]
        return _sums(pieces, self.ranks)

    @property
    def max_over_mean(self) -> float:
        """The busiest rank's load over the mean. 1 is balanced."""
        return _max_over_mean(self.rank_loads)

    @property
    def max_over_mean_before(self) -> float:
        """The same ratio if each expert is only on its owner."""
        return _max_over_mean(_sums(self.loads, self.ranks))

    def bytes_sent(self, expert_bytes: int) -> int:
        """Return the bytes that one `copies` sends between all ranks. Its backward sends as many.

        Args:
            expert_bytes: bytes of one expert in the tensor that you pass to `copies`.
        """
        share, width = self.num_experts // self.ranks, self.physical_per_rank
        moved = [e for p, e in enumerate(self.logical_of_physical) if e // share != p // width]
        return len(moved) * expert_bytes

    def table(self) -> str:
        """Return one line per rank: its load before and after, and its experts. A star: sent."""
        lines = [
            f"{self.num_experts} experts, {self.num_physical} physical, on {self.ranks} ranks; "
            f"max/mean {self.max_over_mean_before:.3f} -> {self.max_over_mean:.3f}; "
            f"{self.bytes_sent(1)} experts sent",
            f"{'rank':>4}{'before':>12}{'after':>12}  experts",
        ]
        before = _sums(self.loads, self.ranks)
        for rank, after in enumerate(self.rank_loads):
            own = self._sent(rank, rank)
            experts = " ".join(f"{e}" if e in own else f"{e}*" for e in self._held(rank))
            lines.append(f"{rank:>4}{before[rank]:>12.1f}{after:>12.1f}  {experts}")
        return "\n".join(lines)

    def assign(
        self, expert_ids: Tensor, *, rank: int, check: bool = True
    ) -> Int64[Tensor, "tokens top_k"]:
        """Choose a physical expert for each choice of a logical one. Local.

        The choices of an expert go to its copies in turn, in their order in `expert_ids`. The loads
        of copies therefore differ by at most one. Ranks begin at different copies.

        Args:
            expert_ids: `[tokens, top_k]`, integers in `[0, num_experts)`.
            rank: this rank, in the group that shares the experts.
            check: look at the ids, for which the host waits. With False, ids out of range become
                -1, and a dispatcher with `check` refuses them.

        Raises:
            ShapeError: the shape or the dtype is wrong, or ids are out of range.
        """
        self._check_ids(expert_ids, values=check)
        asked = expert_ids.flatten().long()
        flat = asked.clamp(0, self.num_experts - 1)
        device = expert_ids.device
        physical = self._table("physical", device, self._physical)
        copies = self._table("copies", device, lambda: torch.tensor(self._copies))
        experts = torch.arange(self.num_experts, device=device)
        ordered, order = flat.sort(stable=True)
        nth = torch.arange(flat.numel(), device=flat.device)
        nth = torch.empty_like(flat).scatter_(
            0, order, nth - torch.searchsorted(ordered, experts)[ordered]
        )
        which = _starts(copies)[flat] + (nth + rank) % copies[flat]
        return physical[which].masked_fill(asked != flat, -1).view(expert_ids.shape)

    @outside_graphs
    def copies(self, own: Tensor, *, group: dist.ProcessGroup, check: bool = True) -> Tensor:
        """Return the weights of this rank's physical experts, and fetch those of other owners.

        Differentiable. An expert's gradients from all copies are summed on its owner. On a GPU the
        order of the sum is not fixed. Collective, and so is its backward, which all ranks must run.
        An expert is sent once to each other rank that holds it. `bytes_sent` gives the bytes.

        Args:
            own: `[own_experts, ...]`, this rank's consecutive share of the experts.
            group: the ranks that share the experts.
            check: as in `AllToAllDispatcher`.

        Raises:
            PlanError: the group has another size, or ranks differ in plan, sizes or in whether they
                need gradients.
            ShapeError: `own` has another number of experts.
            RankError: another rank refused its arguments.
        """
        with agreed("Placement.copies", own, group=group, check=check) as call:
            self._check_own(own, group)
            plan = {"ranks": self.ranks, "logical_of_physical": hash(self.logical_of_physical)}
            call.facts |= plan | facts_of("own", own)
        share, me = self.num_experts // self.ranks, group.rank()
        to = [self._sent(me, other) for other in range(self.ranks)]
        mine = [e - me * share for run in to for e in run]
        rows = self._table(f"rows of {me}", own.device, lambda: torch.tensor(mine).long())
        # Arriving experts are ordered by owner, as the physical experts are.
        return all_to_all_rows(
            own.index_select(0, rows),
            send_counts=[len(run) for run in to],
            receive_counts=[len(self._sent(other, me)) for other in range(self.ranks)],
            group=group,
        )

    @cached_property
    def _copies(self) -> list[int]:
        return np.bincount(self.logical_of_physical, minlength=self.num_experts).tolist()

    def _physical(self) -> Tensor:
        """Return the physical experts sorted by their logical experts."""
        return torch.tensor(self.logical_of_physical).argsort(stable=True)

    def _table(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Copy to a device once, because each copy makes the host wait."""
        if (name, device) not in self._tables:
            self._tables[name, device] = make().to(device)
        return self._tables[name, device]

    @cached_property
    def _tables(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _held(self, rank: int) -> tuple[int, ...]:
        return self.logical_of_physical[
            rank * self.physical_per_rank : (rank + 1) * self.physical_per_rank
        ]

    def _sent(self, owner: int, rank: int) -> list[int]:
        """Return the experts of `owner` that `rank` holds, ascending."""
        share = self.num_experts // self.ranks
        return [e for e in self._held(rank) if e // share == owner]

    def _check_own(self, own: Tensor, group: dist.ProcessGroup) -> None:
        if group.size() != self.ranks:
            raise PlanError(
                f"planned for {self.ranks} ranks; the group has {group.size()}. "
                f"Plan with ranks={group.size()}."
            )
        check_tensors(own=own)
        share = self.num_experts // self.ranks
        if not own.ndim or len(own) != share:
            raise ShapeError(
                f"rank {group.rank()} owns {share} of {self.num_experts} experts; got "
                f"{len(own) if own.ndim else 'one number'}. Pass its consecutive share, without "
                "copies."
            )

    def _check_ids(self, expert_ids: Tensor, *, values: bool) -> None:
        check_tensors(expert_ids=expert_ids)
        if expert_ids.ndim != 2 or expert_ids.is_floating_point() or expert_ids.dtype == torch.bool:
            raise ShapeError(
                f"expert_ids must be integers [tokens, top_k]; "
                f"got {expert_ids.dtype} {tuple(expert_ids.shape)}."
            )
        if expert_ids.numel() == 0 or not values:
            return
        low, high = torch.stack(expert_ids.aminmax()).tolist()
        if low < 0 or high >= self.num_experts:
            raise ShapeError(
                f"expert_ids lie in [{low}, {high}]; the plan has experts 0 to "
                f"{self.num_experts - 1}. Pass logical experts."
            )


def plan_placement(
    loads: Sequence[float] | Tensor, *, ranks: int, redundant: int, slack: float = 0.02
) -> Placement:
    """Give hot experts copies, so that ranks with equally many experts have equal work. Pure.

    Each further copy goes to the expert with the most tokens per copy. Copies are assigned to
    ranks, largest first. Then the busiest rank exchanges experts as long as that helps. Its load
    then exceeds the mean by less than the hottest copy. Within `slack`, experts return to their
    owners, because an owner's expert need not be sent. A rank never holds an expert twice.

    Equal inputs give equal plans. Sum the loads over all ranks, and then each rank may plan alone.
    Without copies the plan is never worse than owners alone. With copies it can be worse if loads
    are balanced already. Compare `max_over_mean` with `max_over_mean_before`.

    Args:
        loads: one number per expert, such as the tokens seen. Only ratios count.
        ranks: the ranks of the group that shares the experts.
        redundant: copies beyond one per expert, over all ranks.
        slack: the fraction of the mean by which the busiest rank may exceed the mean, so that fewer
            experts are sent.

    Raises:
        PlanError: loads are empty, negative or not finite, or `slack` is negative.
        PlanError: `ranks` does not divide the experts or the redundant copies, or an expert would
            have more copies than ranks.

    Source: arXiv:2412.19437, section 3.4 (redundant experts).
    """
    tokens = _checked(loads, ranks, redundant, slack)
    planned = Placement(tokens, ranks, packed(tokens, ranks, redundant, slack))
    alone = Placement(tokens, ranks, tuple(range(len(tokens))))
    return alone if not redundant and planned.max_over_mean >= alone.max_over_mean else planned


def _checked(
    loads: Sequence[float] | Tensor, ranks: int, redundant: int, slack: float
) -> tuple[float, ...]:
    if isinstance(loads, Tensor) and loads.ndim != 1:
        raise PlanError(f"loads must be one number per expert; got shape {tuple(loads.shape)}.")
    if not isinstance(loads, Iterable) or not all(
        isinstance(n, Integral) for n in (ranks, redundant)
    ):
        raise PlanError(
            "needs loads, one number per expert, and whole ranks and redundant; got a "
            f"{type(loads).__name__}, ranks={ranks!r}, redundant={redundant!r}."
        )
    tokens = tuple(map(float, loads.tolist() if isinstance(loads, Tensor) else loads))
    experts = len(tokens)
    bad = [e for e, load in enumerate(tokens) if not 0 <= load <= _MOST]
    if bad:
        raise PlanError(
            f"loads must lie in [0, {_MOST:g}]; {len(bad)} of {experts} do not, "
            f"expert {bad[0]} first: {tokens[bad[0]]}. Pass counts of tokens."
        )
    if experts == 0 or ranks < 1 or experts % ranks:
        fitting = [d for d in range(1, experts + 1) if experts % d == 0]
        raise PlanError(
            f"ranks={ranks} cannot own equal shares of {experts} experts. Use one of {fitting}."
        )
    most = experts * (ranks - 1)
    if redundant < 0 or redundant % ranks or redundant > most:
        raise PlanError(
            f"redundant={redundant} must be a multiple of {ranks} (ranks) from 0 to {most}, where "
            f"every rank holds all {experts} experts: a second copy on a rank balances nothing."
        )
    if not 0 <= slack < math.inf:
        raise PlanError(f"slack={slack} must be a fraction of the mean from 0 up, such as 0.02.")
    return tokens


def _sums(pieces: Sequence[float], ranks: int) -> tuple[float, ...]:
    share = len(pieces) // ranks
    return tuple(math.fsum(pieces[r * share : (r + 1) * share]) for r in range(ranks))


def _max_over_mean(loads: Sequence[float]) -> float:
    total = math.fsum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts

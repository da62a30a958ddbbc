"""Plans that assign the tokens of a packed sequence to ranks.

A plan never changes. Each rank makes its own plan from equal arguments. Ranks compare the
`fingerprint` of their plans. Tables that a call derives from a plan are cached on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, wraps
from itertools import pairwise
from numbers import Integral
from typing import Any, Concatenate, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..errors import PlanError, ShapeError, UnsupportedError, check_counts
from ..groups import agreed, all_to_all_rows, check_group, check_tensors, facts_of, outside_graphs
from .ancestry import Ancestry
from .orders import costs_before, merge_pieces, pieces_in_order

__all__ = ["Run", "SequencePlan", "check_plan", "kept_on_plan", "plan_sequence"]

R = TypeVar("R")


class Run(NamedTuple):
    """A contiguous range of tokens of one document on one rank.

    `start` and `stop` are places in the whole sequence, with `stop` after the last token.
    `document` is the place of the document's first token. `offset` is the place of the run's first
    token among this rank's tokens.
    """

    start: int
    stop: int
    document: int
    offset: int


def kept_on_plan(function: Callable[Concatenate[SequencePlan, ...], R]) -> Callable[..., R]:
    """Cache a function's result on the plan, with the other arguments as the key. Pure.

    The result lives as long as the plan. Therefore the recomputation of a checkpointed layer finds
    the result. Selective checkpoints would refuse the operators that compute it.
    """

    @wraps(function)
    def call(sequence: SequencePlan, *args: Any) -> R:
        kept: dict[Any, R] = sequence.__dict__.setdefault("_kept", {})
        key = (function, args)
        if key not in kept:
            # A training step may use the result later, on any device.
            with torch.inference_mode(False), torch.device("cpu"):
                kept[key] = function(sequence, *args)
        return kept[key]

    return call


@dataclass(frozen=True)
class SequencePlan:
    """Documents packed into one sequence, and the tokens of the sequence that each rank has.

    Split every tensor of tokens by the same plan: ids, positions, masks and labels. A rank keeps
    its tokens in the order of the whole sequence. Make a plan with `plan_sequence`. Equal arguments
    give equal plans, so every rank makes its own plan.

    Attributes:
        document_lengths: the number of tokens in each document. A length may be 0.
        order: the argument `order` of `plan_sequence`.
        pieces: for each rank, the ascending (start, stop) of each contiguous range of tokens.
        costs: the cost of each rank's tokens, in the unit of `plan_sequence`'s `cost`.
        parents: for each document, the document that it continues, or -1. `parents=None` means that
            all documents are roots.
    """

    document_lengths: tuple[int, ...]
    order: str
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    costs: tuple[float, ...] = field(compare=False)
    parents: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return (
            f"<SequencePlan of {len(self.document_lengths)} documents, {self.tokens} tokens, "
            f"{self.ranks} ranks, order={self.order!r}>"
        )

    def __getstate__(self) -> dict[str, object]:
        # Leave out the cached tables. They may be large, or on a device that the copy cannot use.
        return {name: getattr(self, name) for name in _FIELDS}

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @property
    def tokens(self) -> int:
        return sum(self.document_lengths)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        return tuple(sum(stop - start for start, stop in own) for own in self.pieces)

    @property
    def max_over_mean(self) -> float:
        """The cost of the busiest rank divided by the mean cost. 1 means perfect balance."""
        mean = sum(self.costs) / self.ranks
        return max(self.costs) / mean if mean else 1.0

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit number that is equal on ranks with equal plans."""
        known = [self.document_lengths, self.pieces, *([self.parents] if self.parents else [])]
        return xxhash.xxh3_64_intdigest(repr(known).encode()) >> 1

    @cached_property
    def ancestry(self) -> Ancestry:
        """Depths and subtrees of the documents."""
        return Ancestry.of(self.document_lengths, self.parents)

    def table(self) -> str:
        """Return one line per rank: tokens, contiguous ranges, and cost / mean cost."""
        mean = sum(self.costs) / self.ranks or 1.0
        lines = [f"{'rank':<6}{'tokens':>10}{'runs':>7}{'cost/mean':>11}"]
        for rank, (own, cost) in enumerate(zip(self.pieces, self.costs, strict=True)):
            lines.append(f"{rank:<6}{self.counts[rank]:>10}{len(own):>7}{cost / mean:>11.4f}")
        return "\n".join(lines)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the tokens of `rank` as runs, cut where documents begin. Local."""
        return self._runs[rank]

    def indices(self, rank: int) -> Tensor:
        """Return int64 `[local_tokens]`: each token's place in the whole sequence. Local."""
        parts = [torch.arange(start, stop, device="cpu") for start, stop in self.pieces[rank]]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *parts])

    def document_starts(self, rank: int) -> Tensor:
        """Return int64 `[local_tokens]`: the place where each token's document begins. Local."""
        runs = self.runs(rank)
        told = [(run.document, run.stop - run.start) for run in runs]
        starts, lengths = torch.tensor(told, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        return starts.repeat_interleave(lengths)

    def positions(self, rank: int) -> Tensor:
        """Return int64 `[local_tokens]`: each token's place in its document, from 0. Local.

        If documents continue other documents, positions count from the start of the root document.
        """
        if self.parents is not None:
            return torch.from_numpy(self.ancestry.depths)[self.indices(rank)]
        return self.indices(rank) - self.document_starts(rank)

    def labels(self, tokens: Tensor, *, dim: int = -1, ignore_index: int = -100) -> Tensor:
        """Return the next token of each token, and `ignore_index` at each document's end. Local.

        Pass the whole sequence, then split the result, because the next token of a rank's last
        token may be on another rank. Unsigned tokens become int64, because `ignore_index` may be
        negative.

        Raises:
            ShapeError: `tokens` is not the whole sequence along `dim`.
            PlanError: documents continue other documents, so a token may have several next tokens.
        """
        if self.parents is not None:
            raise PlanError(
                "labels was called on a plan with parents, where the last token of a document "
                "precedes a token of each child. Take predictors and targets from the pack: "
                "TreePlan.held(sequence.indices(rank).numpy(), packed.predictors)."
            )
        check_tensors(tokens=tokens)
        self._check(tokens, dim, self.tokens, "the whole sequence")
        shifted = (tokens if tokens.dtype.is_signed else tokens.long()).roll(-1, dim)
        lengths = torch.tensor(self.document_lengths, dtype=torch.int64, device="cpu")
        last = (lengths.cumsum(0) - 1)[lengths > 0]
        return shifted.index_fill(dim, last.to(tokens.device), ignore_index)

    def split(self, x: Tensor, *, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
        """Return this rank's part of `x`. Local. Differentiable.

        The gradient of `x` is zero outside of this rank's part. The sum of the gradients over the
        ranks of `group` is the gradient of the whole sequence.

        Args:
            x: the whole sequence along `dim`, equal on every rank.

        Raises:
            ShapeError: `x` is not the whole sequence along `dim`.
            PlanError: `group` and the plan have different numbers of ranks.
        """
        self.check_group(group)
        check_tensors(x=x)
        self._check(x, dim, self.tokens, "the whole sequence")
        return x.index_select(dim, self.indices(group.rank()).to(x.device))

    @outside_graphs
    def join(
        self, local: Tensor, *, group: dist.ProcessGroup, dim: int = 0, check: bool = True
    ) -> Tensor:
        """Return the whole sequence on every rank. Collective over `group`. Differentiable.

        Every rank receives the parts of all other ranks once. In backward, each rank receives and
        adds the gradients of its own tokens from all ranks. If every rank computes the same loss
        from the result, divide the loss by the number of ranks.

        Args:
            check: as in `ring_attention`.

        Raises:
            ShapeError: `local` is not this rank's part along `dim`.
            PlanError: `group` and the plan have different numbers of ranks, or ranks differ in
                plans, in sizes, or in whether gradients are needed.
            RankError: another rank refused its arguments.
        """
        with agreed("SequencePlan.join", local, group=group, check=check) as call:
            self.check_group(group)
            check_tensors(local=local)
            self._check(local, dim, self.counts[group.rank()], f"the part of rank {group.rank()}")
            call.facts |= {"plan": self.fingerprint, **facts_of("local", local.movedim(dim, 0))}
        own = self.counts[group.rank()]
        rows = local.movedim(dim, 0)
        gathered = all_to_all_rows(
            rows.repeat(self.ranks, *[1] * (rows.ndim - 1)),
            send_counts=[own] * self.ranks,
            receive_counts=self.counts,
            group=group,
        )
        return gathered.index_select(0, self.row_of_token.to(local.device)).movedim(0, dim)

    @cached_property
    def whole(self) -> SequencePlan:
        """A plan that assigns all documents of this plan to one rank."""
        pieces = merge_pieces([(0, self.tokens)])
        costs = (sum(self.costs),)
        return SequencePlan(self.document_lengths, "contiguous", (pieces,), costs, self.parents)

    @property
    @kept_on_plan
    def token_of_row(self) -> Tensor:
        """`[tokens]`: for the concatenated parts of all ranks, each row's place in the sequence."""
        return torch.cat([self.indices(rank) for rank in range(self.ranks)])

    @property
    @kept_on_plan
    def row_of_token(self) -> Tensor:
        """`[tokens]`: the inverse of `token_of_row`."""
        return self.token_of_row.argsort()

    def check_group(self, group: dist.ProcessGroup) -> None:
        """Raise PlanError if `group` lacks this rank, or has a size other than `ranks`. Local."""
        check_group(group)
        if group.size() != self.ranks:
            raise PlanError(
                f"the sequence is planned for {self.ranks} ranks, but the group has "
                f"{group.size()}. Plan with ranks={group.size()}, or pass "
                "meshes.context.get_group()."
            )

    def check_tokens(self, group: dist.ProcessGroup, **operands: Tensor) -> None:
        """Raise ShapeError if a tensor's first dim is not this rank's number of tokens. Local."""
        tokens = self.counts[group.rank()]
        if any(x.shape[:1] != (tokens,) for x in operands.values()):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
            raise ShapeError(
                f"the plan gives this rank {tokens} tokens; got {shapes}. Split by the same plan."
            )

    @cached_property
    def _runs(self) -> tuple[tuple[Run, ...], ...]:
        starts = np.cumsum([0, *self.document_lengths])[:-1]
        # An empty document has no token, so it begins no run.
        starts = starts[np.asarray(self.document_lengths) > 0]
        found = []
        for own in self.pieces:
            runs, offset = [], 0
            for start, stop in own:
                first = int(np.searchsorted(starts, start, side="right")) - 1
                last = int(np.searchsorted(starts, stop, side="left"))
                cuts = [start, *map(int, starts[first + 1 : last]), stop]
                for begin, end in pairwise(cuts):
                    document = int(starts[np.searchsorted(starts, begin, side="right") - 1])
                    runs.append(Run(begin, end, document, offset))
                    offset += end - begin
            found.append(tuple(runs))
        return tuple(found)

    def _check(self, x: Tensor, dim: int, size: int, what: str) -> None:
        if not isinstance(dim, Integral):
            raise ShapeError(f"dim must be one number; got {dim!r}.")
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != size:
            raise ShapeError(
                f"the tensor must be {what}, with {size} tokens along dim {dim}; got "
                f"{tuple(x.shape)}. The plan has {self.tokens} tokens, {list(self.counts)} per "
                "rank."
            )


_FIELDS = tuple(one.name for one in fields(SequencePlan))
# FSDP2 copies each dataclass among the arguments of a layer that it casts. A copy has no tables.
# Functions of `dataclasses`, such as `replace`, therefore refuse a plan.
del SequencePlan.__dataclass_fields__


def check_plan(sequence: object, group: dist.ProcessGroup, *, trees: bool = False) -> None:
    """Refuse a value that is not a plan for this group. Local.

    Also refuse a plan with forks, unless `trees` is True.
    """
    if not isinstance(sequence, SequencePlan):
        raise PlanError(
            f"sequence must be a SequencePlan; got a {type(sequence).__name__}. Make it with "
            f"plan_sequence(document_lengths, ranks={group.size()})."
        )
    if sequence.parents is not None and not trees:
        raise UnsupportedError(
            "the plan has parents, so documents fork. Causal softmax attention follows forks. "
            "Recurrences, convolutions, sparse attention and causal=False do not. Pack whole "
            "rollouts for them, without trees."
        )
    sequence.check_group(group)


def plan_sequence(
    document_lengths: Sequence[int],
    *,
    ranks: int,
    order: str = "balanced",
    parents: Sequence[int] | None = None,
    cost: Callable[[np.ndarray], np.ndarray] | None = None,
    chunk_tokens: int = 128,
) -> SequencePlan:
    """Assign the tokens of packed documents to the ranks that share the sequence. Pure.

    - `contiguous` gives each rank one contiguous range, which suits recurrences best.
    - `zigzag` gives each rank one early and one late range, which balances causal attention only if
      one long document fills the sequence.
    - `balanced` assigns chunks to ranks, the most expensive chunks first. Each chunk goes to the
      rank with the least work among the ranks that still need chunks. `balanced` balances memory
      and work for any documents.

    The lengths of documents need not be divisible by `ranks`. Ranks may get different numbers of
    tokens, also zero.

    Args:
        document_lengths: the number of tokens in each document, in the order in which documents are
            packed.
        parents: for each document, the document that it continues, or -1. A token also sees the
            documents that its document continues, up to the root. Documents must be in preorder:
            all documents that continue a document, directly or not, come right after the document.
            The `parents` of a `losses.packing.TreePlan` are in preorder.
        cost: a function from the positions of tokens in their documents to the cost of each token.
            The default cost is position + 1, the number of keys that causal attention reads.
        chunk_tokens: the number of tokens in a chunk of the order `balanced`.

    Raises:
        PlanError: the order is unknown, a number is out of range, or `parents` are not in preorder.
        PlanError: `cost` does not return a finite number >= 0 for each position.

    Source: arXiv:2407.21783 (zigzag); Graham 1969 (longest processing time first).
    """
    check_counts(ranks=ranks, chunk_tokens=chunk_tokens)
    given: Any = document_lengths
    given = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    whole = isinstance(given, Sequence) and all(isinstance(n, Integral) for n in given)
    if not whole or min(given, default=0) < 0 or not (cost is None or callable(cost)):
        raise PlanError(
            "plan_sequence needs a list of document lengths, whole numbers from 0 up, and a "
            f"callable cost or None; got {given!r:.80}, cost={cost!r}."
        )
    lengths = tuple(int(length) for length in given)
    tree = Ancestry.of(lengths, parents)
    paid = costs_before(tree.depths, cost)
    pieces = pieces_in_order(order, paid, int(ranks), int(chunk_tokens))
    merged = tuple(merge_pieces(own) for own in pieces)
    costs = tuple(float(sum(paid[b] - paid[a] for a, b in own)) for own in merged)
    return SequencePlan(lengths, order, merged, costs, tree.parents)

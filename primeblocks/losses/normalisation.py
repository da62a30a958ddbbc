"""Division of summed losses by what all ranks and micro-batches count together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError, check_counts
from ..groups import agreed
from .tokens import TokenLoss, check_tokens, masked, sequence_sums

__all__ = ["divide", "global_count", "length_weights"]


def divide(
    *losses: TokenLoss,
    by: Literal["tokens", "sequences"] | int = "tokens",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Add losses and divide them by the tokens or sequences of all ranks.

    Gradients are then to be *added* over ranks and micro-batches, and equal those of the whole
    batch on one rank. Where a trainer averages over ranks (DDP, FSDP without a divide factor of
    1), multiply by their number. Collective with `group`: two exchanges of a few bytes, for which
    the host waits. Local without, or with a number.

    Args:
        losses: all micro-batches of this rank, or one at a time with a number. None may be left
            out where `by` is a word: a count is made of what is passed.
        by: a number for micro-batches whose backward runs in turn: `global_count` of their masks,
            before the first. For Dr. GRPO, sequences x longest answer.
        group: the ranks that hold parts of the batch.

    Returns:
        A scalar, 0 with gradients of 0 where all tokens are masked.

    Raises:
        UsageError: no loss; `by` is unknown, or below 0; sequences are not known.
        RankError: another rank refused its arguments, or did not come within the group's timeout.
        PlanError: this rank is not in `group`, or another one divides by something else.

    Example:
        >>> loss = divide(grpo_loss(p, q, a, mask=m), by="tokens", group=group)
        >>> loss = divide(gspo_loss(p, q, a, mask=m, weights=length_weights(m)), by="sequences")
    """
    if isinstance(by, int):
        count = _counted(losses, by)
    else:
        device = losses[0].sum.device if losses else "cpu"
        count = _added(lambda: _counted(losses, by), f"by={by!r}", group=group, device=device)
    return torch.stack([loss.sum for loss in losses]).sum() / max(count, 1)


def global_count(
    count: int, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> int:
    """Add a count over the ranks of a group. Collective with `group`, and the host waits; or local.

    Args:
        device: where the backend of `group` takes tensors.

    Raises:
        RankError, PlanError: as `divide`; or `count` is not a whole number from 0 up.
    """

    def look() -> int:
        check_counts(least=0, count=count)
        return count

    return _added(look, "global_count", group=group, device=device)


def length_weights(
    mask: Bool[Tensor, "*tokens"], *, sequence_ids: Int[Tensor, "*tokens"] | None = None
) -> Float[Tensor, "*tokens"]:
    """One over the tokens that the mask keeps of a token's sequence; 0 where masked. Pure; local.

    With these weights a loss is a sum over sequences of means over their tokens: divide it by the
    sequences, as GRPO and GSPO do. Short answers then count as much as long ones.

    Raises:
        ShapeError: the mask is not bool, or packed tokens come without `sequence_ids`.
    """
    check_tokens(mask, sequence_ids=sequence_ids)
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    return masked(lengths.reciprocal(), mask)


def _counted(losses: Sequence[TokenLoss], by: str | int) -> int:
    if not losses:
        raise UsageError("no loss to divide")
    if by == "tokens":
        return sum(loss.tokens for loss in losses)
    if by == "sequences":
        counts = [loss.sequences for loss in losses if loss.sequences is not None]
        if len(counts) < len(losses):
            raise UsageError(
                "the sequences of packed tokens, or of one row, are unknown. Pass sequence_ids."
            )
        return sum(counts)
    if not isinstance(by, int) or isinstance(by, bool) or by < 0:
        raise UsageError(f'by is "tokens", "sequences" or a count; got {by!r}')
    return by


def _added(
    look: Callable[[], int],
    kind: str,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> int:
    if group is None:
        return look()
    count = torch.zeros((), dtype=torch.int64, device=device)
    with agreed("a global count", count, group=group) as call:
        count.fill_(look())
        call.facts["what is counted"] = kind
    dist.all_reduce(count, group=group)
    return int(count)

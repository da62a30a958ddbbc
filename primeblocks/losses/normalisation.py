"""Division of summed losses by a count over all ranks and micro-batches."""

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

    *Add* gradients over ranks and micro-batches. The sums equal the gradients of the whole batch on
    one rank. If your trainer averages over ranks (DDP, or FSDP without a divide factor of 1),
    multiply by the number of ranks. Collective with `group`: two exchanges of a few bytes, for
    which the host waits. Local without `group`, or if `by` is a number.

    Args:
        losses: all micro-batches of this rank. If `by` is a number, they may come one at a time. If
            `by` is a word, pass all of them, because only the losses that you pass are counted.
        by: a word, or a number if each micro-batch runs its backward before the next one. Get the
            number from `global_count` of all masks, before the first micro-batch. For Dr. GRPO it
            is sequences x longest answer.
        group: the ranks that have parts of the batch.

    Returns:
        A scalar. It is 0 with gradients of 0 if all tokens are masked.

    Raises:
        UsageError: no loss was passed, `by` is unknown or negative, or sequences are unknown.
        RankError: another rank refused its arguments, or did not call within the group's timeout.
        PlanError: this rank is not in `group`, or another rank divides by something else.

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
    """Add a count over the ranks of a group. Collective with `group`, and the host waits.

    Args:
        device: the device from which the backend of `group` sends.

    Raises:
        RankError, PlanError: as for `divide`, or `count` is not a whole number from 0 up.
    """

    def look() -> int:
        check_counts(least=0, count=count)
        return count

    return _added(look, "global_count", group=group, device=device)


def length_weights(
    mask: Bool[Tensor, "*tokens"], *, sequence_ids: Int[Tensor, "*tokens"] | None = None
) -> Float[Tensor, "*tokens"]:
    """Return 1 / (unmasked tokens of the token's sequence), or 0 for masked tokens. Pure. Local.

    With these weights a loss is a sum over sequences of means over their tokens. Divide it by the
    sequences, as GRPO and GSPO do. Short answers then count as much as long ones.

    Raises:
        ShapeError: the mask is not bool, or packed tokens come without `sequence_ids`.
    """
    check_tokens(mask, sequence_ids=sequence_ids)
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    return masked(lengths.reciprocal(), mask)


def _counted(losses: Sequence[TokenLoss], by: str | int) -> int:
    if not losses:
        raise UsageError("the list of losses is empty. Pass at least one loss.")
    if by == "tokens":
        return sum(loss.tokens for loss in losses)
    if by == "sequences":
        counts = [loss.sequences for loss in losses if loss.sequences is not None]
        if len(counts) < len(losses):
            raise UsageError(
                "packed tokens, or tokens of one row, do not show which sequence each belongs "
                "to. Pass sequence_ids."
            )
        return sum(counts)
    if not isinstance(by, int) or isinstance(by, bool) or by < 0:
        raise UsageError(f'by must be "tokens", "sequences" or a count; got {by!r}')
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

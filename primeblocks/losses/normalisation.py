"""Division of summed losses by a count over all ranks and micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Literal, SupportsIndex

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
    by: Literal["tokens", "sequences"] | SupportsIndex = "tokens",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Add losses, and divide the sum by the number of tokens or sequences on all ranks.

    *Add* the gradients of all ranks and micro-batches. The sums of gradients equal the gradients
    that one rank computes for the whole batch. If your trainer averages gradients over ranks (DDP,
    or FSDP unless its divide factor is 1), multiply the loss by the number of ranks. If `group` is
    set and `by` is a word, the call is collective, and the host waits for two exchanges. In each,
    a rank sends at most 40 + 16 x ranks bytes to each rank. Otherwise the call is local.

    Args:
        losses: the losses of all micro-batches of this rank. If `by` is a number, you may pass one
            loss per call. If `by` is a word, pass all losses in one call, because `divide` counts
            only the losses that you pass.
        by: a word ("tokens" or "sequences") or a number. Pass a number if you run the backward of
            each micro-batch before the next forward. Compute the number with `global_count` from
            the masks of all micro-batches, before the first micro-batch. For `Dr. GRPO`, pass the
            number of sequences x the length of the longest answer.
        group: the ranks that have parts of the batch.

    Returns:
        A scalar. If all tokens are masked, the scalar and its gradients are 0.

    Raises:
        UsageError: no loss was passed, `by` is unknown or negative, or `by` is "sequences" and a
            loss has no count of sequences. Also raised if `by` is 0 and a loss has tokens.
        RankError: another rank refused its arguments, or did not make the call within the group's
            timeout.
        PlanError: this rank is not in `group`, or ranks passed different words as `by`.

    Example:

        >>> loss = divide(grpo_loss(p, q, a, mask=m), by="tokens", group=group)
        >>> loss = divide(gspo_loss(p, q, a, mask=m, weights=length_weights(m)), by="sequences")
    """
    if not isinstance(by, str):
        count = _counted(losses, by)
    else:
        device = next((x.sum.device for x in losses if isinstance(x, TokenLoss)), "cpu")
        count = _added(lambda: _counted(losses, by), f"by={by!r}", group=group, device=device)
    return torch.stack([loss.sum for loss in losses]).sum() / max(count, 1)


def global_count(
    count: SupportsIndex,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Return the sum of a count over the ranks of a group.

    With `group`, the call is collective and the host waits. Without `group`, the call is local.

    Args:
        device: the device from which the backend of `group` sends.

    Raises:
        PlanError: as for `divide`, or `count` is negative or not a whole number.
        RankError: as for `divide`.
    """

    def look() -> int:
        check_counts(least=0, count=count)
        return operator.index(count)

    return _added(look, "global_count", group=group, device=device)


def length_weights(
    mask: Bool[Tensor, "*tokens"], *, sequence_ids: Int[Tensor, "*tokens"] | None = None
) -> Float[Tensor, "*tokens"]:
    """Return 1 / (number of unmasked tokens in a token's sequence), or 0 if masked. Pure. Local.

    With length weights, a loss is the sum of the mean losses of all sequences. Divide the loss by
    the number of sequences, as GRPO and GSPO do. With length weights, short and long answers count
    equally.

    Raises:
        ShapeError: the mask is not bool, or packed tokens have no `sequence_ids`.
    """
    check_tokens(mask, sequence_ids=sequence_ids)
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    return masked(lengths.reciprocal(), mask)


def _counted(losses: Sequence[TokenLoss], by: str | SupportsIndex) -> int:
    if not losses:
        raise UsageError("the list of losses is empty. Pass at least one loss.")
    if odd := [loss for loss in losses if not isinstance(loss, TokenLoss)]:
        raise UsageError(
            f"divide() needs a TokenLoss per argument; got a {type(odd[0]).__name__}. Pass the "
            "results of loss functions, and unpack a list of them: divide(*losses)."
        )
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
    if isinstance(by, str):
        raise UsageError(f'by must be "tokens", "sequences" or a count; got {by!r}')
    check_counts(least=0, by=by)
    if (count := operator.index(by)) == 0 and any(loss.tokens for loss in losses):
        raise UsageError("by is 0, but a loss has tokens. Pass the count of the whole batch.")
    return count


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

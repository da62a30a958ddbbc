"""Multi-token prediction (MTP): labels and loss of heads that predict beyond the next token."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ShapeError, UsageError
from .logprobs import token_logprobs
from .tokens import TokenLoss, check_tokens, total

__all__ = ["mtp_labels", "mtp_loss"]


def mtp_labels(
    labels: Int[Tensor, "*tokens"],
    *,
    depth: int,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> Int[Tensor, "*tokens"]:
    """Return the labels of the head that predicts token t + `depth` + 1 at token t. Pure. Local.

    If ranks share the sequence, call this function for the whole sequence, and split the result. If
    each rank shifted only its own part, the labels from the tokens of other ranks would be missing.

    Args:
        labels: the labels of the policy. `labels[t]` is token t + 1, or -100 if token t + 1 is
            padding, begins a sequence or does not count in the loss. For a `Pack`, pass
            `pack.at_predictors(np.where(pack.loss_mask, pack.targets, -100), fill=-100)`.
        depth: the depth of the head. The first head has depth 1, as in DeepSeek-V3.
        sequence_ids: an integer per token. By default, if there are several rows, each row is one
            sequence. A single row needs `sequence_ids`. A label from another sequence becomes -100.

    Raises:
        ShapeError, UsageError: shapes differ, `sequence_ids` are missing, or `depth` is below 1.
    """
    if depth < 1:
        raise UsageError(f"mtp_labels got depth={depth}. The first head has depth 1.")
    if sequence_ids is None:
        if labels.ndim != 2 or len(labels) == 1:
            shape = list(labels.shape)
            raise ShapeError(
                f"mtp_labels got labels of shape {shape}, which do not show their sequences. "
                "Pass sequence_ids, an integer per token."
            )
        sequence_ids = torch.zeros_like(labels)
    check_tokens(labels != -100, sequence_ids=sequence_ids)
    is_same = sequence_ids[..., depth:] == sequence_ids[..., :-depth]
    found = torch.full_like(labels, -100)
    found[..., :-depth] = labels[..., depth:].where(is_same, -100)
    return found


def mtp_loss(
    hidden: Float[Tensor, "*tokens hidden"],
    weight: Float[Tensor, "words hidden"],
    labels: Int[Tensor, "*tokens"],
    *,
    detach_weight: bool = True,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
    **options: Any,
) -> TokenLoss:
    """Cross entropy of one head, summed over the tokens with a label.

    To train only the head, detach the hidden states and embeddings that you pass to the head.
    Without detached inputs of the head, the loss also trains the policy. The loss of DeepSeek-V3
    (arXiv:2412.19437) includes the mean of `divide(mtp_loss(...))` over all depths, multiplied by a
    factor. Megatron calls the factor `mtp_loss_scaling_factor`. Logits are computed in chunks. The
    host waits for the number of labels.

    Args:
        hidden: the head's last hidden states. Rows whose label is -100 may have any values.
        weight: the weight of the output layer, which heads usually share with the policy.
        labels: the result of `mtp_labels`.
        detach_weight: give `weight` no gradient, as Megatron's `mtp_detach_heads` does. With a
            detached weight, the loss needs three matrix products instead of four.
        options: keywords of `logprobs.token_logprobs`.

    Raises:
        ShapeError, UsageError, PlanError, RankError: the errors of `logprobs.token_logprobs`.
    """
    mask = labels != -100
    check_tokens(mask, sequence_ids=sequence_ids, hidden=hidden[..., 0], weights=weights)
    weight = weight.detach() if detach_weight else weight
    found = token_logprobs(hidden[mask], weight, labels[mask], **options)
    losses = found.new_zeros(mask.shape).masked_scatter(mask, -found)
    return total(losses, mask=mask, weights=weights, sequence_ids=sequence_ids)

"""The distance of a trainer from the policies that sampled its batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from ...groups import check_group
from ..tokens import bounded_ratio, check_tokens, log_ratios, masked

__all__ = ["off_policy_metrics"]


@torch.no_grad()
def off_policy_metrics(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Measure a batch: effective sample size and KL estimates. Collective with `group`, or local.

    "ess" is the effective sample size of the unbounded ratios over the number of tokens: 1 on
    policy, near 0 where a few tokens carry all the weight. With x = log p_trainer - log p_rollout
    "k1" is the mean of -x, "k2" of x^2 / 2, "k3" of exp(x) - 1 - x, which estimate KL(rollout ||
    trainer) in nats a token. For no tokens 1 and zeros. Return it from `train`, as all of the
    metrics or among them: `Step.postfix` shows them.

    Args:
        group: ranks that hold parts of the batch; all get the figures of the whole.

    Raises:
        ShapeError: the shapes differ, or a dtype is wrong.
        PlanError: this rank is not in `group`.

    Source: Kish, 1965 (sample size); Schulman, 2020 (joschu.net/blog/kl-approx).
    """
    check_tokens(mask, trainer_logprobs=trainer_logprobs, rollout_logprobs=rollout_logprobs)
    x = log_ratios(trainer_logprobs, rollout_logprobs, mask).double()
    ratio = masked(bounded_ratio(x), mask)
    sums = torch.stack(
        [
            mask.sum().double(),
            ratio.sum(),
            ratio.square().sum(),
            -x.sum(),
            x.square().sum() / 2,
            masked(ratio - 1 - x, mask).sum(),
        ]
    )
    if group is not None:
        check_group(group)
        dist.all_reduce(sums, group=group)
    tokens, first, second, *estimates = sums.tolist()
    if not tokens:
        return {"ess": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}
    ess = first**2 / second / tokens if second else 0.0
    named = zip(("k1", "k2", "k3"), estimates, strict=True)
    return {"ess": ess} | {name: each / tokens for name, each in named}

"""The record of one optimizer step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy as np

from ..rollout import Group

__all__ = ["Step"]

# Names of `losses.corrections.off_policy_metrics`, and verl's names for the same values.
_CORRECTED = {"ess": "ess", "k1": "kl", "k2": "k2_kl", "k3": "k3_kl"}


@dataclass(frozen=True, eq=False)
class Step:
    """The record of one optimizer step.

    Args:
        version: the policy version after the step.
        groups: the groups of the batch.
        staleness: for each group, the number of optimizer steps between the oldest policy that
            sampled tokens of the group and the policy before this step.
        dropped: the number of groups that were too old to train on, counted since the previous
            step. Those that leave the run are in `lost` too. The others are generated again.
        filtered: the number of groups that `keep` left out.
        failures: the number of failed attempts since the previous step, by type of error.
        lost: prompts that the loop gave up because of failures or age, each with the reason.
        masked_tokens: the number of tokens of this batch that are masked because of their age.
        trainer_idle_s: seconds that training waited for rollouts.
        engine_idle_s: seconds in which the staleness policy kept the number of requests below
            `max_in_flight`, counted since the previous step.
        train_s: seconds of `train`.
        publish_s: seconds that training waited for `publish`.
        metrics: the result of `train`. If `metrics` is a mapping, `postfix` shows the values of the
            keys "ess" and "k3".
    """

    version: int
    groups: tuple[Group, ...]
    staleness: tuple[int, ...]
    dropped: int
    trainer_idle_s: float
    train_s: float
    publish_s: float
    metrics: Any
    filtered: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[tuple[Any, str], ...] = ()
    masked_tokens: int = 0
    engine_idle_s: float = 0.0

    @property
    def lags(self) -> Mapping[int, int]:
        """The number of sampled tokens per age in optimizer steps, masked tokens included."""
        ages: Counter[int] = Counter()
        for group in self.groups:
            for rollout in group.rollouts:
                sampled = rollout.versions[rollout.sampled]
                found, counts = np.unique(self.version - 1 - sampled, return_counts=True)
                ages.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        return dict(sorted(ages.items()))

    def postfix(self) -> dict[str, str]:
        """Return texts for a progress bar: `bar.set_postfix(step.postfix())`."""
        shown = {"version": str(self.version), "lag": str(max(self.staleness, default=0))}
        for name in ("dropped", "filtered", "masked_tokens"):
            if value := getattr(self, name):
                shown[name] = str(value)
        if self.failures:
            shown["failures"] = str(sum(self.failures.values()))
        if isinstance(self.metrics, Mapping):
            found = ((name, self.metrics.get(name)) for name in ("ess", "k3"))
            shown |= {name: f"{value:.3g}" for name, value in found if value is not None}
        shown["idle"] = f"{self.trainer_idle_s:.1f}/{self.engine_idle_s:.1f} s"
        return shown

    def metrics_dict(self) -> dict[str, float]:
        """Return the step as a flat dictionary for a logger. Pure.

        A missing value, such as the mean reward of rollouts without rewards, is NaN. If `train`
        returned a mapping, the numbers in this mapping are added under their own names, and replace
        values of the same name. But the keys of `losses.corrections.off_policy_metrics` ("ess",
        "k1", "k2" and "k3") get verl's names with the prefix `rollout_corr/`.
        The page docs/recipes/metrics.md lists all names.
        """
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        lengths = [int(rollout.sampled.sum()) for rollout in rollouts]
        scored = [
            [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            for group in self.groups
        ]
        rewards = [reward for group in scored for reward in group]
        lags = self.lags
        drafts = [each for r in rollouts if (each := r.attachments.get("draft_tokens")) is not None]
        accepted, drafted = np.sum(drafts, axis=0) if drafts else (0, 0)
        found: dict[str, float] = {
            "training/global_step": self.version,
            "reward": _mean(rewards),
            "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else math.nan,
            "frac_reward_zero_std": _mean([max(s) - min(s) < 1e-8 for s in scored if s]),
            "completions/mean_length": _mean(lengths),
            "completions/min_length": min(lengths, default=math.nan),
            "completions/max_length": max(lengths, default=math.nan),
            "completions/clipped_ratio": _mean([r.finish_reason == "length" for r in rollouts]),
            "prompt_length/mean": _mean([r.prompt_length for r in rollouts]),
            "batch/groups_per_step": len(self.groups),
            "batch/samples_per_step": len(rollouts),
            "batch/trained_tokens_per_step": sum(int(r.loss_mask.sum()) for r in rollouts),
            "sample/staleness_mean": _mean(self.staleness),
            "sample/staleness_max": max(self.staleness, default=math.nan),
            "loop/token_staleness_mean": _mean([*lags], [*lags.values()]),
            "loop/masked_tokens": self.masked_tokens,
            "loop/dropped_groups": self.dropped,
            "loop/filtered_groups": self.filtered,
            "loop/failed_attempts": sum(self.failures.values()),
            "loop/lost_prompts": len(self.lost),
            "rollout/spec_accept_rate": float(accepted / drafted) if drafted else math.nan,
            "perf/rollout_wait_s": self.trainer_idle_s,
            "loop/engine_idle_s": self.engine_idle_s,
            "loop/train_s": self.train_s,
            "loop/publish_s": self.publish_s,
        }
        for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
            parts = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
            found[f"rewards/{name}/mean"] = _mean(parts)
        returned = self.metrics if isinstance(self.metrics, Mapping) else {}
        for name, value in returned.items():
            if isinstance(value, SupportsFloat) and np.ndim(value) == 0:  # type: ignore[arg-type]
                key = f"rollout_corr/{_CORRECTED[name]}" if name in _CORRECTED else str(name)
                found[key] = value if isinstance(value, int) else float(value)
        return found


def _mean(values: Sequence[float | bool], counts: Sequence[int] | None = None) -> float:
    return float(np.average(values, weights=counts)) if len(values) else math.nan

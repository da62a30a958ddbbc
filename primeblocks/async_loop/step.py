"""The record of one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rollout import Group

__all__ = ["Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step.

    Args:
        version: the policy after it.
        groups: what it trained on.
        staleness: for each group, optimizer steps since its oldest token's policy.
        dropped: groups that were too old and were not trained on; their prompts are asked again.
        filtered: groups that `keep` left out.
        failures: failed attempts since the step before, by type of error.
        lost: prompts that used up their attempts, each with the reason.
        masked_tokens: tokens of this batch that do not count in the loss because of their age.
        trainer_idle_s: seconds that training waited for rollouts.
        engine_idle_s: seconds since the step before in which fewer requests ran than may, for
            what they would make could not be trained on in time.
        train_s: seconds of `train`.
        publish_s: seconds of `publish` that nothing else was done in.
        metrics: what `train` returned; "ess" and "k3" of a mapping are shown by `postfix`.
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
        """Sampled tokens, masked ones too, by age in optimizer steps: a histogram."""
        ages: Counter[int] = Counter()
        for group in self.groups:
            for rollout in group.rollouts:
                sampled = rollout.versions[rollout.sampled]
                found, counts = np.unique(self.version - 1 - sampled, return_counts=True)
                ages.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        return dict(sorted(ages.items()))

    def postfix(self) -> dict[str, str]:
        """Return what a progress bar shows: `bar.set_postfix(step.postfix())`."""
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

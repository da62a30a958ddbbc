"""The bound on the age of trained tokens, and policies for groups beyond it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, check_counts
from ..rollout import Group, Rollout

__all__ = ["StalenessPolicy", "staleness"]

_ON_STALE = ("wait", "pace", "mask", "drop", "continue")


@dataclass(frozen=True)
class StalenessPolicy:
    """A bound on staleness, and the rule for groups that would exceed the bound.

    Unless `on_stale` is "continue", the loop starts only as many groups as can be trained on within
    the bound. The oldest groups are trained on first.

    - "wait" makes the trainer wait for a group that would become too old in later steps. The bound
      is hard, and the trainer idles while it waits for the slowest group. A group
      exceeds the bound only after a rollback, if `generate` records versions that are too old, or
      if you call `take` without `in_flight`. Such a group is dropped.
    - "pace" only limits how many groups are started, and does not enforce the bound. With "pace",
      no group is dropped, the trainer does not wait for old groups, and a slow group may exceed
      the bound. Trained rollouts have the same length distribution as sampled rollouts.
    - "mask" removes tokens beyond the bound from the loss. The reward of a rollout with masked
      tokens still counts in the baseline of its group.
    - "drop" discards a group beyond the bound. `AsyncLoop` also cancels such a group in flight,
      and its prompt leaves the run (`Step.lost`), because another attempt may take as long. The
      lengths of trained rollouts are biased towards short rollouts.
    - "continue" has no bound.

    With every `on_stale`, the methods `fresh` and `trainable` raise UsageError if a token comes
    from a later policy than the trainer's. This happens if the trainer returned to an older
    checkpoint, and the engine still serves the later weights.

    Args:
        max_off_policy_steps: the largest number of optimizer steps between the policy that sampled
            a token and the policy that trains on the token. A bound of 0 means on-policy training.
        on_stale: "wait", "pace", "mask", "drop" or "continue".
        correction: a name of the correction that your loss applies to tokens of older policies.
            Examples are "truncated importance sampling" and "ratio to the engine's
            log-probabilities". A correction is required if the bound is above 0 or `on_stale` is
            "continue". Without a correction, a loss treats these tokens as if the trainer's policy
            had sampled them.

    Raises:
        UsageError: the bound is negative, `on_stale` is unknown, or a correction is missing.
    """

    max_off_policy_steps: int
    on_stale: str = "wait"
    correction: str = ""

    def __post_init__(self) -> None:
        check_counts(least=0, max_off_policy_steps=self.max_off_policy_steps)
        if self.on_stale not in _ON_STALE:
            raise UsageError(f"on_stale must be one of {list(_ON_STALE)}; got {self.on_stale!r}.")
        if not self.correction and (self.max_off_policy_steps or self.on_stale == "continue"):
            raise UsageError(
                f"max_off_policy_steps={self.max_off_policy_steps} with "
                f"on_stale={self.on_stale!r} trains on tokens of older policies. Pass the name of "
                'the loss correction, such as correction="truncated importance sampling".'
            )

    def fresh(self, rollout: Rollout, *, version: int) -> NDArray[np.bool_]:
        """Return a mask `[completion]` of tokens within the bound, for the policy `version`. Pure.

        The mask is also True for tokens that no policy sampled.

        Raises:
            UsageError: as for `staleness`.
        """
        staleness(rollout, version=version)
        return (version - rollout.versions <= self.max_off_policy_steps) | ~rollout.sampled

    def trainable(self, group: Group, *, version: int) -> Group | None:
        """Return the part of a group that the policy `version` may train on, or None. Pure.

        Raises:
            UsageError: as for `staleness`.
        """
        is_fresh = staleness(group, version=version) <= self.max_off_policy_steps
        if is_fresh or self.on_stale in ("pace", "continue"):
            return group
        if self.on_stale != "mask":
            return None
        rollouts = (
            replace(r, loss_mask=r.loss_mask & self.fresh(r, version=version))
            for r in group.rollouts
        )
        return replace(group, rollouts=tuple(rollouts))

    def room(self, *, batch_size: int, in_flight: int, finished: int, behind: int = 0) -> int:
        """Return how many more groups may start and still be trained on within the bound. Pure.

        A group exceeds the bound if `(max_off_policy_steps + 1) * batch_size` other groups are
        trained on before this group. If `on_stale` is "continue", the number of groups is not
        limited.

        Args:
            in_flight: the number of groups that are being generated.
            finished: the number of generated groups that are not yet trained on.
            behind: the number of versions by which the engine is behind the trainer.

        Source: the capacity law of AReaL, arXiv:2505.24298, section 5.1.
        """
        if self.on_stale == "continue":
            return sys.maxsize
        steps = self.max_off_policy_steps + 1 - behind
        return max(0, steps * batch_size - finished - in_flight)

    def ready(
        self, finished: Iterable[int], in_flight: Iterable[int], *, count: int, version: int
    ) -> bool:
        """Return whether the `count` oldest finished groups may be trained on now. Pure.

        If `on_stale` is "wait", the result is True only if all other groups, finished or in flight,
        can still be trained on within the bound. The result is right only if each later step trains
        on `count` groups, and the loop starts no more groups than `room` allows.

        Args:
            finished: the oldest version of each group that waits to be trained on.
            in_flight: the oldest version of each group that is being generated.
        """
        done = Counter(finished)
        if sum(done.values()) < count:
            return False
        if self.on_stale != "wait":
            return True
        outstanding = done + Counter(in_flight)
        owed = came = 0
        for started in sorted(outstanding):
            owed, came = owed + outstanding[started], came + done[started]
            later = count * max(0, started + self.max_off_policy_steps - version)
            if came < min(count, owed - later):
                return False
        return True


def staleness(item: Group | Rollout, *, version: int) -> int:
    """Return the number of optimizer steps from `item.oldest_version` to `version`. Pure.

    Raises:
        UsageError: `item.newest_version` is later than `version`.
    """
    if item.newest_version > version:
        whose = repr(item.prompt if isinstance(item, Group) else item.prompt_id)
        raise UsageError(
            f"policy {version} cannot train on the rollout of prompt {whose[:80]}, because it "
            f"comes from the later policy {item.newest_version}. If the run went back to an "
            f"earlier checkpoint, publish policy {version} to the engine, or restart the engine."
        )
    return version - item.oldest_version

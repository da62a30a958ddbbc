"""The bound on the age of trained tokens, and policies for groups beyond it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..rollout import Group, Rollout

__all__ = ["StalenessPolicy", "staleness"]

_ON_STALE = ("wait", "pace", "mask", "drop", "continue")


@dataclass(frozen=True)
class StalenessPolicy:
    """A bound on staleness, and what happens to a group that would exceed it.

    Except under "continue", only as many groups are started as can be trained on in time. The
    oldest groups are trained on first.

    - "wait" makes the trainer wait for groups that would exceed the bound. The bound is hard, and
      the trainer idles for the slowest group. A group can exceed the bound after a rollback, or if
      `take` does not know what is in flight. It is then dropped.
    - "pace" does not enforce the bound. Nothing is dropped and the trainer does not wait. A group
      that takes long may exceed the bound. Trained rollouts have the
      length distribution of sampled rollouts.
    - "mask" removes tokens beyond the bound from the loss. Their rollout stays in the baseline of
      its group.
    - "drop" discards the group and generates its prompt again. A rollout that takes longer than the
      bound is never trained on, so lengths are biased.
    - "continue" has no bound.

    With every `on_stale`, a token of a later policy than the trainer's raises UsageError. The
    engine then serves weights that the trainer rolled back.

    Args:
        max_off_policy_steps: the most optimizer steps between the policy that sampled a token and
            the policy that trains on it. 0 is on-policy.
        on_stale: one of the five words above.
        correction: names the correction of the loss for older tokens, for logs. Examples are
            "truncated importance sampling" and "ratio to the engine's log-probabilities". Required
            if the bound is above 0 or `on_stale` is "continue". Without a correction, ratios to the
            trainer's own policy would be wrong.

    Raises:
        UsageError: the bound is negative, `on_stale` is unknown, or a correction is missing.
    """

    max_off_policy_steps: int
    on_stale: str = "wait"
    correction: str = ""

    def __post_init__(self) -> None:
        if self.max_off_policy_steps < 0:
            raise UsageError(
                f"max_off_policy_steps must be 0 or more; got {self.max_off_policy_steps}"
            )
        if self.on_stale not in _ON_STALE:
            raise UsageError(f"on_stale must be one of {list(_ON_STALE)}; got {self.on_stale!r}.")
        if not self.correction and (self.max_off_policy_steps or self.on_stale == "continue"):
            raise UsageError(
                f"max_off_policy_steps={self.max_off_policy_steps} with "
                f"on_stale={self.on_stale!r} trains on tokens of older policies. Pass the name of "
                'the loss correction, such as correction="truncated importance sampling".'
            )

    def fresh(self, rollout: Rollout, *, version: int) -> NDArray[np.bool_]:
        """`[completion]`: a mask of tokens within the bound, for the policy `version`. Pure.

        Tokens that no policy sampled are always within the bound.

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
        """Return how many more groups may be started and still be trained on in time. Pure.

        A group after `(max_off_policy_steps + 1) * batch_size` other groups cannot be trained on in
        time. Under "continue" there is always room.

        Args:
            in_flight: groups that are being generated.
            finished: groups that are generated and not yet trained on.
            behind: versions by which the engine is behind the trainer.

        Source: the capacity law of AReaL, arXiv:2505.24298, section 5.1.
        """
        if self.on_stale == "continue":
            return sys.maxsize
        steps = self.max_off_policy_steps + 1 - behind
        return max(0, steps * batch_size - finished - in_flight)

    def ready(
        self, finished: Iterable[int], in_flight: Iterable[int], *, count: int, version: int
    ) -> bool:
        """Say whether `count` finished groups may be trained on now, the oldest first. Pure.

        Under "wait" this is true only if enough old groups are among them. The remaining old groups
        must fit into later steps of `count` groups, before they exceed the bound.

        Args:
            finished: versions of the groups that wait to be trained on.
            in_flight: versions of the groups that are being generated.
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
    """Return the optimizer steps between the oldest policy in `item` and `version`. Pure.

    Raises:
        UsageError: `item` contains a policy later than `version`.
    """
    if item.newest_version > version:
        whose = repr(item.prompt if isinstance(item, Group) else item.prompt_id)
        raise UsageError(
            f"policy {version} cannot train on the rollout of prompt {whose[:80]}, because it "
            f"comes from the later policy {item.newest_version}. If the run went back to an "
            f"earlier checkpoint, publish policy {version} to the engine, or restart the engine."
        )
    return version - item.oldest_version

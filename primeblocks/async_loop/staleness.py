"""The bound on a token's age when it is trained on, and what happens beyond it."""

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

ON_STALE = ("wait", "pace", "mask", "drop", "continue")


@dataclass(frozen=True)
class StalenessPolicy:
    """The bound on staleness, and what happens to a group that would exceed it.

    Under all but "continue", groups are started only as far as they can be trained on in time, and
    the oldest are trained on first.

    - "wait" makes the trainer wait for groups that would exceed it: a hard bound, and the trainer
      idles for the slowest. A group that exceeds it nevertheless is thrown away as under "drop":
      after a rollback, or if `take` was not given what is in flight.
    - "pace" does not hold the bound: nothing is thrown away, the trainer does not wait, and a group
      that takes long may exceed it. What is trained on has the lengths of what was sampled.
    - "mask" takes tokens beyond it out of the loss, and leaves the rollout in its group's baseline.
    - "drop" throws the group away and asks its prompt again. What takes longer than the bound is
      never trained on: lengths are biased.
    - "continue" knows no bound.

    Under all of them a token of a policy later than the trainer's is refused: its engine serves
    weights of a run that was rolled back.

    Args:
        max_off_policy_steps: optimizer steps that may lie between the policy which sampled a token
            and the policy that trains on it; 0 is on-policy.
        correction: names what the loss does about older tokens, such as "truncated importance
            sampling" or "ratio to the engine's log-probabilities"; for logs. A lag without a
            correction is refused: ratios to the trainer's own policy would be silently wrong.

    Raises:
        UsageError: the bound is negative, `on_stale` is unknown, or the correction has no name.
    """

    max_off_policy_steps: int
    on_stale: str = "wait"
    correction: str = ""

    def __post_init__(self) -> None:
        if self.max_off_policy_steps < 0:
            raise UsageError(
                f"max_off_policy_steps must be 0 or more; got {self.max_off_policy_steps}"
            )
        if self.on_stale not in ON_STALE:
            raise UsageError(f"on_stale must be one of {list(ON_STALE)}; got {self.on_stale!r}.")
        if not self.correction and (self.max_off_policy_steps or self.on_stale == "continue"):
            raise UsageError(
                f"max_off_policy_steps={self.max_off_policy_steps} with on_stale="
                f"{self.on_stale!r} trains on tokens of older policies. Name what the loss does "
                'about it: correction="truncated importance sampling", for instance.'
            )

    def admits(self, item: Group | Rollout, *, version: int) -> bool:
        """Say whether the policy `version` may train on all of this. Pure.

        Raises:
            UsageError: as `staleness`.
        """
        return staleness(item, version=version) <= self.max_off_policy_steps

    def fresh(self, rollout: Rollout, *, version: int) -> NDArray[np.bool_]:
        """`[completion]`: the tokens within the bound, for the policy `version`. Pure.

        Those that no policy sampled are within any.

        Raises:
            UsageError: as `staleness`.
        """
        staleness(rollout, version=version)
        return (version - rollout.versions <= self.max_off_policy_steps) | ~rollout.sampled

    def trainable(self, group: Group, *, version: int) -> Group | None:
        """Return as much of a group as the policy `version` may train on; None is nothing. Pure.

        Raises:
            UsageError: as `staleness`.
        """
        if self.admits(group, version=version) or self.on_stale in ("pace", "continue"):
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

        The trainer uses up `batch_size` groups a step, so a group behind
        `(max_off_policy_steps + 1) * batch_size` others cannot be trained on in time. Under
        "continue" there is always room.

        Args:
            in_flight: groups being generated.
            finished: groups generated and not yet trained on.
            behind: versions that the engine is behind the trainer.

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

        Under "wait", not before as many old ones are among them that those left can still be
        trained on in time, `count` a step.

        Args:
            finished: versions of the groups that wait to be trained on.
            in_flight: versions of those that are being generated.
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
    """Optimizer steps between the oldest policy in `item` and the policy `version`. Pure.

    Raises:
        UsageError: a policy in `item` is later than `version`.
    """
    if item.newest_version > version:
        whose = repr(item.prompt if isinstance(item, Group) else item.prompt_id)
        raise UsageError(
            f"policy {version} cannot train on the rollout of prompt {whose[:80]}: policy "
            f"{item.newest_version}, which is later, has a part in it. An engine that outlived a "
            f"rollback serves such weights: publish policy {version} to it, or restart it."
        )
    return version - item.oldest_version

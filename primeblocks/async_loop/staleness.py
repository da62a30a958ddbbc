"""The bound on a rollout's age when it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError, UsageError, check_version
from .rollout import Group, Rollout

__all__ = ["StalenessPolicy", "cache_salt", "staleness"]


@dataclass(frozen=True)
class StalenessPolicy:
    """The bound on staleness, and what happens to a group beyond it.

    Args:
        max_off_policy_steps: optimizer steps that may lie between the policy which sampled the
            oldest token of a group and the policy that trains on it; 0 is on-policy.
        on_stale: "drop" discards the rollouts and hands the prompt back.

    Raises:
        UsageError: the bound is negative.
        UnsupportedError: another reaction than "drop".
    """

    max_off_policy_steps: int
    on_stale: str = "drop"

    def __post_init__(self) -> None:
        if self.max_off_policy_steps < 0:
            raise UsageError(
                f"max_off_policy_steps must be 0 or more; got {self.max_off_policy_steps}"
            )
        if self.on_stale != "drop":
            raise UnsupportedError(
                f"on_stale={self.on_stale!r} is not built: stale groups are dropped and their "
                'prompts asked again. Use on_stale="drop".'
            )

    def admits(self, item: Group | Rollout, *, version: int) -> bool:
        """Say whether the policy `version` may train on this. Pure."""
        return staleness(item, version=version) <= self.max_off_policy_steps


def staleness(item: Group | Rollout, *, version: int) -> int:
    """Optimizer steps between the oldest policy in `item` and the policy `version`. Pure."""
    return version - item.oldest_version


def cache_salt(version: int) -> str:
    """The salt that keeps the KV pages of one policy version apart from all others. Pure.

    Raises:
        UsageError: `version` is not a policy version.
    """
    return f"policy-{check_version(version)}"

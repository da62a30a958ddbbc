"""The calls that record what happened to each prompt, and the rules of every ledger.

A prompt is in one state. The loop moves it with the call at the arrow:

    drawn --started--> in flight --finished--> finished --taken--> taken --trained--> trained

`dropped` leads from in flight or finished back to drawn, because the prompt is generated again.
`left_out` leads from each of the first three states to filtered or failed. `checkpointed` deletes
trained prompts of steps that cannot be rolled back. `restore` leads from in flight back to drawn,
and from taken and trained back to finished for the steps after the restored weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, check_version
from ..rollout import UNSAMPLED, Group, Rollout, freeze_trajectory, pickled

__all__ = [
    "MOVES",
    "Draft",
    "Ledger",
    "Partial",
    "Progress",
    "PromptState",
    "Restored",
    "group_rolled_back",
    "refuse",
    "rolled_back",
]


class PromptState(StrEnum):
    """The state of a prompt. A prompt that is filtered or failed never changes state again."""

    DRAWN = "drawn"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


# The states in which each call may find a prompt.
MOVES = {
    "started": (PromptState.DRAWN, PromptState.IN_FLIGHT),
    "sampled": (PromptState.IN_FLIGHT,),
    "finished": (PromptState.IN_FLIGHT,),
    "dropped": (PromptState.IN_FLIGHT, PromptState.FINISHED),
    "left_out": (PromptState.DRAWN, PromptState.IN_FLIGHT, PromptState.FINISHED),
    "taken": (PromptState.FINISHED,),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """An unfinished rollout: the trajectory so far. Its arrays are read-only copies.

    Args:
        tokens: ids of the prompt, then of the completion so far, as int64.
        prompt_length: the number of prompt tokens. All tokens may be prompt tokens.
        logprobs: the engine's log-probability of each completion token, as float64.
        versions: the policy version that sampled each completion token, or `UNSAMPLED`, as int64.
        loss_mask: the completion tokens to train on, as bool. By default all sampled tokens.
        attachments: values that travel with the trajectory unchanged, such as expert routes.

    Raises:
        ShapeError: lengths do not fit, or the mask is not bool.
        UsageError: an id or a version is negative, or a log-probability is not finite.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    loss_mask: NDArray[np.bool_] = None  # type: ignore[assignment]  # an array, once made
    attachments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze_trajectory(self, least=0)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return pickled(self)

    @property
    def completion(self) -> NDArray[np.int64]:
        """Ids of the completion: sampled tokens, and tokens that were given in between."""
        return self.tokens[self.prompt_length :]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """A mask of the completion tokens that a policy sampled."""
        return self.versions != UNSAMPLED

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token. There must be a sampled token."""
        return int(self.versions[self.sampled].min())


T = TypeVar("T", bound=Partial | Rollout)


def rolled_back(trajectory: T, version: int) -> T:
    """Return a trajectory in which versions after `version` are replaced by `version`. Pure.

    A run that goes back to `version` trains other policies under the same numbers. A token of an
    abandoned policy would otherwise look younger than it is.
    """
    if trajectory.versions.max(initial=UNSAMPLED) <= version:
        return trajectory
    return replace(trajectory, versions=np.minimum(trajectory.versions, version))


def group_rolled_back(group: Group, version: int) -> Group:
    """Return a group in which versions after `version` are replaced by `version`. Pure."""
    if group.newest_version <= version:
        return group
    rollouts = tuple(rolled_back(rollout, version) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts, version=min(group.version, version))


@dataclass(frozen=True, eq=False)
class Restored:
    """The prompts and groups with which a loop continues.

    Args:
        cursor: the number of prompts drawn so far. The iterable continues there.
        again: prompts to generate again: `(ordinal, prompt, partials)`, with partials by sample. A
            finished sample of an unfinished group is a `Rollout` among them.
        finished: groups to train on, in the order in which they finished: `(ordinal, group)`.
    """

    cursor: int
    again: list[tuple[int, Any, dict[int, Partial | Rollout]]]
    finished: list[tuple[int, Group]]


class Ledger(Protocol):
    """A record of what happened to each prompt of a training run.

    Prompts are numbered 0, 1, 2, ... as they are drawn. Every call is synchronous and quick, and
    changes all or nothing. When it returns, the change is as durable as the ledger promises. A call
    that cannot have happened, such as training a prompt twice, raises UsageError and changes
    nothing.
    """

    def drawn(self, ordinal: int, prompt: Any) -> None:
        """Add the next prompt of the iterable."""

    def started(self, ordinal: int, version: int) -> None:
        """Put a prompt in flight under policy `version`, for the first time or again."""

    def sampled(self, ordinal: int, sample: int, partial: Partial | Rollout) -> None:
        """Store a trajectory of a prompt in flight. It replaces the last one of that sample."""

    def finished(self, ordinal: int, group: Group) -> None:
        """Store the group of a prompt in flight. It replaces the prompt's trajectories."""

    def dropped(self, ordinal: int) -> None:
        """Delete the samples of a prompt, which is generated again from the start."""

    def left_out(self, ordinal: int, reason: str) -> None:
        """End a prompt without training on it: "filtered" or "failed", then ": why". Final."""

    def taken(self, ordinals: Sequence[int], version: int) -> None:
        """Take finished prompts for the step from policy `version`."""

    def trained(self, version: int) -> None:
        """End the step from policy `version`. The policy is `version + 1` then."""

    def checkpointed(self, version: int) -> None:
        """Make the steps before policy `version` final, because its weights are durable."""

    def restore(self, version: int) -> Restored:
        """Go back to policy `version`, the policy of the loaded weights. Return where to continue.

        Prompts of steps from `version` on, taken or trained, are finished again. Prompts in flight
        are generated again, from their trajectories. Earlier steps with a batch are done, because
        the weights result from them. Tokens of policies after `version` count as tokens of
        `version`.

        Raises:
            UsageError: steps from `version` on are final, or no recorded steps lead to `version`.
        """
        ...


class Draft:
    """The trajectories of one prompt so far. `generate` continues them and saves new ones."""

    def __init__(self, ordinal: int, partials: dict[int, Partial], ledger: Ledger) -> None:
        self.ordinal, self.partials, self._ledger = ordinal, partials, ledger

    def save(self, sample: int, partial: Partial) -> None:
        """Store a trajectory. It is durable when this returns."""
        self._ledger.sampled(self.ordinal, sample, partial)
        self.partials[sample] = partial


@dataclass(frozen=True)
class Progress:
    """The progress of a training run in steps, and the rules of their order. Pure.

    Args:
        version: the policy from which the next step begins. None before it is known.
        final: steps before this policy are final.
    """

    version: int | None = None
    final: int = 0

    def check_taken(self, version: int) -> int:
        """Return the step for which a batch is taken. Raises UsageError if the step is past."""
        if check_version(version) < (self.version or 0):
            raise UsageError(
                f"a batch cannot be taken for the step from policy {version}: the policy is "
                f"{self.version} by now"
            )
        return version

    def trained(self, version: int, *, taken: int) -> Progress:
        """Return the progress after a step for which `taken` prompts were taken."""
        if check_version(version) != (version if self.version is None else self.version):
            raise UsageError(
                f"the step from policy {version} cannot be done: the policy is {self.version}"
            )
        if not taken:
            raise UsageError(
                f"no batch was taken for the step from policy {version}. Call taken() before "
                "trained()."
            )
        return replace(self, version=version + 1)

    def checkpointed(self, version: int) -> Progress:
        """Return the progress after weights of policy `version` became durable."""
        if check_version(version) > (newest := self.version or 0):
            raise UsageError(
                f"weights of policy {version} cannot be durable: the policy is {newest}. Call"
                " checkpointed() once the step has ended."
            )
        return replace(self, final=max(version, self.final))  # An older save may end later.

    def restored(self, version: int, *, taken: Collection[int]) -> Progress:
        """Return the progress after a rollback.

        Args:
            taken: the steps for which batches are taken. If the weights are one step ahead, that
                step was done: the weights were saved, and the run ended before recording the step.
        """
        if check_version(version) < self.final:
            raise UsageError(
                f"cannot go back to policy {version}: steps before policy {self.final} are final, "
                f"and their groups gone. Restore policy {self.final} or a later one, or begin a "
                "new ledger."
            )
        ahead = 0 if self.version is None else version - self.version
        if ahead > len(taken) or not {*range(version - max(0, ahead), version)} <= {*taken}:
            raise UsageError(
                f"cannot go on from policy {version}: the last step recorded led to policy "
                f"{self.version}. The weights are of another run, or the ledger is."
            )
        return replace(self, version=version)


def refuse(call: str, ordinal: int, state: str | None, *, cursor: int) -> NoReturn:
    """Raise the UsageError of a call that finds a prompt in a wrong state."""
    if state is None:
        state = "final" if ordinal < cursor else f"not drawn yet: there are {cursor} prompts"
    raise UsageError(
        f"{call}() needs a prompt that is {' or '.join(MOVES[call])}; prompt {ordinal} is {state}"
    )

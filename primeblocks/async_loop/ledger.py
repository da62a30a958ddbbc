"""Calls that say what happened to each prompt, and the rules that every ledger keeps.

A prompt is in one state. The loop moves it with the call at the arrow:

    drawn --started--> in flight --finished--> finished --taken--> taken --trained--> trained

`dropped` leads from in flight or finished back to drawn, since the prompt is generated again.
`left_out` leads from each of the first three states to filtered or failed. `checkpointed` deletes
trained prompts of steps that cannot come back. `restore` leads from in flight back to drawn, and
from taken and trained back to finished for the steps after the weights at hand.
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
    """The one state that a prompt is in; those after `TRAINED` are final from the start."""

    DRAWN = "drawn"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


# The states that each call may find a prompt in.
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
    """A trajectory so far: a rollout that has no end yet. Arrays are read-only copies.

    Args:
        tokens: ids of the prompt, then of what was sampled; int64.
        prompt_length: how many of them are the prompt. All of them may be.
        logprobs: the engine's log-probability of each completion token; float64.
        versions: the policy version that sampled each of them, or `UNSAMPLED`; int64.
        loss_mask: which of them are trained on; bool. All, if it is left out.
        attachments: values that travel along unseen, expert routes for instance.

    Raises:
        ShapeError: lengths do not fit, or the mask is not bool.
        UsageError: a negative id or version, or a log-probability that is not finite.
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
        """Ids of what was sampled, and of what was said in between."""
        return self.tokens[self.prompt_length :]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """The completion tokens that a policy sampled."""
        return self.versions != UNSAMPLED

    @property
    def oldest_version(self) -> int:
        """The oldest policy that sampled a token of it; of some it must have."""
        return int(self.versions[self.sampled].min())


T = TypeVar("T", bound=Partial | Rollout)


def rolled_back(trajectory: T, version: int) -> T:
    """Return a trajectory whose tokens of policies after `version` count as that policy's. Pure.

    A run that goes back to `version` trains other policies under the same numbers. Under its own
    number a token of an abandoned policy would look younger than it is.
    """
    if trajectory.versions.max(initial=UNSAMPLED) <= version:
        return trajectory
    return replace(trajectory, versions=np.minimum(trajectory.versions, version))


def group_rolled_back(group: Group, version: int) -> Group:
    """Return a group whose parts of policies after `version` count as that policy's. Pure."""
    if group.newest_version <= version:
        return group
    rollouts = tuple(rolled_back(rollout, version) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts, version=min(group.version, version))


@dataclass(frozen=True, eq=False)
class Restored:
    """Prompts and groups that a loop goes on with.

    Args:
        cursor: prompts drawn so far; the iterable goes on there.
        again: prompts to ask, by ordinal: `(ordinal, prompt, partials)`, the partials by sample.
            A sample that had ended, in a group that had not, is a `Rollout` among them.
        finished: groups to train on, in the order in which they finished: `(ordinal, group)`.
    """

    cursor: int
    again: list[tuple[int, Any, dict[int, Partial | Rollout]]]
    finished: list[tuple[int, Group]]


class Ledger(Protocol):
    """A record of what happened to each prompt of a run.

    Prompts are numbered 0, 1, 2, ... as they are drawn. Every call is plain and quick, changes
    all or nothing, and is as durable when it returns as the ledger promises. Each refuses with
    UsageError, changing nothing, what cannot have happened, a prompt trained twice for instance.
    """

    def drawn(self, ordinal: int, prompt: Any) -> None:
        """Add the next prompt of the iterable."""

    def started(self, ordinal: int, version: int) -> None:
        """Put a prompt in flight under policy `version`, for the first time or again."""

    def sampled(self, ordinal: int, sample: int, partial: Partial | Rollout) -> None:
        """Keep a trajectory of a prompt in flight, in place of the last one of that sample."""

    def finished(self, ordinal: int, group: Group) -> None:
        """Keep the group of a prompt in flight, in place of its trajectories."""

    def dropped(self, ordinal: int) -> None:
        """Forget what was sampled for a prompt, which is asked again from the start."""

    def left_out(self, ordinal: int, reason: str) -> None:
        """End a prompt that is not trained on: "filtered" or "failed", and ": why". Final."""

    def taken(self, ordinals: Sequence[int], version: int) -> None:
        """Take finished prompts for the step from policy `version`."""

    def trained(self, version: int) -> None:
        """End the step from policy `version`; the policy is `version + 1` now."""

    def checkpointed(self, version: int) -> None:
        """Make the steps before policy `version` final: its weights are durable."""

    def restore(self, version: int) -> Restored:
        """Go back to policy `version`, that of the weights at hand; return what to go on with.

        Prompts of steps from `version` on are finished again, taken or trained; those in flight
        are asked again, with what was sampled of them. Steps before it that a batch was taken for
        are done, for the weights came of them. Tokens of policies after `version` count as its own.

        Raises:
            UsageError: steps from `version` on are final, or there were none that lead to it.
        """
        ...


class Draft:
    """The trajectories of one prompt so far, for `generate` to go on with and to save."""

    def __init__(self, ordinal: int, partials: dict[int, Partial], ledger: Ledger) -> None:
        self.ordinal, self.partials, self._ledger = ordinal, partials, ledger

    def save(self, sample: int, partial: Partial) -> None:
        """Keep a trajectory as far as it is; durable when it returns."""
        self._ledger.sampled(self.ordinal, sample, partial)
        self.partials[sample] = partial


@dataclass(frozen=True)
class Progress:
    """The steps of a run, and the order that they keep. Pure.

    Args:
        version: the policy that the next step begins from; None before it is known.
        final: steps before this policy are final.
    """

    version: int | None = None
    final: int = 0

    def check_taken(self, version: int) -> int:
        """Return the step that a batch is taken for; UsageError if it is past."""
        if check_version(version) < (self.version or 0):
            raise UsageError(
                f"a batch cannot be taken for the step from policy {version}: the policy is "
                f"{self.version} by now"
            )
        return version

    def trained(self, version: int, *, taken: int) -> Progress:
        """Return the progress after a step that `taken` prompts were taken for."""
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
        """Return the progress once weights of policy `version` are durable."""
        if check_version(version) > (newest := self.version or 0):
            raise UsageError(
                f"weights of policy {version} cannot be durable: the policy is {newest}. Call"
                " checkpointed() once the step has ended."
            )
        return replace(self, final=max(version, self.final))  # An older save may end later.

    def restored(self, version: int, *, taken: Collection[int]) -> Progress:
        """Return the progress after a rollback.

        Args:
            taken: the steps that batches are taken for. Weights that are a step ahead say that it
                was done: they were saved, and the run ended before it could tell.
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
    """Raise the UsageError of a call that finds a prompt in no state for it."""
    if state is None:
        state = "final" if ordinal < cursor else f"not drawn yet: there are {cursor} prompts"
    raise UsageError(
        f"{call}() needs a prompt that is {' or '.join(MOVES[call])}; prompt {ordinal} is {state}"
    )

"""The values of a journal and their bytes: states, unfinished rollouts, the point of a restart.

Each prompt has one state. An arrow names the call that changes the state:

    drawn --started--> in flight --finished--> finished --taken--> taken --trained--> trained

`dropped` moves a prompt from in flight or finished back to drawn, because the prompt is generated
again. `left_out` moves a prompt from drawn, in flight or finished to filtered or failed.
`checkpointed` deletes trained prompts of steps that cannot be rolled back. `restore` moves prompts
from in flight back to drawn. For steps after the restored weights, `restore` moves taken and
trained prompts back to finished. For earlier steps, `restore` moves taken prompts to trained.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..codec import pack, unpack
from ..errors import CorruptionError, UnsupportedError, check_counts
from ..rollout import UNSAMPLED, Group, Rollout, freeze_trajectory, pickled

__all__ = [
    "Draft",
    "Partial",
    "PromptState",
    "Restored",
    "check_ordinal",
    "group_rolled_back",
    "pack_group",
    "pack_trajectory",
    "pack_whole_group",
    "rolled_back",
    "unpack_group",
    "unpack_trajectory",
    "unpack_whole_group",
]


class PromptState(StrEnum):
    """The state of a prompt. A filtered or failed prompt never changes its state."""

    DRAWN = "drawn"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """An unfinished rollout: the trajectory so far, in read-only arrays.

    The arguments and errors are as for `Rollout`, but the completion of a `Partial` may be empty.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    loss_mask: NDArray[np.bool_] = None  # type: ignore[assignment]  # an array, once made
    attachments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze_trajectory(self, least=0)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pickled(self)

    @property
    def completion(self) -> NDArray[np.int64]:
        """The token ids of the completion so far."""
        return self.tokens[self.prompt_length :]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """A mask of the completion tokens that a policy sampled."""
        return self.versions != UNSAMPLED

    @cached_property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token, or 2**63 - 1 without a sampled token."""
        return int(self.versions[self.sampled].min(initial=np.iinfo(np.int64).max))


T = TypeVar("T", bound=Partial | Rollout)


def rolled_back(trajectory: T, version: int) -> T:
    """Return a trajectory in which versions after `version` are replaced by `version`. Pure.

    After a run goes back to `version`, new policies get the later version numbers again. If
    versions were not replaced, a token of an abandoned policy would look younger than it is.
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
    """The prompts and groups with which a loop continues after a restart.

    Args:
        cursor: the number of prompts that were drawn so far. The loop skips these prompts.
        again: prompts to generate again, as `(ordinal, prompt, partials)`. `partials` maps the
            position of a sample in its group to the sample's trajectory, which is a `Rollout` if
            the sample is finished.
        finished: groups to train on, as `(ordinal, group)`, in the order in which they finished.
    """

    cursor: int
    again: list[tuple[int, Any, dict[int, Partial | Rollout]]]
    finished: list[tuple[int, Group]]


class Draft:
    """The trajectories of one prompt so far, which `generate` continues and saves."""

    def __init__(
        self,
        ordinal: int,
        partials: dict[int, Partial],
        store: Callable[[int, int, Partial], None],
    ) -> None:
        self.ordinal, self.partials, self._store = ordinal, partials, store

    def save(self, sample: int, partial: Partial) -> None:
        """Store a trajectory. On return, the trajectory is durable."""
        self._store(self.ordinal, sample, partial)
        self.partials[sample] = partial


def check_ordinal(value: Any) -> int:
    """Return the position of a prompt, or of a sample in its group, as an int that SQLite stores.

    Raises:
        UsageError: `value` is not a whole number from 0 to 2**63 - 1.
    """
    check_counts(least=0, ordinal=value)
    return operator.index(value)


_TRAJECTORIES = {"partial": Partial, "rollout": Rollout}


def pack_trajectory(trajectory: Partial | Rollout, *, name: str) -> bytes:
    """Pack every field of a trajectory.

    Raises:
        UnsupportedError: `trajectory` is not a Partial or a Rollout, or an attachment cannot be
            packed.
    """
    for kind, cls in _TRAJECTORIES.items():
        if type(trajectory) is cls:
            return pack([kind, _values(trajectory)], name=name)
    raise UnsupportedError(f"{name} is a {type(trajectory).__name__}. Pass a Partial or a Rollout.")


def unpack_trajectory(payload: bytes, *, name: str) -> Partial | Rollout:
    """Return the trajectory that `pack_trajectory` packed.

    Raises:
        CorruptionError: bytes changed after packing.
        UnsupportedError: the payload has fields that this version of primeblocks does not know.
    """
    kind, values = unpack(payload, name=name)
    return _TRAJECTORIES[kind](**_known(values, _TRAJECTORIES[kind], name))


def pack_group(group: Group, *, name: str) -> bytes:
    """Pack the fields of a group except its prompt and its rollouts."""
    values = _values(group)
    del values["prompt"], values["rollouts"]
    return pack(values, name=name)


def unpack_group(payload: bytes, prompt: Any, rollouts: Sequence[Any], *, name: str) -> Group:
    """Return the group that `pack_group` packed, with its prompt and its rollouts.

    Raises:
        CorruptionError: bytes changed after packing.
        UnsupportedError: the payload has fields that this version of primeblocks does not know.
    """
    values = _known(unpack(payload, name=name), Group, name)
    return Group(prompt=prompt, rollouts=tuple(rollouts), **values)


def pack_whole_group(group: Group) -> bytes:
    """Pack a group with its prompt and its rollouts.

    Raises:
        UnsupportedError: a rollout is not a `Rollout`, or the prompt or an attachment cannot be
            packed.
    """
    name = _named(group.ordinal)
    if strange := [type(each).__name__ for each in group.rollouts if type(each) is not Rollout]:
        raise UnsupportedError(
            f"{name} has a {strange[0]}, which would be unpacked as a Rollout. Pass only Rollouts."
        )
    return pack(_values(group) | {"rollouts": [*map(_values, group.rollouts)]}, name=name)


def unpack_whole_group(payload: bytes, ordinal: int) -> Group:
    """Return the group that `pack_whole_group` packed. Forged bytes may raise any error.

    Raises:
        CorruptionError: bytes changed after packing, or the group has another ordinal.
        UnsupportedError: the payload has fields that this version of primeblocks does not know.
    """
    name = _named(ordinal)
    values = _known(unpack(payload, name=name), Group, name)
    rollouts = [Rollout(**_known(each, Rollout, name)) for each in values["rollouts"]]
    group = Group(**values | {"rollouts": tuple(rollouts)})
    if group.ordinal != ordinal:
        raise CorruptionError(f"the bytes of {name} contain the group of ordinal {group.ordinal}")
    return group


def _named(ordinal: int) -> str:
    return f"the group of ordinal {ordinal}"


def _values(item: Group | Partial | Rollout) -> dict[str, Any]:
    return {each.name: getattr(item, each.name) for each in fields(item)}


def _known(values: dict[str, Any], cls: type, name: str) -> dict[str, Any]:
    if unknown := sorted(values.keys() - {each.name for each in fields(cls)}):
        raise UnsupportedError(
            f"{name} has the fields {', '.join(unknown)}, which {cls.__name__} of this version "
            "does not know. Another version of primeblocks wrote it. Continue with that version."
        )
    return values

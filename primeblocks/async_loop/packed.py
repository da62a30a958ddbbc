"""Trajectories and groups as bytes, packed by `codec`. Unknown fields are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..codec import pack, unpack
from ..errors import CorruptionError, UnsupportedError
from ..rollout import Group, Rollout
from .ledger import Partial

__all__ = [
    "pack_group",
    "pack_trajectory",
    "pack_whole_group",
    "unpack_group",
    "unpack_trajectory",
    "unpack_whole_group",
]

_TRAJECTORIES = {"partial": Partial, "rollout": Rollout}


def pack_trajectory(trajectory: Partial | Rollout, *, name: str) -> bytes:
    """Pack every field of a trajectory.

    Raises:
        UnsupportedError: it is not a Partial or a Rollout, or an attachment cannot be packed.
    """
    for kind, cls in _TRAJECTORIES.items():
        if type(trajectory) is cls:
            values = {each.name: getattr(trajectory, each.name) for each in fields(cls)}
            return pack([kind, values], name=name)
    raise UnsupportedError(f"{name} is a {type(trajectory).__name__}; give a Partial or a Rollout")


def unpack_trajectory(payload: bytes, *, name: str) -> Partial | Rollout:
    """Return the trajectory that was packed.

    Raises:
        CorruptionError: bytes changed after packing.
        UnsupportedError: it has fields that this version does not know.
    """
    kind, values = unpack(payload, name=name)
    return _TRAJECTORIES[kind](**_known(values, _TRAJECTORIES[kind], name))


def pack_group(group: Group, *, name: str) -> bytes:
    """Pack the fields of a group except its prompt and its rollouts."""
    others = {each.name for each in fields(Group)} - {"prompt", "rollouts"}
    return pack({each: getattr(group, each) for each in sorted(others)}, name=name)


def unpack_group(payload: bytes, prompt: Any, rollouts: Sequence[Any], *, name: str) -> Group:
    """Return a group, given its prompt and its rollouts.

    Raises:
        CorruptionError: bytes changed after packing.
        UnsupportedError: it has fields that this version does not know.
    """
    values = _known(unpack(payload, name=name), Group, name)
    return Group(prompt=prompt, rollouts=tuple(rollouts), **values)


def pack_whole_group(group: Group) -> bytes:
    """Pack a group with its prompt and its rollouts, under its ordinal.

    Raises:
        UnsupportedError: a rollout is not a `Rollout`, or the prompt or an attachment cannot be
            packed.
    """
    name = _named(group.ordinal)
    if strange := [type(each).__name__ for each in group.rollouts if type(each) is not Rollout]:
        raise UnsupportedError(f"{name} has a {strange[0]}, which would come back as a Rollout")
    return pack(_values(group) | {"rollouts": [*map(_values, group.rollouts)]}, name=name)


def unpack_whole_group(payload: bytes, ordinal: int) -> Group:
    """Return the group that was packed. Forged bytes may raise other errors.

    Raises:
        CorruptionError: bytes changed after packing, or the group has another ordinal.
        UnsupportedError: it has fields that this version does not know.
    """
    name = _named(ordinal)
    values = _known(unpack(payload, name=name), Group, name)
    rollouts = [Rollout(**_known(each, Rollout, name)) for each in values["rollouts"]]
    group = Group(**values | {"rollouts": tuple(rollouts)})
    if group.ordinal != ordinal:
        raise CorruptionError(f"{name} says that it is of ordinal {group.ordinal}")
    return group


def _named(ordinal: int) -> str:
    return f"the group of ordinal {ordinal}"


def _values(item: Group | Rollout) -> dict[str, Any]:
    return {each.name: getattr(item, each.name) for each in fields(item)}


def _known(values: dict[str, Any], cls: type, name: str) -> dict[str, Any]:
    if unknown := sorted(values.keys() - {each.name for each in fields(cls)}):
        raise UnsupportedError(
            f"{name} has {', '.join(unknown)}, which {cls.__name__} here does not know: another "
            "version of primeblocks wrote it. Go on with that one."
        )
    return values

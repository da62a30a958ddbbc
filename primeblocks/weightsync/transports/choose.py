"""Choice of the committed version that a reader takes, and of the versions it needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import TransferError
from ..marker import Marker

__all__ = ["chain_to", "choose"]


def choose(
    markers: Sequence[Marker], version: int | None, *, served: Marker | None
) -> Marker | None:
    """Return the version asked for, or the newest if newer than the one served; None: wait.

    Raises:
        TransferError: it was retired.
    """
    newest = markers[-1] if markers else None
    if version is None:
        # Another run of the trainer starts counting again.
        old = newest is None or (
            served is not None and served.run == newest.run and served.version >= newest.version
        )
        return None if old else newest
    for marker in markers:
        if marker.version == version:
            return marker
    if newest is not None and newest.version > version:
        raise TransferError(
            f"version {version} was retired; the transport holds "
            f"{[marker.version for marker in markers]}. Receive the newest."
        )
    return None


def chain_to(
    wanted: Marker, markers: Sequence[Marker], *, held: Marker | None
) -> tuple[Marker, ...]:
    """Return the way to `wanted`: deltas after the held one, or a full version and its deltas.

    Raises:
        TransferError: a part of it was retired.
    """
    by_version = {marker.version: marker for marker in markers}
    chain = [wanted]
    while chain[-1].base is not None:
        if held is not None and (held.run, held.version) == (wanted.run, chain[-1].base):
            break
        base = by_version.get(chain[-1].base)
        if base is None:
            raise TransferError(
                f"version {wanted.version} is a delta to version {chain[-1].base}, which was "
                "retired. Receive the newest."
            )
        chain.append(base)
    return tuple(reversed(chain))

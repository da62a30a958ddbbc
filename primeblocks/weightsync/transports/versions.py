"""A reader's choice among committed versions, and its wait for one that is not there yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ...errors import DeadlineError, TransferError
from ..marker import Marker
from .commits import Commits
from .transport import Request

__all__ = ["await_announced", "await_versions", "chain_to", "choose"]


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


def await_versions(
    look: Callable[[], tuple[Marker, ...]],
    request: Request,
    *,
    every_s: float,
    hint: Callable[[], str] = str,
) -> tuple[Marker, ...]:
    """Wait for the version asked for; return it, after missing versions that it is a delta to.

    `hint` ends the message of a wait in vain.

    Raises:
        DeadlineError: it was not committed in time.
        TransferError: it was retired.
    """
    never = threading.Event()
    while True:
        markers = look()
        found = choose(markers, request.version, served=request.served)
        if found is not None:
            return chain_to(found, markers, held=request.held)
        if time.monotonic() >= request.deadline:
            wanted = f"version {request.version}"
            if request.version is None:
                wanted = "a newer version"
            raise DeadlineError(
                f"{wanted} was not committed in time; this engine holds "
                f"{request.served and request.served.version}, the transport "
                f"{[marker.version for marker in markers]}.{hint()}"
            )
        never.wait(min(every_s, max(0.0, request.deadline - time.monotonic())))


def await_announced(commits: Commits, *, deadline: float) -> str:
    """Wait for what the owner announced.

    Raises:
        DeadlineError: there was no owner, or it announced nothing.
    """
    never = threading.Event()
    while (text := commits.announced(deadline=deadline)) is None:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                "nobody announced a plan there in time. Is the trainer running, under that name?"
                f"{commits.hint()}"
            )
        never.wait(commits.look_s)
    return text

"""The protocol of commit records, of notes and of leases; a reader's choice among the versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ...errors import ClosedError, DeadlineError, TransferError, UsageError
from ..marker import Marker
from .transport import ReceiveRequest

__all__ = [
    "ANNOUNCED",
    "Commits",
    "Lease",
    "await_versions",
    "chain_to",
    "check_call",
    "choose",
    "last_chain",
    "newest_only",
    "retired",
]

ANNOUNCED = "announced"


class Lease(NamedTuple):
    """A version that its writers leave alone until it is closed, or until a time.

    Attributes:
        until: the end, by time.monotonic; infinity where it ends with this process.
        close: lets go. Twice is fine.
    """

    until: float
    close: Callable[[], object]


class Commits(Protocol):
    """The versions of one owner, who begins and commits, and the readers of each.

    It is constructed with `owner=True` on one process, which starts with no version. Deadlines are
    of time.monotonic. What others do is looked at again every `look_s`.
    """

    look_s: float

    @property
    def run(self) -> str:
        """Owner: the name of its life."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return what opens its reading end in another process. JSON-able.

        Raises:
            UnsupportedError: it cannot be opened there.
        """
        ...

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        """Owner: hide all versions but those of `keep`, and wait until nobody reads the others.

        After a failure call it again.

        Raises:
            CapacityError: a reader was not done in time.
            TransferError: another owner took over.
        """
        ...

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version that was begun visible, atomically.

        Raises:
            TransferError: another owner took over.
        """
        ...

    def abort(self, version: int) -> None:
        """Owner: give up a version that was begun and not committed, if there is one."""
        ...

    def markers(self, *, deadline: float) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first.

        Raises:
            CorruptionError: their record cannot be read.
        """
        ...

    def hold(self, marker: Marker, *, deadline: float) -> Lease:
        """Reader: keep what was written of a version as it is.

        Raises:
            TransferError: it was retired.
        """
        ...

    def post(self, name: str, text: str, *, deadline: float) -> None:
        """Write a note of this name over the one before. It ends with the run.

        Raises:
            TransferError: no owner has begun.
        """
        ...

    def look(self, name: str, *, run: str | None = None, deadline: float) -> str | None:
        """Return a note of a run, of the one that goes on without `run`; None where there is none.

        The caller holds a version of `run`.
        """
        ...

    def hint(self) -> str:
        """Return what may help somebody who waits for a version in vain, or nothing."""
        ...

    def close(self) -> None:
        """Let go. The owner's versions end; twice is fine."""
        ...


def check_call(*, closed: bool, may: bool = True) -> None:
    """Refuse a call after the end, or one that only the owner may make."""
    if closed:
        raise ClosedError("the transport was closed")
    if not may:
        raise UsageError(
            "only the owner begins and commits. "
            "Construct the transport of trainer rank 0 with owner=True."
        )


def retired(version: int) -> TransferError:
    """Return the error of a reader that came too late."""
    return TransferError(f"version {version} was retired while it was being opened")


def newest_only(base: int | None, markers: Sequence[Marker]) -> int | None:
    """Return the base of a delta, if it is the newest version; None: send in full.

    Else another publisher came between, or the base is not kept.
    """
    return base if base in [marker.version for marker in markers[-1:]] else None


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


def last_chain(markers: Sequence[Marker]) -> tuple[Marker, ...]:
    """Return the last version, after those that it is a delta to."""
    return chain_to(markers[-1], markers, held=None) if markers else ()


def await_versions(commits: Commits, request: ReceiveRequest) -> tuple[Marker, ...]:
    """Wait for the version asked for; return it, after missing versions that it is a delta to.

    Raises:
        DeadlineError: it was not committed in time.
        TransferError: it was retired.
    """
    never, deadline = threading.Event(), request.deadline
    while True:
        # A store that stalls has until the deadline to answer.
        markers = commits.markers(deadline=deadline)
        found = choose(markers, request.version, served=request.served)
        if found is not None:
            return chain_to(found, markers, held=request.held)
        if time.monotonic() >= deadline:
            wanted = f"version {request.version}"
            if request.version is None:
                wanted = "a newer version"
            raise DeadlineError(
                f"{wanted} was not committed in time; this engine holds "
                f"{request.served and request.served.version}, the transport "
                f"{[marker.version for marker in markers]}.{commits.hint()}"
            )
        never.wait(min(commits.look_s, max(0.0, deadline - time.monotonic())))

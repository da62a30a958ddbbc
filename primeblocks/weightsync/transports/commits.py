"""The protocol of commit records, notes and leases, and a reader's choice among the versions."""

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
    """A hold on a version. Its writers leave the version unchanged until the lease ends.

    Attributes:
        until: the end by time.monotonic(). Infinity if the lease ends with this process.
        close: ends the lease. Idempotent.
    """

    until: float
    close: Callable[[], object]


class Commits(Protocol):
    """The versions of one owner, which begins and commits them, and the readers of each version.

    One process constructs it with `owner=True`, and starts without versions. Deadlines are times of
    `time.monotonic()`. A wait looks at the state of other processes every `look_s` seconds.
    """

    look_s: float

    @property
    def run(self) -> str:
        """Owner: the name of this life of the owner."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return the arguments that open its reading end in another process. JSON-able.

        Raises:
            UnsupportedError: another process cannot open it.
        """
        ...

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        """Owner: hide all versions except `keep`, and wait until their readers are done.

        You may call it again after a failure.

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
        """Owner: give up a version that was begun and not committed. Otherwise, do nothing."""
        ...

    def markers(self, *, deadline: float) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first.

        Raises:
            CorruptionError: their record cannot be read.
        """
        ...

    def hold(self, marker: Marker, *, deadline: float) -> Lease:
        """Reader: hold a version, so that its bytes stay unchanged.

        Raises:
            TransferError: the version was retired.
        """
        ...

    def post(self, name: str, text: str, *, deadline: float) -> None:
        """Write a note, over an earlier note of the same name. Notes end with the run.

        Raises:
            TransferError: an owner has not begun.
        """
        ...

    def look(self, name: str, *, run: str | None = None, deadline: float) -> str | None:
        """Return a note, or None without such a note.

        Args:
            run: the run of the note, of which the caller must hold a version. None is the current
                run.
        """
        ...

    def hint(self) -> str:
        """Return a hint for the error of a wait that found no version, or ""."""
        ...

    def close(self) -> None:
        """Release this end. The owner's versions end. Idempotent."""
        ...


def check_call(*, closed: bool, may: bool = True) -> None:
    """Refuse a call after `close`, or a call that only the owner may make."""
    if closed:
        raise ClosedError("the transport was closed. Construct a new one.")
    if not may:
        raise UsageError(
            "only the owner begins and commits. "
            "Construct the transport of trainer rank 0 with owner=True."
        )


def retired(version: int) -> TransferError:
    """Return the error of a reader that came too late."""
    return TransferError(
        f"version {version} was retired while it was being opened. Receive the newest."
    )


def newest_only(base: int | None, markers: Sequence[Marker]) -> int | None:
    """Return the base of a delta, or None to send in full.

    A delta needs the newest version as its base. Otherwise another publisher came in between, or
    the base was not kept.
    """
    return base if base in [marker.version for marker in markers[-1:]] else None


def choose(
    markers: Sequence[Marker], version: int | None, *, served: Marker | None
) -> Marker | None:
    """Return the requested version, or None if the reader must wait for it.

    Args:
        version: the requested version. None is the newest version, if newer than `served`.

    Raises:
        TransferError: the version was retired.
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
    """Return the chain to `wanted`: deltas after `held`, or a full version and its deltas.

    Raises:
        TransferError: a part of the chain was retired.
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
    """Return the last version, after the versions that it depends on."""
    return chain_to(markers[-1], markers, held=None) if markers else ()


def await_versions(commits: Commits, request: ReceiveRequest) -> tuple[Marker, ...]:
    """Wait for the requested version, and return its chain from the version held.

    Raises:
        DeadlineError: the version was not committed in time.
        TransferError: the version was retired.
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

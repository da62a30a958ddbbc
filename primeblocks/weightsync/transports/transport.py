"""The protocols of transports and commits, and a reader's choice among the versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...errors import ClosedError, CorruptionError, DeadlineError, TransferError, UsageError
from ..held import Held, Lent, left_s
from ..marker import Marker
from ..outgoing import Shipment
from ..plan import Plan

__all__ = [
    "ANNOUNCED",
    "Begun",
    "Commits",
    "Incoming",
    "Lease",
    "ReceiveRequest",
    "Transport",
    "await_versions",
    "chain_to",
    "check_call",
    "choose",
    "last_chain",
    "newest_only",
    "pauses",
    "replaced",
    "retired",
]

ANNOUNCED = "announced"


class Begun(NamedTuple):
    """A version that may be written now.

    Attributes:
        run: an id of the owner. An owner that restarts gets a new id.
        base: the version from which a delta may be sent. None to send this version in full.
    """

    run: str
    base: int | None


@dataclass(frozen=True)
class ReceiveRequest:
    """A reader's request for a version.

    Attributes:
        version: the version to return. With None, the newest version is returned if it is newer
            than `served`.
        held: the version whose bytes the reader has. Deltas may be applied to them.
        served: the version that was loaded last.
        deadline: a time of `time.monotonic()`.
    """

    plan: Plan
    reader: int
    version: int | None
    held: Marker | None
    served: Marker | None
    deadline: float


class Incoming(Protocol):
    """A version that was found, whole or as a delta from the version before it."""

    marker: Marker

    def whole(self) -> Held | Lent:
        """Return the bytes of a full version. Writers leave them unchanged until you close them.

        Raises:
            CorruptionError: the bytes are not as sent.
            TransferError: the version was retired before the call.
        """
        ...

    def payload(self, index: int) -> memoryview:
        """Return a bucket of a delta, as it was sent. Raises the errors of `whole`."""
        ...

    def settle(self, error: str, *, deadline: float) -> None:
        """Report that this reader has the version, or why not, and wait for the decision.

        Only a group decides together. Over other transports, this does nothing.

        Args:
            error: why the reader does not have the version. "" if it has the version.

        Raises:
            TransferError: some reader does not have the version, so every reader must drop it.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Carries versions from trainer ranks to readers.

    Trainer rank 0 owns the transport, and calls `begin`, `commit` and `abort`. Every trainer rank
    sends its buckets. Readers see only committed versions. Deadlines are values of
    `time.monotonic()`.
    """

    def spec(self) -> dict[str, Any]:
        """Return the JSON-able argument with which another process calls `open_transport`.

        Raises:
            UnsupportedError: the other process must construct its end itself.
        """
        ...

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version: for a delta from `base` if possible, or in full.

        Raises:
            CapacityError: there is not enough room for the version.
        """
        ...

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: send its buckets. Returns when all bytes were written or sent.

        Raises:
            DeadlineError: the buckets were not sent in time.
            TransferError: the process of a reader has ended.
            CapacityError: there is not enough room for the version.
        """
        ...

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically.

        Raises:
            TransferError: a reader did not get the whole version. Every reader drops this version.
        """
        ...

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed. Otherwise, do nothing."""
        ...

    def markers(self) -> tuple[Marker, ...]:
        """Return the markers of the committed versions that can be read, oldest first."""
        ...

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        """Reader: wait for a version, and return the chain of versions that ends with it.

        A chain begins with a full version, or with a delta from the version that the reader holds,
        and ends with the version of `request`.

        Raises:
            DeadlineError: the version was not committed in time.
            TransferError: the version was retired.
            CorruptionError: the version's marker cannot be read.
        """
        ...

    def close(self) -> None:
        """Release this end. Idempotent.

        The owner removes all versions, but a `FileTransport` keeps the last version.
        """
        ...


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

    One process constructs it with `owner=True`, and starts without versions. A wait for a version
    looks at the state of other processes again after `look_s` seconds, and then less often.
    """

    look_s: float

    @property
    def run(self) -> str:
        """Owner: its id, as in `Begun`."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return the arguments that open its reading end in another process. JSON-able."""
        ...

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        """Owner: hide all versions except `keep`, and wait until the hidden ones have no reader.

        Raises:
            CapacityError: a reader was not done in time.
            TransferError: another owner took over.
        """
        ...

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version that was begun visible, atomically."""
        ...

    def abort(self, version: int) -> None:
        """Owner: give up a version that was begun and not committed. Otherwise, do nothing."""
        ...

    def markers(self, *, deadline: float) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first."""
        ...

    def hold(self, marker: Marker, *, deadline: float) -> Lease:
        """Reader: hold a version, so that its bytes stay unchanged."""
        ...

    def post(self, name: str, text: str, *, deadline: float) -> None:
        """Write a note, over an earlier note of the same name. Notes end with the run."""
        ...

    def look(self, name: str, *, run: str | None = None, deadline: float) -> str | None:
        """Return a note of a run, or None if it does not exist. The default is the current run."""
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
        raise ClosedError("the transport was closed. Construct a new transport.")
    if not may:
        raise UsageError(
            "only the owner begins and commits. "
            "Construct the transport of trainer rank 0 with owner=True."
        )


def retired(version: int) -> TransferError:
    """Return the error of a reader that came too late."""
    return TransferError(
        f"version {version} was retired while it was being opened. Receive the newest version."
    )


def newest_only(base: int | None, markers: Sequence[Marker]) -> int | None:
    """Return the base of a delta, which is the newest version, or None to send in full."""
    return base if base in [marker.version for marker in markers[-1:]] else None


def choose(
    markers: Sequence[Marker], version: int | None, *, served: Marker | None
) -> Marker | None:
    """Return the requested version, or None if the reader must wait for it.

    Without a `version`, the newest version is requested, if it is newer than `served`. Raises
    TransferError if the requested version was retired.
    """
    newest = markers[-1] if markers else None
    if version is None:
        # A new run of the trainer may count versions from the start again.
        old = newest is None or (
            served is not None and served.run == newest.run and served.version >= newest.version
        )
        return None if old else newest
    for marker in markers:
        if marker.version == version:
            return marker
    if newest is not None and newest.version > version:
        raise TransferError(
            f"version {version} was retired. The transport has the versions "
            f"{[marker.version for marker in markers]}. Receive the newest version."
        )
    return None


def replaced(marker: Marker, transport: Transport) -> bool:
    """Whether a trainer that started over has published. It may use the same version number."""
    try:
        markers = transport.markers()
    except (CorruptionError, TransferError):  # Nobody can tell. The bytes are here.
        return False
    return marker not in markers and any(one.run != marker.run for one in markers)


def chain_to(
    wanted: Marker, markers: Sequence[Marker], *, held: Marker | None
) -> tuple[Marker, ...]:
    """Return the chain to `wanted`: deltas after `held`, or a full version and its deltas."""
    by_version = {marker.version: marker for marker in markers}
    chain = [wanted]
    while chain[-1].base is not None:
        if held is not None and (held.run, held.version) == (wanted.run, chain[-1].base):
            break
        base = by_version.get(chain[-1].base)
        if base is None:
            raise TransferError(
                f"version {wanted.version} is a delta from version {chain[-1].base}, which was "
                "retired. Receive the newest version."
            )
        chain.append(base)
    return tuple(reversed(chain))


def last_chain(markers: Sequence[Marker]) -> tuple[Marker, ...]:
    """Return the last version, after the versions that it depends on."""
    return chain_to(markers[-1], markers, held=None) if markers else ()


def pauses(first_s: float, *, longest_s: float = 0.25) -> Iterator[float]:
    """Yield the seconds between looks. Each pause is twice the one before, up to `longest_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


def await_versions(commits: Commits, request: ReceiveRequest) -> tuple[Marker, ...]:
    """Wait for the requested version, and return its chain from the version held."""
    never, deadline = threading.Event(), request.deadline
    # A thousand idle readers may share one store. One version is soon replaced.
    pause = pauses(commits.look_s, longest_s=0.25 if request.version is None else commits.look_s)
    while True:
        # A store that stalls has until the deadline to answer.
        markers = commits.markers(deadline=deadline)
        found = choose(markers, request.version, served=request.served)
        if found is not None:
            return chain_to(found, markers, held=request.held)
        if time.monotonic() >= deadline:
            wanted = "a newer version" if request.version is None else f"version {request.version}"
            have = [marker.version for marker in markers]
            hint = " Publish this version, or pass a longer timeout_s." if have else commits.hint()
            raise DeadlineError(
                f"{wanted} was not committed in time. This engine has version "
                f"{request.served and request.served.version}, and the transport has {have}.{hint}"
            )
        never.wait(min(next(pause), left_s(deadline)))

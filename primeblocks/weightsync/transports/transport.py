"""The protocol of transports, and the values that their two sides exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..held import Held, Lent
from ..marker import Marker
from ..outgoing import Shipment
from ..plan import Plan

__all__ = ["Begun", "Incoming", "ReceiveRequest", "Transport"]


class Begun(NamedTuple):
    """A version that may be written now.

    Attributes:
        run: the name of this life of the owner.
        base: the version to which it may be a delta. None if it must be sent in full.
    """

    run: str
    base: int | None


@dataclass(frozen=True)
class ReceiveRequest:
    """A reader's request for a version.

    Attributes:
        plan: the plan of the reader.
        reader: the number of the reader in the plan.
        version: the version to return. None is the newest version, if newer than `served`.
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
    """A version that was found, whole or as a delta to the version before it."""

    marker: Marker

    def whole(self) -> Held | Lent:
        """Return the bytes. Writers leave them unchanged until they are closed.

        Call it only for a version without `marker.base`.

        Raises:
            CorruptionError: the bytes are not as sent.
            TransferError: the version was retired before the call.
        """
        ...

    def payload(self, index: int) -> memoryview:
        """Return a bucket as it travelled. Raises as `whole`.

        Call it only if `marker.base` is given.
        """
        ...

    def settle(self, error: str, *, deadline: float) -> None:
        """Report that this reader has the version, or why not, and wait for the decision.

        Args:
            error: why the reader does not have the version. "" if it has the version.
            deadline: a time of `time.monotonic()`.

        Raises:
            TransferError: some reader does not have the version, so every reader must drop it.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Carries versions from trainer ranks to readers.

    Trainer rank 0 owns the transport, and calls `begin`, `commit` and `abort`. Every trainer rank
    sends its buckets. Readers see only committed versions.
    """

    def spec(self) -> dict[str, Any]:
        """Return the argument of `open_transport` for another process. JSON-able.

        Raises:
            UnsupportedError: the other process must construct its end itself.
        """
        ...

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version, as a delta to `base` if possible. Readers do not see it.

        Raises:
            CapacityError: there is not enough room.
        """
        ...

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: send its buckets. Returns once they are as safe as the transport promises.

        Raises:
            DeadlineError: the buckets were not sent in time.
            TransferError: a reader has ended.
            CapacityError: there is not enough room.
        """
        ...

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically.

        Raises:
            TransferError: a reader did not get the whole version. Every reader drops it.
        """
        ...

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed. Otherwise, do nothing."""
        ...

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions that can be read, oldest first."""
        ...

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        """Reader: wait for a version, and return it after the missing versions of its chain.

        A chain begins with a full version, or a delta to the version held.

        Raises:
            DeadlineError: the version was not committed in time.
            TransferError: the version was retired.
            CorruptionError: the version's marker cannot be read.
        """
        ...

    def close(self) -> None:
        """Release this end. The owner removes all versions. Idempotent."""
        ...

"""The protocol of transports, and the values that pass between one and its two sides."""

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
    """A version that may be written now: the owner's `run`, and the base it may be a delta to."""

    run: str
    base: int | None


@dataclass(frozen=True)
class ReceiveRequest:
    """The request of a reader.

    Attributes:
        version: the one asked for; None is the newest that is newer than `served`.
        held: the version whose bytes the reader has, to which deltas may be applied.
        served: the version that was loaded last.
        deadline: by time.monotonic.
    """

    plan: Plan
    reader: int
    version: int | None
    held: Marker | None
    served: Marker | None
    deadline: float


class Incoming(Protocol):
    """A version that was found: whole, or as a delta to the one before it."""

    marker: Marker

    def whole(self) -> Held | Lent:
        """Return its bytes, which writers leave alone until closed. Only if `marker.base` is None.

        Raises:
            CorruptionError: they are not those that were sent.
            TransferError: the version was retired meanwhile.
        """
        ...

    def payload(self, index: int) -> memoryview:
        """Return a bucket as it travelled. Only if `marker.base` is given. Raises as `whole`."""
        ...

    def settle(self, error: str, *, deadline: float) -> None:
        """Say whether this reader has it all, or why not, and wait until the version stands.

        Raises:
            TransferError: some reader did not have it all: nobody loads it.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """A carrier of versions from trainer ranks to readers.

    Trainer rank 0 owns it: it begins, commits and aborts. Every trainer rank sends its buckets.
    Readers see committed versions only.
    """

    def spec(self) -> dict[str, Any]:
        """Return what `open_transport` needs to read along in another process. JSON-able.

        Raises:
            UnsupportedError: it has to be constructed there.
        """
        ...

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version that nobody sees yet, a delta to `base` if possible.

        Raises:
            CapacityError: there is no room.
        """
        ...

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: send its buckets; return once they are as safe as the transport promises.

        Raises:
            DeadlineError: they were not sent in time.
            TransferError: a reader is gone.
            CapacityError: there is no room.
        """
        ...

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically.

        Raises:
            TransferError: a reader did not get it all. Nobody loads it.
        """
        ...

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed, if there is one."""
        ...

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions that can be read, oldest first."""
        ...

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        """Reader: wait for a version; return it, after missing versions that it is a delta to.

        Raises:
            DeadlineError: no such version was committed in time.
            TransferError: it was retired.
            CorruptionError: its marker cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go. The owner removes everything; twice is fine."""
        ...

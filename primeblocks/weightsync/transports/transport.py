"""What a transport is, and what passes between it and the two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..held import Held, Lent
from ..marker import Marker
from ..plan import Plan

__all__ = ["Begun", "Incoming", "Outgoing", "Request", "Transport"]


class Outgoing(Protocol):
    """What one trainer rank has to send of one version. A transport asks for it, in any order."""

    plan: Plan
    rank: int
    version: int
    base: int | None

    def fill(self, index: int, into: Sequence[Tensor]) -> None:
        """Copy one of this rank's buckets in full: each of its copies, shaped as its box."""
        ...

    def payload(self, index: int) -> memoryview:
        """The same as it travels: a delta where `base` is given and it is smaller, else packed."""
        ...


class Begun(NamedTuple):
    """A version that may be written now: the owner's `run`, and the base it may be a delta to."""

    run: str
    base: int | None


@dataclass(frozen=True)
class Request:
    """What a reader asks for.

    Attributes:
        version: this one; None is the newest that is newer than `held`.
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
        """Its bytes, which its writers leave alone until closed. Only where `marker.base` is None.

        Raises:
            CorruptionError: not what was sent.
            TransferError: retired meanwhile.
        """
        ...

    def payload(self, index: int) -> memoryview:
        """A bucket as it travelled. Only where `marker.base` is given. Raises as `whole`."""
        ...

    def settle(self, error: str, *, deadline: float) -> None:
        """Say whether this reader has it all, or why not, and hear whether it stands.

        Raises:
            TransferError: somebody did not have it all: nobody loads it.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Carries versions from trainer ranks to readers.

    Trainer rank 0 owns it: it begins, commits and aborts. Every trainer rank sends its buckets.
    Readers see committed versions only.
    """

    def spec(self) -> dict[str, Any]:
        """What `open_transport` needs to read along in another process. JSON-able.

        Raises:
            UnsupportedError: it has to be constructed there.
        """
        ...

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version that nobody sees yet, a delta to `base` if it can be.

        Raises:
            CapacityError: there is no room.
        """
        ...

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: send its buckets; back when they are as safe as the transport promises.

        Raises:
            DeadlineError: not in time.
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
        """Owner: drop a version that was begun and not committed; else nothing."""
        ...

    def markers(self) -> tuple[Marker, ...]:
        """The committed versions that can be read, oldest first."""
        ...

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: wait for a version; it, after those that it is a delta to and one has not.

        Raises:
            DeadlineError: no such version was committed in time.
            TransferError: it was retired.
            CorruptionError: what says that it is there cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go. The owner removes everything; twice is fine."""
        ...

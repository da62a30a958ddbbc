"""The protocol of commit records, of a note for each rank, and of leases of readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..lease import Lease
from ..marker import Marker

__all__ = ["Commits"]


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

    def post(self, rank: int, text: str, *, deadline: float) -> None:
        """Trainer rank: write its note over the one before.

        Raises:
            TransferError: no owner has begun.
        """
        ...

    def look(self, marker: Marker, rank: int, *, deadline: float) -> str | None:
        """Reader: return a rank's note in the run of a version; None where there is none."""
        ...

    def announce(self, text: str, *, deadline: float) -> None:
        """Owner: leave a text for those who find these commits."""
        ...

    def announced(self, *, deadline: float) -> str | None:
        """Return what the owner left; None before."""
        ...

    def hint(self) -> str:
        """Return what may help somebody who waits for a version in vain, or nothing."""
        ...

    def close(self) -> None:
        """Let go. The owner's versions end; twice is fine."""
        ...

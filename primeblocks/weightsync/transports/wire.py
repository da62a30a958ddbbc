"""The protocol of reads of other processes' memory, and the value of one read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Read", "Wire"]


class Read(NamedTuple):
    """Bytes of a buffer of another process, and their destination: a buffer shared here."""

    note: Mapping[str, Any]
    start: int
    target: Tensor


class Wire(Protocol):
    """A reader of other processes' memory. Each process has its own; `adapters.nixl` has one."""

    def share(self, buffer: Tensor) -> dict[str, Any]:
        """Register a buffer, and return what others need to read from it. JSON-able."""
        ...

    def unshare(self, buffer: Tensor) -> None:
        """Deregister a buffer. Nobody reads it any more, or their reads are refused."""
        ...

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        """Do all reads.

        Raises:
            TransferError: the other process is gone.
            DeadlineError: they were not done in time.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Twice is fine."""
        ...

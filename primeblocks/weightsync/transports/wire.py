"""What reads the memory of other processes, and what passes between it and a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Read", "Wire"]


class Read(NamedTuple):
    """Some bytes of a buffer of another process, and where they go: into a buffer shared here."""

    note: Mapping[str, Any]
    start: int
    target: Tensor


class Wire(Protocol):
    """Reads memory of other processes. Each process has its own; `adapters.nixl` has one."""

    def share(self, buffer: Tensor) -> dict[str, Any]:
        """Register a buffer, and say what others need to read from it. JSON-able."""
        ...

    def unshare(self, buffer: Tensor) -> None:
        """Take it back. Nobody reads it any more, or what they read is refused."""
        ...

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        """Do all reads.

        Raises:
            TransferError: the other process is gone.
            DeadlineError: not in time.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Twice is fine."""
        ...

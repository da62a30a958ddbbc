"""The carrier over a wire of one-sided reads; `tcp_wire` and `adapters.nixl` have wires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .packed import OpenedSpans, Shared, Span, places

__all__ = ["Read", "Wire", "WireCarrier"]


class Read(NamedTuple):
    """Bytes of a buffer of another process, and their destination: a buffer shared here."""

    note: Mapping[str, Any]
    start: int
    target: Tensor


class Wire(Protocol):
    """A reader of other processes' memory. Each process has its own; `adapters.nixl` has one."""

    def spec(self) -> dict[str, Any]:
        """Return what opens the reading end in another process. JSON-able."""
        ...

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


class WireCarrier:
    """A `Carrier` whose reader copies what it wants into one registered buffer of its own.

    Args:
        device: the device of this process's buffers.
    """

    def __init__(self, wire: Wire, *, device: torch.device | str = "cpu") -> None:
        self._wire, self._device = wire, torch.device(device)
        self._spare: Tensor | None = None
        self._closed = False

    def spec(self) -> dict[str, Any]:
        return {"kind": "wire", "wire": self._wire.spec()}

    def make(self, size_bytes: int) -> Shared:
        # Not 0: there is nothing to register then.
        buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=self._device)
        return Shared(buffer, self._wire.share(buffer))

    def drop(self, shared: Shared) -> None:
        self._wire.unshare(shared.buffer)

    def fetch(self, spans: Sequence[Span], *, again: bool, deadline: float) -> OpenedSpans:
        starts, size_bytes = places({i: span.bytes for i, span in enumerate(spans)})
        buffer, self._spare = self._spare, None
        if buffer is None or len(buffer) != max(1, size_bytes):
            self._give_back(buffer, again=False)
            buffer = self.make(size_bytes).buffer
        parts = [buffer[starts[i] : starts[i] + span.bytes] for i, span in enumerate(spans)]
        reads = [Read(s.note, s.start, part) for s, part in zip(spans, parts, strict=True)]
        try:
            self._wire.read(reads, deadline=deadline)
        except BaseException:
            self._give_back(buffer, again=False)  # A read may go on.
            raise
        return OpenedSpans(parts, True, partial(self._give_back, buffer, again=again))

    def close(self) -> None:
        # The wire deregisters the buffers.
        self._closed, self._spare = True, None
        self._wire.close()

    def _give_back(self, buffer: Tensor | None, *, again: bool) -> None:
        if buffer is None or self._closed:
            return
        if again and self._spare is None:
            self._spare = buffer
        else:
            self._wire.unshare(buffer)

"""The carrier over a wire of one-sided reads, and a wire between processes of one host.

`adapters.nixl` has one between hosts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import DeadlineError, TransferError, UnsupportedError
from .packed import Opened, Shared, Span, noted, places

__all__ = ["ProcessWire", "Read", "Wire", "WireCarrier"]

_ALLOW, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
_STEP_BYTES = 64 << 20  # Between two looks at the clock.


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

    def fetch(self, spans: Sequence[Span], *, again: bool, deadline: float) -> Opened:
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
        return Opened(parts, True, partial(self._give_back, buffer, again=again))

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


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class ProcessWire:
    """Reads by process_vm_readv, into memory of any kind, without a copy in the kernel.

    A process that shares lets every other one of its user look into its memory.
    """

    def __init__(self) -> None:
        self.shared: dict[int, Tensor] = {}

    def spec(self) -> dict[str, Any]:
        return {"kind": "process"}

    def share(self, buffer: Tensor) -> dict[str, Any]:
        _libc().prctl(_ALLOW, _ANYBODY, 0, 0, 0)  # No effect where Yama is not loaded.
        self.shared[buffer.data_ptr()] = buffer
        return {"pid": os.getpid(), "address": buffer.data_ptr()}

    def unshare(self, buffer: Tensor) -> None:
        del self.shared[buffer.data_ptr()]

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        for place, read in enumerate(reads):
            done, size = 0, len(read.target)
            pid, address = noted(read.note, "pid"), noted(read.note, "address")
            while done < size:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{place} of {len(reads)} reads in time")
                step = min(_STEP_BYTES, size - done)
                here = _Range(read.target.data_ptr() + done, step)
                there = _Range(address + read.start + done, step)
                done += _read(pid, here, there)

    def close(self) -> None:
        self.shared.clear()


def _read(pid: int, here: _Range, there: _Range) -> int:
    args = (ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    count: int = _libc().process_vm_readv(pid, *args)
    if count > 0:
        return count
    said = ctypes.get_errno()
    if said == errno.EPERM:
        raise UnsupportedError(
            f"memory of process {pid} may not be read. Trainer and engine must run as one user; a "
            "container needs the capability SYS_PTRACE."
        )
    raise TransferError(f"memory of process {pid} is gone: {os.strerror(said)}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc

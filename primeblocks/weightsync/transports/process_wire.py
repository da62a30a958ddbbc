"""A `Wire` between processes of one host and one user: Linux reads one's memory for another."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ...errors import DeadlineError, TransferError, UnsupportedError
from .carrier import Read, noted

__all__ = ["ProcessWire"]

_ALLOW, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
_STEP_BYTES = 64 << 20  # Between two looks at the clock.


class _Span(ctypes.Structure):
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
                here = _Span(read.target.data_ptr() + done, step)
                there = _Span(address + read.start + done, step)
                done += _read(pid, here, there)

    def close(self) -> None:
        self.shared.clear()


def _read(pid: int, here: _Span, there: _Span) -> int:
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

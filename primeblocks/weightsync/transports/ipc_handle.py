"""A buffer of this process that others on the same host can open: on the CPU, or on a GPU.

On the CPU it is anonymous shared memory, found through /proc; torch's own handles of CPU tensors
are each for one reader, which opens it once. On a GPU it is CUDA IPC through torch's handles: that
half has not run on a GPU yet.
"""

from __future__ import annotations

import os
import pickle
import secrets
import weakref
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...errors import CapacityError, UnsupportedError
from .memory_file import allocate, open_of

__all__ = ["Exported", "open_exported"]

_DEVICE = 6  # Which argument of rebuild_cuda_tensor is the index of the device.


class Exported:
    """A new buffer. It ends with this process, or when it is closed.

    Attributes:
        note: the argument of `open_exported`. JSON-able; its `token` names the buffer.

    Raises:
        CapacityError: there is no memory for it.
    """

    buffer: UInt8[Tensor, " bytes"]
    note: dict[str, Any]

    def __init__(self, size_bytes: int, *, device: torch.device) -> None:
        token = secrets.token_hex(8)
        self.note = {"token": token, "bytes": size_bytes}
        self._end: weakref.finalize[..., Exported] | None = None
        try:
            if device.type == "cuda":
                self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
                handle = pickle.dumps(reduce_tensor(self.buffer)[1])
                self.note |= {"uuid": _uuid(self.buffer.device), "cuda": handle.hex()}
            else:
                fd = allocate(_name(token), size_bytes)
                self._end = weakref.finalize(self, os.close, fd)
                self.buffer = _mapped(fd, size_bytes, shared=True)
                self.note |= {"pid": os.getpid(), "fd": fd}
        except (OSError, torch.OutOfMemoryError) as error:
            self.close()
            raise CapacityError(
                f"no {size_bytes:,} bytes on {device} for packed weights: {error}. A trainer rank "
                "needs twice the bytes that it sends."
            ) from error

    def close(self) -> None:
        """Let nobody else open the buffer. On the CPU, readers that did keep its memory."""
        if self._end is not None:
            self._end()


def open_exported(note: dict[str, Any]) -> UInt8[Tensor, " bytes"]:
    """Open the buffer of another process, shared. On the CPU, writing to it harms the writer only.

    Unpickles what CUDA needs: read notes only from places where nobody but this user can write.

    Raises:
        TransferError: its process is gone, or closed it.
        UnsupportedError: it is on a GPU that this process does not see.
    """
    if "cuda" in note:
        return _open_cuda(note)
    fd = open_of(note["pid"], note["fd"], _name(note["token"]), os.O_RDONLY)
    try:
        return _mapped(fd, note["bytes"], shared=False)
    finally:
        os.close(fd)


def _open_cuda(note: dict[str, Any]) -> UInt8[Tensor, " bytes"]:
    seen = [_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if note["uuid"] not in seen:
        raise UnsupportedError(
            f"the weights are on GPU {note['uuid']}, this process sees {seen}. Make it visible, "
            "or use SharedMemoryTransport."
        )
    args = list(pickle.loads(bytes.fromhex(note["cuda"])))
    # Processes count the same GPUs differently.
    args[_DEVICE] = seen.index(note["uuid"])
    opened = rebuild_cuda_tensor(*args)
    assert isinstance(opened, Tensor)
    return opened


def _mapped(fd: int, size_bytes: int, *, shared: bool) -> UInt8[Tensor, " bytes"]:
    path = f"/proc/self/fd/{fd}"
    return torch.from_file(path, shared=shared, size=size_bytes, dtype=torch.uint8)


def _name(token: str) -> str:
    return f"primeblocks-{token}"


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)

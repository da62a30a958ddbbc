"""Mapped files, kept: to map a gigabyte anew costs as much as several copies of it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

__all__ = ["FileId", "Mappings", "file_id", "map_file"]


class FileId(NamedTuple):
    """What a mapping is of. No other file has this inode while it is mapped."""

    inode: int
    size: int


class Mappings:
    """Buffers by the file that they map. Those of files that have no name any more are dropped."""

    def __init__(self) -> None:
        self._buffers: dict[FileId, UInt8[Tensor, " bytes"]] = {}

    def take(self, file: FileId, directory: Path) -> UInt8[Tensor, " bytes"] | None:
        """A mapping that nobody else will get, until it is given back; None where there is none."""
        self._prune(directory)
        return self._buffers.pop(file, None)

    def give(self, file: FileId, buffer: UInt8[Tensor, " bytes"]) -> None:
        """Keep a mapping for the next one."""
        self._buffers[file] = buffer

    def clear(self) -> None:
        """Drop all."""
        self._buffers.clear()

    def _prune(self, directory: Path) -> None:
        named = set()
        with os.scandir(directory) as entries:
            named = {entry.inode() for entry in entries}
        for file in [file for file in self._buffers if file.inode not in named]:
            del self._buffers[file]


def file_id(fd: int) -> FileId:
    """Of an open file."""
    status = os.fstat(fd)
    return FileId(status.st_ino, status.st_size)


def map_file(fd: int, size: int) -> UInt8[Tensor, " bytes"]:
    """An open file as a tensor, to be written to."""
    # mmap.mmap keeps a duplicate of the descriptor, and with it a lock.
    if sys.platform.startswith("linux"):
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    mapped = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE)
    return torch.frombuffer(mapped, dtype=torch.uint8)

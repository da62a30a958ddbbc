"""Mapped memory, kept: mapping a gigabyte again costs as much as several copies of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

__all__ = ["FileId", "Mappings", "file_id"]

T = TypeVar("T")


class FileId(NamedTuple):
    """Identity of a mapped file. No other file has this inode while it is mapped."""

    inode: int
    size: int


class Mappings(Generic[T]):
    """Mappings by their files. Those of files that no longer have a path are dropped."""

    def __init__(self) -> None:
        self._kept: dict[FileId, T] = {}

    def take(self, file: FileId, paths: Iterable[Path]) -> T | None:
        """Return one that nobody else gets until it is given back; None where there is none."""
        inodes = set()
        for path in paths:
            with suppress(OSError):
                inodes.add(os.stat(path).st_ino)
        for kept in [kept for kept in self._kept if kept.inode not in inodes]:
            del self._kept[kept]
        return self._kept.pop(file, None)

    def give(self, file: FileId, mapping: T) -> None:
        """Keep one for the next time."""
        self._kept[file] = mapping

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()


def file_id(fd: int) -> FileId:
    """Return the identity of an open file."""
    status = os.fstat(fd)
    return FileId(status.st_ino, status.st_size)

"""Pages on disk: one file each, believed only after its checksum."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import CapacityError, CorruptionError, PlanError, UsageError
from .page import DIGEST_BYTES, PageKey

__all__ = ["DiskTier"]

_MAGIC = b"pbkvpg01"
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}sIQ")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """A directory of pages that survives a crash.

    A page is written to a temporary file and renamed; a file that is torn, changed or gone is
    noticed on reading and never served. There is no fsync: after a power cut the newest pages may
    be lost, not wrong. Opening a directory adopts the pages that are in it. One process
    at a time owns a directory.

    Args:
        path: directory, made if absent.
        capacity_bytes: size of all pages with attachments; headers (under 200 bytes a page) and
            rounding to file-system blocks come on top.
        page_bytes: bytes of a page.
        attachment_bytes: room beside each page for its packed attachments.
        write: writes bytes to a file descriptor and returns how many it took; tests pass one
            that fails.

    Raises:
        PlanError: not even one page fits.
        UsageError: the directory cannot be made or locked: read-only, or owned by another process.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        page_bytes: int,
        attachment_bytes: int = 0,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        slot_bytes = page_bytes + attachment_bytes
        if page_bytes <= 0 or attachment_bytes < 0 or capacity_bytes < slot_bytes:
            raise PlanError(
                f"a disk tier of {capacity_bytes} bytes does not hold one page of {page_bytes} "
                f"bytes with {attachment_bytes} bytes of attachments"
            )
        self.path = Path(path)
        self.page_bytes = page_bytes
        self.attachment_bytes = attachment_bytes
        self.capacity_pages = capacity_bytes // slot_bytes
        self._write = write
        self._lock = self._own_directory()
        self._files: dict[PageKey, Path] = {}
        self._adopt()

    def put(self, key: PageKey, content: np.ndarray, digest: bytes) -> None:
        """Write a page, all or nothing. Local.

        Raises:
            CapacityError: quota or disk full; the tier holds what it held before.
            OSError: the file system refused for another reason; likewise.
        """
        if key not in self._files and len(self._files) >= self.capacity_pages:
            raise CapacityError(f"all {self.capacity_pages} pages of {self.path} are taken")
        path = self._file_of(key)
        name = key.encode()
        header = _HEADER.pack(_MAGIC, digest, len(name), content.nbytes)
        scratch = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(scratch, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            try:
                self._write_all(descriptor, memoryview(header + name))
                self._write_all(descriptor, content.data)
            finally:
                os.close(descriptor)
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            if error.errno in _FULL:
                raise CapacityError(
                    f"no space for a page of {content.nbytes} bytes in {self.path}: {error}"
                ) from error
            raise
        self._files[key] = path

    def get(self, key: PageKey, *, into: np.ndarray) -> tuple[int, bytes] | None:
        """Read a page: its length and the digest it was saved with, or None. Local.

        The caller compares the digest with the bytes.

        Raises:
            CorruptionError: the file is not the one that was written.
            OSError: the file system refused.
        """
        path = self._files.get(key)
        if path is None:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                digest, name, length = _read_header(file.read, path)
                if name != key.encode():
                    raise CorruptionError(f"{path} holds another page than its name says")
                if length > into.nbytes:
                    raise CorruptionError(f"{path} claims {length} bytes; at most {into.nbytes}")
                if _read_into(file.readinto, into.data[:length]) != length:
                    raise CorruptionError(f"{path} is shorter than the {length} bytes it claims")
        except FileNotFoundError as error:
            raise CorruptionError(f"{path} vanished") from error
        return length, digest

    def drop(self, key: PageKey) -> None:
        """Forget a page; unknown keys are ignored."""
        path = self._files.pop(key, None)
        if path is not None:
            # A file that cannot be removed is no longer listed, so it is not served.
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def keys(self) -> list[PageKey]:
        """All keys, in the order in which they were written."""
        return list(self._files)

    def close(self) -> None:
        """Give the directory up; the pages stay."""
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def _own_directory(self) -> int | None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise UsageError(f"cannot keep pages in {self.path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise UsageError(
                f"{self.path} belongs to another store ({error}). Give each its own directory."
            ) from error
        return lock

    def _adopt(self) -> None:
        for scratch in self.path.glob("??/*.tmp"):
            scratch.unlink(missing_ok=True)
        found = sorted(self.path.glob("??/*.page"), key=lambda path: path.stat().st_mtime_ns)
        for path in found:
            try:
                with path.open("rb", buffering=0) as file:
                    _, name, length = _read_header(file.read, path)
                key = PageKey.decode(name)
            except CorruptionError:
                path.unlink(missing_ok=True)
                continue
            fits = self.page_bytes <= length <= self.page_bytes + self.attachment_bytes
            if fits and path == self._file_of(key):
                self._files[key] = path
            else:
                path.unlink(missing_ok=True)
        for key in self.keys()[: max(0, len(self) - self.capacity_pages)]:
            self.drop(key)

    def _file_of(self, key: PageKey) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.path / name[:2] / f"{name}.page"

    def _write_all(self, descriptor: int, data: memoryview) -> None:
        while data:
            data = data[self._write(descriptor, data) :]


def _read_header(read: Callable[[int], bytes | None], path: Path) -> tuple[bytes, bytes, int]:
    head = read(_HEADER.size) or b""
    if len(head) != _HEADER.size:
        raise CorruptionError(f"{path} ends inside its header")
    magic, digest, name_bytes, length = _HEADER.unpack(head)
    # A flipped length must not make us read gigabytes.
    if magic != _MAGIC or name_bytes > 1 << 16:
        raise CorruptionError(f"{path} is no page file")
    name = read(name_bytes) or b""
    if len(name) != name_bytes:
        raise CorruptionError(f"{path} ends inside its key")
    return digest, name, length


def _read_into(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = readinto(buffer[done:])
        if not count:
            break
        done += count
    return done

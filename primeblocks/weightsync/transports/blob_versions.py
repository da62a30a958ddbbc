"""Versions beside the commits of a directory: each a blob of whole tensors, or deltas by rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, TransferError
from ..lease import FileLease
from ..marker import Marker
from ..sealed import SealedLease
from .blobs import Blobs
from .directory_commits import DirectoryCommits, fsync, last_chain
from .own_files import open_own

__all__ = ["BlobVersions"]


class BlobVersions:
    """Blobs by version: allocate, write, finish, lease, retire. Readers hold the blob itself.

    Args:
        durable: fsync what is written.
    """

    def __init__(self, commits: DirectoryCommits, blobs: Blobs, *, durable: bool) -> None:
        self._commits, self._blobs, self._durable = commits, blobs, durable
        self._begun: set[int] = set()  # With a blob.

    def allocate(self, version: int, *, size_bytes: int, delta: bool = False) -> None:
        """Owner: make room for a version. A delta has no blob: its parts make their own files."""
        self._commits.check(owner=True)
        self.abort(version)
        path, made = self._path(version), delta
        for marker in self._commits.hide(last_chain(self._commits.committed)):
            old = self._path(marker.version)
            made = made or self._blobs.reuse(old, path, size_bytes)
            self._remove(marker.version)
        try:
            if not made:
                self._blobs.make(path, size_bytes)
        except OSError as error:
            self._blobs.drop(path)
            raise self._commits.no_room(error, size_bytes) from error
        self._commits.open(version)
        if not delta:
            self._begun.add(version)

    def writable(self, version: int, *, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: return the blob of a begun version, to be written to in place."""
        self._commits.check()
        try:
            return self._blobs.writable(self._path(version), size_bytes)
        except FileNotFoundError as error:
            raise TransferError(
                f"{error.filename} has None bytes, the plan {size_bytes}. "
                "Trainer ranks must share the directory and the plan."
            ) from error

    def flush(self, version: int) -> None:
        """Writer: return when the blob is as safe as promised."""
        if self._durable:
            fsync(self._path(version))

    def write_part(self, version: int, rank: int, payloads: Iterable[memoryview]) -> None:
        """Writer: write one rank's part of a delta; it is safe on return."""
        self._commits.check()
        try:
            path = self._part(version, rank)
            path.unlink(missing_ok=True)  # Of an attempt that failed.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(open_own(path, flags, user=self._commits.place.user), "wb") as file:
                for payload in payloads:
                    file.write(payload)
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._commits.no_room(error, 0) from error

    def read_part(self, version: int, rank: int, at: int, size: int) -> memoryview:
        """Reader: return some bytes of a part.

        Raises:
            TransferError: it was retired.
            CorruptionError: it is shorter.
        """
        self._commits.check()
        try:
            path = self._part(version, rank)
            fd = open_own(path, os.O_RDONLY, user=self._commits.place.user)
            with open(fd, "rb") as file:
                file.seek(at)
                payload = file.read(size)
        except FileNotFoundError as error:
            raise TransferError(f"version {version} was retired while it was read") from error
        if len(payload) != size:
            raise CorruptionError(f"{path} ends at {at + len(payload)} bytes; {at + size} needed")
        return memoryview(payload)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: finish a version's blob, and make it visible."""
        if marker.version in self._begun:
            self._blobs.finish(self._path(marker.version))
        self._commits.commit(marker, deadline=deadline)
        self._begun.discard(marker.version)

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed, if there is one."""
        committed = any(marker.version == version for marker in self._commits.committed)
        if version in self._begun and not committed:
            self._blobs.abort(self._path(version))
            self._blobs.drop(self._path(version))
        self._commits.abort(version)
        self._begun.discard(version)

    def lease(self, marker: Marker, *, size_bytes: int) -> FileLease | SealedLease:
        """Reader: hold the file of a committed version.

        Raises:
            TransferError: it was retired meanwhile.
            CorruptionError: it has another size.
        """
        self._commits.check()
        try:
            return self._blobs.lease(self._path(marker.version), size_bytes)
        except (FileNotFoundError, BlockingIOError) as error:
            raise TransferError(
                f"version {marker.version} was retired while it was being opened"
            ) from error

    def close(self) -> None:
        """Let go; the owner removes everything. Twice is fine."""
        self._blobs.close()
        self._commits.close()

    def _path(self, version: int) -> Path:
        return self._commits.directory / f"version-{version}.safetensors"

    def _part(self, version: int, rank: int) -> Path:
        return self._commits.directory / f"version-{version}.{rank}.delta"

    def _remove(self, version: int) -> None:
        self._blobs.drop(self._path(version))
        self._commits.remove(version)

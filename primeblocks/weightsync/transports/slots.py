"""Versioned blobs as files in one directory: allocate, write, commit, lease, retire."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from ...errors import CapacityError, ClosedError, CorruptionError, TransferError, UsageError
from ..marker import Marker
from .lease import Lease
from .mappings import Mappings, file_id, map_file

__all__ = ["Slots"]

_SECTOR_BYTES = 512  # The unit of st_blocks.
_COMMITS, _LOCK = "commits.json", "owner.lock"
_OURS = re.compile(
    rf"version-\d+\.(safetensors|\d+\.delta)|{re.escape(_COMMITS)}(\.tmp)?|{re.escape(_LOCK)}"
)


class Slots:
    """The state of a directory transport. `durable`: fsync before a commit, never reuse a file.

    Without `durable` the file of a retired version becomes the next blob, where no reader holds
    it: touching fresh pages costs more than copying into known ones. Readers say that they hold
    one by a shared flock, which ends with their process.
    """

    def __init__(self, directory: Path, *, owner: bool, durable: bool) -> None:
        self._dir, self._owner, self._durable = directory, owner, durable
        self._run = secrets.token_hex(8)
        self._committed: list[Marker] = []
        self._begun: dict[int, int] = {}
        # What was written, and what was read and given back.
        self._written, self._read = Mappings(directory), Mappings(directory)
        self._seen: tuple[bytes, tuple[Marker, ...]] = (b"", ())
        self._closed = False
        self._removal: weakref.finalize[..., Slots] | None = None
        if owner:
            # A directory on a disk that was there before is the user's own.
            ours = not durable or not directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(directory)
            _remove_files(directory, but=_LOCK)
            # Runs at the end of the process too.
            self._removal = weakref.finalize(
                self, _remove_all, directory, lock, os.getpid(), directory_too=ours
            )

    @property
    def run(self) -> str:
        """Names the life of this owner."""
        return self._run

    def allocate(self, version: int, *, size_bytes: int, delta: bool = False) -> None:
        """Owner: make room for a version. A delta has no blob: its parts make their own files."""
        self._check(owner=True)
        if version in self._begun:
            self.abort(version)
        kept = _chain(self._committed)
        retired = [marker for marker in self._committed if marker not in kept]
        if retired:
            self._write_commits(kept)
        path = self._path(version)
        fd = -1
        for marker in retired:
            fd = self._retire(marker.version, path, reuse=fd < 0 and not delta) or fd
        if delta:
            self._begun[version] = os.open(self._dir, os.O_RDONLY)
            return
        try:
            if fd < 0:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                self._lock(fd)
            os.ftruncate(fd, size_bytes)
            # Reserved now: a full tmpfs would end a later write with SIGBUS. Where all pages are
            # there, this would look at each.
            if os.fstat(fd).st_blocks * _SECTOR_BYTES < size_bytes:
                os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            path.unlink(missing_ok=True)
            raise self._no_room(error, size_bytes) from error
        self._begun[version] = fd

    def writable(self, version: int, *, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: the blob of a begun version, to be written to in place."""
        self._check()
        path = self._path(version)
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR)
            found = file_id(fd)
            if found.size != size_bytes:
                raise self._other_size(path, found.size, size_bytes)
            blob = self._written.take(found)
            if blob is None:
                blob = map_file(fd, size_bytes, private=False)
            if not self._durable:  # There each version is a new file.
                self._written.give(found, blob)
        except FileNotFoundError as error:
            raise self._other_size(path, None, size_bytes) from error
        finally:
            if fd >= 0:
                os.close(fd)
        return blob

    def flush(self, version: int) -> None:
        """Writer: return when the blob is as safe as promised."""
        self._check()
        if self._durable:
            _fsync(self._path(version))

    def write_part(self, version: int, rank: int, payloads: Iterable[memoryview]) -> None:
        """Writer: one rank's part of a delta, safe when it returns."""
        self._check()
        try:
            with self._part(version, rank).open("wb") as file:
                for payload in payloads:
                    file.write(payload)
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._no_room(error, 0) from error

    def read_part(self, version: int, rank: int, at: int, size: int) -> memoryview:
        """Reader: some bytes of a part.

        Raises:
            TransferError: it was retired.
            CorruptionError: it is shorter.
        """
        self._check()
        try:
            with self._part(version, rank).open("rb") as file:
                file.seek(at)
                payload = file.read(size)
        except FileNotFoundError as error:
            raise TransferError(f"version {version} was retired while it was read") from error
        if len(payload) != size:
            raise CorruptionError(
                f"{self._part(version, rank)} ends at {at + len(payload)} bytes; {at + size} needed"
            )
        return memoryview(payload)

    def commit(self, marker: Marker) -> None:
        """Owner: make a version visible, atomically."""
        self._check(owner=True)
        if marker.version not in self._begun:
            raise UsageError(f"commit of version {marker.version}, which was not begun")
        # Before anyone can see it, for a reader does not wait for the writer's lock.
        fcntl.flock(self._begun[marker.version], fcntl.LOCK_UN)
        self._write_commits([*self._committed, marker])
        os.close(self._begun.pop(marker.version))

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed; else nothing."""
        self._check(owner=True)
        if version in self._begun:
            # Removed, never reused: a rank that hangs may still write to its pages.
            if all(marker.version != version for marker in self._committed):
                self._remove(version)
            os.close(self._begun.pop(version))

    def markers(self) -> tuple[Marker, ...]:
        """What is committed, oldest first."""
        self._check()
        try:
            text = (self._dir / _COMMITS).read_bytes()
        except FileNotFoundError:
            return ()
        if text != self._seen[0]:
            self._seen = text, self._read_markers(text)
        return self._seen[1]

    def lease(self, marker: Marker, *, size_bytes: int) -> Lease:
        """Reader: hold the blob of a committed version.

        Raises:
            TransferError: it was retired meanwhile.
            CorruptionError: it has another size.
        """
        self._check()
        path = self._path(marker.version)
        gone = TransferError(f"version {marker.version} was retired while it was being opened")
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise gone from error
        try:
            if not self._durable:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.stat(path).st_ino != os.fstat(fd).st_ino:
                    raise gone
            found = file_id(fd)
            if found.size != size_bytes:
                raise CorruptionError(f"{path} has {found.size} bytes; {size_bytes} were sent")
            # Of the open file: by its name it may be gone by now.
            blob = self._read.take(found)
            if blob is None:
                blob = map_file(fd, size_bytes, private=True)
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(fd)
            raise gone from error
        except BaseException:
            os.close(fd)
            raise
        keep = partial(self._read.give, found)
        return Lease(blob, fd, _forget if self._durable else keep)

    def close(self) -> None:
        """Let go; the owner removes everything. Twice is fine."""
        self._closed = True
        self._written.clear()
        self._read.clear()
        for version in list(self._begun):
            os.close(self._begun.pop(version))
        if self._removal is not None:
            self._removal()

    def _read_markers(self, text: bytes) -> tuple[Marker, ...]:
        try:
            return tuple(Marker.from_json(row) for row in json.loads(text))
        except (ValueError, TypeError) as error:
            raise CorruptionError(f"{self._dir / _COMMITS} cannot be read: {error}") from error

    def _path(self, version: int) -> Path:
        return self._dir / f"version-{version}.safetensors"

    def _part(self, version: int, rank: int) -> Path:
        return self._dir / f"version-{version}.{rank}.delta"

    def _remove(self, version: int) -> None:
        self._path(version).unlink(missing_ok=True)
        for part in self._dir.glob(f"version-{version}.*.delta"):
            part.unlink(missing_ok=True)

    def _check(self, *, owner: bool = False) -> None:
        if self._closed:
            raise ClosedError(f"the transport at {self._dir} was closed")
        if owner and not self._owner:
            raise UsageError(
                f"only the owner of {self._dir} begins and commits. "
                "Construct the transport of trainer rank 0 with owner=True."
            )

    def _lock(self, fd: int) -> None:
        if not self._durable:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _retire(self, version: int, new: Path, *, reuse: bool) -> int | None:
        """Rename the file to `new` where nobody holds it, else remove it; None then."""
        old = self._path(version)
        if reuse and not self._durable and old.exists():
            fd = os.open(old, os.O_RDWR)
            try:
                self._lock(fd)
                old.rename(new)
                return fd
            except BlockingIOError:
                os.close(fd)
        self._remove(version)
        return None

    def _write_commits(self, markers: list[Marker]) -> None:
        text = json.dumps([marker.to_json() for marker in markers])
        scratch = self._dir / f"{_COMMITS}.tmp"
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        scratch.replace(self._dir / _COMMITS)
        self._committed = markers
        if self._durable:
            _fsync(self._dir)

    def _other_size(self, path: Path, found: int | None, size_bytes: int) -> TransferError:
        return TransferError(
            f"{path} has {found} bytes, the plan {size_bytes}. "
            "Trainer ranks must share the directory and the plan."
        )

    def _no_room(self, error: OSError, size_bytes: int) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return TransferError(f"{self._dir}: {error}")
        free = os.statvfs(self._dir)
        return CapacityError(
            f"{self._dir} has {free.f_bavail * free.f_frsize:,} bytes free; one more version needs "
            f"{size_bytes:,}. Plan for two versions, three while a reader lags."
        )


def _forget(blob: UInt8[Tensor, " bytes"]) -> None:
    """It goes with its last user."""


def _chain(committed: list[Marker]) -> list[Marker]:
    """The last version, and those that it is a delta to."""
    chain: list[Marker] = []
    for marker in reversed(committed):
        if not chain or marker.version == chain[-1].base:
            chain.append(marker)
    return chain[::-1]


def _take_lock(directory: Path) -> int:
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise UsageError(
            f"{directory} has a living owner. Choose another name; only rank 0 passes owner=True."
        ) from error
    return fd


def _remove_files(directory: Path, *, but: str = "") -> None:
    # Only what is ours: a directory on a disk may be shared with other things.
    for path in directory.iterdir():
        if path.name != but and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove_all(directory: Path, lock: int, pid: int, *, directory_too: bool) -> None:
    # A forked child inherits the finalizer, not the ownership.
    if os.getpid() == pid and directory.is_dir():
        _remove_files(directory)
        if directory_too and not any(directory.iterdir()):
            directory.rmdir()
    os.close(lock)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Versioned blobs as files in one directory: allocate, write, commit, lease, retire."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from ...errors import CapacityError, ClosedError, CorruptionError, TransferError, UsageError
from ..marker import Marker
from .lease import Hold, Lease
from .mappings import Mappings, file_id, map_file
from .place import Owned, Place, open_own, removable, remove

__all__ = ["Slots"]

_SECTOR_BYTES = 512  # The unit of st_blocks.
_COMMITS = "commits.json"


class Slots:
    """The state of a directory transport. `durable`: fsync before a commit, never reuse a file.

    Without `durable` the file of a retired version becomes the next blob, where no reader holds
    it: touching fresh pages costs more than copying into known ones. Readers say that they hold
    one by a shared flock, which ends with their process.
    """

    def __init__(self, place: Place, *, owner: bool, durable: bool) -> None:
        self._place, self._durable = place, durable
        self._committed: list[Marker] = []
        self._begun: dict[int, int] = {}
        self._written = Mappings()
        self._seen: tuple[bytes, tuple[Marker, ...]] = (b"", ())
        self._closed = False
        self._owned: Owned | None = None
        self._removal: weakref.finalize[..., Slots] | None = None
        if owner:
            self._owned = place.take()
            # Runs at the end of the process too.
            self._removal = weakref.finalize(
                self, _leave, place, self._owned, self._committed, os.getpid(), durable
            )

    @property
    def run(self) -> str:
        """Names the life of this owner."""
        assert self._owned is not None, "others do not begin"
        return self._owned.run

    @property
    def directory(self) -> Path:
        """The directory of the files as it is now.

        Raises:
            FileNotFoundError: there was no owner yet, or it removed everything.
        """
        return self._place.here() if self._owned is None else self._owned.directory

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: the files that `close` removes; on a disk, all but the last version."""
        self._check(owner=True)
        stays = _names_that_stay(self.directory, self._committed, self._durable)
        return tuple(removable(self.directory, keep=stays))

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
            self._begun[version] = os.open(self.directory, os.O_RDONLY)
            return
        try:
            if fd < 0:
                fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, user=self._place.user)
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
        fd = -1
        try:
            path = self._path(version)
            fd = open_own(path, os.O_RDWR, user=self._place.user)
            found = file_id(fd)
            if found.size != size_bytes:
                raise _other_size(path, found.size, size_bytes)
            blob = self._written.take(found, path.parent)
            if blob is None:
                blob = map_file(fd, size_bytes)
            if not self._durable:  # There each version is a new file.
                self._written.give(found, blob)
        except FileNotFoundError as error:
            raise _other_size(error.filename, None, size_bytes) from error
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
            path = self._part(version, rank)
            path.unlink(missing_ok=True)  # Of an attempt that failed.
            fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, user=self._place.user)
            with open(fd, "wb") as file:
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
            path = self._part(version, rank)
            with open(open_own(path, os.O_RDONLY, user=self._place.user), "rb") as file:
                file.seek(at)
                payload = file.read(size)
        except FileNotFoundError as error:
            raise TransferError(f"version {version} was retired while it was read") from error
        if len(payload) != size:
            raise CorruptionError(f"{path} ends at {at + len(payload)} bytes; {at + size} needed")
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
            path = self.directory / _COMMITS
            with open(open_own(path, os.O_RDONLY, user=self._place.user), "rb") as file:
                text = file.read()
        except FileNotFoundError:
            return ()
        if text != self._seen[0]:
            self._seen = text, _read_markers(path, text)
        return self._seen[1]

    def lease(self, marker: Marker, *, size_bytes: int) -> Lease:
        """Reader: hold the file of a committed version.

        Raises:
            TransferError: it was retired meanwhile.
            CorruptionError: it has another size.
        """
        self._check()
        gone = TransferError(f"version {marker.version} was retired while it was being opened")
        try:
            path = self._path(marker.version)
            fd = open_own(path, os.O_RDONLY, user=self._place.user)
        except FileNotFoundError as error:
            raise gone from error
        try:
            hold = Hold(fd, None if self._durable else fcntl.LOCK_SH)
        except BlockingIOError as error:
            raise gone from error
        try:
            if not self._durable and os.stat(path).st_ino != os.fstat(fd).st_ino:
                raise gone
            size = os.fstat(fd).st_size
            if size != size_bytes:
                raise CorruptionError(f"{path} has {size} bytes; {size_bytes} were sent")
        except FileNotFoundError as error:
            hold.close()
            raise gone from error
        except BaseException:
            hold.close()
            raise
        return Lease(hold)

    def close(self) -> None:
        """Let go; the owner removes everything. Twice is fine."""
        self._closed = True
        self._written.clear()
        for version in list(self._begun):
            os.close(self._begun.pop(version))
        if self._removal is not None:
            self._removal()

    def _path(self, version: int) -> Path:
        return self.directory / f"version-{version}.safetensors"

    def _part(self, version: int, rank: int) -> Path:
        return self.directory / f"version-{version}.{rank}.delta"

    def _remove(self, version: int) -> None:
        self._path(version).unlink(missing_ok=True)
        for part in self.directory.glob(f"version-{version}.*.delta"):
            part.unlink(missing_ok=True)

    def _check(self, *, owner: bool = False) -> None:
        if self._closed:
            raise ClosedError("the transport was closed")
        if owner and self._owned is None:
            raise UsageError(
                "only the owner begins and commits. "
                "Construct the transport of trainer rank 0 with owner=True."
            )

    def _lock(self, fd: int) -> None:
        if not self._durable:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _retire(self, version: int, new: Path, *, reuse: bool) -> int | None:
        """Rename the file to `new` where nobody holds it, else remove it; None then."""
        old = self._path(version)
        if reuse and not self._durable and old.exists():
            fd = open_own(old, os.O_RDWR, user=self._place.user)
            try:
                self._lock(fd)
                old.rename(new)
                return fd
            except BlockingIOError:
                os.close(fd)
        self._remove(version)
        return None

    def _write_commits(self, markers: list[Marker]) -> None:
        _write_markers(self.directory, markers, durable=self._durable)
        self._committed[:] = markers
        if self._durable:
            _fsync(self.directory)

    def _no_room(self, error: OSError, size_bytes: int) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return TransferError(f"{self.directory}: {error}")
        free = os.statvfs(self.directory)
        return CapacityError(
            f"{self.directory} has {free.f_bavail * free.f_frsize:,} bytes free; one more version "
            f"needs {size_bytes:,}. Plan for two versions, three while a reader lags."
        )


def _chain(committed: list[Marker]) -> list[Marker]:
    """The last version, and those that it is a delta to."""
    chain: list[Marker] = []
    for marker in reversed(committed):
        if not chain or marker.version == chain[-1].base:
            chain.append(marker)
    return chain[::-1]


def _leave(place: Place, owned: Owned, committed: list[Marker], pid: int, durable: bool) -> None:
    if os.getpid() != pid:
        return  # A forked child inherits the finalizer, not the ownership.
    try:
        try:
            with suppress(FileNotFoundError):
                stays = _names_that_stay(owned.directory, committed, durable)
                remove(owned.directory, keep=stays)
                if stays and _chain(committed) != committed:
                    _write_markers(owned.directory, _chain(committed), durable=durable)
        finally:
            place.leave(owned)
    except OSError as error:
        raise TransferError(
            f"cannot clear up: {error}. Move {owned.directory} if you need what is in it: the next "
            "owner removes it."
        ) from error


def _names_that_stay(directory: Path, committed: list[Marker], durable: bool) -> set[str]:
    """On a disk, what a reader needs of the last version: those weights may be the final ones."""
    chain = _chain(committed) if durable else []
    versions = tuple(f"version-{marker.version}." for marker in chain)
    files = {path.name for path in directory.iterdir() if path.name.startswith(versions)}
    return {_COMMITS, *files} if chain else set()


def _write_markers(directory: Path, markers: list[Marker], *, durable: bool) -> None:
    text = json.dumps([marker.to_json() for marker in markers])
    scratch = directory / f"{_COMMITS}.tmp"
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    scratch.replace(directory / _COMMITS)


def _read_markers(path: Path, text: bytes) -> tuple[Marker, ...]:
    try:
        return tuple(Marker.from_json(row) for row in json.loads(text))
    except (ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error


def _other_size(path: object, found: int | None, size_bytes: int) -> TransferError:
    return TransferError(
        f"{path} has {found} bytes, the plan {size_bytes}. "
        "Trainer ranks must share the directory and the plan."
    )


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

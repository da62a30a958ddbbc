"""Versioned blobs as files in one directory: allocate, write, commit, lease, retire."""

from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from ...errors import CapacityError, ClosedError, CorruptionError, TransferError, UsageError
from ..lease import Lease
from ..marker import Marker
from ..sealed import SealedLease
from .blobs import Blobs
from .place import Owned, Place, open_own, removable, remove

__all__ = ["DirectoryCommits"]

_COMMITS = "commits.json"
_ANNOUNCED = "announced.json"


class DirectoryCommits:
    """The state of a directory transport.

    Args:
        blobs: the buffers of full versions.
        durable: fsync before a commit, and leave the last version at the end.
    """

    def __init__(self, place: Place, blobs: Blobs, *, owner: bool, durable: bool) -> None:
        self._place, self._blobs, self._durable = place, blobs, durable
        self._committed: list[Marker] = []
        self._begun: dict[int, bool] = {}  # Whether it has a blob.
        self._seen: tuple[bytes, tuple[Marker, ...]] = (b"", ())
        self._closed = False
        self._owned: Owned | None = None
        self._removal: weakref.finalize[..., DirectoryCommits] | None = None
        if owner:
            self._owned = place.take()
            # Runs at the end of the process too.
            self._removal = weakref.finalize(
                self, _leave, place, self._owned, self._committed, os.getpid(), durable
            )

    @property
    def run(self) -> str:
        """Name of this owner's life."""
        assert self._owned is not None, "others do not begin"
        return self._owned.run

    @property
    def directory(self) -> Path:
        """The directory that holds the files now.

        Raises:
            FileNotFoundError: there was no owner yet, or it removed everything.
        """
        return self._place.here() if self._owned is None else self._owned.directory

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: return the files that `close` removes; on a disk, all but the last version."""
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
        path, made = self._path(version), delta
        for marker in retired:
            old = self._path(marker.version)
            made = made or self._blobs.reuse(old, path, size_bytes)
            self._remove(marker.version)
        try:
            if not made:
                self._blobs.make(path, size_bytes)
        except OSError as error:
            self._blobs.drop(path)
            raise self._no_room(error, size_bytes) from error
        self._begun[version] = not delta

    def writable(self, version: int, *, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: return the blob of a begun version, to be written to in place."""
        self._check()
        try:
            return self._blobs.writable(self._path(version), size_bytes)
        except FileNotFoundError as error:
            raise TransferError(
                f"{error.filename} has None bytes, the plan {size_bytes}. "
                "Trainer ranks must share the directory and the plan."
            ) from error

    def flush(self, version: int) -> None:
        """Writer: return when the blob is as safe as promised."""
        self._check()
        if self._durable:
            _fsync(self._path(version))

    def write_part(self, version: int, rank: int, payloads: Iterable[memoryview]) -> None:
        """Writer: write one rank's part of a delta; it is safe on return."""
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
        """Reader: return some bytes of a part.

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
        if self._begun[marker.version]:
            self._blobs.finish(self._path(marker.version))
        self._write_commits([*self._committed, marker])
        del self._begun[marker.version]

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed, if there is one."""
        self._check(owner=True)
        if version in self._begun:
            if all(marker.version != version for marker in self._committed):
                self._blobs.abort(self._path(version))
                self._remove(version)
            del self._begun[version]

    def announce(self, text: str) -> None:
        """Owner: leave a text for those who find its versions."""
        self._check(owner=True)
        try:
            _write(self.directory / _ANNOUNCED, text.encode(), durable=self._durable)
        except OSError as error:
            raise self._no_room(error, len(text)) from error

    def announced(self) -> str | None:
        """Return what the owner left; None before."""
        text = self._read(_ANNOUNCED)
        return None if text is None else text.decode(errors="replace")

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first."""
        text = self._read(_COMMITS)
        if text is None:
            return ()
        if text != self._seen[0]:
            self._seen = text, _read_markers(self.directory / _COMMITS, text)
        return self._seen[1]

    def lease(self, marker: Marker, *, size_bytes: int) -> Lease | SealedLease:
        """Reader: hold the file of a committed version.

        Raises:
            TransferError: it was retired meanwhile.
            CorruptionError: it has another size.
        """
        self._check()
        try:
            return self._blobs.lease(self._path(marker.version), size_bytes)
        except (FileNotFoundError, BlockingIOError) as error:
            raise TransferError(
                f"version {marker.version} was retired while it was being opened"
            ) from error

    def close(self) -> None:
        """Let go; the owner removes everything. Twice is fine."""
        self._closed = True
        self._blobs.close()
        if self._removal is not None:
            self._removal()

    def _path(self, version: int) -> Path:
        return self.directory / f"version-{version}.safetensors"

    def _part(self, version: int, rank: int) -> Path:
        return self.directory / f"version-{version}.{rank}.delta"

    def _remove(self, version: int) -> None:
        self._blobs.drop(self._path(version))
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

    def _read(self, name: str) -> bytes | None:
        self._check()
        try:
            fd = open_own(self.directory / name, os.O_RDONLY, user=self._place.user)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return file.read()

    def _write_commits(self, markers: list[Marker]) -> None:
        _write_markers(self.directory, markers, durable=self._durable)
        self._committed[:] = markers
        if self._durable:
            _fsync(self.directory)

    def _no_room(self, error: OSError, size_bytes: int) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            return TransferError(f"{self.directory}: {error}")
        free = os.statvfs(self.directory)
        room: object = f"{free.f_bavail * free.f_frsize:,} bytes free"
        if error.errno == errno.ENOMEM:
            room = error.strerror
        return CapacityError(
            f"{self.directory} has {room}; one more version needs {size_bytes:,}. "
            "Plan for two versions, three while a reader lags."
        )


def _chain(committed: list[Marker]) -> list[Marker]:
    """Return the last version, and those that it is a delta to."""
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
    """Return, on a disk, the files that the last version needs: it may be the final one."""
    chain = _chain(committed) if durable else []
    versions = tuple(f"version-{marker.version}." for marker in chain)
    files = {path.name for path in directory.iterdir() if path.name.startswith(versions)}
    return {_COMMITS, _ANNOUNCED, *files} if chain else set()


def _write_markers(directory: Path, markers: list[Marker], *, durable: bool) -> None:
    text = json.dumps([marker.to_json() for marker in markers])
    _write(directory / _COMMITS, text.encode(), durable=durable)


def _write(path: Path, text: bytes, *, durable: bool) -> None:
    """Write over a file, in one step."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    scratch.replace(path)


def _read_markers(path: Path, text: bytes) -> tuple[Marker, ...]:
    try:
        return tuple(Marker.from_json(row) for row in json.loads(text))
    except (ValueError, TypeError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

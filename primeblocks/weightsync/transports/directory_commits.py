"""`Commits` as small files in a directory; locks that end with their process are the leases."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ...errors import CapacityError, ClosedError, TransferError, UsageError
from ..lease import Hold
from ..marker import Marker, as_corruption
from .own_files import open_own, removable, remove
from .place import Owned, Place
from .versions import chain_to

__all__ = ["DirectoryCommits", "fsync", "last_chain"]

_COMMITS = "commits.json"
_ANNOUNCED = "announced.json"


class DirectoryCommits:
    """A record of all markers in one file; a lock file a version, which its readers lock.

    Args:
        durable: fsync before a commit, and leave the last version at the end.
    """

    look_s = 0.002

    def __init__(self, place: Place, *, owner: bool, durable: bool = False) -> None:
        self.place, self._durable = place, durable
        self.committed: list[Marker] = []
        self._begun: set[int] = set()
        self._seen: tuple[bytes, tuple[Marker, ...]] = (b"", ())
        self._closed = False
        self._owned: Owned | None = None
        self._removal: weakref.finalize[..., DirectoryCommits] | None = None
        if owner:
            self._owned = place.take()
            # Runs at the end of the process too.
            self._removal = weakref.finalize(
                self, _leave, place, self._owned, self.committed, os.getpid(), durable
            )

    @property
    def run(self) -> str:
        assert self._owned is not None, "others do not begin"
        return self._owned.run

    @property
    def directory(self) -> Path:
        """The directory that holds the files now.

        Raises:
            FileNotFoundError: there was no owner yet, or it removed everything.
        """
        return self.place.here() if self._owned is None else self._owned.directory

    def spec(self) -> dict[str, Any]:
        return {"kind": "directory", **self.place.spec()}

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: return the files that `close` removes; on a disk, all but the last version."""
        self.check(owner=True)
        stays = _names_that_stay(self.directory, self.committed, self._durable)
        return tuple(removable(self.directory, keep=stays))

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        self.check(owner=True)
        self.abort(version)
        with ExitStack() as locks:
            for marker in self.committed:
                if marker not in keep:
                    locks.callback(self._lock(marker, deadline).close)
            # No longer visible from here on, and then their files are gone.
            for marker in self.hide(keep):
                self.remove(marker.version)
        self.open(version)
        _write(self._lock_path(version), b"", durable=False)

    def hide(self, keep: Sequence[Marker]) -> list[Marker]:
        """Owner: hide all versions but those of `keep`, and return the others."""
        gone = [marker for marker in self.committed if marker not in keep]
        if gone:
            self._write_commits(list(keep))
        return gone

    def open(self, version: int) -> None:
        """Owner: note that a version may be committed."""
        self._begun.add(version)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        self.check(owner=True)
        if marker.version not in self._begun:
            raise UsageError(f"commit of version {marker.version}, which was not begun")
        self._write_commits([*self.committed, marker])
        self._begun.discard(marker.version)

    def abort(self, version: int) -> None:
        self.check(owner=True)
        if version in self._begun:
            if all(marker.version != version for marker in self.committed):
                self.remove(version)
            self._begun.discard(version)

    def remove(self, version: int) -> None:
        """Owner: remove the small files of a version."""
        self._lock_path(version).unlink(missing_ok=True)
        for part in self.directory.glob(f"version-{version}.*.delta"):
            part.unlink(missing_ok=True)

    def markers(self, *, deadline: float = 0.0) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first: a look at one file."""
        text = self._read(_COMMITS)
        if text is None:
            return ()
        if text != self._seen[0]:
            self._seen = text, _read_markers(self.directory / _COMMITS, text)
        return self._seen[1]

    def hold(self, marker: Marker, *, deadline: float) -> Hold:
        self.check()
        gone = TransferError(f"version {marker.version} was retired while it was being opened")
        try:
            path = self._lock_path(marker.version)
            hold = Hold(open_own(path, os.O_RDONLY, user=self.place.user), fcntl.LOCK_SH)
        except (FileNotFoundError, BlockingIOError) as error:
            raise gone from error
        try:
            # The owner hides a version before it lets go of the lock.
            if marker not in self.markers():
                raise gone
        except BaseException:
            hold.close()
            raise
        return hold

    def post(self, rank: int, text: str, *, deadline: float) -> None:
        self.check()
        try:
            _write(self.directory / _note(rank), text.encode(), durable=False)
        except FileNotFoundError as error:
            raise TransferError("no owner has begun. Pass owner=True on rank 0.") from error
        except OSError as error:
            raise self.no_room(error, len(text)) from error

    def look(self, marker: Marker, rank: int, *, deadline: float) -> str | None:
        text = self._read(_note(rank))
        return None if text is None else text.decode(errors="replace")

    def announce(self, text: str, *, deadline: float) -> None:
        self.check(owner=True)
        try:
            _write(self.directory / _ANNOUNCED, text.encode(), durable=self._durable)
        except OSError as error:
            raise self.no_room(error, len(text)) from error

    def announced(self, *, deadline: float) -> str | None:
        text = self._read(_ANNOUNCED)
        return None if text is None else text.decode(errors="replace")

    def hint(self) -> str:
        return self.place.others()

    def close(self) -> None:
        self._closed = True
        if self._removal is not None:
            self._removal()

    def check(self, *, owner: bool = False) -> None:
        """Refuse a call after the end, or one that only the owner may make."""
        if self._closed:
            raise ClosedError("the transport was closed")
        if owner and self._owned is None:
            raise UsageError(
                "only the owner begins and commits. "
                "Construct the transport of trainer rank 0 with owner=True."
            )

    def no_room(self, error: OSError, size_bytes: int) -> Exception:
        """Return the error that a caller is told where a file could not be written."""
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

    def _lock_path(self, version: int) -> Path:
        return self.directory / f"version-{version}.lock"

    def _lock(self, marker: Marker, deadline: float) -> Hold:
        """Take the lock of a version that nobody holds, so that nobody can take hold of it."""
        never = threading.Event()
        while True:
            fd = open_own(self._lock_path(marker.version), os.O_RDONLY, user=self.place.user)
            try:
                return Hold(fd, fcntl.LOCK_EX)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise CapacityError(
                        f"version {marker.version} is still being read by an engine, and the "
                        "next one needs its buffers. Publish again, with more time."
                    ) from error
            never.wait(self.look_s)

    def _read(self, name: str) -> bytes | None:
        self.check()
        try:
            fd = open_own(self.directory / name, os.O_RDONLY, user=self.place.user)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return file.read()

    def _write_commits(self, markers: list[Marker]) -> None:
        _write_markers(self.directory, markers, durable=self._durable)
        self.committed[:] = markers
        if self._durable:
            fsync(self.directory)


def fsync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _note(rank: int) -> str:
    return f"rank-{rank}.json"


def _leave(place: Place, owned: Owned, committed: list[Marker], pid: int, durable: bool) -> None:
    if os.getpid() != pid:
        return  # A forked child inherits the finalizer, not the ownership.
    try:
        try:
            with suppress(FileNotFoundError):
                stays = _names_that_stay(owned.directory, committed, durable)
                remove(owned.directory, keep=stays)
                if stays and last_chain(committed) != committed:
                    _write_markers(owned.directory, last_chain(committed), durable=durable)
        finally:
            place.leave(owned)
    except OSError as error:
        raise TransferError(
            f"cannot clear up: {error}. Move {owned.directory} if you need what is in it: the next "
            "owner removes it."
        ) from error


def last_chain(committed: Sequence[Marker]) -> list[Marker]:
    """Return the last version, after those that it is a delta to."""
    return list(chain_to(committed[-1], committed, held=None)) if committed else []


def _names_that_stay(
    directory: Path, committed: Sequence[Marker], durable: bool
) -> Collection[str]:
    """Return, on a disk, the files that the last version needs: it may be the final one."""
    chain = last_chain(committed) if durable else []
    versions = tuple(f"version-{marker.version}." for marker in chain)
    files = {path.name for path in directory.iterdir() if path.name.startswith(versions)}
    return {_COMMITS, _ANNOUNCED, *files} if chain else set()


def _write_markers(directory: Path, markers: Sequence[Marker], *, durable: bool) -> None:
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
    with as_corruption(str(path)):
        return tuple(Marker.from_json(row) for row in json.loads(text))

"""`Commits` as small files in a directory. A lease is a lock, which ends with the reader's process.

A version is begun, then committed, then retired. `commits.json` lists the committed versions. The
owner replaces it in one step, so a reader sees a version completely or not at all. A reader takes a
shared lock on the version's lock file, and then looks whether the version is still listed. The
owner first takes an exclusive lock on that file, and then removes the version from the list. Only
then does it unlock the file and reuse the version's buffers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ...errors import CapacityError, TransferError, UsageError
from ..lease import Hold
from ..marker import Marker, as_corruption
from .place import Owned, Place, open_own, read_own, removable, remove, write_over
from .transport import ANNOUNCED, Lease, check_call, last_chain, retired

__all__ = ["DirectoryCommits", "fsync", "not_opened"]

_COMMITS = "commits.json"


class DirectoryCommits:
    """A record of all markers in one file, and a lock file per version, which its readers lock.

    Calls that write wait for each other, in all threads. With `durable`, files are synced to the
    disk before a commit, and `close` leaves the last version.
    """

    def __init__(self, place: Place, *, owner: bool = False, durable: bool = False) -> None:
        self._place, self._durable = place, durable
        self.look_s = 0.1 if durable else 0.002  # Each look opens files, perhaps on a shared disk.
        self.committed: list[Marker] = []
        self._begun: set[int] = set()
        self._seen: tuple[bytes, tuple[Marker, ...]] = (b"", ())
        self._closed = False
        self._writing = threading.RLock()  # Two threads would write to one scratch file.
        self._owned: Owned | None = None
        self.hint = place.hint
        if owner:
            self._owned = place.take()
            # This also runs when the process ends.
            self._removal = weakref.finalize(
                self, _leave, place, self._owned, self.committed, os.getpid(), durable
            )

    @property
    def run(self) -> str:
        assert self._owned is not None, "others do not begin"
        return self._owned.run

    @property
    def directory(self) -> Path:
        """The directory that has the files now. Raises FileNotFoundError without an owner."""
        return self._place.here() if self._owned is None else self._owned.directory

    def spec(self) -> dict[str, Any]:
        return {"kind": "directory", "place": self._place.spec()}

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: return the files that `close` removes. On a disk, the last version stays."""
        self.check(owner=True)
        stays = _names_that_stay(self.directory, self.committed, self._durable)
        return tuple(removable(self.directory, keep=stays))

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        with self._writing, ExitStack() as locks:
            self.abort(version)
            for marker in self.committed:
                if marker not in keep:
                    locks.callback(self._lock(marker, deadline).close)
            self.retire(keep)
            self.open(version)
            write_over(self._lock_path(version), (), durable=False)

    def retire(self, keep: Sequence[Marker]) -> list[Marker]:
        """Owner: hide all versions except `keep`, remove their small files, and return them."""
        with self._writing:
            gone = [marker for marker in self.committed if marker not in keep]
            if gone:
                # Readers cannot see these versions from here on. Then their files are removed.
                self._write_commits(keep)
            for marker in gone:
                self._remove(marker.version)
        return gone

    def open(self, version: int) -> None:
        self._begun.add(version)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        self.check(owner=True)
        with self._writing:
            if marker.version not in self._begun:
                raise UsageError(
                    f"commit() got version {marker.version}, which was not begun. Call begin() "
                    "first."
                )
            last = self.committed[-1].version if self.committed else -1
            if marker.version <= last:
                raise UsageError(
                    f"commit() got version {marker.version}, but another publisher has committed "
                    f"version {last}. Use one Publisher per transport."
                )
            self._write_commits([*self.committed, marker])
            self._begun.discard(marker.version)

    def abort(self, version: int) -> None:
        self.check(owner=True)
        with self._writing:
            if version not in self._begun:
                return
            if all(marker.version != version for marker in self.committed):
                self._remove(version)
            self._begun.discard(version)

    def markers(self, *, deadline: float = 0.0) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first. Reads one file."""
        text = self.read(_COMMITS)
        if text is None:
            return ()
        if text != self._seen[0]:
            with as_corruption(_COMMITS):
                self._seen = text, tuple(Marker.from_json(row) for row in json.loads(text))
        return self._seen[1]

    def hold(self, marker: Marker, *, deadline: float) -> Lease:
        self.check()
        try:
            path = self._lock_path(marker.version)
            hold = Hold(open_own(path, os.O_RDONLY, user=self._place.user), fcntl.LOCK_SH)
        except OSError as error:
            raise not_opened(marker.version, error) from error
        try:
            # The owner hides a version before it lets go of the lock.
            if marker not in self.markers():
                raise retired(marker.version)
        except BaseException:
            hold.close()
            raise
        return Lease(math.inf, hold.close)

    def post(self, name: str, text: str, *, deadline: float) -> None:
        self.write(f"{name}.json", [text.encode()])

    def look(self, name: str, *, run: str | None = None, deadline: float) -> str | None:
        text = self.read(f"{name}.json")
        return None if text is None else text.decode(errors="replace")

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Replace a small file. If `durable`, it is on the disk when the call returns."""
        self.check()
        try:
            with self._writing:
                write_over(self.directory / name, parts, durable=self._durable)
        except FileNotFoundError as error:
            raise TransferError(
                "the transport does not have an owner yet. Pass owner=True on rank 0."
            ) from error
        except OSError as error:
            raise self.no_room(error, sum(map(len, parts))) from error

    def read(self, name: str, at: int = 0, size: int = -1) -> bytes | None:
        """Return bytes of a small file, or None if it does not exist or was replaced."""
        self.check()
        try:
            return read_own(self.directory / name, at, size, user=self._place.user)
        except OSError as error:
            if _is_gone(error):
                return None
            raise _unreadable(error) from error

    def close(self) -> None:
        self._closed = True
        if self._owned is not None:
            with self._writing:
                self._removal()

    def check(self, *, owner: bool = False) -> None:
        """Refuse a call after `close`, or a call that only the owner may make."""
        check_call(closed=self._closed, may=not owner or self._owned is not None)

    def no_room(self, error: OSError, size_bytes: int) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            return TransferError(f"{self.directory}: {error}")
        free = os.statvfs(self.directory)
        room: object = f"{free.f_bavail * free.f_frsize:,} bytes free"
        if error.errno == errno.ENOMEM:
            room = error.strerror
        return CapacityError(
            f"{self.directory} has {room}, but one more version needs {size_bytes:,} bytes. Make "
            "room for two versions, or for three while a reader lags."
        )

    def _lock_path(self, version: int) -> Path:
        return self.directory / f"version-{version}.lock"

    def _lock(self, marker: Marker, deadline: float) -> Hold:
        """Take the lock of a version once it has no reader. No reader can follow."""
        never = threading.Event()
        while True:
            self.check()  # End this wait after `close`, which waits for this thread.
            fd = open_own(self._lock_path(marker.version), os.O_RDONLY, user=self._place.user)
            try:
                return Hold(fd, fcntl.LOCK_EX)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise CapacityError(
                        f"version {marker.version} is still being read by an engine, and the next "
                        "version needs its buffers. Publish again with a longer timeout_s."
                    ) from error
            never.wait(self.look_s)

    def _remove(self, version: int) -> None:
        self._lock_path(version).unlink(missing_ok=True)
        for part in self.directory.glob(f"version-{version}.*.delta*"):
            part.unlink(missing_ok=True)

    def _write_commits(self, markers: Sequence[Marker]) -> None:
        self.write(_COMMITS, [_text(markers)])
        self.committed[:] = markers
        if self._durable:
            fsync(self.directory)


def not_opened(version: int, error: OSError) -> TransferError:
    """Return the error of a reader that cannot open a version, or came too late."""
    late = _is_gone(error) or isinstance(error, BlockingIOError)
    return retired(version) if late else _unreadable(error)


def _is_gone(error: OSError) -> bool:
    # NFS reports a file as stale if its server removed or replaced the file.
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE


def _unreadable(error: OSError) -> TransferError:
    return TransferError(
        f"a file of the transport cannot be read: {error}. Check the disk and the limit of open "
        "files, and receive again."
    )


def fsync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _leave(place: Place, owned: Owned, committed: list[Marker], pid: int, durable: bool) -> None:
    if os.getpid() != pid:
        return  # A forked child inherits the finalizer, not the ownership.
    try:
        try:
            with suppress(FileNotFoundError):
                stays = _names_that_stay(owned.directory, committed, durable)
                remove(owned.directory, keep=stays)
                chain = last_chain(committed)
                if stays and len(chain) < len(committed):
                    _write_markers(owned.directory, chain, durable=durable)
        finally:
            place.leave(owned)
    except OSError as error:
        raise TransferError(
            f"cannot remove files: {error}. The next owner removes {owned.directory}. Move this "
            "directory if you need its files."
        ) from error


def _names_that_stay(
    directory: Path, committed: Sequence[Marker], durable: bool
) -> Collection[str]:
    """Return the names of the files that stay: on a disk, those that the last version needs."""
    chain = last_chain(committed) if durable else ()
    versions = tuple(f"version-{marker.version}." for marker in chain)
    files = {path.name for path in directory.iterdir() if path.name.startswith(versions)}
    return {_COMMITS, f"{ANNOUNCED}.json", *files} if chain else set()


def _write_markers(directory: Path, markers: Sequence[Marker], *, durable: bool) -> None:
    write_over(directory / _COMMITS, [_text(markers)], durable=durable)


def _text(markers: Sequence[Marker]) -> bytes:
    return json.dumps([marker.to_json() for marker in markers]).encode()

"""Directories of versions. One owner makes each directory, and other processes find it.

An owner makes a directory with a random name, and locks a file until its process ends. At the end
it removes the directory, unless files are to stay. The next owner removes the directories of dead
owners, whose locks are free. The files in a directory belong to the owner's user, and other users
cannot write to them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UnsupportedError, UsageError
from ..lease import Hold
from ..marker import as_corruption

__all__ = [
    "OWNED",
    "DiskPlace",
    "Owned",
    "Place",
    "PrivatePlace",
    "open_own",
    "read_own",
    "removable",
    "remove",
    "write_over",
]

_LOCK = "primeblocks.lock"
_RUN = "primeblocks-run.json"
_TOKEN_BYTES = 8
OWNED = f"primeblocks-*-{'[0-9a-f]' * 2 * _TOKEN_BYTES}"  # A glob.
_TOKEN = f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}"
_OURS = re.compile(
    r"(version-\d+\.(safetensors|\d+\.delta|lock)|(rank-\d+|commits|announced)\.json)(\.tmp)?"
    rf"|note\.tmp|{re.escape(_LOCK)}"
)
_REFUSED = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
# Another process needs at most this long to remove a dead owner's directory.
_LOOKS, _LOOK_S = 10, 0.01


class Owned(NamedTuple):
    """An owner's new directory. `run` is a part of its name, and identifies this owner."""

    directory: Path
    run: str
    lock: Hold


class PrivatePlace:
    """A directory in `root` that only this user can read. It is found by its name and its user.

    One owner at a time stores versions there. Directories of other users are ignored.
    """

    user: int | None = None  # Files must belong to the user of this process.

    def __init__(self, name: str, root: str, *, prefix: str = "primeblocks") -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(
                f"files in shared memory need Linux; this is {sys.platform}. Use FileTransport."
            )
        if not os.path.isdir(root):  # Also False if this user may not look there.
            raise UnsupportedError(
                f"{root} is not a directory. Mount a tmpfs, or use FileTransport."
            )
        if not name or Path(name).name != name or "\0" in name:
            raise UsageError(f"name must be one path component, such as 'policy'; got {name!r}")
        mode = os.stat(root).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise UsageError(
                f"{root} has mode {mode & 0o7777:o}, so other users may rename files in it. Run: "
                f"chmod +t {root}"
            )
        self._spec = {"name": name, "root": root, "prefix": prefix}
        self._root, self._name = Path(root), f"{prefix}-{name}"
        self._found: Path | None = None

    def spec(self) -> dict[str, Any]:
        """Return the arguments that open it in another process. JSON-able."""
        return {"kind": "private", **self._spec}

    def take(self) -> Owned:
        """Become the owner: remove the directories of dead owners, and make a new directory.

        Raises:
            UsageError: the place has a living owner, or cannot be written to.
        """
        _sweep(self._root)
        self._refuse_a_second(None)
        while True:
            run = secrets.token_hex(_TOKEN_BYTES)
            directory = self._root / f"{self._name}-{run}"
            try:
                directory.mkdir(mode=0o700)
            except OSError as error:
                raise _unusable(self._root, error) from error
            try:
                lock = _take_lock(directory / _LOCK)
            except (BlockingIOError, FileNotFoundError):
                continue  # Another owner removed it before it was locked.
            try:
                self._refuse_a_second(directory)
            except UsageError:
                remove(directory)
                lock.close()
                raise
            return Owned(directory, run, lock)

    def here(self) -> Path:
        """Return the directory of the owner, or of the last owner.

        Raises:
            FileNotFoundError: there was never an owner, or its directory was removed.
            UsageError: the directory belongs to another user, or other users may write to it.
        """
        if self._found is None or not _is_own(self._found):
            found = [path for path in self._named() if _is_own(path)]
            if not found:
                raise FileNotFoundError(f"no {self._name}-* of this user in {self._root}")
            self._found = found[0]
        mode = self._found.lstat().st_mode & 0o777
        if mode & 0o077:
            raise UsageError(
                f"{self._found} has mode {mode:o}; it must belong to user {os.geteuid()} with "
                "mode 700. Others may have written to this directory. End its owner and start it "
                "again."
            )
        return self._found

    def leave(self, owned: Owned) -> None:
        """Give up the ownership. First remove the files that must not stay in the directory."""
        try:
            remove(owned.directory)
        finally:
            owned.lock.close()

    def hint(self) -> str:
        """Return what a reader needs to find the owner's versions."""
        return (
            f" It looks for {self._root}/{self._name}-* of this user. Run trainer and engine on "
            "one host as one user."
        )

    def _named(self) -> list[Path]:
        name = re.compile(rf"{re.escape(self._name)}-{_TOKEN}")
        try:
            return [path for path in self._root.iterdir() if name.fullmatch(path.name)]
        except PermissionError as error:
            raise _unusable(self._root, error) from error

    def _refuse_a_second(self, mine: Path | None) -> None:
        never = threading.Event()
        for _ in range(_LOOKS):
            found = [path for path in self._named() if path != mine and _is_own(path)]
            if not found:
                return
            never.wait(_LOOK_S)
        raise _second(found[0])


class DiskPlace:
    """A directory at a path. Each owner makes a directory in it, and a file names the last one."""

    def __init__(self, path: str, *, user: int | None = None) -> None:
        if "\0" in path:
            raise UsageError(
                f"{path!r} is not a path: it contains a NUL character. Remove that character."
            )
        self._path, self.user = Path(path).absolute(), user

    def spec(self) -> dict[str, Any]:
        return {"kind": "disk", "path": str(self._path), "user": self.user}

    def take(self) -> Owned:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self._path, error) from error
        try:
            lock = _take_lock(self._path / _LOCK, user=self.user)
        except (BlockingIOError, FileNotFoundError) as error:
            raise _second(self._path) from error
        try:
            last = self._note()
            if last is not None and not last["closed"]:
                _remove_dead(self._path / f"run-{last['run']}")
            run = secrets.token_hex(_TOKEN_BYTES)
            directory = self._path / f"run-{run}"
            directory.mkdir(mode=0o700)
            self._write_note(run, closed=False)
        except BaseException as error:
            (self._path / _LOCK).unlink(missing_ok=True)
            lock.close()
            if isinstance(error, OSError):
                raise _unusable(self._path, error) from error
            raise
        return Owned(directory, run, lock)

    def here(self) -> Path:
        note = self._note()
        if note is None:
            raise FileNotFoundError(f"no run in {self._path}")
        return self._path / f"run-{note['run']}"

    def leave(self, owned: Owned) -> None:
        with suppress(OSError):
            owned.directory.rmdir()  # This succeeds only if no file is to stay.
        try:
            if owned.directory.is_dir():
                self._write_note(owned.run, closed=True)
            else:
                (self._path / _RUN).unlink(missing_ok=True)
            (self._path / _LOCK).unlink(missing_ok=True)
        finally:
            owned.lock.close()

    def hint(self) -> str:
        return f" Trainer and engine must share {self._path}."

    def _note(self) -> dict[str, object] | None:
        path = self._path / _RUN
        try:
            text = read_own(path, user=self.user)
        except FileNotFoundError:
            return None
        with as_corruption(f"{path} (remove this file)"):
            note = json.loads(text)
            if re.fullmatch(_TOKEN, note["run"]):
                return {"run": note["run"], "closed": bool(note["closed"])}
            raise ValueError(f"{note['run']!r} is not the name of a run")

    def _write_note(self, run: str, *, closed: bool) -> None:
        text = json.dumps({"run": run, "closed": closed}).encode()
        scratch = self._path / f"run-{run}" / "note.tmp"
        write_over(self._path / _RUN, [text], durable=True, scratch=scratch)


Place = PrivatePlace | DiskPlace


def _sweep(root: Path) -> None:
    """Remove the private directories that this user's dead owners left in `root`."""
    for path in root.glob(OWNED):
        if not _is_own(path):
            continue
        try:
            lock = Hold(open_own(path / _LOCK, os.O_RDWR), fcntl.LOCK_EX)
        except FileNotFoundError:
            with suppress(OSError):
                path.rmdir()
            continue
        except (BlockingIOError, UsageError):
            continue
        _remove_dead(path)
        lock.close()


def open_own(path: Path, flags: int, *, user: int | None = None) -> int:
    """Open a file that belongs to this user, and that other users cannot write to.

    With `user`, the file must belong to that user and may have any mode, because some mounts show
    other users and modes.

    Raises:
        FileNotFoundError, FileExistsError: as os.open.
        UsageError: it is not a regular file, belongs to another user, or cannot be opened.
    """
    kept = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # Opening a pipe must not wait.
    try:
        fd = os.open(path, flags | kept, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise UsageError(f"{path} was refused: {error.strerror}. Remove this path.") from error
    found = os.fstat(fd)
    wanted = os.geteuid() if user is None else user
    open_to_others = user is None and found.st_mode & 0o022
    if not stat.S_ISREG(found.st_mode) or found.st_uid != wanted or open_to_others:
        os.close(fd)
        raise UsageError(
            f"{path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; it must "
            f"be a file of user {wanted} that others cannot write to. The file was not read. "
            "Remove the file."
        )
    return fd


def read_own(path: Path, at: int = 0, size: int = -1, *, user: int | None) -> bytes:
    """Return bytes of a file, at most to its end. Raises the errors of `open_own`."""
    with open(open_own(path, os.O_RDONLY, user=user), "rb") as file:
        file.seek(at)
        return file.read(size)


def write_over(
    path: Path, parts: Iterable[bytes | memoryview], *, durable: bool, scratch: Path | None = None
) -> None:
    """Replace a file in one step. The new contents are in `scratch` until then."""
    scratch = path.with_name(f"{path.name}.tmp") if scratch is None else scratch
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.writelines(parts)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    scratch.replace(path)


def remove(directory: Path, *, keep: Collection[str] = ()) -> None:
    """Remove an owner's files from its directory, and then the directory if it is empty."""
    with suppress(FileNotFoundError):
        for path in removable(directory, keep=keep):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def removable(directory: Path, *, keep: Collection[str] = ()) -> list[Path]:
    """Return an owner's files in its directory, except those in `keep`. The lock comes last."""
    # Without the lock, the next owner could not tell that the other files may be removed.
    ours = (p for p in directory.iterdir() if _OURS.fullmatch(p.name) and p.name not in keep)
    return sorted(ours, key=lambda path: (path.name == _LOCK, path))


def _take_lock(path: Path, *, user: int | None = None) -> Hold:
    """Take an owner's lock, or raise BlockingIOError, or FileNotFoundError if it was removed."""
    fd = open_own(path, os.O_RDWR | os.O_CREAT, user=user)
    inode = os.fstat(fd).st_ino
    lock = Hold(fd, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            return lock
    lock.close()
    raise FileNotFoundError(f"{path} was removed")


def _remove_dead(directory: Path) -> None:
    logging.getLogger(__name__).info("removing %s, whose owner died", directory)
    remove(directory)


def _unusable(directory: Path, error: OSError) -> UsageError:
    return UsageError(f"{directory} cannot be used: {error}. Choose another directory.")


def _second(directory: Path) -> UsageError:
    return UsageError(
        f"{directory} has a living owner. Close its transport or choose another name. Pass "
        "owner=True only on rank 0."
    )


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

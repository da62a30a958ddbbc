"""The vote of known readers after they loaded a version: all keep it, or all go back."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import torch.distributed as dist

from ..errors import DeadlineError, TransferError, UsageError
from .marker import Marker
from .transports.board import Board
from .transports.own_files import open_own

__all__ = ["Ballot", "Member", "Round"]

_COMMIT, _ABORT = "commit", "abort"
_EMPTY = f"{_ABORT}: an empty note"  # As a disk may have it that lost power.
_LOOK_S = 0.01
_GRACE_S = 1.0


class _Notes(Protocol):
    """Notes of which the first under a key stands. Raises TransferError where they fail."""

    def post_first(self, key: str, text: str, *, deadline: float) -> str: ...
    def look(self, key: str, *, deadline: float) -> str | None: ...
    def remove(self, key: str, *, deadline: float) -> None: ...


class Ballot:
    """The readers that have to have a version before it stands, and a place for their votes.

    A reader whose load fails refuses the version; so does one whose time ends before all have
    voted, and the trainer whose time does. The first word stands, whoever dies. A version that was
    refused is loaded by nobody until it is published again. Votes are by the trainer's run, so
    those on a version of a trainer that was replaced are no votes on its successor's.

    Args:
        place: a directory of the readers' and the trainer's user, on a disk or in /dev/shm; or a
            store that outlives them. Votes on a version are removed once two later ones stood.
        members: names of all readers.

    Raises:
        UsageError: there are none, or two of a name; or others may write to the directory.
    """

    def __init__(self, place: str | Path | dist.Store, members: Sequence[str]) -> None:
        if not members or len(set(members)) < len(members):
            raise UsageError(f"members are {list(members)}; give each reader a name of its own")
        self.members = tuple(members)
        self._rounds: list[Round] = []
        self._stood: dict[str, int] = {}
        self._notes: _Notes = (
            Board(place, "ballot") if isinstance(place, dist.Store) else _Files(Path(place))
        )

    def member(self, name: str) -> Member:
        """Return the part of one reader, for its `Subscriber`.

        Raises:
            UsageError: it is not among the members.
        """
        if name not in self.members:
            raise UsageError(f"{name!r} is not among {list(self.members)}")
        return Member(self, name)

    def await_all(self, run: str, version: int, *, again: bool, deadline: float) -> None:
        """Trainer: wait until all members have loaded a version. At the deadline it is refused.

        Args:
            again: it was committed before, and may have been refused.

        Raises:
            TransferError: it is refused; no member keeps it.
        """
        attempt, refused = self._attempt(run, version, deadline)
        if again and refused:
            attempt += 1
            self._notes.post_first(_key(run, version, attempt, "open"), "again", deadline=deadline)
        turn = Round(self, run, version, attempt)
        self._rounds.append(turn)
        if refused and not again:
            raise TransferError(refused)
        said = turn.await_decision("the trainer", deadline)
        if said:
            raise TransferError(said)
        with suppress(TransferError):
            self._forget(run, version)

    def _forget(self, run: str, version: int) -> None:
        """Remove what was said before the version that stood before this one.

        All have voted on this one, so nobody waits for those; readers that come late take it.
        """
        before, self._stood[run] = self._stood.get(run, 0), version
        gone = [one for one in self._rounds if one.run == run and one.version < before]
        self._rounds = [one for one in self._rounds if one not in gone]
        for one in gone:
            for what in (*(f"vote/{name}" for name in self.members), "open", "decision"):
                one._remove(what)

    def _attempt(self, run: str, version: int, deadline: float) -> tuple[int, str]:
        """Return the last attempt at a version, and why it was refused, if it was."""
        attempt = 0
        while True:
            said = self._notes.look(_key(run, version, attempt, "decision"), deadline=deadline)
            if said is None or said == _COMMIT:
                return attempt, ""
            following = _key(run, version, attempt + 1, "open")
            if self._notes.look(following, deadline=deadline) is None:
                return attempt, said or _EMPTY
            attempt += 1


@dataclass(frozen=True)
class Member:
    """A reader that votes."""

    ballot: Ballot
    name: str

    def enter(self, marker: Marker, *, deadline: float) -> Round:
        """Begin to load a version.

        Raises:
            TransferError: it was refused.
        """
        attempt, refused = self.ballot._attempt(marker.run, marker.version, deadline)
        if refused:
            raise TransferError(f"version {marker.version} was refused: {refused}")
        return Round(self.ballot, marker.run, marker.version, attempt, self.name)

    def pick(
        self, markers: Callable[[], Sequence[Marker]], served: Marker | None, *, deadline: float
    ) -> int | None:
        """Wait for a version newer than `served` that was not refused; None if none is committed.

        Raises:
            DeadlineError: there are only others.
        """
        while known := markers():
            newer = known[known.index(served) + 1 :] if served in known else known
            for marker in reversed(newer):
                if not self.ballot._attempt(marker.run, marker.version, deadline)[1]:
                    return marker.version
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"version {known[-1].version} was refused by a reader, and no other came. "
                    "Publish the next one."
                )
            threading.Event().wait(_LOOK_S)
        return None


@dataclass(frozen=True)
class Round:
    """One attempt of all members to load a version."""

    ballot: Ballot
    run: str
    version: int
    attempt: int
    name: str = ""

    def vote(self, *, deadline: float) -> str:
        """Member: say that it has loaded the version; return why it has to go back, or "".

        Raises:
            TransferError: the votes cannot be reached: it is not known what the others do.
        """
        self._post(f"vote/{self.name}", _COMMIT)
        votes = (self._look(f"vote/{name}") for name in self.ballot.members)
        if all(vote is not None for vote in votes):
            # No member has to live longer than its own part.
            self._post("decision", _COMMIT)
        return self.await_decision(self.name, deadline)

    def refuse(self, why: str) -> None:
        """Member: say that it has not loaded the version. Best effort: a silent one is waited for.

        Changes nothing where all had loaded it before.
        """
        with suppress(TransferError):
            self._post("decision", f"{_ABORT}: {self.name}: {why}"[:600])

    def await_decision(self, who: str, deadline: float) -> str:
        """Wait until it is decided; return why the version is refused, or ""."""
        while (said := self._look("decision")) is None:
            if time.monotonic() >= deadline:
                here = [name for name in self.ballot.members if self._look(f"vote/{name}") is None]
                said = self._post("decision", f"{_ABORT}: {who} waited in vain for {here}")
                break
            threading.Event().wait(_LOOK_S)
        return "" if said == _COMMIT else said or _EMPTY

    def _look(self, what: str) -> str | None:
        key = _key(self.run, self.version, self.attempt, what)
        return self.ballot._notes.look(key, deadline=time.monotonic() + _GRACE_S)

    def _post(self, what: str, text: str) -> str:
        key = _key(self.run, self.version, self.attempt, what)
        return self.ballot._notes.post_first(key, text, deadline=time.monotonic() + _GRACE_S)

    def _remove(self, what: str) -> None:
        key = _key(self.run, self.version, self.attempt, what)
        self.ballot._notes.remove(key, deadline=time.monotonic() + _GRACE_S)


class _Files:
    """Notes as files of one directory, to which nobody else can write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = [directory.lstat(), directory.stat()]
        except OSError as error:
            raise UsageError(f"{directory} cannot be used: {error}. Choose another.") from error
        if {one.st_uid for one in found} != {os.geteuid()} or found[1].st_mode & 0o022:
            raise UsageError(
                f"{directory} is of user {found[0].st_uid} with mode {found[1].st_mode & 0o777:o}; "
                f"votes need one of user {os.geteuid()} that nobody else can write to."
            )

    def post_first(self, key: str, text: str, *, deadline: float) -> str:
        scratch = self._directory / f".{secrets.token_hex(8)}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(scratch, flags, 0o600), "w") as file:
                file.write(text)
            with suppress(FileExistsError):
                os.link(scratch, self._path(key))  # All of it at once, or nothing.
            scratch.unlink()
        except OSError as error:
            raise TransferError(f"no vote can be written: {error}") from error
        said = self.look(key, deadline=deadline)
        if said is None:
            raise TransferError(f"{self._path(key)} is gone")
        return said

    def look(self, key: str, *, deadline: float) -> str | None:
        try:
            with open(open_own(self._path(key), os.O_RDONLY), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except (OSError, UsageError) as error:
            raise TransferError(f"no vote can be read: {error}") from error

    def remove(self, key: str, *, deadline: float) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise TransferError(f"no vote can be removed: {error}") from error

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")


def _key(run: str, version: int, attempt: int, what: str) -> str:
    return f"{run}/{version}/{attempt}/{what}"

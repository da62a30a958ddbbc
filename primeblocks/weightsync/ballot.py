"""The vote of known readers after they loaded a version: all keep it, or all go back."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from ..errors import DeadlineError, TransferError, UsageError
from .marker import Marker
from .transports.board import Board

__all__ = ["Ballot", "Member", "Round"]

_COMMIT, _ABORT = "commit", "abort"
_LOOK_S = 0.01
_GRACE_S = 1.0


class Ballot:
    """The readers that have to have a version before it stands, and a place for their votes.

    A reader whose load fails refuses the version; so does one whose time ends before all have
    voted, and the trainer whose time does. The first word stands, whoever dies. A version that was
    refused is loaded by nobody until it is published again. Votes are by the trainer's run, so
    those on a version of a trainer that was replaced are no votes on its successor's.

    Args:
        place: a directory of the readers' and the trainer's user, on a disk or in /dev/shm; or a
            store that outlives them. A decision stays, some 100 bytes a version; votes go when the
            trainer has heard of two more.
        members: names of all readers.

    Raises:
        UsageError: there are none, or two of a name.
    """

    def __init__(self, place: str | Path | dist.Store, members: Sequence[str]) -> None:
        if not members or len(set(members)) < len(members):
            raise UsageError(f"members are {list(members)}; give each reader a name of its own")
        self.members = tuple(members)
        self._notes = (
            Board(place, "ballot") if isinstance(place, dist.Store) else _Files(Path(place))
        )
        self._decided: list[Round] = []

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
        turn = Round(self, run, version).last()
        refused = turn.refused
        if refused and not again:
            raise TransferError(refused)
        if refused:
            turn = turn.next
            turn.post("open", "again")
        said = turn.await_decision("the trainer", deadline)
        self._decided.append(turn)
        self._forget_votes()
        if said:
            raise TransferError(said)

    def _forget_votes(self) -> None:
        """Drop votes that nobody counts any more: a late reader finds the decision."""
        with suppress(TransferError):
            for old in self._decided[:-2]:
                for name in self.members:
                    old.remove(f"vote/{name}")
                self._decided.remove(old)


@dataclass(frozen=True)
class Member:
    """A reader that votes."""

    ballot: Ballot
    name: str

    def enter(self, marker: Marker) -> Round:
        """Begin to load a version.

        Raises:
            TransferError: it was refused.
        """
        turn = Round(self.ballot, marker.run, marker.version, name=self.name).last()
        if turn.refused:
            raise TransferError(f"version {marker.version} was refused: {turn.refused}")
        return turn

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
                if not Round(self.ballot, marker.run, marker.version).last().refused:
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
    attempt: int = 0
    name: str = ""

    @property
    def refused(self) -> str:
        """The reason why it was refused, "" if it was not."""
        said = self.look("decision")
        return "" if said is None or said == _COMMIT else said

    @property
    def next(self) -> Round:
        """The attempt after this one."""
        return replace(self, attempt=self.attempt + 1)

    def last(self) -> Round:
        """Return the last attempt, from this one on, that was opened."""
        turn = self
        while turn.refused and turn.next.look("open") is not None:
            turn = turn.next
        return turn

    def vote(self, *, deadline: float) -> str:
        """Member: say that it has loaded the version; return why it has to go back, or "".

        Raises:
            TransferError: the votes cannot be reached: it is not known what the others do.
        """
        self.post(f"vote/{self.name}", _COMMIT)
        votes = (self.look(f"vote/{name}") for name in self.ballot.members)
        if all(vote is not None for vote in votes):
            # No member has to live longer than its own part.
            self.post("decision", _COMMIT)
        return self.await_decision(self.name, deadline)

    def refuse(self, why: str) -> None:
        """Member: say that it has not loaded the version. Best effort: a silent one is waited for.

        Changes nothing where all had loaded it before.
        """
        with suppress(TransferError):
            self.post("decision", f"{_ABORT}: {self.name}: {why}"[:600])

    def await_decision(self, who: str, deadline: float) -> str:
        """Wait until it is decided; return why the version is refused, or ""."""
        while (said := self.look("decision")) is None:
            if time.monotonic() >= deadline:
                here = [name for name in self.ballot.members if self.look(f"vote/{name}") is None]
                said = self.post("decision", f"{_ABORT}: {who} waited in vain for {here}")
                break
            threading.Event().wait(_LOOK_S)
        return "" if said == _COMMIT else said

    def look(self, what: str) -> str | None:
        """Read a note of this attempt that is there now."""
        return self.ballot._notes.look(self._key(what), deadline=time.monotonic() + _GRACE_S)

    def post(self, what: str, text: str) -> str:
        """Write a note of this attempt unless there is one; return the one that stands."""
        deadline = time.monotonic() + _GRACE_S
        return self.ballot._notes.post_first(self._key(what), text, deadline=deadline)

    def remove(self, what: str) -> None:
        """Remove a note of this attempt."""
        self.ballot._notes.remove(self._key(what), deadline=time.monotonic() + _GRACE_S)

    def _key(self, what: str) -> str:
        return f"{self.run}/{self.version}/{self.attempt}/{what}"


class _Files:
    """Notes as files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def post_first(self, key: str, text: str, *, deadline: float) -> str:
        scratch = self._directory / f".{secrets.token_hex(8)}"
        try:
            scratch.write_text(text)
            with suppress(FileExistsError):
                os.link(scratch, self._path(key))  # All of it at once, or nothing.
            scratch.unlink()
        except OSError as error:
            raise TransferError(f"no vote can be written: {error}") from error
        said = self.look(key, deadline=deadline)
        return text if said is None else said  # It was written, and dropped.

    def look(self, key: str, *, deadline: float) -> str | None:
        try:
            return self._path(key).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TransferError(f"no vote can be read: {error}") from error

    def remove(self, key: str, *, deadline: float) -> None:
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

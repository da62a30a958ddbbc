"""Commit records of versions and counts of their readers, as notes in a torch Store."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...errors import CapacityError, CorruptionError, TransferError
from ..marker import Marker
from .board import Board

__all__ = ["Commits", "StoreCommits"]

_COMMITS = "commits"
_LOOK_S = 0.005


class Commits(NamedTuple):
    """The owner's last note. `lease_s`: the time that a reader may read after it said so."""

    run: str
    lease_s: float
    markers: tuple[Marker, ...]


class StoreCommits:
    """A note of all markers, which the owner writes over, and counters of readers by version.

    Every call ends by its deadline. A new owner takes over from one that died; if the old one still
    lives, its next commit is refused: it writes over its own note only, in one step of the store.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._run = ""
        self._hidden: dict[int, float] = {}

    def take_over(self, *, lease_s: float, deadline: float) -> None:
        """Owner: start again, with no version."""
        self._run = secrets.token_hex(8)
        text = _text(Commits(self._run, lease_s, ()))
        self._board.post(_COMMITS, text, deadline=deadline)

    def read(self, *, deadline: float) -> Commits | None:
        """Return the note that stands now; None before the first owner.

        Raises:
            CorruptionError: it cannot be read.
        """
        text = self._board.look(_COMMITS, deadline=deadline)
        return None if text is None else _parsed(text)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: add a marker."""
        mine = self._owned(deadline)
        self._replace(mine, (*mine.markers, marker), deadline)

    def leave(self, *, deadline: float) -> None:
        """Owner: hide all versions, unless another one took over. Best effort."""
        with suppress(TransferError):
            self._replace(self._owned(deadline), (), deadline)

    def retire(self, keep: Sequence[Marker], *, deadline: float) -> None:
        """Owner: hide all versions but these, and wait until nobody reads the others.

        It waits for a reader that died until its lease is over. After a failure call it again.

        Raises:
            CapacityError: a reader was not done in time.
        """
        mine = self._owned(deadline)
        gone = [marker for marker in mine.markers if marker not in keep]
        if gone:
            self._replace(mine, tuple(keep), deadline)
            self._hidden.update((marker.version, time.monotonic()) for marker in gone)
        for version, hidden_at in list(self._hidden.items()):
            self._await_readers(mine, version, hidden_at + mine.lease_s, deadline)
            del self._hidden[version]

    def hold(self, marker: Marker, *, deadline: float) -> float:
        """Reader: say that it reads a version; return the time until which it may.

        Raises:
            TransferError: it was retired.
        """
        start = time.monotonic()
        self._count(marker.run, marker.version, "held", 1, deadline)
        # The owner hides a version before it counts, so one of the two sees the other.
        now = self.read(deadline=deadline)
        if now is None or marker not in now.markers:
            self.release(marker, deadline=deadline)
            raise TransferError(f"version {marker.version} was retired while it was being opened")
        return start + now.lease_s

    def release(self, marker: Marker, *, deadline: float) -> None:
        """Reader: say that it is done."""
        self._count(marker.run, marker.version, "let_go", 1, deadline)

    def _await_readers(self, mine: Commits, version: int, over: float, deadline: float) -> None:
        never = threading.Event()
        while time.monotonic() < over:
            held = self._count(mine.run, version, "held", 0, deadline)
            if held == self._count(mine.run, version, "let_go", 0, deadline):
                return
            if time.monotonic() >= deadline:
                left_s = over - time.monotonic()
                raise CapacityError(
                    f"version {version} is still being read, and the next one needs its buffers; "
                    f"its readers' leases end in {left_s:.1f} s. Publish again, with more time."
                )
            never.wait(_LOOK_S)

    def _owned(self, deadline: float) -> Commits:
        now = self.read(deadline=deadline)
        if now is None or now.run != self._run:
            raise _deposed()
        return now

    def _replace(self, mine: Commits, markers: tuple[Marker, ...], deadline: float) -> None:
        new = _text(mine._replace(markers=markers))
        if not self._board.replace(_COMMITS, _text(mine), new, deadline=deadline):
            raise _deposed()

    def _count(self, run: str, version: int, what: str, amount: int, deadline: float) -> int:
        return self._board.add(f"{run}/{version}/{what}", amount, deadline=deadline)


def _parsed(text: str) -> Commits:
    try:
        head = json.loads(text)
        run, lease_s, rows = head["run"], head["lease_s"], head["markers"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"the note of commits cannot be read: {error}") from error
    return Commits(run, lease_s, tuple(Marker.from_json(row) for row in rows))


def _text(commits: Commits) -> str:
    """Return the note as it is written: equal commits give equal text."""
    head: dict[str, Any] = {"run": commits.run, "lease_s": commits.lease_s}
    return json.dumps({**head, "markers": [marker.to_json() for marker in commits.markers]})


def _deposed() -> TransferError:
    return TransferError(
        "another owner took over. One trainer may publish under one name; choose another."
    )

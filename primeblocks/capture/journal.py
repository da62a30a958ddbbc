"""Turns on disk: what was sampled outlives the process that recorded it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import codec
from ..attachments import Aligned
from ..database import Database
from ..errors import UsageError
from .conversation import Conversation, Turn, common_prefix

__all__ = ["CaptureJournal", "KeptTurn"]

_SCHEMA = """
CREATE TABLE turns (session TEXT NOT NULL, turn INTEGER NOT NULL, payload BLOB NOT NULL,
    UNIQUE (session, turn));
"""
_SCHEMA_VERSION = 1
_APPLICATION = 0x50424350  # "PBCP"


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """A turn as `Conversation.append` took it; `values` are its named arguments."""

    prompt: NDArray[np.int64]
    sampled: NDArray[np.int64]
    values: Mapping[str, Any]


class CaptureJournal:
    """The turns of sessions in one SQLite file, each there as a whole once it was answered.

    A turn is there before the agent gets its answer, SIGKILL notwithstanding. Its cost on disk is
    what it added: tokens that it shares with the turn before, and their rows, are not written
    again.

    Args and errors: as `primeblocks.async_loop.Journal`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Literal["process", "power"] = "process",
        timeout_s: float = 5.0,
    ) -> None:
        # Of sessions that are open: the number of turns, and all tokens of the last.
        self._last: dict[str, tuple[int, NDArray[np.int64]]] = {}
        self._gapped: set[str] = set()  # A turn of theirs could not be written.
        self._database = Database(
            path,
            schema=_SCHEMA,
            schema_version=_SCHEMA_VERSION,
            application=_APPLICATION,
            durability=durability,
            timeout_s=timeout_s,
        )

    def __enter__(self) -> CaptureJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Twice is fine."""
        self._database.close()

    def append(
        self,
        session: str,
        turn: Turn,
        prompt: Sequence[int],
        sampled: Sequence[int],
        *,
        attachments: Mapping[str, Any],
        **values: Any,
    ) -> None:
        """Keep a turn that a conversation has taken, with what it was given; durable on return.

        Raises:
            UsageError: the turns that are kept of the session were not read.
            UnsupportedError: an attachment is no value that can be packed.
            CapacityError, DeadlineError, CorruptionError, ClosedError: as `Journal`.
        """
        if session not in self._last:
            raise UsageError(f"call turns({session!r}) first, which may be kept from another run")
        place, last = self._last[session]
        asked = np.asarray(prompt, np.int64)
        same = common_prefix(last, asked)
        # Another branch has none of these rows yet, nor has one that lacks a turn.
        goes_on = turn.continuity in {"clean", "realign"} and session not in self._gapped
        first = turn.matched - 1 if goes_on else 0
        payload = codec.pack(
            {
                **values,
                "same": same,
                "prompt": asked[same:],
                "sampled": np.asarray(sampled, np.int64),
                "attachments": {
                    name: _rows_from(value, first) for name, value in attachments.items()
                },
            },
            name=_name(session, place),
        )
        try:
            with self._database.transaction() as db:
                db.execute("INSERT INTO turns VALUES (?, ?, ?)", (session, place, payload))
        except BaseException:
            self._gapped.add(session)
            raise
        self._last[session] = (place + 1, np.concatenate([asked, np.asarray(sampled, np.int64)]))

    def sessions(self) -> list[str]:
        """Return the names of the sessions of which turns are kept."""
        with self._database.transaction() as db:
            return [name for (name,) in db.execute("SELECT DISTINCT session FROM turns ORDER BY 1")]

    def turns(self, session: str) -> list[KeptTurn]:
        """Return the turns of a session, in order, and be ready for more of them.

        Raises:
            CorruptionError: bytes changed since.
        """
        found = self._read(session)
        ends = [np.concatenate([turn.prompt, turn.sampled]) for turn in found[-1:]]
        self._last[session] = (len(found), ends[0] if ends else np.zeros(0, np.int64))
        return found

    def _read(self, session: str) -> list[KeptTurn]:
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT turn, payload FROM turns WHERE session = ? ORDER BY turn", (session,)
            ).fetchall()
        found, last = [], np.zeros(0, np.int64)
        for place, payload in rows:
            values = codec.unpack(payload, name=_name(session, place))
            prompt = np.concatenate([last[: values.pop("same")], values.pop("prompt")])
            found.append(KeptTurn(prompt, values.pop("sampled"), values))
            last = np.concatenate([prompt, found[-1].sampled])
        return found

    def load(self, session: str, *, max_realigned_tokens: int = 0) -> Conversation:
        """Return the conversation as it was after the last turn that is kept.

        Args:
            max_realigned_tokens: as of the conversation that was kept.

        Raises:
            CorruptionError: bytes changed since.
        """
        conversation = Conversation(max_realigned_tokens=max_realigned_tokens)
        for turn in self._read(session):
            conversation.append(turn.prompt, turn.sampled, **turn.values)
        return conversation

    def leave(self, session: str) -> None:
        """Free what is held in memory of a session that gets no more turns. They stay on disk."""
        self._last.pop(session, None)
        self._gapped.discard(session)

    def forget(self, session: str) -> None:
        """Delete the turns of a session, whose rollouts are in safer hands or of no use."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM turns WHERE session = ?", (session,))
        self.leave(session)


def _name(session: str, place: int) -> str:
    return f"turn {place} of session {session}"


def _rows_from(value: Any, first: int) -> Any:
    if not isinstance(value, Aligned) or not value.by_token or first <= value.start:
        return value
    return Aligned.rows(value.value[first - value.start :], start=first)

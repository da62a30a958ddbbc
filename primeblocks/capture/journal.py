"""Recorded turns on disk, which survive the process that recorded them.

A journal takes turns of a session after `turns` was called for the session. It then keeps the
session's last tokens in memory until `leave` or `forget`, and writes only the tokens and rows that
a turn adds. If a write fails, or the attachments with rows differ between turns, the session has
a gap: later turns are written with all their rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """A recorded turn. `values` contains the keyword arguments of `Conversation.append`."""

    prompt: NDArray[np.int64]
    sampled: NDArray[np.int64]
    values: Mapping[str, Any]


class CaptureJournal:
    """The turns of sessions in one SQLite file. Each turn is written in one transaction.

    A turn is on disk before the agent gets its answer, and survives SIGKILL. A turn takes disk
    space only for the tokens and rows that it adds to the previous turn. A FORK turn writes all its
    rows. After a failed write, every later turn of the session writes all its rows too. The same
    applies after two turns with rows of differently named attachments.

    The errors and the durability are the same as for a `primeblocks.async_loop.Journal` with
    default arguments.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # For each open session: the number of turns, all tokens of the last turn, and the distinct
        # sets of attachments with rows.
        self._last: dict[str, tuple[int, NDArray[np.int64], set[frozenset[str]]]] = {}
        self._gapped: set[str] = set()  # Sessions of which a turn could not be written.
        self._database = Database(
            path,
            schema=_SCHEMA,
            schema_version=_SCHEMA_VERSION,
            application=_APPLICATION,
            durability="process",
            timeout_s=5.0,
        )

    def __enter__(self) -> CaptureJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. You may call `close` twice."""
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
        """Write the arguments of the `Conversation.append` call that returned `turn`.

        On return, the turn is durable.

        Raises:
            UsageError: `turns` was not called for the session.
            UnsupportedError: `codec.pack` cannot pack an attachment.
            CapacityError, DeadlineError, CorruptionError, ClosedError: as for `async_loop.Journal`.
        """
        if session not in self._last:
            raise UsageError(
                f"call turns({session!r}) first, because the journal may have turns of this "
                "session from another run"
            )
        place, last, named = self._last[session]
        named = named | {_with_rows(attachments)}
        asked = np.asarray(prompt, np.int64)
        same = common_prefix(last, asked)
        # A new branch, or a session that lacks a turn or rows of a turn, does not have earlier rows
        # in the journal.
        has_gap = session in self._gapped or len(named) > 1
        goes_on = turn.continuity in {"clean", "realign"} and not has_gap
        first = turn.matched - 1 if goes_on else 0
        try:
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
            with self._database.transaction() as db:
                db.execute("INSERT INTO turns VALUES (?, ?, ?)", (session, place, payload))
        except BaseException:
            self._gapped.add(session)
            raise
        tokens = np.concatenate([asked, np.asarray(sampled, np.int64)])
        self._last[session] = (place + 1, tokens, named)

    def sessions(self) -> list[str]:
        """Return the names of all sessions with turns in the journal."""
        with self._database.transaction() as db:
            return [name for (name,) in db.execute("SELECT DISTINCT session FROM turns ORDER BY 1")]

    def turns(self, session: str) -> list[KeptTurn]:
        """Return the turns of a session in order, and let `append` accept new turns of the session.

        Raises:
            CorruptionError: bytes in the file changed after the journal wrote these bytes.
        """
        found = self._read(session)
        ends = [np.concatenate([turn.prompt, turn.sampled]) for turn in found[-1:]]
        named = {_with_rows(turn.values["attachments"]) for turn in found}
        self._last[session] = (len(found), ends[0] if ends else np.zeros(0, np.int64), named)
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
        """Return the conversation of a session, up to the last recorded turn.

        Args:
            max_realigned_tokens: the `max_realigned_tokens` of the recorded `Conversation`.

        Raises:
            CorruptionError: bytes in the file changed after the journal wrote these bytes.
        """
        conversation = Conversation(max_realigned_tokens=max_realigned_tokens)
        for turn in self._read(session):
            conversation.append(turn.prompt, turn.sampled, **turn.values)
        return conversation

    def leave(self, session: str) -> None:
        """Free the memory of a session that gets no more turns. The turns stay on disk."""
        self._last.pop(session, None)
        self._gapped.discard(session)

    def forget(self, session: str) -> None:
        """Delete the turns of a session from disk and memory."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM turns WHERE session = ?", (session,))
        self.leave(session)


def _name(session: str, place: int) -> str:
    return f"turn {place} of session {session}"


def _with_rows(attachments: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in attachments.items() if _has_rows(value))


def _has_rows(value: Any) -> bool:
    return isinstance(value, Aligned) and value.by_token


def _rows_from(value: Any, first: int) -> Any:
    if not _has_rows(value) or first <= value.start:
        return value
    return Aligned.rows(value.value[first - value.start :], start=first)

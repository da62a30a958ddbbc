"""The SQL tables of a journal, and queries that run inside a transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import CorruptionError, UsageError
from .ledger import PromptState, check_ordinal

__all__ = [
    "APPLICATION",
    "SCHEMA",
    "SCHEMA_VERSION",
    "check",
    "check_restart",
    "counts_of",
    "cursor_of",
    "delete",
    "expect",
    "name_of",
    "progress_of",
    "trajectories",
]

SCHEMA_VERSION = 2
APPLICATION = 0x50424A4C  # "PBJL"
# The states that a row may have. Final prompts and left out prompts have no row.
_STATES = [*PromptState][: [*PromptState].index(PromptState.TRAINED) + 1]
# The states in which each call may find a prompt.
_MOVES = {
    "started": (PromptState.DRAWN, PromptState.IN_FLIGHT),
    "sampled": (PromptState.IN_FLIGHT,),
    "finished": (PromptState.IN_FLIGHT,),
    "dropped": (PromptState.IN_FLIGHT, PromptState.FINISHED),
    "left_out": (PromptState.DRAWN, PromptState.IN_FLIGHT, PromptState.FINISHED),
    "taken": (PromptState.FINISHED,),
}
# Steps before policy `final` are final. Values of prompts and trajectories have tables of their
# own, because an update rewrites the whole row.
SCHEMA = """
CREATE TABLE progress (cursor INTEGER NOT NULL, version INTEGER, final INTEGER NOT NULL,
    trained INTEGER NOT NULL, filtered INTEGER NOT NULL, failed INTEGER NOT NULL);
INSERT INTO progress VALUES (0, NULL, 0, 0, 0, 0);
CREATE TABLE prompts (ordinal INTEGER PRIMARY KEY, state TEXT NOT NULL, version INTEGER,
    step INTEGER, head BLOB);
CREATE INDEX steps ON prompts (step) WHERE step IS NOT NULL;
CREATE TABLE drawn (ordinal INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE trajectories (id INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL,
    sample INTEGER NOT NULL, payload BLOB NOT NULL, UNIQUE (ordinal, sample));
"""


def name_of(ordinal: int, sample: int | None = None) -> str:
    return f"prompt {ordinal}" if sample is None else f"sample {sample} of prompt {ordinal}"


def cursor_of(db: sqlite3.Connection) -> int:
    return db.execute("SELECT cursor FROM progress").fetchone()[0]


def progress_of(db: sqlite3.Connection) -> tuple[int | None, int]:
    return db.execute("SELECT version, final FROM progress").fetchone()


def counts_of(db: sqlite3.Connection) -> dict[PromptState, int]:
    rows = dict(db.execute("SELECT state, count(*) FROM prompts GROUP BY state"))
    ended = db.execute("SELECT trained, filtered, failed FROM progress").fetchone()
    for state, count in zip(("trained", "filtered", "failed"), ended, strict=True):
        rows[state] = rows.get(state, 0) + count
    return {state: rows.get(state, 0) for state in PromptState}


def expect(db: sqlite3.Connection, call: str, ordinals: Sequence[int]) -> list[int]:
    """Return the ordinals in order. Raise UsageError if the call does not fit a prompt's state."""
    wanted = sorted({check_ordinal(ordinal) for ordinal in ordinals})
    if not wanted or len(wanted) < len(ordinals):
        raise UsageError(
            f"{call}() needs at least one prompt, and each prompt only once; got {list(ordinals)}"
        )
    states = dict(
        db.execute(
            "SELECT ordinal, state FROM prompts WHERE ordinal IN (SELECT value FROM json_each(?))",
            (json.dumps(wanted),),
        )
    )
    for ordinal in wanted:
        if (state := states.get(ordinal)) in _MOVES[call]:
            continue
        if state is None:
            cursor = cursor_of(db)
            state = "final" if ordinal < cursor else f"not drawn yet: {cursor} prompts were drawn"
        needed = " or ".join(_MOVES[call])
        raise UsageError(f"{call}() needs a prompt that is {needed}; prompt {ordinal} is {state}")
    return wanted


def delete(db: sqlite3.Connection, ordinals: list[int]) -> None:
    for name in ("prompts", "drawn", "trajectories"):
        db.execute(
            f"DELETE FROM {name} WHERE ordinal IN (SELECT value FROM json_each(?))",
            (json.dumps(ordinals),),
        )


def check_restart(db: sqlite3.Connection, version: int) -> None:
    """Raise UsageError if steps from `version` on are final, or steps before it are not recorded.

    The weights may be one step ahead of the record. They were then saved, but the run ended before
    it recorded the end of the step.
    """
    now, final = progress_of(db)
    if version < final:
        raise UsageError(
            f"cannot go back to policy {version}: steps before policy {final} are final, and "
            f"their groups are deleted. Restore policy {final} or a later one, or begin a new "
            "journal."
        )
    taken = {step for (step,) in db.execute("SELECT step FROM prompts WHERE state = 'taken'")}
    ahead = 0 if now is None else version - now
    if ahead > len(taken) or not {*range(version - max(ahead, 0), version)} <= taken:
        raise UsageError(
            f"cannot go on from policy {version}: the last recorded step ended at policy {now}. "
            "The weights or the journal are from another run."
        )


def check(db: sqlite3.Connection) -> None:
    """Raise CorruptionError if the file is damaged, or a prompt is missing or in a wrong state."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise CorruptionError(f"the journal is damaged: {found}. Restore a backup of the file.")
    for ordinal, state in db.execute("SELECT ordinal, state FROM prompts"):
        if state not in _STATES:
            raise CorruptionError(
                f"{name_of(ordinal)} is in the unknown state {state!r}. Restore a backup of the "
                "journal."
            )
    if (found := sum(counts_of(db).values())) != (cursor := cursor_of(db)):
        raise CorruptionError(
            f"{cursor} prompts were drawn, but the journal has {found}. Restore a backup of the "
            "file."
        )


def trajectories(db: sqlite3.Connection, state: str, order: str) -> Iterable[Any]:
    return db.execute(
        "SELECT ordinal, sample, payload FROM trajectories JOIN prompts USING (ordinal)"
        f" WHERE state = ? ORDER BY {order}",
        (state,),
    )

"""A ledger in one SQLite file. If the process is killed, the file keeps the calls that returned."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from .. import codec
from ..database import Database
from ..errors import CorruptionError, UsageError, check_version
from ..rollout import Group, Rollout
from . import tables
from .ledger import (
    Partial,
    PromptState,
    Restored,
    group_rolled_back,
    pack_group,
    pack_trajectory,
    rolled_back,
    unpack_group,
    unpack_trajectory,
)
from .tables import name_of

__all__ = ["Journal"]


class Journal:
    """A record of what happened to each prompt of a training run. It survives a crash.

    Prompts are numbered 0, 1, 2, ... as they are drawn. A call that does not fit the state of its
    prompt, such as training a prompt twice, raises UsageError and changes nothing.

    After SIGKILL every call that returned has taken effect. A call that was interrupted has taken
    effect as a whole or not at all. Prompts of final steps, and prompts that are left out, are
    counted and deleted. So the file is as large as the other prompts were at most.

    Calls may come from any thread. One process at a time owns a journal, on a local disk. Other
    processes may read the file with any SQLite. Files named like `path`, with `-wal`, `-shm` and
    `-lock` appended, are stored next to it.

    Args:
        path: the file. It is made if absent, in a folder that exists.
        durability: with "process", no call is lost if the process dies, but a power loss may undo
            the last calls. With "power", a power loss undoes no call, and each call costs an fsync.
        timeout_s: the longest wait for another program that writes to the file.

    Raises:
        UsageError: the file is open already or of another program, or its folder does not exist.
        UnsupportedError: it has another schema, or its disk cannot have a write-ahead log.
        CorruptionError: the file is damaged.
        CapacityError: any call may raise it if the disk is full. Nothing was changed.
        DeadlineError: any call may raise it if another program locked the file. Nothing was
            changed.
        ClosedError: any call may raise it after `close`, or in a forked child.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Literal["process", "power"] = "process",
        timeout_s: float = 5.0,
    ) -> None:
        self._database = Database(
            path,
            schema=tables.SCHEMA,
            schema_version=tables.SCHEMA_VERSION,
            application=tables.APPLICATION,
            durability=durability,
            timeout_s=timeout_s,
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. May be called twice. Does nothing in a forked child."""
        self._database.close()

    def drawn(self, ordinal: int, prompt: Any) -> None:
        """Add the next prompt of the iterable.

        Raises:
            UsageError: its ordinal is not the number of prompts drawn so far.
            UnsupportedError: the prompt is of a type that `codec.pack` does not take.
        """
        ordinal = tables.integer(ordinal)
        value = codec.pack(prompt, name=f"the value of {name_of(ordinal)}")
        with self._database.transaction() as db:
            if ordinal != (cursor := tables.cursor_of(db)):
                raise UsageError(f"prompt {ordinal} is out of order: the next prompt is {cursor}")
            db.execute("INSERT INTO prompts (ordinal, state) VALUES (?, ?)", (ordinal, "drawn"))
            db.execute("INSERT INTO drawn VALUES (?, ?)", (ordinal, value))
            db.execute("UPDATE progress SET cursor = ?", (ordinal + 1,))

    def started(self, ordinal: int, version: int) -> None:
        """Put a prompt in flight under policy `version`, for the first time or again."""
        version = check_version(version)
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "started", [ordinal])
            db.execute(
                "UPDATE prompts SET state = 'in flight', version = ? WHERE ordinal = ?",
                (version, ordinal),
            )

    def sampled(self, ordinal: int, sample: int, partial: Partial | Rollout) -> None:
        """Store a trajectory of a prompt in flight. It replaces the sample's last trajectory.

        Raises:
            UnsupportedError: an attachment cannot be packed.
            CapacityError: the trajectory is larger than SQLite's largest value, 1 GB.
        """
        payload = pack_trajectory(partial, name=name_of(ordinal, sample))
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "sampled", [ordinal])
            db.execute(
                "INSERT INTO trajectories (ordinal, sample, payload) VALUES (?, ?, ?)"
                " ON CONFLICT (ordinal, sample) DO UPDATE SET payload = excluded.payload",
                (ordinal, tables.integer(sample), payload),
            )

    def finished(self, ordinal: int, group: Group) -> None:
        """Store the group of a prompt in flight. It replaces the prompt's trajectories.

        `drawn` stored the prompt itself, which is not written again.

        Raises:
            UnsupportedError: an attachment cannot be packed.
            CapacityError: a rollout is larger than SQLite's largest value, 1 GB.
        """
        ordinal = tables.integer(ordinal)
        head = pack_group(group, name=name_of(ordinal))
        payloads = [
            (ordinal, sample, pack_trajectory(rollout, name=name_of(ordinal, sample)))
            for sample, rollout in enumerate(group.rollouts)
        ]
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "finished", [ordinal])
            db.execute("DELETE FROM trajectories WHERE ordinal = ?", (ordinal,))
            db.executemany(
                "INSERT INTO trajectories (ordinal, sample, payload) VALUES (?, ?, ?)", payloads
            )
            db.execute(
                "UPDATE prompts SET state = 'finished', head = ? WHERE ordinal = ?",
                (head, ordinal),
            )

    def dropped(self, ordinal: int) -> None:
        """Delete the samples of a prompt, which is generated again from the start."""
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "dropped", [ordinal])
            db.execute("DELETE FROM trajectories WHERE ordinal = ?", (ordinal,))
            db.execute(
                "UPDATE prompts SET state = 'drawn', head = NULL WHERE ordinal = ?", (ordinal,)
            )

    def left_out(self, ordinal: int, reason: str) -> None:
        """End a prompt without training on it. No later call changes this.

        `reason` is "filtered" or "failed", and may continue with ": " and a text. The prompt is
        counted and deleted. The reason is not stored.
        """
        end = reason.partition(":")[0]
        if end not in {PromptState.FILTERED, PromptState.FAILED}:
            raise UsageError(f'reason must be "filtered" or begin with "failed: "; got {reason!r}')
        with self._database.transaction() as db:
            tables.delete(db, tables.expect(db, "left_out", [ordinal]))
            db.execute(f"UPDATE progress SET {end} = {end} + 1")

    def taken(self, ordinals: Sequence[int], version: int) -> None:
        """Take finished prompts for the step from policy `version`.

        Raises:
            UsageError: `ordinals` is empty, repeats a prompt or names one that is not finished, or
                the step is past.
        """
        version = check_version(version)
        with self._database.transaction() as db:
            now, _ = tables.progress_of(db)
            if version < (now or 0):
                raise UsageError(
                    f"taken() got policy {version}, but the journal is already at policy {now}"
                )
            ordinals = tables.expect(db, "taken", ordinals)
            db.execute(
                "UPDATE prompts SET state = 'taken', step = ?"
                " WHERE ordinal IN (SELECT value FROM json_each(?))",
                (version, json.dumps(ordinals)),
            )

    def trained(self, version: int) -> None:
        """End the step from policy `version`. The policy is `version + 1` then."""
        version = check_version(version)
        with self._database.transaction() as db:
            now, _ = tables.progress_of(db)
            if now not in {None, version}:
                raise UsageError(
                    f"trained() got policy {version}, but the journal is at policy {now}"
                )
            done = db.execute(
                "UPDATE prompts SET state = 'trained' WHERE state = 'taken' AND step = ?",
                (version,),
            )
            if not done.rowcount:
                raise UsageError(
                    f"no batch was taken for the step from policy {version}. Call taken() before "
                    "trained()."
                )
            db.execute("UPDATE progress SET version = ?", (version + 1,))

    def checkpointed(self, version: int) -> None:
        """Make the steps before policy `version` final, because its weights are durable.

        Their groups are deleted.
        """
        version = check_version(version)
        with self._database.transaction() as db:
            now, final = tables.progress_of(db)
            if version > (now or 0):
                raise UsageError(
                    f"checkpointed() got policy {version}, but the journal is at policy "
                    f"{now or 0}. Call checkpointed() after the step has ended."
                )
            # The save of an older checkpoint may end later.
            db.execute("UPDATE progress SET final = ?", (max(version, final),))
            done = db.execute(
                "SELECT ordinal FROM prompts WHERE state = 'trained' AND step < ?", (version,)
            )
            ordinals = [ordinal for (ordinal,) in done]
            tables.delete(db, ordinals)
            db.execute("UPDATE progress SET trained = trained + ?", (len(ordinals),))

    def restore(self, version: int) -> Restored:
        """Go back to policy `version`, the policy of the loaded weights. Return where to continue.

        Prompts of steps from `version` on, taken or trained, are finished again. Prompts in flight
        are generated again, and continue from their trajectories. Earlier steps with a batch count
        as completed, because the loaded weights result from them. Tokens of policies after
        `version` count as tokens of `version`.

        Raises:
            UsageError: steps from `version` on are final, or the steps before it are not recorded.
            CorruptionError: bytes of a prompt or a trajectory changed. Nothing was rolled back.
        """
        version = check_version(version)
        with self._database.transaction() as db:
            tables.check_restart(db, version)
            db.execute("UPDATE progress SET version = ?", (version,))
            db.execute(
                "UPDATE prompts SET state = 'trained' WHERE state = 'taken' AND step < ?",
                (version,),
            )
            db.execute(
                "UPDATE prompts SET state = 'finished', step = NULL WHERE step >= ?", (version,)
            )
            db.execute("UPDATE prompts SET state = 'drawn' WHERE state = 'in flight'")
            tables.check(db)
            return Restored(tables.cursor_of(db), _again(db, version), _finished(db, version))

    def counts(self) -> dict[PromptState, int]:
        """Return the number of prompts in each state. Final prompts count as trained."""
        with self._database.transaction() as db:
            return tables.counts_of(db)

    def table(self) -> str:
        """Return a table with one line per state: the number of its prompts."""
        with self._database.transaction() as db:
            counts, (version, final) = tables.counts_of(db), tables.progress_of(db)
        lines = [f"{state:<12}{count:>10}" for state, count in counts.items()]
        now = "unknown" if version is None else version
        return "\n".join(
            [
                f"{'state':<12}{'prompts':>10}",
                *lines,
                f"{'in all':<12}{sum(counts.values()):>10}",
                f"policy {now}; steps before policy {final} are final",
            ]
        )


def _again(db: sqlite3.Connection, version: int) -> list[tuple[int, Any, dict[int, Any]]]:
    partials: dict[int, dict[int, Any]] = {}
    changed = []
    for ordinal, sample, payload in tables.trajectories(db, "drawn", "ordinal, sample"):
        value = unpack_trajectory(payload, name=name_of(ordinal, sample))
        kept = rolled_back(value, version)
        if kept is not value:
            changed.append((ordinal, sample, kept))
        partials.setdefault(ordinal, {})[sample] = kept
    _rewrite(db, changed)
    return [
        (ordinal, prompt, partials.get(ordinal, {}))
        for ordinal, (prompt, _) in _prompts(db, "drawn").items()
    ]


def _finished(db: sqlite3.Connection, version: int) -> list[tuple[int, Group]]:
    prompts, groups = _prompts(db, "finished"), []
    changed = []
    # A group's rollouts are inserted together, so ids have the order in which groups finished.
    for ordinal, rows in groupby(tables.trajectories(db, "finished", "id"), itemgetter(0)):
        prompt, head = prompts.pop(ordinal)
        rollouts = [
            unpack_trajectory(payload, name=name_of(ordinal, sample)) for _, sample, payload in rows
        ]
        found = unpack_group(head, prompt, rollouts, name=name_of(ordinal))
        group = group_rolled_back(found, version)
        if group is not found:
            changed.append((ordinal, group))
        groups.append((ordinal, group))
    if prompts:
        raise CorruptionError(
            f"{name_of(min(prompts))} is finished, but the journal lacks its rollouts. Restore a "
            "backup of the file."
        )
    for ordinal, group in changed:
        head = pack_group(group, name=name_of(ordinal))
        db.execute("UPDATE prompts SET head = ? WHERE ordinal = ?", (head, ordinal))
        _rewrite(db, [(ordinal, i, each) for i, each in enumerate(group.rollouts)])
    return groups


def _prompts(db: sqlite3.Connection, state: str) -> dict[int, tuple[Any, bytes]]:
    """Return the prompts in a state, and the packed fields of their groups, by ordinal."""
    prompts = {}
    for ordinal, head, value in db.execute(
        "SELECT ordinal, head, value FROM prompts LEFT JOIN drawn USING (ordinal)"
        " WHERE state = ? ORDER BY ordinal",
        (state,),
    ):
        prompt = codec.unpack(value or b"", name=f"the value of {name_of(ordinal)}")
        prompts[ordinal] = prompt, head or b""
    return prompts


def _rewrite(db: sqlite3.Connection, changed: list[tuple[int, int, Any]]) -> None:
    """Replace trajectories by new ones of the same ordinal and sample."""
    db.executemany(
        "UPDATE trajectories SET payload = ? WHERE ordinal = ? AND sample = ?",
        (
            (pack_trajectory(kept, name=name_of(ordinal, sample)), ordinal, sample)
            for ordinal, sample, kept in changed
        ),
    )

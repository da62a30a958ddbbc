"""A ledger in one SQLite file. If the process is killed, the file keeps the calls that returned."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from .. import codec
from ..errors import CorruptionError, UsageError, check_version
from ..rollout import Group, Rollout
from . import tables
from .database import Database
from .ledger import (
    Partial,
    PromptState,
    Restored,
    check_ordinal,
    group_rolled_back,
    pack_group,
    pack_trajectory,
    rolled_back,
    unpack_group,
    unpack_trajectory,
)
from .tables import name_of

__all__ = ["Journal"]

logger = logging.getLogger(__name__)


class Journal:
    """A record of what happened to each prompt of a training run, which survives a crash.

    The ordinals of prompts are 0, 1, 2, ... in the order in which prompts are drawn. If a call does
    not fit the state of its prompt, such as training on a prompt twice, the call raises UsageError
    and changes nothing.

    SIGKILL does not undo calls that returned. A call that SIGKILL interrupts takes effect as a
    whole or not at all. The journal deletes prompts of final steps (see `checkpointed`) and prompts
    that are left out, and keeps only their number. New prompts reuse the space of deleted prompts,
    but the file does not shrink.

    You may call methods from any thread. The file must be on a local disk, and only one process at
    a time can open the journal. Other processes may read the file with any SQLite client. Three
    more files are stored next to the file `path`, with `-wal`, `-shm` and `-lock` appended to its
    name.

    Args:
        path: the file. A missing file is created, but a missing folder is an error.
        durability: what a finished call survives. With "process", the call survives the death of
            the process, but a power loss may undo the last calls. With "power", the call also
            survives a power loss, and costs an fsync.
        timeout_s: seconds to wait at most for another program that writes to the file.

    Raises:
        UsageError: the file is already open, the file belongs to another program, or its folder
            does not exist.
        UnsupportedError: the file has another schema, or its disk does not support a write-ahead
            log.
        CorruptionError: the file is damaged.
        CapacityError: any method may raise CapacityError if the disk is full. The journal is
            unchanged.
        DeadlineError: any method may raise DeadlineError if another program locked the file. The
            journal is unchanged.
        ClosedError: any method except `close` raises ClosedError after `close`, or in a forked
            child.
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
        """Close the file. You may call `close` twice. In a forked child, `close` does nothing."""
        self._database.close()

    def drawn(self, ordinal: int, prompt: Any) -> None:
        """Add the next prompt that was drawn from the iterable of prompts.

        Raises:
            UsageError: `ordinal` is not the number of prompts drawn so far.
            UnsupportedError: `codec.pack` does not support the type of the prompt.
        """
        ordinal = check_ordinal(ordinal)
        value = codec.pack(prompt, name=f"the value of {name_of(ordinal)}")
        with self._database.transaction() as db:
            if ordinal != (cursor := tables.cursor_of(db)):
                raise UsageError(f"prompt {ordinal} is out of order: the next prompt is {cursor}")
            db.execute("INSERT INTO prompts (ordinal, state) VALUES (?, ?)", (ordinal, "drawn"))
            db.execute("INSERT INTO drawn VALUES (?, ?)", (ordinal, value))
            db.execute("UPDATE progress SET cursor = ?", (ordinal + 1,))

    def started(self, ordinal: int, version: int) -> None:
        """Record that a prompt is in flight under policy `version`, for the first time or again."""
        version = check_version(version)
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "started", [ordinal])
            db.execute(
                "UPDATE prompts SET state = 'in flight', version = ? WHERE ordinal = ?",
                (version, ordinal),
            )

    def sampled(self, ordinal: int, sample: int, partial: Partial | Rollout) -> None:
        """Store a trajectory of a prompt in flight, in place of the sample's last trajectory.

        Raises:
            UnsupportedError: an attachment cannot be packed.
            CapacityError: the trajectory is larger than 1 GB, the limit of a value in SQLite.
        """
        payload = pack_trajectory(partial, name=name_of(ordinal, sample))
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "sampled", [ordinal])
            db.execute(
                "INSERT INTO trajectories (ordinal, sample, payload) VALUES (?, ?, ?)"
                " ON CONFLICT (ordinal, sample) DO UPDATE SET payload = excluded.payload",
                (ordinal, check_ordinal(sample), payload),
            )

    def finished(self, ordinal: int, group: Group) -> None:
        """Store the group of a prompt in flight, in place of the prompt's trajectories.

        This method does not write the prompt again, because `drawn` stored the prompt.

        Raises:
            UnsupportedError: an attachment cannot be packed.
            CapacityError: a rollout is larger than 1 GB, the limit of a value in SQLite.
        """
        ordinal = check_ordinal(ordinal)
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
        """Delete the samples of a prompt, so that the prompt is generated again from the start."""
        with self._database.transaction() as db:
            (ordinal,) = tables.expect(db, "dropped", [ordinal])
            db.execute("DELETE FROM trajectories WHERE ordinal = ?", (ordinal,))
            db.execute(
                "UPDATE prompts SET state = 'drawn', head = NULL WHERE ordinal = ?", (ordinal,)
            )

    def left_out(self, ordinal: int, reason: str) -> None:
        """Record that a prompt leaves the training run and is never trained on.

        `reason` is "filtered" or "failed", optionally followed by a colon and a text. The journal
        deletes the prompt, and counts it as filtered or failed. The journal does not store the text
        of the reason.
        """
        end = reason.partition(":")[0]
        if end not in {PromptState.FILTERED, PromptState.FAILED}:
            raise UsageError(
                f'reason must be "filtered" or "failed", alone or before a colon; got {reason!r}'
            )
        with self._database.transaction() as db:
            tables.delete(db, tables.expect(db, "left_out", [ordinal]))
            db.execute(f"UPDATE progress SET {end} = {end} + 1")

    def taken(self, ordinals: Sequence[int], version: int) -> None:
        """Record that the step from policy `version` trains on the finished prompts `ordinals`.

        Raises:
            UsageError: `ordinals` is empty or repeats a prompt, a prompt is not finished, or the
                journal is at a later policy than `version`.
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
        """Record the end of the step from policy `version` to policy `version + 1`."""
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
        """Mark the steps before policy `version` as final.

        The weights of `version` must be durable. `restore` cannot undo a final step, so the groups
        of final steps are deleted.
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
        """Go back to policy `version`, and return the prompts and groups of the restored state.

        `version` is the policy of the loaded weights. Prompts of the step from `version`, and of
        later steps, get the state "finished" again. Prompts in the state "in flight" get the state
        "drawn". Drawn prompts are generated again, and continue from their trajectories. Prompts
        that were taken for earlier steps get the state "trained", because the loaded weights result
        from these steps. Tokens of policies after `version` count as tokens of `version`.

        Raises:
            UsageError: the step from `version` is final, or a step before `version` is not
                recorded.
            CorruptionError: a prompt or a trajectory in the file is damaged. `restore` then changes
                nothing.
        """
        version = check_version(version)
        with self._database.transaction() as db:
            tables.check_restart(db, version)
            db.execute("UPDATE progress SET version = ?", (version,))
            db.execute(
                "UPDATE prompts SET state = 'trained' WHERE state = 'taken' AND step < ?",
                (version,),
            )
            (again,) = db.execute(
                "SELECT count(*) FROM prompts WHERE state = 'trained' AND step >= ?", (version,)
            ).fetchone()
            db.execute(
                "UPDATE prompts SET state = 'finished', step = NULL WHERE step >= ?", (version,)
            )
            db.execute("UPDATE prompts SET state = 'drawn' WHERE state = 'in flight'")
            tables.check(db)
            restored = Restored(tables.cursor_of(db), _again(db, version), _finished(db, version))
        if version and not restored.cursor:
            logger.warning(
                "The journal has no prompts, and the run begins at policy %d with the first "
                "prompt. If the run has trained on prompts before, copy its journal to this path.",
                version,
            )
        if again:
            logger.warning(
                "The journal goes back to policy %d: %d groups of later steps are trained again.",
                version,
                again,
            )
        return restored

    def counts(self) -> dict[PromptState, int]:
        """Return the number of prompts per state.

        The number of trained prompts includes the prompts that `checkpointed` has deleted.
        """
        with self._database.transaction() as db:
            return tables.counts_of(db)

    def table(self) -> str:
        """Return a table with the number of prompts per state."""
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

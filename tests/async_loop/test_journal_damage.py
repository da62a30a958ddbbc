"""What may happen to a journal's file: no room, a flipped bit, an end that is missing."""

import os
import random
import shutil
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from primeblocks.async_loop.journal import Journal
from primeblocks.errors import CapacityError, CorruptionError, DeadlineError, UsageError
from primeblocks.rollout import Group, Rollout

from .ledgers import connection_of, fill, make_partial, make_rollout, plain, some_calls


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def journal(path):
    with Journal(path) as journal:
        yield journal


def content(journal, version):
    return plain(journal.restore(version)), journal.counts()


def state_of(journal):
    rows = connection_of(journal).execute("SELECT * FROM prompts").fetchall()
    return plain([journal.counts(), rows])


def test_a_full_disk_is_an_error_and_nothing_is_half_written(journal):
    fill(journal)
    (count,) = connection_of(journal).execute("PRAGMA page_count").fetchone()
    connection_of(journal).execute(f"PRAGMA max_page_count = {count + 2}")
    before, wide = state_of(journal), np.zeros((99, 999), np.uint8)
    rollout = Rollout(**{**vars(make_rollout(1)), "attachments": {"routes": wide}})
    for call, *args in (
        ("sampled", 6, 0, rollout),
        ("finished", 6, Group("x", (make_rollout(1), rollout), 0)),
        ("drawn", 8, "x" * 99_999),
    ):
        with pytest.raises(CapacityError, match=r"no room for .*journal.*Nothing was changed"):
            getattr(journal, call)(*args)
        assert state_of(journal) == before
        assert not connection_of(journal).in_transaction
    connection_of(journal).execute("PRAGMA max_page_count = 99999")
    journal.finished(6, Group("x", (make_rollout(1), rollout), 0))  # Room was made.
    assert 6 in [ordinal for ordinal, _ in journal.restore(2).finished]


def test_a_full_file_system_is_too(tmp_path):
    """A small file system in memory: the write-ahead log meets its end in the middle of a call."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system of our own: {done.stderr.strip()}")
    try:
        with Journal(tmp_path / "journal") as journal:
            journal.restore(0)
            for ordinal in range(999):
                try:
                    journal.drawn(ordinal, "x" * 5000)
                except CapacityError:
                    break
            assert 3 < ordinal < 99
            assert journal.restore(0).cursor == ordinal
        with Journal(tmp_path / "journal") as journal:
            assert journal.restore(0).cursor == ordinal
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_rollout_beyond_sqlites_largest_value_is_refused(journal):
    fill(journal)
    connection_of(journal).setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2000)
    wide = {"attachments": {"routes": np.zeros(3000, np.uint8)}}
    with pytest.raises(CapacityError, match=r"1,000,000,000 bytes.*more densely"):
        journal.sampled(6, 0, Rollout(**{**vars(make_rollout(1)), **wide}))
    journal.sampled(6, 0, make_partial(1))


def test_another_programs_transaction_is_waited_for_but_not_for_ever(path):
    with Journal(path, timeout_s=0) as journal:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DeadlineError, match="another program"):
            journal.drawn(0, "x")
        other.execute("ROLLBACK")
        other.close()
        journal.drawn(0, "x")


# --- damage


def test_every_flipped_bit_is_refused_or_means_nothing(path, full):
    with Journal(path) as journal:
        fill(journal)
    sound = path.read_bytes()
    with Journal(path) as journal:
        expected = content(journal, 1)
    chance, seen = random.Random(0), Counter()
    places = [i for i, byte in enumerate(sound) if byte or full]  # Most zeros are unused.
    for i in range(4000 if full else 60):
        damaged = bytearray(sound)
        damaged[chance.choice(places)] ^= 1 << chance.randrange(8)
        copy = path.with_name(f"damaged{i}")
        copy.write_bytes(damaged)
        try:
            with Journal(copy) as journal:
                assert content(journal, 1) == expected
            seen["same"] += 1
        except (CorruptionError, UsageError) as error:  # Some bits say whose file it is.
            seen[type(error)] += 1
    assert min(seen["same"], seen[CorruptionError]) >= 10 > seen[UsageError], seen


@pytest.mark.parametrize(
    ("table", "column", "where", "named"),
    [
        ("trajectories", "payload", "ordinal = 4 AND sample = 1", "sample 1 of prompt 4"),
        ("trajectories", "payload", "ordinal = 7", "sample 1 of prompt 7"),
        ("drawn", "value", "ordinal = 3", "prompt 3"),
        ("drawn", "value", "ordinal = 2", "prompt 2"),
        ("prompts", "head", "ordinal = 4", "prompt 4"),
        ("prompts", "state", "ordinal = 4", "prompt 4"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_rolled_back(path, table, column, where, named):
    with Journal(path) as journal:
        fill(journal)
        before = journal.counts()
        db = connection_of(journal)
        query = f"SELECT rowid, {column} FROM {table} WHERE {where}"
        row, sound = db.execute(query).fetchone()
        sound = sound.encode() if isinstance(sound, str) else sound
        for at in {0, len(sound) // 2, len(sound) - 1}:
            damaged = bytearray(sound)
            damaged[at] ^= 0x81
            change = f"UPDATE {table} SET {column} = CAST(? AS {{}}) WHERE rowid = ?"
            kind = "TEXT" if column == "state" else "BLOB"
            db.execute(change.format(kind), (bytes(damaged), row))
            for _ in range(2):
                with pytest.raises(CorruptionError, match=named):
                    journal.restore(1)
            db.execute(change.format(kind), (sound, row))
        assert journal.counts() == before
        journal.restore(1)


def test_rows_that_are_gone_or_elsewhere_are_missed(path):
    for damage in (
        "DELETE FROM drawn WHERE ordinal = 6",
        "DELETE FROM trajectories WHERE ordinal = 4",
        "DELETE FROM prompts WHERE ordinal = 6",
        "UPDATE trajectories SET ordinal = 2 WHERE ordinal = 6",
        "UPDATE trajectories SET sample = 9 WHERE ordinal = 6",
        "UPDATE prompts SET head = NULL WHERE ordinal = 4",
        "UPDATE progress SET cursor = 9",
    ):
        path.unlink(missing_ok=True)
        with Journal(path) as journal:
            fill(journal)
            connection_of(journal).execute(damage)
            with pytest.raises(CorruptionError):
                journal.restore(1)


def test_a_log_that_ends_anywhere_is_the_calls_until_then(path, full):
    """As after a power cut: what was appended last is gone, or zeros."""
    calls, half, copy = [*some_calls()], path.with_name("half"), path.with_name("copy")
    with Journal(path) as journal:
        ends = []
        for call, *args in calls:
            getattr(journal, call)(*args)
            ends.append(os.path.getsize(f"{path}-wal"))
        log = Path(f"{path}-wal").read_bytes()
        shutil.copy(path, half)
    chance, expected = random.Random(0), {}
    anywhere = [chance.randrange(ends[0], ends[-1]) for _ in range(300 if full else 20)]
    step = 1 if full else 3
    for cut in [*ends[::step], *(end - 1 for end in ends[1::step]), *anywhere]:
        left = log[:cut] + bytes(chance.choice([0, ends[-1] - cut]))
        count = sum(left[:end] == log[:end] for end in ends)
        version = 1 if count >= len(calls) - 1 else 0
        if count not in expected:
            with Journal(path.with_name(f"until{count}")) as whole:
                fill(whole, calls=count)
                expected[count] = whole.counts(), plain(whole.restore(version))
        shutil.copy(half, copy)
        Path(f"{copy}-wal").write_bytes(left)
        with Journal(copy) as journal:
            assert (journal.counts(), plain(journal.restore(version))) == expected[count]

"""The journal's file: whose it is, what may fail, what it costs, what damage does."""

import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from primeblocks.async_loop.journal import Journal
from primeblocks.errors import (
    ClosedError,
    CorruptionError,
    UnsupportedError,
    UsageError,
)
from primeblocks.rollout import Group, Rollout
from tests.deadlines import HANG_S

from .ledgers import connection_of, fill, make_group, make_partial, make_rollout, some_calls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def journal(path):
    with Journal(path) as journal:
        yield journal


# --- whose it is


def script(body, *args):
    """Start Python that knows the block, without torch."""
    code = f"from primeblocks.async_loop.journal import *\n{body}"
    command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


HOLDER = """
import sys
journal = Journal(sys.argv[1])
journal.drawn(0, "a prompt")
print("open", flush=True)
sys.stdin.read()
"""


def test_one_process_has_it_until_it_dies(path):
    with script(HOLDER, path) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match="already open"):
            Journal(path)
        with sqlite3.connect(path) as reader:  # To look at it is allowed.
            assert reader.execute("SELECT count(*) FROM prompts").fetchone() == (1,)
        reader.close()
        holder.kill()
    with Journal(path) as journal:
        assert journal.restore(0).again == [(0, "a prompt", {})]
        with pytest.raises(UsageError, match="already open"):
            Journal(path)
    Journal(path).close()


FORKS = """
import os, sys
from primeblocks.errors import ClosedError, UsageError
path = sys.argv[1]
journal = Journal(path)
journal.drawn(0, "before")
for leave in (sys.exit, os._exit):
    if (child := os.fork()) == 0:
        with journal:
            try:
                journal.drawn(1, "in the child")
            except ClosedError as error:
                assert str(os.getppid()) in str(error)
                try:
                    Journal(path)
                except UsageError:
                    del journal
                    leave(7)  # With sys.exit the interpreter ends what it has, connections too.
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    journal.drawn(1 + (leave is os._exit), "after")
os.kill(os.getpid(), 9)
"""


def test_a_fork_has_no_part_in_it_and_takes_nothing_along(path):
    with script(FORKS, path) as parent:
        _, complaints = parent.communicate(timeout=HANG_S)
    assert (parent.returncode, complaints) == (-signal.SIGKILL, "")
    with Journal(path) as journal:
        assert [prompt for _, prompt, _ in journal.restore(0).again] == ["before", "after", "after"]


def test_threads_share_it(journal):
    def some(start):
        for ordinal in range(start, 20, 4):
            journal.started(ordinal, 0)
            journal.finished(ordinal, make_group("x", ordinal))

    for ordinal in range(20):
        journal.drawn(ordinal, "x")
    threads = [threading.Thread(target=some, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ordinal for ordinal, _ in journal.restore(0).finished) == [*range(20)]


def test_closed_is_closed(path):
    with Journal(path) as journal:
        pass
    journal.close()
    for call, *args in some_calls():
        with pytest.raises(ClosedError, match="closed"):
            getattr(journal, call)(*args)
    assert sorted(each.name for each in path.parent.iterdir()) == ["journal", "journal-lock"]


# --- what it refuses to be


def test_another_schema_is_refused_with_what_to_do(path):
    Journal(path).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 9")
    file.close()
    with pytest.raises(UnsupportedError, match="schema 9.*has 2.*the version that began the run"):
        Journal(path)


def test_a_file_of_something_else_is_left_alone(path):
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE recipes (name)")
    file.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="another application"):
        Journal(path)
    assert path.read_bytes() == before
    path.write_bytes(b"a text, and a long one at that: " * 99)
    with pytest.raises(CorruptionError, match="never was a journal"):
        Journal(path)
    with pytest.raises(UsageError, match="does not exist"):
        Journal(path / "below" / "journal")
    with pytest.raises(UsageError, match="cannot write in"):
        Journal(path.parent / ("x" * 300))


def test_a_file_whose_making_was_interrupted_is_made_anew(path):
    file = sqlite3.connect(path)
    file.execute("PRAGMA journal_mode = WAL")
    file.close()
    with Journal(path) as journal:
        fill(journal)
        assert journal.counts()["drawn"] == 1


@pytest.mark.parametrize(("durability", "synchronous"), [("process", 1), ("power", 2)])
def test_durability_is_sqlites(path, durability, synchronous):
    with Journal(path, durability=durability) as journal:
        fill(journal)
        db = connection_of(journal)
        assert db.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# --- prompts


def test_what_cannot_be_kept_changes_nothing(journal):
    with pytest.raises(UnsupportedError, match="prompt 0 is a object"):
        journal.drawn(0, object())
    journal.drawn(0, "x")
    journal.started(0, 0)
    odd = Rollout(**{**vars(make_rollout(1)), "attachments": {"routes": object()}})
    with pytest.raises(UnsupportedError, match=r"sample 1 of prompt 0\[.*routes.*is a object"):
        journal.finished(0, Group("x", (make_rollout(1), odd), 0))
    with pytest.raises(UnsupportedError, match="sample 3 of prompt 0"):
        journal.sampled(0, 3, odd)
    assert journal.restore(0).again == [(0, "x", {})]


@pytest.mark.parametrize("ordinal", [-1, (1 << 63) - 1, 1 << 70])
def test_an_ordinal_that_is_none_is_refused(journal, ordinal):
    with pytest.raises(UsageError, match="ordinal must be|out of order"):
        journal.drawn(ordinal, "x")


# --- what it costs


def test_a_call_is_a_few_statements_however_much_there_is(journal):
    counts, statements = {}, []
    connection_of(journal).set_trace_callback(statements.append)

    def count(call, *args):
        statements.clear()
        getattr(journal, call)(*args)
        counts.setdefault(call, set()).add(len(statements))

    for ordinal in range(0, 120, 4):
        version = ordinal // 4
        for i in range(ordinal, ordinal + 4):
            count("drawn", i, "x")
            count("started", i, version)
            count("sampled", i, 0, make_partial(1))
        for i in range(ordinal, ordinal + 2):
            count("finished", i, make_group("x", 3))  # One rollout.
        count("taken", [*range(ordinal, ordinal + 1 + version % 2)], version)
        count("trained", version)
        count("dropped", ordinal + 2)
        count("left_out", ordinal + 3, "filtered")
        if version % 10 == 9:
            count("checkpointed", version - 5)
            count("restore", version + 1)
            for i in range(ordinal + 4 - 40, ordinal + 4):
                if i % 4 == 2:
                    journal.started(i, version)
    assert {call: len(numbers) for call, numbers in counts.items()} == dict.fromkeys(counts, 1)
    assert max(counts.pop("restore")) <= 20
    assert max(max(numbers) for numbers in counts.values()) <= 9
    journal.started(2, 50)
    statements.clear()
    journal.finished(2, Group("x", (make_rollout(1),) * 50, 0))
    assert len(statements) == 49 + max(counts["finished"])


def test_the_file_stays_as_large_as_what_is_under_way(path, full):
    """Groups of some kilobytes pass through, forty at a time: ten thousand with `--full`."""
    steps = 500 if full else 50
    rollout = Rollout(**{**vars(make_rollout(1)), "attachments": {"routes": bytes(3000)}})
    sizes = []
    with Journal(path) as journal:
        connection_of(journal).execute("PRAGMA synchronous = OFF")  # Not durable, but quick.
        for step in range(steps):
            ordinals = [*range(20 * step, 20 * step + 20)]
            for ordinal in ordinals:
                journal.drawn(ordinal, "x" * 100)
                journal.started(ordinal, step)
                journal.finished(ordinal, Group("x", (rollout,), step))
            journal.taken(ordinals, step)
            journal.trained(step)
            if step % 2:
                journal.checkpointed(step)
            files = (path, Path(f"{path}-wal"))
            sizes.append(sum(file.stat().st_size for file in files))
        (pages,) = connection_of(journal).execute("PRAGMA page_count").fetchone()
        assert journal.restore(steps).cursor == 20 * steps
    assert pages * 4096 < 20 * 3 * 8000  # Three steps' worth.
    assert max(sizes) < 20 * 3 * 8000 + (17 << 20)  # The log, before it is copied, is 16 MiB.
    assert path.stat().st_size <= pages * 4096


@pytest.mark.parametrize("reason", ["", "gone", "failedly", "drawn: x"])
def test_an_unknown_reason_is_refused_with_the_known_ones(journal, reason):
    journal.drawn(0, "x")
    with pytest.raises(UsageError, match='"filtered" or "failed", alone or before a colon; got'):
        journal.left_out(0, reason)


def test_the_table_counts_prompts(journal):
    fill(journal)
    lines = journal.table().splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["1", "2", "1", "0", "3", "1", "0", "8"]
    assert lines[-1] == "policy 2; steps before policy 1 are final"

"""SIGKILL before any SQL statement and after any call: the file is what the calls until then left.

Killed are forks of this file run as a script, which make the calls of `some_calls` one after the
other. BEGIN and COMMIT are statements too. A life goes on where the last one was killed. What a
loop makes of a journal that ends anywhere is the business of `test_loop_resume.py`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

from primeblocks.async_loop.journal import Journal
from tests.async_loop.ledgers import connection_of, fill, plain, some_calls
from tests.deadlines import JOB_S

CALLS = [*some_calls()]


def content(path, count):
    """What a copy of a journal holds after so many calls."""
    with Journal(path) as journal:
        counts = journal.counts()
        return counts, plain(journal.restore(1 if count >= len(CALLS) - 1 else 0))


@cache
def expected(count):
    with tempfile.TemporaryDirectory() as folder:
        with Journal(Path(folder, "journal")) as journal:
            fill(journal, calls=count)
        return content(Path(folder, "journal"), count)


def live(path, start, when, moment):
    """Make calls in a fork, killed at a moment. Return how many calls took effect, of all."""
    notes = path.with_name("notes")
    notes.write_text("")
    if (child := os.fork()) == 0:
        try:
            left = Counter({when: moment})

            def pass_by(here):
                left[here] -= 1
                if left[here] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            note = os.open(notes, os.O_APPEND | os.O_WRONLY)
            journal = Journal(path)
            # No hook in the journal: SQLite itself says when a statement is about to run.
            connection_of(journal).set_trace_callback(lambda _: pass_by("before"))
            for call, *args in CALLS[start:]:
                os.write(note, b".")
                getattr(journal, call)(*args)
                pass_by("after")
            journal.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in {0, signal.SIGKILL}, status
    begun = start + notes.stat().st_size
    done = begun if status == 0 or when == "after" else begun - 1
    copy = path.with_name("copy")
    for end in ("", "-wal"):
        Path(f"{copy}{end}").unlink(missing_ok=True)
        if os.path.exists(f"{path}{end}"):
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    assert content(copy, done) == expected(done)
    return done, Counter() if status == 0 else Counter([(CALLS[begun - 1][0], when)])


def run(folder, moments):
    """Live until all calls are made. Return the kills by call and moment."""
    folder.mkdir()
    done, kills = 0, Counter()
    while done < len(CALLS):
        done, killed = live(folder / "journal", done, *next(moments, ("never", 0)))
        kills += killed
    return kills


def main(step, many, folder):
    assert "torch" not in sys.modules
    kills, chance, number = Counter(), random.Random(17), 0
    for when, apart in (("before", step), ("after", 1)):
        moment, killed = 1, True
        while killed:  # Once in each run, at one moment later than in the run before.
            killed = run(folder / f"{when}{moment}", iter([(when, moment)]))
            kills += killed
            moment += apart
    random_kills = Counter()
    while random_kills.total() < many:
        moments = iter(
            lambda: (chance.choice(["before", "after"]), int(40 ** chance.random())), None
        )
        random_kills += run(folder / f"run{number}", moments)
        number += 1
    kills += random_kills
    print(json.dumps([[call, when, count] for (call, when), count in kills.items()]))


def test_a_killed_journal_is_what_its_calls_left(tmp_path, full):
    memory = Path("/dev/shm")  # A kill loses no more there, and fsync is free.
    where = memory if memory.is_dir() else tmp_path
    step, many = (1, 800) if full else (3, 20)
    command = [sys.executable, "-W", "error", "-m", "tests.async_loop.test_journal_crash"]
    with tempfile.TemporaryDirectory(dir=where) as folder:
        done = subprocess.run(
            [*command, str(step), str(many), folder],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=JOB_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    kills = {(call, when): count for call, when, count in json.loads(done.stdout)}
    assert sum(kills.values()) >= (1000 if full else 100)
    for moment in ("before", "after"):
        assert {call for call, when in kills if when == moment} == {call for call, *_ in CALLS}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

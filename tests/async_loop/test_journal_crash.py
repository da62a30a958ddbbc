"""SIGKILL at every statement, again and again: the run ends as one that was never killed.

A driver (`crashing.py`) notes each call of the journal before and after, so that it is known to the
call what a journal has to hold when its process is killed; a journal that hears of the same calls
and is never killed says what that is. Killed are forks of this file run as a script, before any SQL
statement (BEGIN and COMMIT are some) or between the end of a call and the next line.
"""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import pytest

if __name__ == "__main__":
    from tests.async_loop import light  # noqa: F401

from primeblocks.async_loop.journal import Journal
from tests.async_loop.crashing import Driver, apply, how_it_ends, load_weights
from tests.async_loop.ledgers import plain
from tests.deadlines import JOB_S


class Run:
    """Lives of one run, one after the other, and what the journal has to hold between them."""

    def __init__(self, folder, prompts):
        folder.mkdir(parents=True)
        self.folder, self.prompts = folder, prompts
        self.mirror, self.read = Journal(folder / "mirror"), 0
        how_it_ends(prompts)  # Once, and not in every life.
        self.killed_in, self.partials = Counter(), 0

    def live(self, moment, seed):
        """Run one life; True if it came to the end of the run."""
        child = os.fork()
        if child == 0:
            try:
                Driver(self.folder, self.prompts, moment, seed).run()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status in {0, signal.SIGKILL}, status
        self.hear(moment[0], killed=status != 0)
        self.look()
        return status == 0

    def hear(self, when, *, killed):
        """Tell the mirror what was done: a call with nothing after it, if it was killed after."""
        with open(self.folder / "notes") as notes:
            notes.seek(self.read)
            lines = notes.read().splitlines()
            self.read = notes.tell()
        for i, line in enumerate(lines):
            if line == "done":
                continue
            call, *args = json.loads(line)
            done = lines[i + 1 : i + 2] == ["done"]
            if not done:
                assert killed
                assert i == len(lines) - 1
                self.killed_in[call, when] += 1
            if done or when == "after":
                apply(self.mirror, call, *args)

    def look(self):
        """Open what the last life left, and compare it with the mirror."""
        version = len(load_weights(self.folder))
        with Journal(self.folder / "journal") as journal:
            restored, expected = journal.restore(version), self.mirror.restore(version)
            assert plain(restored) == plain(expected)
            assert journal.counts() == self.mirror.counts()
        self.partials += sum(len(partials) for *_, partials in restored.again)

    def check_end(self):
        tokens, ends = how_it_ends(self.prompts)
        assert load_weights(self.folder) == tokens  # Each step once, on the prompts that are due.
        counts = self.mirror.counts()
        assert {state: count for state, count in counts.items() if count} == ends
        assert sum(counts.values()) == self.prompts
        self.mirror.close()


def every_statement(folder, apart):
    """Kill at every `apart`-th statement of a short run, and after each call; some go on."""
    kills = Counter()
    for when, step in (("before", apart), ("after", 1)):
        n, over = 1, False
        while not over:
            run = Run(folder / f"{when}{n}", prompts=9)
            over = run.live((when, n), seed=0)
            goes_on = n % (4 * step) == 1
            if not over and goes_on:
                assert run.live(("never", 0), seed=-n)
            if over or goes_on:
                run.check_end()
            kills += run.killed_in
            n += step
    return kills


def again_and_again(folder, at_least):
    """Kill runs at random moments until they end, that many times."""
    kills, chance = Counter(), random.Random(17)
    while kills.total() < at_least:
        run, lives, over = Run(folder / f"run{kills.total()}", prompts=100), 0, False
        while not over:
            when = chance.choice(["before", "before", "after"])
            over = run.live((when, int(150 ** chance.random())), seed=lives)
            lives += 1
        run.check_end()
        assert run.partials > lives / 2  # Lives begin with trajectories to go on with.
        kills += run.killed_in
    return kills


def main(count, folder):
    assert "torch" not in sys.modules
    gc.freeze()
    gc.disable()
    folder = Path(folder)
    kills = (
        every_statement(folder, int(count))
        if int(count) < 9
        else again_and_again(folder, int(count))
    )
    print(json.dumps([[call, when, count] for (call, when), count in kills.items()]))


CALLS = {
    *("drawn", "started", "sampled", "finished", "dropped"),
    *("left_out", "taken", "trained", "checkpointed", "restore"),
}


@pytest.fixture
def folder(tmp_path):
    """A folder in memory where there is one: a kill loses no more there, and fsync is free."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("what", ["every statement", "again and again"])
def test_a_run_that_is_killed_ends_as_one_that_was_not(what, folder, full):
    count = (1 if full else 2) if what == "every statement" else 1000 if full else 150
    command = [sys.executable, "-W", "error", "-m", "tests.async_loop.test_journal_crash"]
    done = subprocess.run(
        [*command, str(count), folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills = {(call, when): count for call, when, count in json.loads(done.stdout)}
    assert sum(kills.values()) >= (count if count > 9 else 400 // count)
    if full or what == "every statement":
        assert {call for call, when in kills if when == "before"} == CALLS
        assert {call for call, when in kills if when == "after"} == CALLS


if __name__ == "__main__":
    main(*sys.argv[1:])

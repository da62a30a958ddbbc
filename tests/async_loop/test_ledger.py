"""The ledger on disk against a table of states, whatever is called when."""

import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.async_loop.journal import Journal
from primeblocks.errors import UsageError

from .ledgers import PROMPTS, make_group, make_partial, make_rollout, plain

# The states in which each call makes sense.
FITS = {
    "started": ("drawn", "in flight"),
    "sampled": ("in flight",),
    "finished": ("in flight",),
    "dropped": ("in flight", "finished"),
    "left_out": ("drawn", "in flight", "finished"),
    "taken": ("finished",),
}
UNDER_WAY = ("drawn", "in flight", "finished", "taken", "trained")
EVENTS = (
    *("draw", "draw", "start", "start", "sample", "sample", "finish", "finish", "drop"),
    *("leave_out", "take", "take", "train", "train", "checkpoint", "restore", "reopen", "nonsense"),
)


class Row:
    def __init__(self, prompt, state="drawn"):
        self.prompt, self.state = prompt, state
        self.partials, self.group, self.step, self.place = {}, None, None, None


class Ledgers:
    """Calls of a journal; `rows` is what they mean, by the words of its methods."""

    def __init__(self, folder):
        self.path, self.lives = Path(folder) / "journal", 0
        self.journal = Journal(self.path)
        self.rows, self.version, self.final, self.places = [], None, 0, 0
        self.seen = Counter()

    def call(self, legal, call, *args):
        """Make a call, which is refused exactly where it is not legal."""
        if legal:
            getattr(self.journal, call)(*args)
        else:
            with pytest.raises(UsageError):
                getattr(self.journal, call)(*args)
        self.seen[call if legal else "refused"] += 1
        return legal

    def among(self, *states):
        return [i for i, row in enumerate(self.rows) if row.state in states]

    def some(self, chance, call):
        """Some of the prompts for which a call makes sense."""
        likely = self.among(*FITS[call])
        return chance.sample(likely, min(len(likely), chance.randint(1, 4)))

    def draw(self, chance):
        for prompt in chance.sample(PROMPTS, 2):
            self.call(True, "drawn", len(self.rows), prompt)
            self.rows.append(Row(prompt))

    def start(self, chance):
        for ordinal in self.some(chance, "started"):
            self.call(True, "started", ordinal, chance.randrange(5))
            self.rows[ordinal].state = "in flight"

    def sample(self, chance):
        for ordinal in self.some(chance, "sampled"):
            sample, make = chance.randrange(3), chance.choice([make_partial, make_rollout])
            made = make(chance.randrange(200))
            self.call(True, "sampled", ordinal, sample, made)
            self.rows[ordinal].partials[sample] = made

    def finish(self, chance):
        for ordinal in self.some(chance, "finished"):
            row = self.rows[ordinal]
            group = make_group(row.prompt, chance.randrange(200))
            self.call(True, "finished", ordinal, group)
            row.state, row.group, row.partials, row.place = "finished", group, {}, self.places
            self.places += 1

    def drop(self, chance):
        for ordinal in self.some(chance, "dropped")[:1]:
            self.call(True, "dropped", ordinal)
            row = self.rows[ordinal]
            row.state, row.group, row.partials = "drawn", None, {}

    def leave_out(self, chance):
        for ordinal in self.some(chance, "left_out")[:1]:
            end = chance.choice(["filtered", "failed"])
            self.call(True, "left_out", ordinal, f"{end}: for a reason")
            self.rows[ordinal] = Row(None, state=end)

    def take(self, chance):
        if ordinals := self.some(chance, "taken"):
            version = (self.version or 0) + chance.choice([0, 0, 0, 1])
            self.call(True, "taken", ordinals, version)
            for ordinal in ordinals:
                self.rows[ordinal].state, self.rows[ordinal].step = "taken", version

    def train(self, chance):
        if not (taken := [self.rows[ordinal] for ordinal in self.among("taken")]):
            return
        version = min(row.step for row in taken)
        if self.call(self.version in {None, version}, "trained", version):
            self.version = version + 1
            for row in taken:
                if row.step == version:
                    row.state = "trained"

    def checkpoint(self, chance):
        version = max(0, (self.version or 0) - chance.choice([0, 0, 1, 2, -1]))
        if self.call(version <= (self.version or 0), "checkpointed", version):
            self.final = max(self.final, version)
            for ordinal in self.among("trained"):
                if self.rows[ordinal].step < version:
                    self.rows[ordinal].state = "final"

    def lowered(self, trajectory, version):
        """Tokens of abandoned policies count as those of the policy that the run went back to."""
        self.seen["lowered"] += bool((trajectory.versions > version).any())
        return replace(trajectory, versions=[min(v, version) for v in trajectory.versions.tolist()])

    def restore(self, chance):
        version = max(0, (self.version or 0) - chance.choice([0, 0, 1, 2, -1, -1, -2]))
        last = version if self.version is None else self.version
        while any(row.state == "taken" and row.step == last for row in self.rows):
            last += 1  # The weights may have been saved before anybody could say so.
        if not self.final <= version <= last:
            self.call(False, "restore", version)
            return
        self.version = version
        for row in self.rows:
            if row.state == "in flight":
                row.state = "drawn"
            elif row.state == "taken" and row.step < version:
                self.seen["done after all"] += 1
                row.state = "trained"
            elif row.state == "taken" or (row.state == "trained" and row.step >= version):
                self.seen["rolled back"] += row.state == "trained"
                row.state, row.step = "finished", None
            if row.state in ("drawn", "finished"):
                row.partials = {i: self.lowered(x, version) for i, x in row.partials.items()}
                if row.group is not None:
                    row.group = replace(
                        row.group,
                        version=min(row.group.version, version),
                        rollouts=[self.lowered(x, version) for x in row.group.rollouts],
                    )
        again = [(i, self.rows[i].prompt, self.rows[i].partials) for i in self.among("drawn")]
        finished = sorted(self.among("finished"), key=lambda i: self.rows[i].place)
        restored = self.journal.restore(version)
        assert restored.cursor == len(self.rows)
        kept = [(i, p, dict(sorted(partials.items()))) for i, p, partials in restored.again]
        assert plain(kept) == plain([(i, p, dict(sorted(x.items()))) for i, p, x in again])
        assert plain(restored.finished) == plain([(i, self.rows[i].group) for i in finished])
        self.seen["restored partials"] += sum(len(partials) for *_, partials in kept)
        self.seen["restored groups"] += len(finished)

    def reopen(self, chance):
        """Close it, or leave the files as SIGKILL does and let the next process find them."""
        if chance.random() < 0.5:
            self.lives += 1
            copy = self.path.with_name(f"journal{self.lives}")
            for end in ("", "-wal"):
                shutil.copy(f"{self.path}{end}", f"{copy}{end}")
            self.journal.close()
            self.path = copy
        self.journal.close()
        self.journal = Journal(self.path)
        self.seen["reopened"] += 1

    def nonsense(self, chance):
        """Call for what is not so: nothing may change."""
        call = chance.choice(list(FITS))
        ordinal = chance.choice(sorted({*range(len(self.rows) + 1)} - {*self.among(*FITS[call])}))
        version = self.version or 0
        args = {
            "started": (ordinal, 0),
            "sampled": (ordinal, 0, make_partial(1)),
            "finished": (ordinal, make_group("text", 1)),
            "dropped": (ordinal,),
            "left_out": (ordinal, "filtered"),
            "taken": ([*self.among("finished")[:1], ordinal], version),
        }
        self.call(False, call, *args[call])
        self.call(False, "drawn", len(self.rows) + chance.choice([-1, 1]), "text")
        self.call(False, "left_out", ordinal, "for no good reason")
        self.call(False, "taken", [], version)
        if finished := self.among("finished")[:1]:
            self.call(False, "taken", finished * 2, version)
            if self.version:
                self.call(False, "taken", finished, version - 1)
        self.call(False, "trained", version + 9)

    def check(self):
        """Every prompt is in one state, and it is the right one."""
        states = ["trained" if row.state == "final" else row.state for row in self.rows]
        names = [*UNDER_WAY, "filtered", "failed"]
        expected = {name: states.count(name) for name in names}
        assert self.journal.counts() == expected
        reader = sqlite3.connect(self.path)  # As somebody who watches a run does.
        found = reader.execute("SELECT ordinal, state FROM prompts").fetchall()
        reader.close()
        assert found == [(i, self.rows[i].state) for i in self.among(*UNDER_WAY)]


def play(events):
    with tempfile.TemporaryDirectory() as folder:
        ledgers = Ledgers(folder)
        try:
            for event, seed in events:
                getattr(ledgers, event)(random.Random(seed))
                ledgers.check()
            ledgers.restore(random.Random(0))
        finally:
            ledgers.journal.close()
        return ledgers.seen


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2**32)), max_size=80))
def test_ledgers_say_what_happened(events):
    play(events)


def test_a_long_run_comes_by_everything(full):
    chance = random.Random(0)
    seen = play([(chance.choice(EVENTS), chance.random()) for _ in range(600 if full else 400)])
    assert len(seen) == len(FITS) + len(("drawn", "trained", "checkpointed", "refused")) + 6
    assert min(seen.values()) >= 10, seen

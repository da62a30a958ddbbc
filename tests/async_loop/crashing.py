"""A run that notes every call of its journal, and kills itself at a chosen moment.

It draws, samples, finishes, drops, filters, trains and saves, as an asynchronous loop would, in an
order drawn at random. What it trained on is in its weights, a file of its own.
"""

import json
import os
import random
import signal
from collections import Counter
from functools import cache

import numpy as np

from primeblocks.async_loop.journal import Journal
from primeblocks.async_loop.ledger import Partial
from primeblocks.rollout import Group, Rollout

BATCH, GROUP, IN_FLIGHT, SAVE_EVERY = 3, 2, 5, 2


# --- the task: everything about a prompt follows from its ordinal


def prompt_of(ordinal):
    return {"text": f"prompt {ordinal}"}


def fate_of(ordinal):
    if ordinal % 7 == 2:
        return "filtered"
    return "failed: no answer" if ordinal % 13 == 5 else "trained"


def length_of(ordinal, sample):
    return 1 + (ordinal * 5 + sample * 3) % 6


def trajectory_of(ordinal, sample, versions):
    """As many tokens as there are versions; all but those follow from the ordinal."""
    length = len(versions)
    fields = {
        "tokens": np.array([1, *(1000 * ordinal + 10 * sample + t for t in range(length))]),
        "prompt_length": 1,
        "logprobs": np.array([-1.0 / (2 + t) for t in range(length)]),
        "versions": np.array(versions, dtype=np.int64),
        "loss_mask": np.array([t % 2 == 0 for t in range(length)], dtype=bool),
        "attachments": {"routes": np.full((length, 2), ordinal % 256, np.uint8)},
    }
    if length < length_of(ordinal, sample):
        return Partial(**fields)
    return Rollout(**fields, finish_reason="stop", reward=sample / 2)


def group_of(ordinal, versions):
    rollouts = tuple(trajectory_of(ordinal, i, each) for i, each in enumerate(versions))
    return Group(prompt_of(ordinal), rollouts, versions[0][0], ordinal=ordinal)


@cache
def how_it_ends(prompts):
    """What is trained on in each step, and how prompts end: whatever happens on the way."""
    ordinals = [ordinal for ordinal in range(prompts) if fate_of(ordinal) == "trained"]
    steps = [ordinals[i : i + BATCH] for i in range(0, len(ordinals), BATCH)]
    tokens = [
        [[ordinal, [trajectory_of(ordinal, i, [0] * length_of(ordinal, i)).tokens.tolist()
                    for i in range(GROUP)]] for ordinal in step]
        for step in steps
    ]  # fmt: skip
    ends = Counter(fate_of(ordinal).partition(":")[0] for ordinal in range(prompts))
    return tokens, dict(ends)


# --- the driver


class Noted:
    """A journal that notes each call before it is made and after; SIGKILL at a chosen moment.

    Args:
        moment: ("before", n), before the n-th SQL statement of this life, or ("after", n), when
            the n-th call has returned and nothing knows of it yet.
    """

    def __init__(self, folder, moment):
        self.journal = Journal(folder / "journal")
        self._notes = os.open(folder / "notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._when, self._left = moment
        # No hook in the journal: SQLite itself says when a statement is about to run.
        self.journal._database._connection.set_trace_callback(lambda _: self._count("before"))

    def __call__(self, call, *args):
        os.write(self._notes, json.dumps([call, *args]).encode() + b"\n")
        result = apply(self.journal, call, *args)
        self._count("after")
        os.write(self._notes, b"done\n")
        return result

    def _count(self, when):
        self._left -= when == self._when
        if self._left == 0 and when == self._when:
            os.kill(os.getpid(), signal.SIGKILL)


def apply(ledger, call, *args):
    """Make a call whose arguments are JSON of any ledger."""
    if call == "drawn":
        return ledger.drawn(args[0], prompt_of(args[0]))
    if call == "sampled":
        return ledger.sampled(*args[:2], trajectory_of(*args))
    if call == "finished":
        return ledger.finished(args[0], group_of(*args))
    return getattr(ledger, call)(*args)


class Driver:
    """One life of a run: from what the journal and the weights hold to the end, or to a SIGKILL."""

    def __init__(self, folder, prompts, moment, seed):
        self.folder, self.prompts, self.chance = folder, prompts, random.Random(seed)
        self.weights = load_weights(folder)
        self.note = Noted(folder, moment)
        restored = self.note("restore", self.version)
        self.drawn = restored.cursor
        self.waiting = [ordinal for ordinal, *_ in restored.again]
        self.versions = {
            ordinal: [partials[i].versions.tolist() if i in partials else [] for i in range(GROUP)]
            for ordinal, _, partials in restored.again
        }
        for ordinal, prompt, partials in restored.again:
            assert prompt == prompt_of(ordinal)
            for i, partial in partials.items():
                assert partial.completion.tolist() == [
                    1000 * ordinal + 10 * i + t for t in range(len(partial.versions))
                ]
        self.finished = dict(restored.finished)
        self.flying, self.attempts, self.was_dropped = [], Counter(), set()

    @property
    def version(self):
        return len(self.weights)

    def run(self):
        steps, _ = how_it_ends(self.prompts)
        while self.version < len(steps) or self.flying or self.waiting or self.drawn < self.prompts:
            if self.version < len(steps) and self.step(
                [ordinal for ordinal, _ in steps[self.version]]
            ):
                continue
            if len(self.flying) < IN_FLIGHT and (self.waiting or self.drawn < self.prompts):
                self.start()
            else:
                self.go_on(self.chance.choice(self.flying))
        self.save()
        self.note("checkpointed", self.version)
        self.note.journal.close()

    def start(self):
        if not self.waiting:
            self.note("drawn", self.drawn)
            self.waiting.append(self.drawn)
            self.drawn += 1
        ordinal = self.waiting.pop(self.chance.randrange(len(self.waiting)))
        self.note("started", ordinal, self.version)
        self.versions.setdefault(ordinal, [[] for _ in range(GROUP)])
        self.flying.append(ordinal)

    def go_on(self, ordinal):
        versions = self.versions[ordinal]
        if fate_of(ordinal) == "failed: no answer" and self.chance.random() < 0.5:
            self.attempts[ordinal] += 1
            if self.attempts[ordinal] < 3:
                self.note("started", ordinal, self.version)
                return
            self.leave(ordinal)
            self.note("left_out", ordinal, fate_of(ordinal))
            return
        going = [i for i in range(GROUP) if len(versions[i]) < length_of(ordinal, i)]
        if not going:
            self.end(ordinal)
            return
        sample = self.chance.choice(going)
        versions[sample].append(self.version)
        if self.chance.random() < 0.7:  # What is not saved is sampled again.
            self.note("sampled", ordinal, sample, versions[sample])

    def end(self, ordinal):
        if fate_of(ordinal) == "filtered":
            self.leave(ordinal)
            self.note("left_out", ordinal, fate_of(ordinal))
            return
        if fate_of(ordinal) != "trained":
            return
        versions = self.leave(ordinal)
        self.note("finished", ordinal, versions)
        if ordinal % 5 == 0 and ordinal not in self.was_dropped:
            self.was_dropped.add(ordinal)
            self.note("dropped", ordinal)
            self.waiting.append(ordinal)
        else:
            self.finished[ordinal] = group_of(ordinal, versions)

    def leave(self, ordinal):
        self.flying.remove(ordinal)
        return self.versions.pop(ordinal)

    def step(self, ordinals):
        if not {*ordinals} <= self.finished.keys():
            return False
        self.note("taken", ordinals, self.version)
        groups = [self.finished.pop(ordinal) for ordinal in ordinals]
        before = self.version
        self.weights.append([[g.ordinal, [r.tokens.tolist() for r in g.rollouts]] for g in groups])
        if self.version % SAVE_EVERY:
            self.note("trained", before)
        else:  # Weights may be saved before the step has been said to be done.
            self.save()
            self.note("trained", before)
            self.note("checkpointed", self.version)
        return True

    def save(self):
        new = self.folder / "weights.new"
        new.write_text(json.dumps(self.weights))
        new.rename(self.folder / "weights")


def load_weights(folder):
    path = folder / "weights"
    return json.loads(path.read_text()) if path.exists() else []

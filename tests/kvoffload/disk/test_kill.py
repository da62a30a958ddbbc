"""SIGKILL at every call that changes the disk, each write torn at several lengths as well, before
and after each transaction; and at any moment, also within SQLite.
"""

import os
import random
import shutil
import signal
import warnings
from contextlib import closing
from functools import partial

import pytest

from tests.kvoffload.disk.faults import Fault, FaultySystem
from tests.kvoffload.disk.small import assert_serves, content_of, key_of, open_tier, record, state

PAGES = 4
# Replacing, replacing without a spare frame, runs that wrap, drops, clears, flushes, and keys that
# take several pages of the index.
SCRIPT = [
    ("put", [(0, 1), (1, 1), (2, 1)]),
    ("drop", [1]),
    ("put", [(3, 1), (1, 2)]),
    ("put", [(0, 2), (3, 2)]),
    ("drop", [2, 0]),
    ("flush", []),
    ("put", [(4, 1), (3, 3)]),
    ("clear", []),
    ("put", [(5, 1), (100, 1)]),
    ("drop", [100]),
    ("put", [(101, 1), (102, 1), (5, 2)]),
    ("drop", [101]),
    ("put", [(101, 2)]),
]


def play(tier, operation):
    name, arguments = operation
    if name == "put":
        records = [record(*each) for each in arguments]
        assert tier.put(records) == [None] * len(records)
    elif name == "drop":
        tier.drop([key_of(number) for number in arguments])
    else:
        getattr(tier, name)()


def states_of(operation, state):
    """The states that an operation goes through, one page at a time."""
    name, arguments = operation
    states = [dict(state)]

    def drop(number):
        states.append({key: value for key, value in states[-1].items() if key != number})

    if name == "put":
        spare = PAGES - len(state)
        replaced = [number for number, _ in arguments if number in state]
        for number in replaced[: max(0, len(arguments) - spare)]:
            drop(number)
        for number, value in arguments:
            states.append(states[-1] | {number: content_of(number, value).tobytes()})
    elif name == "drop":
        for number in arguments:
            drop(number)
    elif name == "clear":
        states.append({})
    return states


def run(path, script, *, io, acknowledged=lambda: None, operations=SCRIPT):
    tier = open_tier(path, pages=PAGES, io=io, system=FaultySystem(script))
    for operation in operations:
        play(tier, operation)
        acknowledged()


def killed(path, script, *, after=None, **how):
    """Run in a child that `script` kills, or who is killed from outside `after` so many answers.

    Returns:
        How many operations were answered.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none
        child = os.fork()
    if child == 0:
        try:
            run(path, script, acknowledged=lambda: os.write(writer, b"."), **how)
            while after is not None:  # On a busy machine the kill comes late.
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as answers:
        count = 0
        while answer := answers.read(1):
            count += len(answer)
            if count == after:
                os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return count


def passed_states(operations):
    """The states that operations go through, and how many there are after each operation."""
    passed, states = [0], [{}]
    for operation in operations:
        states += states_of(operation, states[-1])[1:]
        passed.append(len(states) - 1)
    return passed, states


def torn_lengths(name, size, *, io):
    if name in ("commit", "checkpoint"):
        return [0, 1]  # before, and after
    if name == "write" and size < 64:  # the mark of the lock
        return [0, size]
    if name != "write":
        return [0]
    if io == "direct" and size % 4096 == 0:  # a device takes whole sectors
        return sorted({0, 512, size // 2, size})
    return sorted({0, 1, 12, size // 2, size - 1, size})


def strike_at(at, count, fault, *_):
    return fault if next(count) == at else None


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_kill_at_any_call_leaves_a_state_that_was_gone_through(tmp_path, io, full):
    calls = []
    run(tmp_path / "whole", lambda name, size: calls.append((name, size)), io=io)
    assert {name for name, _ in calls} == {
        "open", "remove", "write", "sync", "sync_folder", "truncate", "commit", "checkpoint",
    }  # fmt: skip
    assert sum(name == "commit" for name, _ in calls) > len(SCRIPT)
    passed, states = passed_states(SCRIPT)
    for at, (name, size) in enumerate(calls):
        lengths = torn_lengths(name, size, io=io)
        if not full:  # every call, torn at one length; with direct I/O every third call
            lengths = [] if io == "direct" and at % 3 else [lengths[at % len(lengths)]]
        for written in lengths:
            path = tmp_path / f"{at}-{written}"
            count = iter(range(at + 1))
            script = partial(strike_at, at, count, Fault(written))
            answered = killed(path, script, io=io)
            last = min(answered + 1, len(SCRIPT))
            possible = states[passed[answered] : passed[last] + 1]
            with closing(open_tier(path, pages=PAGES, io=io)) as tier:
                found = state(tier)
                assert found in possible, (at, name, size, written, answered)
                assert_serves(tier, pages=PAGES)
            with closing(open_tier(path, pages=PAGES, io=io)) as tier:
                assert state(tier) == found


def test_a_kill_at_any_moment_leaves_a_state_that_was_gone_through(tmp_path, full):
    """The child goes on while it is killed: it may be anywhere, in a checkpoint too."""
    operations = 20 * [("clear", []), *SCRIPT]
    passed, states = passed_states(operations)
    chance = random.Random(0)
    for number in range(400 if full else 8):
        path = tmp_path / str(number)
        after = chance.randrange(1, len(operations) - 20)
        answered = killed(path, lambda *_: None, after=after, io="buffered", operations=operations)
        assert answered >= after
        last = min(answered + 1, len(operations))
        with closing(open_tier(path, pages=PAGES)) as tier:
            found = state(tier)
            assert found in states[passed[answered] : passed[last] + 1], (number, answered)
            assert_serves(tier, pages=PAGES)
        shutil.rmtree(path)

"""A disk tier against a dictionary, under any history of calls, faults, restarts and crashes."""

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from primeblocks.errors import PrimeblocksError
from tests.kvoffload.disk.faults import Fault, FaultySystem
from tests.kvoffload.disk.small import (
    assert_serves,
    content_of,
    key_of,
    open_tier,
    record,
    state,
)

PAGES = 5
numbers_ = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 100, 101]), max_size=4, unique=True)


class DiskMachine(RuleBasedStateMachine):
    """`now` is what the tier must say, `ghosts` what else a crash may bring.

    A change that was refused may be on the disk nevertheless, until the next one succeeds.
    """

    io = "buffered"

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.copies = 0
        self.path = self.folder / "0"
        self.now = {}
        self.ghosts = {}
        self.calls = 0
        self.faults = range(0)
        self.fault = None
        self.tier = None

    def script(self, name, size):
        self.calls += 1
        if self.calls not in self.faults:
            return None
        return Fault(min(size, self.fault.written), self.fault.error)

    @initialize()
    def open(self):
        system = FaultySystem(self.script)
        self.tier = open_tier(self.path, pages=PAGES, io=self.io, system=system)

    def haunt(self, number, content):
        self.ghosts.setdefault(number, set()).add(content)

    @rule(numbers=numbers_, value=st.integers(0, 60))
    def put(self, numbers, value):
        held = len(self.tier)
        new = [number for number in numbers if number not in self.now]
        refused = new[PAGES - held :]
        short = max(0, len(numbers) - len(refused) - (PAGES - held))
        answers = self.tier.put([record(n, value) for n in numbers])
        if None in answers:
            self.ghosts.clear()
        gone = 0
        for number, answer in zip(numbers, answers, strict=True):
            content = content_of(number, value).tobytes()
            if answer is None:
                assert number not in refused
                self.now.pop(number, None)
                self.now[number] = content
                continue
            assert number in refused or self.faults
            self.haunt(number, content)
            if number in self.now and not self.tier.holds([key_of(number)])[0]:
                self.haunt(number, self.now.pop(number))
                gone += 1
        assert gone <= short or self.fault.error == errno.ENOSPC
        self.check()

    @rule(numbers=numbers_)
    def drop(self, numbers):
        dropped = {number: self.now.pop(number) for number in numbers if number in self.now}
        try:
            self.tier.drop([key_of(number) for number in numbers])
            if dropped:
                self.ghosts.clear()
        except (PrimeblocksError, OSError):
            assert self.faults
            for number, content in dropped.items():
                self.haunt(number, content)
        self.check()

    @rule()
    def clear(self):
        before = dict(self.now)
        self.now.clear()
        try:
            self.tier.clear()
            self.ghosts.clear()
        except (PrimeblocksError, OSError):
            assert self.faults
            for number, content in before.items():
                self.haunt(number, content)
        self.check()

    @rule()
    def flush(self):
        try:
            self.tier.flush()
            self.ghosts.clear()
        except (PrimeblocksError, OSError):
            assert self.faults
        self.check()

    @rule(
        after=st.integers(0, 4),
        calls=st.integers(1, 6),
        written=st.sampled_from([0, 1, 40, 130, 4096, 1 << 20]),
        error=st.sampled_from([errno.ENOSPC, errno.EIO]),
    )
    def fail(self, after, calls, written, error):
        self.faults = range(self.calls + 1 + after, self.calls + 1 + after + calls)
        self.fault = Fault(written, error)

    @rule()
    def heal(self):
        self.faults = range(0)

    @rule()
    def restart(self):
        self.heal()
        self.tier.close()
        self.ghosts.clear()
        self.open()
        self.check()
        assert self.tier.keys() == [key_of(number) for number in self.now]

    @rule()
    def crash(self):
        """Go on with the files as they are now."""
        self.heal()
        self.copies += 1
        copy = self.folder / str(self.copies)
        shutil.copytree(self.path, copy)
        self.tier.close()
        self.path = copy
        self.open()
        found = state(self.tier)
        for number in {*found, *self.now}:
            content = found.get(number)
            haunted = number in self.ghosts and content in {None, *self.ghosts[number]}
            assert content == self.now.get(number) or haunted
        self.now = {number: content for number, content in found.items() if content}
        assert found == self.now
        self.ghosts.clear()

    def check(self):
        """Where a full disk has no room for the journal, the tier gives up some of its pages."""
        found = state(self.tier)
        lost = {number: self.now.pop(number) for number in [*self.now] if number not in found}
        assert found == self.now
        assert not lost or (self.faults and self.fault.error == errno.ENOSPC)
        for number, content in lost.items():
            self.haunt(number, content)

    def teardown(self):
        self.heal()
        if self.tier is not None:
            assert_serves(self.tier, pages=PAGES)
            self.tier.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_disk_is_a_dictionary_that_survives(io, full):
    machine = type("DiskMachine", (DiskMachine,), {"io": io})
    how = settings(max_examples=1000 if full else 15, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=how)

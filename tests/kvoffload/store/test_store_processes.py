"""Processes that live at the same time, a store each, over one shared tier; some are killed."""

import os
import random
import signal
import traceback
import warnings
from contextlib import suppress
from multiprocessing import get_context

import numpy as np
import pytest

from primeblocks.errors import UsageError, how_it_ended
from primeblocks.kvoffload import DiskTier, HostTier, TieredStore
from tests.kvoffload.conftest import FRAME, PAGE, SIZES
from tests.kvoffload.memory_tier import SOON, MemoryTier
from tests.kvoffload.store.calls import key_of, page_of

KEYS = 24
HIT = 128  # added to the number of a page that was loaded


def store_of(common, folder=None):
    tiers = [HostTier(capacity_bytes=2 * FRAME, **SIZES), MemoryTier(0, **SIZES, common=common)]
    if folder is not None:
        tiers.insert(1, DiskTier(folder, capacity_bytes=4 * FRAME, **SIZES))
    return TieredStore(tiers, write="through")


def found(store, number):
    """Whether the page is there; it is the right one then."""
    into = np.zeros(PAGE, np.uint8)
    hit = store.load(key_of(number), into=into).wait(timeout_s=SOON)
    assert np.array_equal(into, page_of(number) if hit else np.zeros(PAGE)), "a wrong page"
    return bool(hit)


class Life:
    """A process that saves pages of its own and loads everybody's until it is ended.

    Each page that it has flushed, and each that it has loaded, is one answer.
    """

    def __init__(self, common, folder, *, seed, me):
        self.reader, writer = os.pipe()
        self.stop, stopped = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forked beside threads
            self.child = os.fork()
        if self.child == 0:
            os.close(self.reader)
            os.set_blocking(self.stop, False)
            os.close(stopped)
            try:
                self._live(common, folder, random.Random(seed), me, writer)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        os.close(self.stop)
        self.stop = stopped

    def _live(self, common, folder, chance, me, writer):
        with store_of(common, folder) as store:
            while not self._ended():
                number = chance.randrange(KEYS)
                if chance.random() < 0.5:
                    if found(store, number):
                        os.write(writer, bytes([HIT + number]))
                elif number % 2 == me:
                    save = store.save(key_of(number), page_of(number))
                    assert save.wait(timeout_s=SOON).stored
                    store.flush().wait(timeout_s=SOON)
                    os.write(writer, bytes([number]))

    def _ended(self):
        with suppress(BlockingIOError):
            return os.read(self.stop, 1) == b""
        return False

    def answers(self, count):
        """Wait for so many more."""
        got = []
        while len(got) < count:
            one = os.read(self.reader, 1)
            assert one, f"the process {how_it_ended(self.wait())}"
            got += one
        return got

    def end(self, *, kill):
        """Return the answers that it still gave, and how it ended."""
        if kill:
            os.kill(self.child, signal.SIGKILL)
        os.close(self.stop)
        got = []
        while one := os.read(self.reader, 1):
            got += one
        os.close(self.reader)
        return got, self.wait()

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def test_two_live_stores_over_a_shared_tier_outlive_kills(tmp_path, full):
    """The one that lives on sees no wrong page and no error; what was flushed is there."""
    chance = random.Random(0)
    with get_context("fork").Manager() as manager:
        common = manager.dict()
        steady = Life(common, tmp_path / "steady", seed=1, me=0)
        answers = steady.answers(5)
        for seed in range(60 if full else 6):
            life = Life(common, tmp_path / "killed", seed=seed, me=1)
            answers += life.answers(chance.randrange(1, 30))
            rest, status = life.end(kill=True)
            assert status == -signal.SIGKILL
            answers += rest + steady.answers(5)
        rest, status = steady.end(kill=False)
        assert status == 0
        flushed = {each for each in answers + rest if each < HIT}
        hits = {each - HIT for each in answers + rest if each >= HIT}
        assert {number % 2 for number in flushed} == {number % 2 for number in hits} == {0, 1}
        with store_of(common) as store:
            assert all(found(store, number) for number in flushed)


def test_the_folder_of_a_live_process_is_refused_and_that_of_a_killed_one_adopted(tmp_path):
    with get_context("fork").Manager() as manager:
        common = manager.dict()
        life = Life(common, tmp_path / "killed", seed=0, me=1)
        life.answers(20)
        with pytest.raises(UsageError, match="another store"):
            store_of({}, tmp_path / "killed")
        with store_of(common, tmp_path / "own") as store:
            number = next(each for each in life.answers(20) if each < HIT)
            assert found(store, number)
            _, status = life.end(kill=True)
            assert status == -signal.SIGKILL
            assert found(store, number)
        with store_of({}, tmp_path / "killed") as store:  # the shared tier is another
            assert sum(found(store, number) for number in range(KEYS)) > 0

"""Many threads at one store: whatever they do, a page is the one its key names."""

import random
import threading

import numpy as np
import pytest

from primeblocks.errors import CancelledError, DeadlineError
from primeblocks.kvoffload import PageKey, TieredStore
from primeblocks.kvoffload.evict import RolloutAware, VersionAware, lru
from tests.deadlines import HANG_S
from tests.kvoffload.conftest import PAGE

KEYS = 24


def key_of(number, version=0):
    return PageKey("s", bytes([number]), version=version)


def page_of(number, writes):
    """Says whose page it is and which of its writes; no two bytes of other pages make it up."""
    return np.frombuffer(bytes([number, writes]) * (PAGE // 2), np.uint8)


class Caller:
    """One thread. It alone writes its own keys, and reads everybody's."""

    def __init__(self, store, me, callers, *, calls):
        self.store, self.me, self.callers, self.calls = store, me, callers, calls
        self.chance = random.Random(me)
        self.written = {}
        self.started = {}
        self.error = None
        self.hits = 0

    def run(self):
        try:
            for _ in range(self.calls):
                self.act()
        except BaseException as error:
            self.error = error

    def act(self):
        number = self.chance.randrange(KEYS)
        match self.chance.randrange(12):
            case 0 | 1 | 2 | 3:
                self.save(number - number % self.callers + self.me)
            case 4:
                self.store.end(self.me)
            case 5:
                self.given_up(number)
            case 6:
                self.store.flush().wait(timeout_s=HANG_S)
            case _:
                self.load([self.chance.randrange(KEYS) for _ in range(self.chance.randrange(1, 5))])

    def save(self, number):
        writes = self.started[number] = self.started.get(number, 0) % 250 + 1
        page = np.array(page_of(number, writes))
        saved = self.store.save(
            key_of(number), page, attachments={"routes": bytes([number, writes])}, rollout=self.me
        )
        assert saved.wait(timeout_s=HANG_S).stored
        page[:] = 255
        self.written[number] = writes

    def load(self, numbers):
        into = [np.zeros(PAGE, np.uint8) for _ in numbers]
        keys = [key_of(number) for number in numbers]
        loaded = self.store.load_batch(keys, into=into, rollout=self.me).wait(timeout_s=HANG_S)
        for number, page, found in zip(numbers, into, loaded, strict=True):
            if not found:
                assert not page.any()
                continue
            self.hits += 1
            writes = int(page[1])
            assert page.tobytes() == page_of(number, writes).tobytes(), "a wrong page"
            assert found.attachments == {"routes": bytes([number, writes])}, "stale routes"
            if number % self.callers == self.me:
                assert writes == self.written[number], "an old page"

    def given_up(self, number):
        """The buffer is the caller's again at once."""
        into = np.zeros(PAGE, np.uint8)
        pending = self.store.load(key_of(number), into=into)
        if self.chance.random() < 0.5:
            pending.cancel()
        try:
            pending.wait(timeout_s=0)
        except (CancelledError, DeadlineError):
            before = into.copy()
            self.load([number])
            assert np.array_equal(into, before), "written after it was given up"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "evict", [lru, VersionAware(1), RolloutAware(1)], ids=["lru", "version aware", "rollout aware"]
)
@pytest.mark.parametrize("write", ["back", "through"])
def test_threads_never_see_a_wrong_page(host, memory, evict, write, full):
    with TieredStore([host(5), memory(9)], evict=evict, write=write, copy_threads=3) as store:
        callers = [Caller(store, me, 4, calls=2000 if full else 150) for me in range(4)]
        threads = [threading.Thread(target=caller.run) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=HANG_S)
            assert not thread.is_alive(), "a caller hangs"
        for caller in callers:
            if caller.error is not None:
                raise caller.error
        assert sum(caller.hits for caller in callers) > 0
        assert store.statistics()["host"].pages <= 5

"""Results in asyncio and in forked children; tiers of one page."""

import asyncio
import functools
import math
import os
import threading
import weakref

import numpy as np
import pytest

from primeblocks.errors import CancelledError, ClosedError
from primeblocks.kvoffload import TieredStore
from primeblocks.kvoffload.pending import Pending
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of, load, page_of, save

pytestmark = pytest.mark.usefixtures("patient")


def in_child(body):
    """Return what `body` returns in a forked child, which leaves without any clean-up."""
    child = os.fork()
    if child == 0:
        os._exit(body())
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_results_are_awaited_as_well_as_waited_for(host, memory):
    below = memory(4)

    async def use(store):
        saved = await store.save(key_of(0), page_of(0))
        into = np.zeros(PAGE, np.uint8)
        loaded = await asyncio.gather(*(store.load(key_of(n), into=into) for n in (0, 7)))
        return saved.stored, [each.tier for each in loaded], bytes(into)

    async def give_up(store):
        below.stuck = True
        pending = store.save(key_of(3), page_of(3))
        task = asyncio.ensure_future(pending)
        while not below.entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pending

    with TieredStore([host(1), below]) as store:
        assert asyncio.run(use(store)) == (True, ["host", None], page_of(0).tobytes())
        pending = asyncio.run(give_up(store))
        with pytest.raises(CancelledError):
            pending.wait(timeout_s=0)
        below.release.set()


@pytest.mark.parametrize("wait", [Pending.wait, Pending.done])
def test_a_wait_may_be_without_end(wait):
    pending = Pending()
    threading.Timer(0.1, pending.finish, [7]).start()
    limit = "timeout_s" if wait is Pending.wait else "within_s"
    assert wait(pending, **{limit: math.inf}) in (7, True)


def test_the_store_lets_go_of_buffers_whose_results_are_there(host, memory):
    def gone(buffer, use):
        free = threading.Event()
        weakref.finalize(buffer, free.set)
        result = use(buffer).wait(timeout_s=SOON)
        del buffer
        return result, free

    with TieredStore([host(2), memory(4)]) as store:
        for number in (0, 1, 2):
            _, free = gone(page_of(number), functools.partial(store.save, key_of(number)))
            assert free.wait(SOON)
        for number, tier in (2, "host"), (0, "memory"):
            into = functools.partial(store.load, key_of(number))
            hit, free = gone(np.zeros(PAGE, np.uint8), lambda page, into=into: into(into=page))
            assert free.wait(SOON)
            assert hit.tier == tier
        assert store.statistics()["host"].pages == 2


def test_a_forked_child_is_told_at_once_and_makes_its_own_store(host, disk, tmp_path):
    """Its threads are its parent's, and so may be a lock of the store."""
    with TieredStore([host(2), disk(8)]) as store:
        for number in range(4):
            save(store, number)

        def calls():
            told = 0
            for call in (lambda: save(store, 5), lambda: load(store, 1), store.flush):
                try:
                    call()
                except ClosedError:
                    told += 1
            store.close()
            with TieredStore([host(2), disk(8, path=tmp_path / "own")]) as own:
                for number in range(5, 9):
                    save(own, number)
                return 10 * told + sum(load(own, number) is not None for number in range(9))

        with store._changed:
            assert in_child(calls) == 34
        save(store, 9)
        assert [load(store, number) for number in (0, 5)] == ["disk", None]
        assert all(load(store, number) for number in (1, 2, 3, 9))

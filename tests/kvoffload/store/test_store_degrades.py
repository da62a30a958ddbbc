"""Full, failing, slow and hung tiers cost pages, callers' mistakes cost the call, not the store."""

import random
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    UsageError,
)
from primeblocks.kvoffload import DiskTier, TieredStore
from primeblocks.kvoffload.evict import Choice, lru
from primeblocks.testing.faults import ManualClock
from tests.kvoffload.conftest import FRAME, PAGE, SIZES
from tests.kvoffload.disk.memory_system import MemorySystem
from tests.kvoffload.disk.small import Unsynced
from tests.kvoffload.disk.test_refusals import mounted
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of, load, page_of, save

ROFS = OSError(30, "Read-only file system")


@pytest.fixture
def clock():
    return ManualClock()


def test_a_host_tier_has_one_store(host, memory):
    slab = host(1)
    with TieredStore([slab]), pytest.raises(UsageError, match="another store"):
        TieredStore([slab, memory(1)])
    with pytest.raises(UsageError, match="another store"):
        TieredStore([slab])  # which was released


def test_a_tier_whose_index_is_found_damaged_is_empty(host, memory):
    below = memory(4)

    def damaged():
        raise CorruptionError("no such table: pages")

    below.keys = damaged
    with TieredStore([host(1), below]) as store:
        save(store, 0)
        save(store, 1)
        assert load(store, 0) == "memory"


def test_flush_says_how_many_pages_find_no_room(host, disk):
    with TieredStore([host(8), disk(4)]) as store:
        for number in range(8):
            save(store, number)
        with pytest.raises(CapacityError, match=r"4 of 8 pages .* do not fit into disk"):
            store.flush().wait(timeout_s=SOON)


def test_flush_writes_again_what_left_for_another_page(host, memory):
    below = memory(8)
    with TieredStore([host(4), below]) as store:
        for number in range(4):
            save(store, number)
        store.flush().wait(timeout_s=SOON)  # 0 to 3 are the oldest below
        for number in range(20, 28):
            save(store, number)
        for number in range(4):
            load(store, number)
        store.flush().wait(timeout_s=SOON)
        here = list(store._catalogue._pages)
        assert below.holds(here) == [True] * len(here)


def test_flush_hears_of_a_write_that_was_under_way(host, memory):
    below = memory(8)
    below.stuck, below.refuse = True, OSError(28, "no space left")
    with TieredStore([host(2), below], write="through") as store:
        save(store, 0)
        assert below.entered.wait(SOON)
        flushed = store.flush()
        below.release.set()
        with pytest.raises(OSError, match="no space"):
            flushed.wait(timeout_s=SOON)
        below.refuse = None
        store.flush().wait(timeout_s=SOON)
        assert below.holds([key_of(0)]) == [True]


def test_what_was_flushed_after_a_failed_sync_survives_a_power_cut(host):
    """Also a page that the failed sync lost for good, as long as host memory has it."""
    system, path, chance = MemorySystem(), Path("/pages"), random.Random(1)

    def tier(system):
        return DiskTier(path, capacity_bytes=8 * FRAME, io="buffered", system=system, **SIZES)

    with TieredStore([host(8), tier(system)]) as store:
        for number in range(4):
            save(store, number)
        system.failing = {"pages": chance}
        with pytest.raises(OSError, match="error"):
            store.flush().wait(timeout_s=SOON)
        system._names[path / "pages"].current[2 * FRAME] ^= 1  # what the kernel shows now
        with suppress(Exception):
            store.flush().wait(timeout_s=SOON)
        store.flush().wait(timeout_s=SOON)
        after = system.cut(chance)
    with TieredStore([host(8), tier(after)]) as store:
        assert [load(store, number) for number in range(4)] == ["disk"] * 4


def test_a_tier_that_hangs_when_asked_what_it_lost_stops_nobody(host, memory):
    below, asked, release = memory(8), threading.Event(), threading.Event()

    def fail():
        raise OSError(5, "input/output error")

    with TieredStore([host(4), below]) as store:
        save(store, 0)
        store.flush().wait(timeout_s=SOON)
        below.flush = fail
        below.holds = lambda keys: (asked.set(), release.wait(SOON), [False] * len(keys))[-1]
        flushed = store.flush()
        assert asked.wait(SOON)
        saving = threading.Thread(target=save, args=(store, 1))
        saving.start()
        saving.join(SOON)
        goes_on = not saving.is_alive()
        release.set()
        assert goes_on
        with pytest.raises(OSError, match="input/output"):
            flushed.wait(timeout_s=SOON)
        assert store.statistics()["memory"].pages == 0


def test_a_hung_tier_costs_a_batch_of_frames_and_no_save(host, memory, clock):
    below = memory(1000)
    with TieredStore([host(16), below], clock=clock.now) as store:
        for number in range(100, 116):
            save(store, number)
        store.flush().wait(timeout_s=SOON)
        for number in range(116, 132):
            save(store, number)  # 100 to 115 are below alone
        entered, release, put = threading.Event(), threading.Event(), below.put
        below.put = lambda records: (entered.set(), release.wait(SOON), put(records))[-1]
        waiting = [store.save(key_of(n), page_of(n)) for n in range(40)]
        assert entered.wait(SOON)
        clock.advance(2.0)
        assert all(each.wait(timeout_s=SOON).stored for each in waiting)
        for number in range(40, 90):
            assert save(store, number).stored
        # A batch of four is held, one page is fed to it, one of 16 leaves ahead of need.
        assert [load(store, number) for number in range(80, 90)] == ["host"] * 10
        assert load(store, 100) is None  # at once: nobody waits for it either
        assert store.statistics()["memory"].skipped > 0
        flushed = store.flush()
        assert save(store, 90).stored
        with pytest.raises(DeadlineError, match="does not answer"):
            release.set() or flushed.wait(timeout_s=SOON)
        store.flush().wait(timeout_s=SOON)
        clock.advance(60.0)
        assert load(store, 100) == "memory"


def test_a_hung_read_costs_half_of_the_frames_and_no_save(host, memory, clock):
    below = memory(1000)
    with TieredStore([host(16), below], clock=clock.now) as store:
        for number in range(32):
            save(store, number)
            store.flush().wait(timeout_s=SOON)
        entered, release, get, asked = threading.Event(), threading.Event(), below.get, []

        def hung(keys, into):
            asked.append(len(keys))
            entered.set()
            release.wait(SOON)
            return get(keys, into=into)

        below.get = hung
        reading = [store.load(key_of(n), into=np.empty(PAGE, np.uint8)) for n in range(16)]
        assert entered.wait(SOON)
        clock.advance(2.0)
        for number in range(100, 150):
            assert save(store, number).stored
        # Those that are not begun are given up for the saves; one of 16 leaves ahead of need.
        here = [load(store, number) for number in range(143, 150)]
        release.set()
        found = [each.wait(timeout_s=SOON).tier for each in reading]
        assert here == ["host"] * 7
        assert max(asked) <= 8
        assert found.count("memory") <= 8


def test_a_tier_that_does_not_keep_up_gets_what_it_can_take(host, memory, clock):
    """One page written for each that is allowed; saves wait for none once the tier is late."""
    below, allowed, waits = memory(1000), threading.Semaphore(0), threading.Semaphore(0)
    put = below.put

    def slow(records):
        for _ in records:
            waits.release()
            assert allowed.acquire(timeout=SOON)
        return put(records)

    below.put = slow
    with TieredStore([host(8), below], clock=clock.now) as store:
        for number in range(8):
            save(store, number)
        first = store.save(key_of(8), page_of(8))
        assert waits.acquire(timeout=SOON)
        clock.advance(2.0)
        assert first.wait(timeout_s=SOON).stored
        for number in range(9, 100):
            assert save(store, number).stored
            if number % 10 == 0:
                allowed.release()
        allowed.release(1000)
        store.flush().wait(timeout_s=SOON)
        count = store.statistics()["memory"]
        assert count.skipped > 60
        assert count.failures == 0
        assert save(store, 100).stored


def test_a_tier_fuller_than_its_quota_still_takes_pages(host, memory):
    below = memory(8)
    below.room, clock = 2, ManualClock()
    with TieredStore([host(1), below], clock=clock.now) as store:
        for number in range(6):
            assert save(store, number).stored
        count = store.statistics()["memory"]
        assert (count.stores, count.failures) == (4, 1)  # 0, 1, not 2, then 3 and 4 in their places
        assert [load(store, n) for n in (5, 4)] == ["host", "memory"]
        for seconds in (1, 2, 4, 8, 8, 8):  # between the trials
            clock.advance(seconds - 0.01)
            for number in range(20):
                save(store, number)
            assert len(below) == 2
            clock.advance(0.01)
            before = store.statistics()["memory"].failures
            for number in range(20):
                save(store, number)
            assert (len(below), store.statistics()["memory"].failures) == (2, before + 1)
        below.room = None
        clock.advance(30)
        for number in range(20):
            save(store, number)
        assert len(below) == 8


def test_a_full_file_system_keeps_its_pages_and_takes_more_when_there_is_room(
    host, tmp_path, clock
):
    path = tmp_path / "small"
    mounted(path, 64 * FRAME)
    try:
        ballast = path / "ballast"
        ballast.write_bytes(bytes(24 * FRAME))
        disk = DiskTier(path / "pages", capacity_bytes=50 * FRAME, system=Unsynced(), **SIZES)
        with TieredStore([host(4), disk], clock=clock.now) as store:
            for number in range(250):
                save(store, number)
                clock.advance(0.02)
            full = [load(store, number) for number in range(250)].count("disk")
            assert full >= 25, store.statistics()
            with suppress(CapacityError):
                store.flush().wait(timeout_s=SOON)
            ballast.unlink()
            for number in 2 * [*range(250)]:  # of the room, 0.9 is taken again within 10 s
                save(store, number)
                clock.advance(0.02)
            assert store.statistics()["disk"].pages >= 45
            for number in range(250):
                into = np.zeros(PAGE, np.uint8)
                if store.load(key_of(number), into=into).wait(timeout_s=SOON):
                    assert into.tobytes() == page_of(number).tobytes()
            store.flush().wait(timeout_s=SOON)
            here = list(store._catalogue._pages)
        again = DiskTier(path / "pages", capacity_bytes=50 * FRAME, **SIZES)
        with closing(again):
            assert again.holds(here) == [True] * len(here)
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("name", [("a", ["b"]), ({"a": 1},)])  # types let these pass
def test_a_name_that_cannot_be_hashed_is_refused(host, name):
    with TieredStore([host(1)]) as store:
        save(store, 0)
        for call in (
            lambda: store.save(key_of(1), page_of(1), rollout=name),
            lambda: store.load(key_of(0), into=page_of(0), rollout=name),
            lambda: store.pause(name, "pytest"),
            lambda: store.pause("a", name),
            lambda: store.resume(name),
            lambda: store.queue(["a", name]),
            lambda: store.end(name),
        ):
            with pytest.raises(UsageError, match="must be hashable"):
                call()
        assert save(store, 1).stored
        assert load(store, 1) == "host"


@pytest.mark.parametrize(
    "answer",
    [
        lambda snapshot: None,
        lambda snapshot: "page",
        lambda snapshot, kept=[]: kept[0] if kept else kept.append(lru(snapshot)) or kept[0],
        lambda snapshot: Choice(type(lru(snapshot).page)(key_of(9), 0)),
    ],
    ids=["nothing", "text", "a page that left", "no page of the tier"],
)
def test_a_policy_that_makes_no_choice_is_replaced(host, memory, answer, caplog):
    with TieredStore([host(2), memory(2)], evict=answer) as store:
        for number in range(8):
            assert save(store, number).stored
        assert load(store, 7) == "host"
    assert caplog.text.count("Later failures are not logged") == 2  # one for each tier


@pytest.mark.parametrize("where", ["copied_in", "copied_out", "written", "read", "save"])
def test_an_error_of_ours_fails_who_waits_and_lets_the_folder_go(host, disk, monkeypatch, where):
    store = TieredStore([host(2), disk(8)])
    for number in range(4):
        save(store, number)

    def wrong(*arguments, **named):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(store._catalogue, where, wrong)
    calls = [
        lambda: load(store, 0),
        lambda: load(store, 3),
        lambda: store.save(key_of(5), page_of(5)).wait(timeout_s=SOON),
        lambda: store.flush().wait(timeout_s=SOON),
        lambda: store.load(key_of(1), into=page_of(1)).wait(timeout_s=SOON),
    ]
    for call in calls:
        with suppress(ClosedError):
            call()
    with pytest.raises(ClosedError, match="a bug"):
        store.load(key_of(3), into=page_of(3))
    store.close(timeout_s=SOON)
    disk(8).close()

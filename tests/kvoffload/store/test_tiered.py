"""What the store does with its tiers, and everything that can go wrong around it."""

import errno
import os

import numpy as np
import pytest

from primeblocks.errors import (
    CancelledError,
    ClosedError,
    DeadlineError,
    PlanError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from primeblocks.kvoffload import HostTier, TieredStore
from primeblocks.kvoffload.evict import VersionAware
from tests.kvoffload.conftest import EXTRA, FRAME, PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of, load, page_of, save

pytestmark = pytest.mark.usefixtures("patient")


def test_pages_go_down_when_room_runs_out_and_come_back_when_used(host, memory):
    with TieredStore([host(2), memory(4)]) as store:
        for number in range(4):
            assert save(store, number, attachments={"routes": b"r"}).stored
        assert [load(store, n) for n in (3, 0, 0)] == ["host", "memory", "host"]
        count = store.statistics()
        assert (count["host"].hits, count["host"].misses, count["memory"].hits) == (2, 1, 1)
        # 0 and 1 went down; 2 had to when 0 came back.
        assert (count["host"].evictions, count["memory"].stores) == (3, 3)
        assert count["memory"].bytes_read == PAGE + 4 + 10 + 6 + 1


def test_a_page_in_pieces_is_one_page(host, memory):
    pieces = [np.arange(n, dtype=np.uint8) for n in (7, 1, 40)]
    into = [np.zeros(n, np.uint8) for n in (16, 32)]
    with TieredStore([host(1), memory(4)]) as store:
        assert store.save(key_of(0), pieces).wait(timeout_s=SOON).stored
        for _ in range(2):
            assert store.load(key_of(0), into=into).wait(timeout_s=SOON)
            assert np.concatenate(into).tobytes() == np.concatenate(pieces).tobytes()
            save(store, 9)  # pushes it down


def test_a_batch_answers_for_each_page(host, memory):
    keys = [key_of(n) for n in range(40)]
    routes = [{"routes": bytes([n])} if n % 2 else None for n in range(40)]
    with TieredStore([host(4), memory(40)]) as store:
        saved = store.save_batch(keys, [page_of(n) for n in range(40)], attachments=routes)
        assert all(each.stored for each in saved.wait(timeout_s=SOON))
        keys.append(key_of(99))
        into = [np.zeros(PAGE, np.uint8) for _ in keys]
        loaded = store.load_batch(keys, into=into).wait(timeout_s=SOON)
        assert [bool(each) for each in loaded] == [True] * 40 + [False]
        for number in range(40):
            assert into[number].tobytes() == page_of(number).tobytes()
            assert loaded[number].attachments == (routes[number] or {})
        assert store.save_batch([], []).wait(timeout_s=0) == []
        with pytest.raises(ShapeError, match="'keys': 41, 'into': 0"):
            store.load_batch(keys, into=[])


def test_flush_writes_what_host_memory_alone_has(host, memory):
    below = memory(4)
    with TieredStore([host(3), below]) as store:
        for number in range(3):
            save(store, number)
        assert len(below) == 0
        store.flush().wait(timeout_s=SOON)
        assert below.holds([key_of(n) for n in range(3)]) == [True] * 3
        assert below.flushes == 1
        store.flush().wait(timeout_s=SOON)
        assert store.statistics()["memory"].stores == 3
    assert below.closed
    with TieredStore([host(3), below]) as store:
        assert [load(store, n) for n in range(3)] == ["memory"] * 3


def test_dead_versions_leave_first_and_are_not_worth_a_write(host, memory):
    with TieredStore([host(3), memory(4)], evict=VersionAware(max_staleness=1)) as store:
        for number, version in ((0, 5), (1, 7), (2, 6)):
            save(store, number, version)
        store.advance(version=7)
        assert load(store, 0, 5) == "host"  # staleness does not bound reads
        save(store, 3, 7)
        assert load(store, 0, 5) is None
        assert store.statistics()["memory"].stores == 0
        assert [load(store, n, v) for n, v in ((1, 7), (2, 6), (3, 7))] == ["host"] * 3
        for wrong, said in ((6, "at version 7; got 6"), (-1, "-1"), (1 << 63, "0"), (True, "True")):
            with pytest.raises(UsageError, match=said):
                store.advance(version=wrong)
        store.clear().wait(timeout_s=SOON)
        store.advance(version=6)


def test_after_clear_nothing_is_found_anywhere(host, memory):
    below = memory(8)
    with TieredStore([host(2), below]) as store:
        for number in range(4):
            save(store, number)
        store.clear().wait(timeout_s=SOON)
        assert len(below) == 0
        assert [load(store, n) for n in range(4)] == [None] * 4
        assert key_of(0) not in store


def test_damage_below_is_a_miss_and_is_counted_once(host, memory):
    below = memory(4)
    with TieredStore([host(1), below]) as store:
        for number in range(4):
            save(store, number)
        for number in range(3):
            below.damage(key_of(number))
        # 3 made room for what turned out to be damaged.
        assert [load(store, n) for n in range(4)] == [None, None, None, "memory"]
        assert [load(store, n) for n in range(4)] == [None, None, None, "host"]
        assert store.statistics()["memory"].checksum_failures == 3
        assert save(store, 0).stored
        assert load(store, 0) == "host"


def test_a_page_of_the_wrong_length_is_damage(host, memory):
    below = memory(4)
    with TieredStore([host(1), below]) as store:
        for number in range(2):
            save(store, number)
        content, digest = below.pages[key_of(0)]
        below.pages[key_of(0)] = content[:-1], digest
        assert load(store, 0) is None
        assert store.statistics()["memory"].checksum_failures == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        RuntimeError("a tier that breaks its contract"),
    ],
)
def test_a_tier_that_refuses_costs_pages_not_service(host, memory, error):
    below = memory(4)
    below.refuse = error
    with TieredStore([host(1), below]) as store:
        for page in range(3):
            assert save(store, page).stored
        assert [load(store, n) for n in range(3)] == [None, None, "host"]
        assert store.statistics()["memory"].failures == 2
        below.refuse = None
        save(store, 3)
        assert [load(store, n) for n in (2, 3)] == ["memory", "memory"]


def test_an_unreadable_page_is_a_miss(host, memory):
    below = memory(4)
    with TieredStore([host(1), below]) as store:
        save(store, 0)
        save(store, 1)
        below.pages[key_of(0)] = OSError(errno.EIO, os.strerror(errno.EIO))
        assert load(store, 0) is None
        assert store.statistics()["memory"].failures == 1
        assert load(store, 1) == "memory"  # it made room for nothing


def test_what_one_store_saved_another_finds_in_the_tier_they_share(host, memory):
    common = {}
    one = TieredStore([host(1), memory(0, common=common)], write="through")
    other = TieredStore([host(1), memory(2, name="own"), memory(0, common=common)])
    with one, other:
        save(one, 0, attachments={"routes": b"r"})
        one.flush().wait(timeout_s=SOON)
        assert key_of(0) not in other
        assert other.holds([key_of(0), key_of(1)]).wait(timeout_s=SOON) == [True, False]
        assert [load(other, 0), load(other, 0), load(other, 1)] == ["memory", "host", None]
        del common[key_of(0)]  # a shared tier evicts by itself
        assert other.holds([key_of(0)]).wait(timeout_s=SOON) == [True]
        assert load(one, 0) == "host"


@pytest.fixture
def stuck(host, memory, monkeypatch):
    """A store whose lower tier hangs in a write until it is released."""
    below = memory(4)
    below.stuck = True
    monkeypatch.setattr("primeblocks.kvoffload.store._MAX_PENDING", 2)
    with TieredStore([host(1), below]) as store:
        save(store, 0)
        yield store, below
        below.release.set()


def test_a_hung_tier_ends_in_a_deadline_and_touches_nothing_later(stuck):
    store, below = stuck
    page, into = page_of(1), page_of(99)
    slow = store.save(key_of(1), page)
    assert below.entered.wait(SOON)
    late = store.load(key_of(1), into=into)
    for pending in (slow, late):
        assert not pending.done()
        with pytest.raises(DeadlineError, match=r"0\.01 s"):
            pending.wait(timeout_s=0.01)
        assert pending.done()
    page[:] = 5  # the caller's again
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        store.close(timeout_s=0.01)
    below.release.set()
    store.close(timeout_s=SOON)
    assert into.tobytes() == page_of(99).tobytes()
    with pytest.raises(DeadlineError):
        late.wait(timeout_s=SOON)


def test_pages_on_their_way_down_are_still_served(stuck):
    store, below = stuck
    store.save(key_of(1), page_of(1))
    assert below.entered.wait(SOON)
    assert load(store, 0) == "host"


def test_a_cancelled_call_touches_nothing_later(stuck):
    store, below = stuck
    page, into = page_of(1), page_of(99)
    slow, late = store.save(key_of(1), page), store.load(key_of(1), into=into)
    assert slow.cancel()
    assert late.cancel()
    assert not late.cancel()
    page[:] = 5
    below.release.set()
    for pending in (slow, late):
        with pytest.raises(CancelledError):
            pending.wait(timeout_s=SOON)
    assert load(store, 1) is None
    assert into.tobytes() == page_of(99).tobytes()
    assert save(store, 1).stored


def test_a_retry_after_a_deadline_succeeds(stuck):
    store, below = stuck
    with pytest.raises(DeadlineError):
        store.save(key_of(1), page_of(1)).wait(timeout_s=0.01)
    below.release.set()
    assert save(store, 1).stored
    assert load(store, 1) == "host"
    assert load(store, 0) == "memory"


def test_saves_beyond_the_bound_are_declined_and_leave_no_old_page(stuck):
    store, below = stuck
    first = store.save(key_of(1), page_of(1))
    assert below.entered.wait(SOON)
    second = store.save(key_of(2), page_of(2))
    declined = store.save(key_of(0), page_of(9)).wait(timeout_s=0)
    assert not declined.stored
    assert "2 pages wait for room" in declined.reason
    below.release.set()
    assert first.wait(timeout_s=SOON).stored
    assert second.wait(timeout_s=SOON).stored
    assert load(store, 0) is None  # the old page of that key is not the newest
    assert save(store, 0).stored


def test_a_store_needs_host_memory_in_front(host, memory):
    with pytest.raises(UnsupportedError, match=r"\['memory'\].*HostTier"):
        TieredStore([memory(2)])
    with pytest.raises(UnsupportedError, match="HostTier"):
        TieredStore([])
    with pytest.raises(PlanError, match="copy_threads=0"):
        TieredStore([host(1)], copy_threads=0)
    with pytest.raises(UnsupportedError, match=r"\['host', 'host'\]"):
        TieredStore([host(1), host(1)])
    with pytest.raises(UnsupportedError, match="must be the last"):
        TieredStore([host(1), memory(0, common={}), memory(1, name="own")])
    with pytest.raises(PlanError, match='"back" or "through"; got \'around\''):
        TieredStore([host(1)], write="around")


def test_tiers_must_agree_on_sizes(memory):
    other = HostTier(capacity_bytes=FRAME, page_bytes=PAGE + 1, attachment_bytes=EXTRA)
    with pytest.raises(PlanError, match=r"\(48, 64\), \(49, 64\)"):
        TieredStore([other, memory(1)])


def test_wrong_sizes_are_refused_before_anything_happens(host):
    with TieredStore([host(1)]) as store:
        with pytest.raises(ShapeError, match="48 bytes; got 47"):
            store.save_batch([key_of(0), key_of(1)], [bytes(48), bytes(47)])
        with pytest.raises(ShapeError, match="read-only"):
            store.load(key_of(0), into=bytes(48))
        with pytest.raises(ShapeError, match=r"attachment_bytes=(\d+) or more"):
            save(store, 0, attachments={"routes": bytes(EXTRA)})
        assert key_of(0) not in store


def test_a_result_that_nobody_waited_for_is_neither_true_nor_false(host):
    with TieredStore([host(1)]) as store:
        pending = store.load(key_of(0), into=page_of(1))
        with pytest.raises(UsageError, match=r"<Pending: \w+> has no truth .* result of .wait"):
            bool(pending)
        assert not pending.wait(timeout_s=SOON)
        assert repr(pending) == "<Pending: over>"


def test_a_closed_store_says_so(host):
    store = TieredStore([host(1)])
    pending = store.save(key_of(0), page_of(0))
    store.close()
    store.close()
    assert pending.wait(timeout_s=0).stored  # asked for before
    with pytest.raises(ClosedError):
        store.save(key_of(0), page_of(0))
    with pytest.raises(ClosedError):
        store.load(key_of(0), into=bytearray(PAGE))

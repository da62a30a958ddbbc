"""What the store does with its tiers, and everything that can go wrong around it."""

import errno
import os
import threading

import numpy as np
import pytest

from primeblocks.errors import (
    ClosedError,
    DeadlineError,
    PlanError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from primeblocks.kvoffload import (
    HostTier,
    PageKey,
    TieredStore,
    VersionAware,
)

PAGE, EXTRA, SOON = 48, 64, 5.0
SIZES = {"page_bytes": PAGE, "attachment_bytes": EXTRA}


def page_of(number):
    return np.full(PAGE, number, dtype=np.uint8)


def key_of(number, version=None):
    return PageKey("s", bytes([number]), version=version)


def save(store, number, version=None, **more):
    key = key_of(number, version)
    return store.save(key, page_of(number), **more).wait(timeout_s=SOON)


def load(store, number, version=None):
    into = np.zeros(PAGE, np.uint8)
    found = store.load(key_of(number, version), into=into).wait(timeout_s=SOON)
    if not found:
        assert not into.any()
        return None
    assert into.tobytes() == page_of(number).tobytes()
    return found.tier


def test_pages_go_down_when_room_runs_out_and_come_back_when_used(host, disk):
    with TieredStore([host(2), disk(4)]) as store:
        for number in range(4):
            assert save(store, number, attachments={"routes": b"r"}).stored
        assert [load(store, n) for n in (3, 0, 0)] == ["host", "disk", "host"]
        count = store.statistics()
        assert (count["host"].hits, count["host"].misses, count["disk"].hits) == (2, 1, 1)
        # 0 and 1 went down; 2 had to when 0 came back.
        assert (count["host"].evictions, count["disk"].stores) == (3, 3)
        assert count["disk"].bytes_read == PAGE + 4 + 10 + 6 + 1


def test_a_load_counts_as_a_use(host):
    with TieredStore([host(2)]) as store:
        for number in (0, 1):
            save(store, number)
        load(store, 0)
        save(store, 2)
        assert [load(store, n) for n in range(3)] == ["host", None, "host"]


def test_a_page_on_disk_is_not_written_twice(host, disk):
    with TieredStore([host(1), disk(4)]) as store:
        for number in (0, 1):
            save(store, number)
        for number in (0, 1, 0, 1):
            assert load(store, number) == "disk"
        assert store.statistics()["disk"].stores == 2


def test_the_newest_content_of_a_key_wins_in_every_tier(host, disk):
    into = np.zeros(PAGE, np.uint8)
    with TieredStore([host(1), disk(4)]) as store:
        for content in (1, 2):
            store.save(key_of(0), page_of(content)).wait(timeout_s=SOON)
            save(store, 9)  # pushes it to disk
        assert store.load(key_of(0), into=into).wait(timeout_s=SOON)
        assert into[0] == 2


def test_dead_versions_leave_first_and_are_not_worth_disk(host, disk):
    with TieredStore([host(3), disk(4)], evict=VersionAware(max_staleness=1)) as store:
        for number, version in ((0, 5), (1, 7), (2, 6)):
            save(store, number, version)
        store.advance(version=7)
        save(store, 3, 7)
        assert load(store, 0, 5) is None
        assert store.statistics()["disk"].stores == 0
        assert [load(store, n, v) for n, v in ((1, 7), (2, 6), (3, 7))] == ["host"] * 3
        with pytest.raises(UsageError, match="at version 7; got 6"):
            store.advance(version=6)


def test_salts_and_versions_never_meet(host):
    into = np.zeros(PAGE, np.uint8)
    with TieredStore([host(8)]) as store:
        keys = [PageKey(salt, b"h", 0, v) for salt in ("v0", "v1", b"v0") for v in (None, 0, 1)]
        for number, key in enumerate(keys[:-1]):
            store.save(key, page_of(number)).wait(timeout_s=SOON)
        for number, key in enumerate(keys[:-1]):
            assert store.load(key, into=into).wait(timeout_s=SOON)
            assert into[0] == number
        assert not store.load(keys[-1], into=into).wait(timeout_s=SOON)


def test_damage_on_disk_is_a_miss_and_is_counted_once(host, disk, tmp_path):
    with TieredStore([host(1), disk(4)]) as store:
        for number in range(4):
            save(store, number)
        files = sorted((tmp_path / "pages").glob("??/*.page"))
        assert len(files) == 3
        for file in files:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        assert [load(store, n) for n in range(4)] == [None, None, None, "host"]
        assert [load(store, n) for n in range(4)] == [None, None, None, "host"]
        assert store.statistics()["disk"].checksum_failures == 3
        assert save(store, 0).stored
        assert load(store, 0) == "host"


def test_damage_in_host_memory_is_a_miss(host):
    tier = host(2)
    with TieredStore([tier]) as store:
        save(store, 1)
        tier._slab ^= 1
        assert load(store, 1) is None
        assert store.statistics()["host"].checksum_failures == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_costs_pages_not_service(host, disk, number):
    broken = True

    def write(descriptor, data):
        if broken:
            raise OSError(number, os.strerror(number))
        return os.write(descriptor, data)

    with TieredStore([host(1), disk(4, write=write)]) as store:
        for page in range(3):
            assert save(store, page).stored
        assert [load(store, n) for n in range(3)] == [None, None, "host"]
        assert store.statistics()["disk"].failures == 2
        broken = False
        save(store, 3)
        assert [load(store, n) for n in (2, 3)] == ["disk", "disk"]


def test_an_unreadable_page_is_a_miss(host, disk, tmp_path):
    with TieredStore([host(1), disk(4)]) as store:
        save(store, 0)
        save(store, 1)
        (file,) = (tmp_path / "pages").glob("??/*.page")
        file.unlink()
        file.mkdir()  # reading it is an OSError, for root too
        assert load(store, 0) is None
        assert store.statistics()["disk"].failures == 1
        assert load(store, 1) == "host"


@pytest.fixture
def stuck(host, disk):
    """A store whose disk hangs in a write until it is released."""
    release, entered = threading.Event(), threading.Event()

    def write(descriptor, data):
        entered.set()
        assert release.wait(SOON)
        return os.write(descriptor, data)

    with TieredStore([host(1), disk(4, write=write)], max_pending=2) as store:
        save(store, 0)
        yield store, entered, release
        release.set()


def test_a_hung_disk_ends_in_a_deadline_and_touches_nothing_later(stuck):
    store, entered, release = stuck
    slow = store.save(key_of(1), page_of(1))
    assert entered.wait(SOON)
    into = page_of(99)
    late = store.load(key_of(0), into=into)
    for pending in (slow, late):
        assert not pending.done()
        with pytest.raises(DeadlineError, match=r"0\.01 s"):
            pending.wait(timeout_s=0.01)
        assert pending.done()
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        store.close(timeout_s=0.01)
    release.set()
    store.close(timeout_s=SOON)
    assert into.tobytes() == page_of(99).tobytes()
    with pytest.raises(DeadlineError):
        late.wait(timeout_s=SOON)


def test_a_retry_after_a_deadline_succeeds(stuck):
    store, _, release = stuck
    with pytest.raises(DeadlineError):
        store.save(key_of(1), page_of(1)).wait(timeout_s=0.01)
    release.set()
    assert save(store, 1).stored
    assert load(store, 1) == "host"
    assert load(store, 0) == "disk"


def test_saves_beyond_the_bound_are_declined_and_leave_no_old_page(stuck):
    store, entered, release = stuck
    first = store.save(key_of(1), page_of(1))
    assert entered.wait(SOON)
    second = store.save(key_of(2), page_of(2))
    declined = store.save(key_of(0), page_of(9)).wait(timeout_s=0)
    assert not declined.stored
    assert "2 saves are on their way" in declined.reason
    release.set()
    assert first.wait(timeout_s=SOON).stored
    assert second.wait(timeout_s=SOON).stored
    assert load(store, 0) is None  # the old page of that key is not the newest
    assert save(store, 0).stored


def test_a_store_needs_host_memory_in_front(host, disk):
    with pytest.raises(UnsupportedError, match=r"\['disk'\].*HostTier"):
        TieredStore([disk(2)])
    with pytest.raises(UnsupportedError, match="HostTier"):
        TieredStore([])
    with pytest.raises(PlanError, match="max_pending"):
        TieredStore([host(1)], max_pending=0)


def test_tiers_must_agree_on_sizes(host):
    other = HostTier(capacity_bytes=1000, page_bytes=PAGE + 1, attachment_bytes=EXTRA)
    with pytest.raises(PlanError, match=r"\(48, 64\), \(49, 64\)"):
        TieredStore([host(1), other])


def test_wrong_sizes_are_refused_before_anything_happens(host):
    with TieredStore([host(1)]) as store:
        with pytest.raises(ShapeError, match="48 bytes; got 47"):
            store.save(key_of(0), bytes(47))
        with pytest.raises(ShapeError, match="read-only"):
            store.load(key_of(0), into=bytes(48))
        with pytest.raises(ShapeError, match=r"attachment_bytes=(\d+) or more"):
            save(store, 0, attachments={"routes": bytes(EXTRA)})
        assert key_of(0) not in store


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

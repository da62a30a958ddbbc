"""What a disk tier gives back, adopts and refuses."""

import errno
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from primeblocks.errors import (
    ClosedError,
    PlanError,
    ShapeError,
    UnsupportedError,
)
from primeblocks.kvoffload import DiskTier, PageKey
from primeblocks.kvoffload.disk import System
from primeblocks.kvoffload.tier import Record
from tests.kvoffload import tier_conformance as conformance
from tests.kvoffload.disk.small import (
    EXTRA,
    FRAME,
    PAGE,
    Unsynced,
    aligned,
    assert_serves,
    content_of,
    framed,
    key_of,
    open_tier,
    read,
    record,
    state,
)


class Counting(Unsynced):
    """Notes how many buffers and bytes each call moves."""

    def __init__(self):
        self.writes, self.reads = [], []

    def write(self, descriptor, buffers, offset):
        count = super().write(descriptor, buffers, offset)
        self.writes.append((len(buffers), count))
        return count

    def read(self, descriptor, buffers, offset):
        count = super().read(descriptor, buffers, offset)
        self.reads.append((len(buffers), count))
        return count


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_pages_that_are_written_together_move_together_once(tmp_path, io):
    system = Counting()
    with closing(open_tier(tmp_path, pages=8, io=io, system=system)) as tier:
        tier.put([record(100)])
        system.writes.clear()
        system.reads.clear()
        assert tier.put([record(number) for number in range(6)]) == [None] * 6
        assert system.writes == [(6, 6 * FRAME)]
        tier.get([key_of(n) for n in (5, 2, 1, 3, 4)], into=[aligned() for _ in range(5)])
        assert system.reads == [(5, 5 * FRAME)]


def test_the_newest_of_several_records_with_one_key_counts(tmp_path):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(0, 1), record(1), record(0, 2)]) == [None] * 3
        assert read(tier, [0]) == [content_of(0, 2).tobytes()]
        assert len(tier) == 2
        assert_serves(tier)


def test_what_does_not_fit_is_refused_and_the_rest_kept(tmp_path):
    long = np.zeros(PAGE + EXTRA + 1, np.uint8)
    wrong = [framed(key_of(5), long), framed(key_of(6), long[:9], b"")]
    wrong.append(Record(key_of(7), long[:9], bytes(16), long))
    with closing(open_tier(tmp_path)) as tier:
        *answers, last = tier.put([*wrong, record(1)])
        assert all(isinstance(answer, ShapeError) for answer in answers)
        assert "113" in str(answers[0])
        assert last is None
        assert_serves(tier)


def test_a_short_buffer_fails_alone(tmp_path):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(number) for number in range(3)]) == [None] * 3
        keys, into = [key_of(number) for number in (0, 1, 2, 5)], [aligned() for _ in range(4)]
        into[1], into[3] = into[1][:-1], into[3][:-1]
        first, short, last, missing = tier.get(keys, into=into)
        assert isinstance(short, ShapeError)
        assert missing is None
        for number, found, frame in ((0, first, into[0]), (2, last, into[2])):
            assert frame[: found.length].tobytes() == content_of(number).tobytes()


@pytest.mark.parametrize("pages", [1, 2, 9])
def test_another_quota_keeps_what_lies_within_it(tmp_path, pages):
    with closing(open_tier(tmp_path)) as tier:
        tier.put([record(number) for number in range(4)])
        before = state(tier)
    for _ in range(2):
        with closing(open_tier(tmp_path, pages=pages)) as tier:
            assert state(tier) == {number: before[number] for number in range(min(4, pages))}
            assert os.path.getsize(tmp_path / "pages") <= pages * FRAME
            assert_serves(tier, pages=pages)


@pytest.mark.parametrize("sizes", [(PAGE, EXTRA - 1), (5000, 0)])
def test_pages_of_another_size_are_dropped_once_there_are_others(tmp_path, sizes, caplog):
    with closing(open_tier(tmp_path)) as tier:
        tier.put([record(number) for number in range(8)])
        before = state(tier)
    page, extra = sizes
    how = {"capacity_bytes": 2 * FRAME, "page_bytes": page, "attachment_bytes": extra}
    with closing(DiskTier(tmp_path, **how)) as tier:
        assert (
            f"48 bytes with 64 bytes of attachments, but now has pages of {page} bytes with {extra}"
            in caplog.text
        )
        assert "not served, and the first write, flush or clear deletes them" in caplog.text
        assert len(tier) == 0
    with closing(open_tier(tmp_path)) as tier:  # a mistake that wrote nothing costs nothing
        assert state(tier) == before
    other = np.full(page, 7, np.uint8)
    with closing(DiskTier(tmp_path, **how)) as tier:
        assert tier.put([framed(key_of(1), other, size=2 * FRAME)]) == [None]
        assert os.path.getsize(tmp_path / "pages") <= 2 * FRAME
    with closing(DiskTier(tmp_path, **how)) as tier:
        into = aligned(2 * FRAME)
        assert tier.get([key_of(1), key_of(0)], into=[into, into])[1] is None
        assert into[:page].tobytes() == other.tobytes()
    with closing(open_tier(tmp_path)) as tier:
        assert len(tier) == 0
        assert_serves(tier)


@pytest.mark.parametrize("sizes", [(0, 0, FRAME), (48, -1, FRAME), (48, 64, FRAME - 1)])
def test_a_tier_without_room_for_a_page_is_refused(sizes, tmp_path):
    page, extra, capacity = sizes
    with pytest.raises(PlanError):
        DiskTier(tmp_path, capacity_bytes=capacity, page_bytes=page, attachment_bytes=extra)
    assert not any(tmp_path.iterdir())


class WithoutDirect(Unsynced):
    """A file system that opens files for direct I/O and refuses to read, as some do."""

    def read(self, descriptor, buffers, offset):
        if os.get_blocking(descriptor) and self.is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().read(descriptor, buffers, offset)

    @staticmethod
    def is_direct(descriptor):
        import fcntl

        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_io_follows_the_file_system_or_says_that_it_cannot(tmp_path):
    with closing(open_tier(tmp_path, io="auto")) as tier:
        assert tier.direct
    system = WithoutDirect()
    with closing(open_tier(tmp_path, io="auto", system=system)) as tier:
        assert not tier.direct
        assert_serves(tier)
    with pytest.raises(UnsupportedError, match='"auto"'):
        open_tier(tmp_path, io="direct", system=system)
    with pytest.raises(PlanError, match="directly"):
        open_tier(tmp_path, io="directly")
    open_tier(tmp_path).close()


def test_short_reads_and_writes_are_continued(tmp_path):
    class Short(Unsynced):
        def write(self, descriptor, buffers, offset):
            return super().write(descriptor, [b"".join(buffers)[:1500]], offset)

        def read(self, descriptor, buffers, offset):
            return super().read(descriptor, [buffers[0][:700]], offset)

    with closing(open_tier(tmp_path, system=Short())) as tier:
        assert tier.put([record(n) for n in range(3)]) == [None] * 3
        before = state(tier)
        assert b"" not in before.values()
    with closing(open_tier(tmp_path, system=Short())) as tier:
        assert state(tier) == before


def test_clear_gives_the_room_back(tmp_path):
    with closing(open_tier(tmp_path)) as tier:
        tier.put([record(number) for number in range(4)])
        tier.clear()
        assert (len(tier), tier.keys()) == (0, [])
        assert os.path.getsize(tmp_path / "pages") == 0
        assert os.path.getsize(tmp_path / "index") <= 3 * 4096
        assert_serves(tier)


def test_the_index_stays_in_proportion(tmp_path):
    """The file by what it has, the log by what SQLite lets it grow to."""
    with closing(open_tier(tmp_path)) as tier:
        for value in range(600):
            assert tier.put([record(value % 3, value)]) == [None]
            if value % 100 == 0:
                sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
                assert sizes["index"] <= 4 * 4096
                assert sizes["index-wal"] < 5 << 20
        before = state(tier)
    assert not (tmp_path / "index-wal").exists()
    with closing(open_tier(tmp_path)) as tier:
        assert state(tier) == before


def test_the_memory_of_a_page_is_bounded(tmp_path):
    count = 4000
    with closing(open_tier(tmp_path, pages=count)) as tier:
        records = [record(0) for _ in range(count)]
        for number, each in enumerate(records):
            key = PageKey("a salt", number.to_bytes(32, "big"), version=7, recipe="r" * 32)
            records[number] = replace(each, key=key)
        assert tier.put(records) == [None] * count
    del records
    tracemalloc.start()
    try:
        with closing(open_tier(tmp_path, pages=count)) as tier:
            held, _ = tracemalloc.get_traced_memory()
            assert len(tier) == count
    finally:
        tracemalloc.stop()
    assert held / count < 250


def test_a_closed_tier_says_so(tmp_path):
    tier = open_tier(tmp_path)
    tier.close()
    for call in (
        lambda: tier.put([record(0)]),
        lambda: read(tier, [0]),
        lambda: tier.drop([key_of(0)]),
        tier.clear,
        tier.flush,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


class Meeting(Unsynced):
    """Two calls that are inside at the same time meet; one alone gives up soon."""

    def __init__(self):
        self.door = threading.Barrier(2)
        self.met = 0

    def _inside(self, call, *arguments):
        with suppress(threading.BrokenBarrierError):
            self.door.wait(0.02)
            self.met += 1
        if self.door.broken:
            self.door.reset()
        return call(*arguments)

    def write(self, *arguments):
        return self._inside(super().write, *arguments)

    def read(self, *arguments):
        return self._inside(super().read, *arguments)

    def sync(self, *arguments):
        return self._inside(super().sync, *arguments)


def test_threads_take_turns_in_one_tier(tmp_path):
    """It has one head of free frames, one scratch frame and one connection."""
    with closing(open_tier(tmp_path, pages=8, system=Meeting())) as tier:
        tier._system.met = 0
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(tier.put, [record(0), record(1)])]
            calls += [pool.submit(tier.put, [record(2)]), pool.submit(tier.flush)]
            calls += [pool.submit(read, tier, [0, 2]), pool.submit(tier.drop, [key_of(1)])]
        assert [call.exception() for call in calls] == [None] * 5
        assert tier._system.met == 0
        assert not tier.put([record(1)])[0]
        assert state(tier) == {n: content_of(n).tobytes() for n in (0, 2, 1)}


def test_of_threads_that_close_a_tier_one_does(tmp_path):
    tier = open_tier(tmp_path, system=Meeting())
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(tier.close) for _ in range(4)]
    assert [call.exception() for call in calls] == [None] * 4
    open_tier(tmp_path).close()


def test_the_real_system_syncs(tmp_path):
    """A flush empties the log: of one that a power cut shortens, a prefix would hide the file."""
    with closing(open_tier(tmp_path, system=System())) as tier:
        tier.put([record(0)])
        assert os.path.getsize(tmp_path / "index-wal") > 0
        tier.flush()
        assert os.path.getsize(tmp_path / "index-wal") == 0
        tier.clear()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=conformance.check_name)
def test_conformance(check, tmp_path):
    host = conformance.host_for()
    how = {"page_bytes": conformance.PAGE, "attachment_bytes": conformance.EXTRA}
    how |= {"capacity_bytes": 20 * 8192, "system": Unsynced()}
    with closing(DiskTier(tmp_path, **how)) as tier:
        check(conformance.Bench(host, tier, room=20, too_many=24))
    host.close()


def test_a_tier_does_not_care_where_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(open_tier("pages")) as tier:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert tier.put([record(0)]) == [None]
        tier.flush()

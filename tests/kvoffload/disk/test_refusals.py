"""Full, read-only and failing disks: an answer for each page, then normal service."""

import errno
import os
import subprocess
from contextlib import closing, suppress

import pytest

from primeblocks.errors import CapacityError, CorruptionError, PrimeblocksError, UsageError
from tests.kvoffload.disk.faults import Fault, FaultySystem
from tests.kvoffload.disk.small import (
    FRAME,
    PAGE,
    Unsynced,
    assert_serves,
    content_of,
    key_of,
    open_tier,
    read,
    record,
    state,
)


class Script:
    """No faults, until `faults` names calls, by number or by name, or all."""

    def __init__(self):
        self.seen = []
        self.faults = {}

    def __call__(self, name, size):
        self.seen.append((name, size))
        for which in (len(self.seen) - 1, name, "always"):
            if which in self.faults:
                return self.faults[which]
        return None

    def fail(self, *, after, fault):
        self.faults = {len(self.seen) + after: fault}


def filled(tmp_path, **how):
    script = Script()
    tier = open_tier(tmp_path, system=FaultySystem(script), **how)
    assert tier.put([record(0), record(1)]) == [None, None]
    return tier, script


def assert_reopens(tmp_path, tier, **how):
    before = state(tier)
    tier.close()
    with closing(open_tier(tmp_path, **how)) as again:
        assert state(again) == before
        assert_serves(again, **how)


@pytest.mark.parametrize(
    ("number", "kind", "torn"),
    [
        (errno.ENOSPC, CapacityError, 50),
        (errno.EDQUOT, CapacityError, 0),
        (errno.EFBIG, CapacityError, FRAME),
        (errno.EROFS, OSError, 0),
        (errno.EIO, OSError, FRAME),
    ],
)
def test_a_page_whose_data_is_refused_costs_itself_alone(tmp_path, number, kind, torn):
    tier, script = filled(tmp_path, pages=6)
    now, fault = len(script.seen), Fault(torn, number)
    script.faults = {now: fault, now + 2: fault}  # of all three pages, and of the second alone
    before = state(tier)
    first, second, third = tier.put([record(2), record(0, 7), record(3)])
    assert (first, third) == (None, None)
    assert isinstance(second, kind)
    assert os.strerror(number) in str(second)
    assert state(tier) == before | {n: content_of(n).tobytes() for n in (2, 3)}
    assert tier.put([record(0, 7)]) == [None]
    assert_serves(tier, pages=6)
    assert_reopens(tmp_path, tier, pages=6)


def test_of_a_run_that_cannot_be_read_the_good_pages_are(tmp_path):
    class Bad(Unsynced):
        bad = False

        def read(self, descriptor, buffers, offset):
            if self.bad and offset <= 2 * FRAME < offset + sum(len(each) for each in buffers):
                raise OSError(errno.EIO, "bad sector")
            return super().read(descriptor, buffers, offset)

    system = Bad()
    with closing(open_tier(tmp_path, system=system)) as tier:
        tier.put([record(n) for n in range(4)])
        good = read(tier, range(4))
        system.bad = True
        assert read(tier, range(4)) == [good[0], good[1], None, good[3]]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, CapacityError), (errno.EIO, OSError)])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_refused_index_keeps_what_was_there(tmp_path, number, kind, checkpoints):
    tier, script = filled(tmp_path)
    before = state(tier)
    script.faults = {"commit": Fault(0, number)}
    if not checkpoints:
        script.faults["checkpoint"] = Fault(0, errno.EIO)
        kind = OSError
    for answer in tier.put([record(2), record(0, 7)]):
        assert isinstance(answer, kind)
    assert state(tier) == before
    script.faults = {}
    assert tier.put([record(0, 8)]) == [None]
    assert state(tier) == before | {0: content_of(0, 8).tobytes()}
    assert_serves(tier)
    assert_reopens(tmp_path, tier)


def test_a_log_without_room_is_copied_and_written_from_its_front(tmp_path):
    tier, script = filled(tmp_path)
    script.fail(after=1, fault=Fault(0, errno.ENOSPC))
    assert tier.put([record(2)]) == [None]
    names = [name for name, _ in script.seen[-4:]]
    assert names == ["write", "commit", "checkpoint", "commit"]
    assert_serves(tier)
    assert_reopens(tmp_path, tier)


def test_pages_that_give_their_room_to_the_index_free_their_frames(tmp_path):
    tier, script = filled(tmp_path, pages=8)
    assert tier.put([record(number) for number in range(2, 8)]) == [None] * 6
    now, full = len(script.seen), Fault(0, errno.ENOSPC)
    script.faults = {now: full, now + 2: full}  # both commits, around a checkpoint
    tier.drop([key_of(0)])
    assert [*state(tier)] == [1, 2]  # 16 KiB and more of frames went to the index
    assert_serves(tier, pages=8)
    assert_reopens(tmp_path, tier, pages=8)


def test_an_index_that_sqlite_itself_finds_full(tmp_path):
    """The error is SQLite's own; the pages before it stay, and dropping one makes room."""
    with closing(open_tier(tmp_path, pages=400)) as tier:
        tier.put([record(0)])
        tier._index._connection.execute("PRAGMA max_page_count = 20")
        kept = 0
        while tier.put([record(100 + kept)]) == [None]:
            kept += 1
        assert 0 < kept < 4
        before = state(tier)
        assert isinstance(tier.put([record(120)])[0], CapacityError)
        assert state(tier) == before
        tier.drop([key_of(100)])
        del before[100]
        assert tier.put([record(121)]) == [None]
    with closing(open_tier(tmp_path, pages=400)) as tier:
        assert [*state(tier)] == [*before, 121]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["drop", "clear"])
def test_a_drop_that_is_not_written_is_an_error_and_written_later(tmp_path, number, name):
    tier, script = filled(tmp_path)
    script.faults = {"always": Fault(0, number)}
    with pytest.raises(PrimeblocksError if number == errno.ENOSPC else OSError):
        tier.drop([key_of(0), key_of(1)]) if name == "drop" else tier.clear()
    assert (len(tier), read(tier, [0, 1])) == (0, [None, None])
    # Its frames wait: the file still says that the pages are there.
    assert isinstance(
        tier.put([record(2)])[0], CapacityError if number == errno.ENOSPC else OSError
    )
    script.faults = {}
    assert_serves(tier)
    assert_reopens(tmp_path, tier)


def test_a_clear_that_is_not_written_is_written_on_close(tmp_path):
    tier, script = filled(tmp_path)
    script.faults = {"always": Fault(0, errno.ENOSPC)}
    with pytest.raises(CapacityError):
        tier.clear()
    assert state(tier) == {}
    script.faults = {}
    assert_reopens(tmp_path, tier)


@pytest.mark.parametrize("call", ["sync", "sync_folder", "checkpoint"])
def test_after_a_flush_that_failed_the_next_one_holds(tmp_path, call):
    tier, script = filled(tmp_path)
    script.faults = {call: Fault(0, errno.EIO)}
    with pytest.raises(OSError, match="error"):
        tier.flush()
    assert script.seen[-1][0] == call
    script.faults = {}
    tier.flush()
    assert script.seen[-1][0] == "checkpoint"
    assert_reopens(tmp_path, tier)


@pytest.mark.parametrize("call", ["write", "remove", "sync_folder", "commit"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_index_that_cannot_be_begun_is_begun_later(tmp_path, call, number):
    """At the first page, and where pages of another size are in the way."""
    for sizes in ({}, {"page_bytes": PAGE + 1}):
        script = Script()
        tier = open_tier(tmp_path, system=FaultySystem(script), **sizes)
        script.faults = {call: Fault(0, number)}
        full = number == errno.ENOSPC
        assert isinstance(tier.put([record(0)])[0], CapacityError if full else OSError)
        assert (len(tier), tier.keys()) == (0, [])
        script.faults = {}
        assert_serves(tier)
        assert tier.put([record(0)]) == [None]
        before = state(tier)
        tier.close()
        with closing(open_tier(tmp_path, **sizes)) as again:
            assert state(again) == before


def mounted(path, size):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")


def test_a_read_only_file_system_is_refused_and_one_that_becomes_so_still_reads(tmp_path):
    path = tmp_path / "small"
    mounted(path, "1m")
    try:
        with closing(open_tier(path)) as tier:
            tier.put([record(0)])
            before = state(tier)
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        with pytest.raises(UsageError, match="Read-only"):
            open_tier(path)
        subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)
        with closing(open_tier(path)) as tier:
            assert state(tier) == before
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        open_tier(tmp_path / "file" / "pages")


def test_a_file_system_that_is_full_for_long_keeps_taking_pages(tmp_path):
    """Each page takes the place of another; the index finds room, if need be that of pages."""
    mounted(tmp_path / "small", 64 * FRAME)
    try:
        with closing(open_tier(tmp_path / "small", pages=1000, system=Unsynced())) as tier:
            there, failed = [], 0
            for number in range(3000):
                if failed:
                    with suppress(CapacityError):
                        tier.drop([key_of(there.pop(0))])
                (answer,) = tier.put([record(number % 100, number)])
                failed = failed + 1 if answer else min(failed, 1)
                there += [] if answer else [number % 100]
                assert failed < 5, number
            assert len(tier) > 30
            before = state(tier)
            assert b"" not in before.values()
        with closing(open_tier(tmp_path / "small", pages=1000)) as tier:
            assert state(tier) == before
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


class Unseen(Unsynced):
    """Cannot look at a file of the index at chosen looks."""

    looks, fails = 0, ()

    def stamp(self, file):
        if not isinstance(file, int) and file.name.startswith("index"):
            self.looks += 1
            if self.looks in self.fails:
                raise OSError(errno.EIO, "stat")
        return super().stamp(file)


@pytest.mark.parametrize("look", range(1, 5))
def test_a_look_at_the_index_that_fails_costs_no_page(tmp_path, look):
    system = Unseen()
    tier = open_tier(tmp_path, system=system)
    assert tier.put([record(0), record(1)]) == [None, None]
    system.fails = (system.looks + look,)
    (answer,) = tier.put([record(2)])
    kept = [0, 1] if answer is not None else [0, 1, 2]
    assert system.looks >= system.fails[0]
    assert state(tier) == {number: content_of(number).tobytes() for number in kept}
    tier.drop([key_of(2)])
    assert_serves(tier)
    assert_reopens(tmp_path, tier)


def test_an_index_that_is_removed_after_a_failed_look_is_reported(tmp_path):
    system = Unseen()
    tier = open_tier(tmp_path, system=system)
    assert tier.put([record(0), record(1)]) == [None, None]
    system.fails = (system.looks + 3,)  # The first one after the change.
    assert tier.put([record(2)]) == [None]
    for file in tmp_path.glob("index*"):
        file.unlink()
    (answer,) = tier.put([record(3)])
    assert isinstance(answer, CorruptionError)
    assert tier.put([record(4)]) == [None]
    assert_reopens(tmp_path, tier)

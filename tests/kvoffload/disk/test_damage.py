"""Flipped, cut and vanished bytes: a page that was put under its key, or a miss; then service."""

import os
import shutil
import sqlite3
from contextlib import closing, suppress

import pytest

from primeblocks.errors import CorruptionError, UsageError
from tests.kvoffload.disk.small import (
    FRAME,
    Unsynced,
    aligned,
    assert_serves,
    key_of,
    open_tier,
    read,
    record,
    state,
)

STEPS = [
    ("put", 0, 1),
    ("put", 1, 1),
    ("drop", 0, 0),
    ("put", 2, 1),
    ("put", 1, 2),
    ("put", 3, 1),
    ("drop", 2, 0),
    ("put", 0, 3),
]


class LongLog(sqlite3.Connection):
    """Copies the log when it is asked to, and not where it has grown to some length."""

    def execute(self, sql, *arguments):
        return super().execute(
            sql.replace("wal_autocheckpoint = 4", "wal_autocheckpoint = 0"), *arguments
        )


class SmallPages(Unsynced):
    """An index of a few KiB, all of which can be damaged, and all of its changes in the log."""

    connection = LongLog

    def connect(self, path):
        connection = super().connect(path)
        connection.execute("PRAGMA page_size = 512")
        return connection


def tier_of(path):
    tier = open_tier(path, system=SmallPages())
    with suppress(CorruptionError):  # a store reads all keys when it opens a tier
        tier.keys()
    return tier


def files_of(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


class History:
    """A short history, or its first steps; the states after each, and the files.

    `killed` are the files as a kill after each state leaves them, `closed` those of the last one
    after `close`.
    """

    def __init__(self, path, *, flush_at=(), steps=8):
        self.path = path
        self.states, self.killed = [], []
        with closing(tier_of(path)) as tier:
            self._note(tier)
            for at, (what, number, value) in enumerate(STEPS[:steps]):
                if what == "put":
                    assert tier.put([record(number, value)]) == [None]
                else:
                    tier.drop([key_of(number)])
                if at in flush_at:
                    tier.flush()
                self._note(tier)
        self.closed = files_of(path)
        self.ever = {each for one in self.states for each in one.items()}

    def _note(self, tier):
        self.states.append(state(tier))
        self.killed.append(files_of(self.path))

    def write(self, files):
        for each in self.path.iterdir():
            each.unlink()
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        return self.path

    def found(self, files):
        """What a new owner of these files serves."""
        with closing(tier_of(self.write(files))) as tier:
            return {number: content for number, content in state(tier).items() if content}


def flipped(files, name, at, flip):
    data = bytearray(files[name])
    data[at] ^= flip
    return files | {name: bytes(data)}


def assert_normal(path):
    """The tier serves what it found, takes new pages, and finds them again."""
    with closing(tier_of(path)) as tier:
        tier.drop([key_of(number) for number, content in state(tier).items() if not content])
        assert_serves(tier)
        assert tier.put([record(0, 9)]) == [None]
        after = state(tier)
    with closing(tier_of(path)) as tier:
        assert state(tier) == after


def test_a_flipped_byte_of_the_index_makes_no_wrong_page(tmp_path, full):
    """One bit of every byte of the header, and of one byte in seven behind it; or of all."""
    history = History(tmp_path)
    kept, size = 0, len(history.closed["index"])
    for at in range(size) if full else (*range(100), *range(100, size, 7)):
        files = flipped(history.closed, "index", at, (0x01, 0x80, 0xFF)[at % 3])
        right = history.found(files)
        assert right.items() <= history.ever, at
        kept += len(right)
        if at % 11 == 0 or at == 18:  # which may forbid all writes
            assert_normal(history.write(files))
    assert kept > 100


def test_a_flipped_byte_of_the_log_makes_no_wrong_page(tmp_path):
    """Changes after the damage are undone, so a page that was dropped may be there again."""
    history = History(tmp_path)
    for at in range(0, len(history.killed[-1]["index-wal"]), 29):
        files = flipped(history.killed[-1], "index-wal", at, 0x10)
        assert history.found(files).items() <= history.ever, at
        if at % 11 == 0:
            assert_normal(history.write(files))


def test_damage_after_a_flush_keeps_the_flushed_pages(tmp_path):
    history = History(tmp_path, flush_at=[4])
    flushed, kept = history.states[5], 0
    for at in range(0, len(history.killed[-1]["index-wal"]), 29):
        files = flipped(history.killed[-1], "index-wal", at, 0x10)
        right = history.found(files)
        # Changes since the flush may be undone, older ones not.
        since = {each for one in history.states[5:] for each in one.items()}
        assert right.items() <= since
        assert right[1] == flushed[1]
        kept += len(right)
        if at % 11 == 0:
            assert_normal(history.write(files))
    assert kept > 100


def test_an_older_log_makes_no_wrong_page(tmp_path):
    """The log of some time before a flush, in the place of the one that the flush emptied."""
    history = History(tmp_path, flush_at=[1, 6], steps=7)
    assert history.killed[-1]["index-wal"] == b""
    log = history.killed[-2]["index-wal"]
    for length in (*range(0, len(log), 53), len(log)):
        right = history.found(history.killed[-1] | {"index-wal": log[:length]})
        assert right.items() <= history.ever, length
        assert_normal(tmp_path)


def test_an_index_that_was_cut_makes_no_wrong_page(tmp_path):
    history = History(tmp_path, flush_at=[4])
    for files, name in ((history.closed, "index"), (history.killed[-1], "index-wal")):
        for length in range(0, len(files[name]), 19):
            right = history.found(files | {name: files[name][:length]})
            assert right.items() <= history.ever, length
            # What was flushed is in the index.
            assert name == "index" or right[1] == history.states[5][1]
            if length % 11 == 0:
                assert_normal(tmp_path)


def test_a_log_that_a_kill_has_torn_is_the_state_before(tmp_path):
    history = History(tmp_path)
    for after in range(2, len(STEPS) + 1):
        before, files = history.killed[after - 1], history.killed[after]
        log, was = files["index-wal"], len(before["index-wal"])
        assert was < len(log)
        for length in range(was, len(log), 31):
            torn = before | {"pages": files["pages"], "index-wal": log[:length]}
            # Its own change alone may have taken the place of a page.
            assert history.found(torn) == history.states[after - 1], (after, length)
        whole = before | {"pages": files["pages"], "index-wal": log}
        assert history.found(whole) == history.states[after]


def test_a_damaged_lock_costs_nothing_and_keeps_the_folder_ours(tmp_path):
    history = History(tmp_path)
    for at in range(len(history.closed["lock"])):
        for damaged in (
            flipped(history.closed, "lock", at, 0x10),
            history.closed | {"lock": history.closed["lock"][:at]},
        ):
            assert history.found(damaged) == history.states[-1]
            with closing(tier_of(tmp_path)) as tier:
                assert tier.put([record(1, 5)]) == [None]
            assert (tmp_path / "lock").read_bytes()[:8] == b"pbkvix01"


def test_an_index_that_is_damaged_while_open_costs_its_pages_once(tmp_path, caplog):
    numbers = range(100, 108)  # whose keys are long
    with closing(open_tier(tmp_path, pages=8)) as tier:
        assert tier.put([record(number) for number in numbers]) == [None] * 8
        tier.flush()
        tier._index._connection.execute("PRAGMA shrink_memory")
        size = os.path.getsize(tmp_path / "index")
        with (tmp_path / "index").open("r+b") as file:
            file.seek(4096)
            file.write(bytes([0x5A]) * (size - 4096))
        found = tier.get([key_of(103), key_of(104)], into=[aligned(), aligned()])
        assert all(isinstance(each, CorruptionError) for each in found)
        assert (len(tier), tier.keys(), tier.holds([key_of(103)])) == (0, [], [False])
        assert tier.put([record(3)]) == [None]
        assert_serves(tier, pages=8)
        before = state(tier)
    with closing(open_tier(tmp_path, pages=8)) as tier:
        assert state(tier) == before


def test_flipped_bytes_of_pages_show_in_the_digest(tmp_path):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(0), record(1)]) == [None, None]
        good = read(tier, [0, 1])
    whole = (tmp_path / "pages").read_bytes()
    assert len(whole) == 2 * FRAME
    for at in range(len(good[0])):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        (tmp_path / "pages").write_bytes(damaged)
        with closing(open_tier(tmp_path)) as tier:
            assert read(tier, [0, 1]) == [b"", good[1]]
    swapped = whole[FRAME:] + whole[:FRAME]
    (tmp_path / "pages").write_bytes(swapped)
    with closing(open_tier(tmp_path)) as tier:
        assert read(tier, [0, 1]) == [b"", b""]


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_pages_that_the_file_has_no_longer_are_forgotten(tmp_path, frames):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(n) for n in range(3)]) == [None] * 3
        before = state(tier)
    os.truncate(tmp_path / "pages", frames * FRAME + 100)
    found = {number: before[number] for number in range(frames)}
    with closing(open_tier(tmp_path)) as tier:
        assert state(tier) == found
    assert_normal(tmp_path)


def removed(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replaced(path):
    path.rename(path.with_name("old"))
    if (old := path.with_name("old")).is_dir():
        path.mkdir()
    else:
        path.write_bytes(old.read_bytes())


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("put", [False, True])
@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((name, cut) for name in ("pages", "index", "index-wal")),  # a cut lock is written again
        *((name, removed) for name in ("pages", "index", "index-wal", "lock", "")),
        *((name, replaced) for name in ("pages", "index", "index-wal", "lock", "")),
    ],
)
def test_nothing_is_acknowledged_into_files_that_are_gone(tmp_path, name, harm, put):
    path, copy = tmp_path / "tier", tmp_path / "copy"
    with closing(open_tier(path, pages=8)) as tier:
        assert tier.put([record(n) for n in range(3)]) == [None] * 3
        before = state(tier)
        harm(path / name)
        assert harm is cut or state(tier) == before
        lives = name.startswith("index") or harm is cut
        if put:
            kept = lives and name == "pages"  # in front of the cut
            assert (tier.put([record(3)]) == [None]) == kept
        with pytest.raises(CorruptionError, match="removed|lost") as caught:
            tier.flush()
        assert str(path) in str(caught.value)
        assert (tier.put([record(4)]) == [None]) == lives
        if lives:
            tier.flush()
            served = state(tier)
            shutil.copytree(path, copy)  # as a kill would leave it
            with closing(open_tier(copy, pages=8)) as after:
                assert state(after) == served
                assert 4 in served
        else:
            with pytest.raises(CorruptionError, match="Close the tier"):
                tier.drop([key_of(0)])
    if (name, harm) == ("lock", removed):
        with pytest.raises(UsageError, match="another application"):
            open_tier(path)
    else:
        assert_normal(path)

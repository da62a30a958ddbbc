"""Flipped, cut and vanished bytes: a right page or a miss, then normal service."""

import os
import shutil
from contextlib import closing

import pytest

from primeblocks.errors import UsageError
from tests.kvoffload.disk.small import (
    FRAME,
    assert_serves,
    key_of,
    open_tier,
    read,
    record,
    state,
)


def write_history(path, *, flush_at=(), steps=8):
    """A short history, or its first steps; the states after each."""
    states = [{}]
    with closing(open_tier(path)) as tier:
        for at, (what, number, value) in enumerate(
            [
                ("put", 0, 1),
                ("put", 1, 1),
                ("drop", 0, 0),
                ("put", 2, 1),
                ("put", 1, 2),
                ("put", 3, 1),
                ("drop", 2, 0),
                ("put", 0, 3),
            ][:steps]
        ):
            if what == "put":
                assert tier.put([record(number, value)]) == [None]
            else:
                tier.drop([key_of(number)])
            states.append(state(tier))
            if at in flush_at:
                tier.flush()
    return states


class Files:
    """The files of a history, to be put back after each damage."""

    def __init__(self, path):
        self.journal, self.pages = (path / "journal").read_bytes(), (path / "pages").read_bytes()
        self.path = path

    def damaged(self, journal):
        (self.path / "journal").write_bytes(journal)
        (self.path / "pages").write_bytes(self.pages)
        return self.path

    def flipped(self, at, flip):
        return self.damaged(
            self.journal[:at] + bytes([self.journal[at] ^ flip]) + self.journal[at + 1 :]
        )


def assert_normal(path, found):
    """The tier serves what it found, takes new pages, and finds them again."""
    with closing(open_tier(path)) as tier:
        assert state(tier) == found
        assert_serves(tier)
        assert tier.put([record(0, 9)]) == [None]
        after = state(tier)
    with closing(open_tier(path)) as tier:
        assert state(tier) == after


def test_a_flipped_byte_of_the_journal_costs_pages_and_brings_none_back(tmp_path):
    states = write_history(tmp_path)
    files, kept = Files(tmp_path), 0
    for at in range(len(files.journal)):
        path = files.flipped(at, (0x01, 0x80, 0xFF)[at % 3])
        with closing(open_tier(path)) as tier:
            found = state(tier)
        assert found.items() <= states[-1].items(), at
        kept += len(found)
        if at % 11 == 0:
            assert_normal(path, found)
    assert kept > len(files.journal)  # what came after the damage is kept


def test_damage_after_a_flush_keeps_the_flushed_pages(tmp_path):
    states = write_history(tmp_path, flush_at=[4])
    files, flushed = Files(tmp_path), states[5]
    behind_the_mark = files.journal.rindex(key_of(3).encode()) + 20
    for at in range(0, len(files.journal), 5):
        path = files.flipped(at, 0x10)
        with closing(open_tier(path)) as tier:
            found = state(tier)
        # Drops since the flush may be undone, older ones not.
        assert all(
            (n, content) in states[-1].items() | flushed.items() for n, content in found.items()
        )
        if at > behind_the_mark:
            assert found[1] == flushed[1]
        assert_normal(path, found)


def test_damage_before_a_flush_brings_nothing_back(tmp_path):
    states = write_history(tmp_path, flush_at=[1, 6], steps=7)
    files = Files(tmp_path)
    last_mark = files.journal.rindex(key_of(2).encode())
    for at in range(0, last_mark, 5):
        with closing(open_tier(files.flipped(at, 0x10))) as tier:
            assert state(tier).items() <= states[-1].items(), at


def test_damage_after_the_journal_was_rewritten_brings_nothing_back(tmp_path):
    sizes = [0]
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(0)]) == [None]
        while os.path.getsize(tmp_path / "journal") >= sizes[-1]:
            sizes.append(os.path.getsize(tmp_path / "journal"))
            assert tier.put([record(100, len(sizes))]) == [None]
        rewritten = os.path.getsize(tmp_path / "journal")
        tier.drop([key_of(0)])
        assert tier.put([record(1)]) == [None]
    files = Files(tmp_path)
    for at in range(rewritten, len(files.journal), 5):
        with closing(open_tier(files.flipped(at, 0x10))) as tier:
            assert not tier.holds([key_of(0)])[0], at


def test_a_journal_that_was_cut_is_a_prefix(tmp_path):
    states = write_history(tmp_path)
    files = Files(tmp_path)
    for length in range(len(files.journal)):
        path = files.damaged(files.journal[:length])
        with closing(open_tier(path)) as tier:
            found = state(tier)
        # Frames of pages that were dropped later may have been used again: their digests tell.
        right = {number: content for number, content in found.items() if content}
        assert any(right.items() <= each.items() and found.keys() == each.keys() for each in states)
    assert len(found) >= 2


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
    assert_normal(tmp_path, found)


def test_pages_cut_off_while_open_are_errors(tmp_path):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(n) for n in range(3)]) == [None] * 3
        os.truncate(tmp_path / "pages", FRAME)
        first, *rest = read(tier, range(3))
        assert first == record(0).content.tobytes()
        assert rest == [None, None]
        assert tier.put([record(1), record(2)]) == [None, None]
        assert None not in read(tier, range(3))


@pytest.mark.parametrize("name", ["pages", "journal", "lock"])
def test_a_file_that_vanished_costs_pages(tmp_path, name):
    with closing(open_tier(tmp_path)) as tier:
        assert tier.put([record(0), record(1)]) == [None, None]
        before = state(tier)
        (tmp_path / name).unlink()
        assert state(tier) == before
        assert tier.put([record(2)]) == [None]
    if name == "lock":
        with pytest.raises(UsageError, match="something else"):
            open_tier(tmp_path)
        (tmp_path / "lock").touch()
        return
    assert_normal(tmp_path, {})


def test_a_folder_that_vanished_is_an_answer(tmp_path):
    with closing(open_tier(tmp_path / "pages")) as tier:
        assert tier.put([record(0)]) == [None]
        shutil.rmtree(tmp_path / "pages")
        assert read(tier, [0]) == [record(0).content.tobytes()]
        assert tier.put([record(1)]) == [None]
    assert_normal(tmp_path / "pages", {})

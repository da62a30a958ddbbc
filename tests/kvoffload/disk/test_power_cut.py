"""Power cuts, simulated: a page or a miss, and what was flushed is there."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from primeblocks.errors import CorruptionError
from tests.kvoffload.disk.memory_system import MemorySystem, PowerCut
from tests.kvoffload.disk.small import (
    assert_serves,
    content_of,
    key_of,
    open_tier,
    read,
    record,
    state,
)

NUMBERS = [0, 1, 2, 3, 4, 5, 6, 100, 101, 102]
PAGES = 6


class Expected:
    """Which contents may be found under each number, and which must."""

    def __init__(self):
        self.now = {}
        self.may = {number: set() for number in NUMBERS}
        self.must = {}

    def touch(self, number, content=None):
        """It is about to be put or dropped."""
        if content is not None:
            self.may[number].add(content)
        self.must.pop(number, None)

    def forget_before(self):
        """Nothing but what is there now may come back."""
        self.may = {n: {self.now[n]} if n in self.now else set() for n in NUMBERS}


def play(chance, tier, expected, system):
    """One random operation."""
    what = chance.choices(["put", "drop", "flush", "bad flush", "clear"], [6, 4, 1, 0.5, 0.3])[0]
    numbers = chance.sample(NUMBERS, chance.randint(1, 3))
    if what == "put":
        value = chance.randrange(1000)
        records = [record(number, value) for number in numbers]
        contents = {number: content_of(number, value).tobytes() for number in numbers}
        for number in numbers:
            expected.touch(number, contents[number])
        answers = tier.put(records)
        kept = [n for n, answer in zip(numbers, answers, strict=True) if answer is None]
        expected.now |= {number: contents[number] for number in kept}
    elif what == "drop":
        for number in numbers:
            expected.touch(number)
        tier.drop([key_of(number) for number in numbers])
        expected.now = {n: each for n, each in expected.now.items() if n not in numbers}
    elif what == "bad flush":
        system.failing = {"pages": chance}
        with suppress(OSError):
            tier.flush()
        assert not system.failing
    elif what == "flush":
        tier.flush()
        expected.forget_before()
        expected.must = dict(expected.now)
    else:
        expected.must = {}
        tier.clear()
        expected.now = {}
        expected.forget_before()
    assert state(tier) == expected.now


def test_a_power_cut_leaves_right_pages_and_all_that_was_flushed(full):
    seen = {"kept": 0, "lost": 0, "undone": 0, "mismatched": 0}
    for seed in range(5000 if full else 16):
        chance = random.Random(seed)
        system, path, expected = MemorySystem(), Path("/pages"), Expected()
        for _ in range(3):
            tier = open_tier(path, pages=PAGES, system=system)
            assert state(tier) == expected.now
            system.calls_left = chance.randrange(100)
            with suppress(PowerCut):
                while True:
                    play(chance, tier, expected, system)
            system = system.cut(chance)
            tier = open_tier(path, pages=PAGES, system=system)
            found = dict(zip(NUMBERS, read(tier, NUMBERS), strict=True))
            for number, content in found.items():
                if number in expected.must:
                    assert content == expected.must[number], (seed, number)
                assert not content or content in expected.may[number], (seed, number)
                seen["kept"] += bool(content) and content == expected.now.get(number)
                seen["lost"] += content is None and number in expected.now
                seen["undone"] += bool(content) and content != expected.now.get(number)
                seen["mismatched"] += content == b""
            # The store drops what does not match.
            tier.drop([key_of(number) for number, content in found.items() if content == b""])
            expected.now = {number: content for number, content in found.items() if content}
            expected.must = {}
            expected.forget_before()
            tier.close()
        assert_serves(open_tier(path, pages=PAGES, system=system), pages=PAGES)
    assert min(seen.values()) > 5, seen


def test_a_power_cut_during_a_flush_keeps_what_was_flushed_before(full):
    calls = 0
    for at in range(200 if full else 42):
        system, chance = MemorySystem(), random.Random(at)
        tier = open_tier(Path("/pages"), pages=PAGES, system=system)
        tier.put([record(0)])
        tier.flush()
        tier.put([record(100), record(1)])  # rows of many sectors
        system.calls_left = at % 7
        try:
            tier.flush()
        except PowerCut:
            calls = max(calls, at % 7)
        tier = open_tier(Path("/pages"), pages=PAGES, system=system.cut(chance))
        assert read(tier, [0]) == [record(0).content.tobytes()], at
    assert calls == 2  # the data, the folder, the checkpoint


def test_a_flush_after_one_that_failed_keeps_every_page(full):
    for seed in range(40 if full else 15):
        chance, system = random.Random(seed), MemorySystem()
        tier = open_tier(Path("/pages"), pages=PAGES, system=system)
        tier.put([record(0)])
        tier.flush()
        tier.put([record(number) for number in (1, 2, 3, 4)])
        tier.drop([key_of(4)])
        system.failing = {"pages": chance}
        with pytest.raises(OSError, match="error"):
            tier.flush()
        tier.flush()
        found = read(open_tier(Path("/pages"), pages=PAGES, system=system.cut(chance)), range(4))
        assert found == [record(number).content.tobytes() for number in range(4)], seed


def test_a_flush_says_which_pages_a_failed_one_lost():
    chance, system = random.Random(0), MemorySystem()
    tier = open_tier(Path("/pages"), pages=PAGES, system=system)
    tier.put([record(number) for number in (0, 1, 2)])
    system.failing = {"pages": chance}
    with pytest.raises(OSError, match="error"):
        tier.flush()
    file = system._names[Path("/pages/pages")]
    file.current[4096] ^= 1  # some file systems show what is on the disk, not what was written
    with pytest.raises(CorruptionError, match="1 pages of /pages were lost"):
        tier.flush()
    assert tier.keys() == [key_of(0), key_of(2)]
    tier.flush()
    assert tier.put([record(1)]) == [None]
    assert_serves(tier, pages=PAGES)


def test_a_flush_keeps_the_file_as_well_as_its_bytes():
    path = Path("/pages")
    for seed in range(8):
        system = MemorySystem()
        tier = open_tier(path, system=system)
        tier.put([record(1)])
        tier.close()
        system.remove(path / "pages")  # and so made anew, beside an index that is left as it is
        system.sync_folder(path)
        tier = open_tier(path, system=system)
        tier.put([record(0)])
        tier.flush()
        tier = open_tier(path, system=system.cut(random.Random(seed)))
        assert read(tier, [0, 1]) == [record(0).content.tobytes(), None]

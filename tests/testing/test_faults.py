import asyncio

import pytest

from primeblocks.errors import UsageError
from primeblocks.testing.faults import (
    FaultyTransport,
    ManualClock,
    flip_byte,
    truncate,
)


class _Pipe:
    name = "pipe"

    def __init__(self):
        self.sent = []

    def send(self, value, *, twice=False):
        self.sent += [value, value] if twice else [value]
        return len(self.sent)


def test_a_script_decides_call_by_call():
    pipe = _Pipe()
    faulty = FaultyTransport(
        pipe, {"send": [None, ConnectionError("cut"), lambda call: None, lambda call: call() * 100]}
    )
    assert faulty.send("a", twice=True) == 2
    with pytest.raises(ConnectionError, match="cut"):
        faulty.send("b")
    assert faulty.send("c") is None
    assert faulty.send("d") == 300
    assert faulty.send("e") == 4
    assert pipe.sent == ["a", "a", "d", "e"]
    assert faulty.calls == ["send"] * 5
    assert faulty.name == "pipe"


def test_a_script_for_a_method_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="_Pipe has no method receive"):
        FaultyTransport(_Pipe(), {"receive": [None]})


def test_a_manual_clock_wakes_sleepers_in_order():
    async def story():
        clock, woken = ManualClock(start_s=5.0), []

        async def sleeper(seconds):
            await clock.sleep(seconds)
            woken.append(seconds)

        tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3.0, 1.0, 9.0)]
        await asyncio.sleep(0)
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(2.5)
        await asyncio.gather(*tasks[:2])
        assert woken == [1.0, 3.0]
        assert clock.now() == 8.0
        assert not tasks[2].done()
        tasks[2].cancel()
        await clock.sleep(0)

    asyncio.run(story())


def test_a_sleeper_that_gave_up_does_not_disturb_the_clock():
    async def story():
        clock = ManualClock()
        task = asyncio.create_task(clock.sleep(1.0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        clock.advance(1.0)

    asyncio.run(story())


def test_time_does_not_go_back():
    with pytest.raises(UsageError, match="-1"):
        ManualClock().advance(-1.0)


def test_a_byte_is_flipped_in_place(tmp_path):
    file = tmp_path / "page"
    file.write_bytes(bytes([1, 2, 3]))
    flip_byte(file, 1)
    flip_byte(file, -1)
    assert file.read_bytes() == bytes([1, 2 ^ 0xFF, 3 ^ 0xFF])
    for offset in (3, -4):
        with pytest.raises(UsageError, match="3 bytes"):
            flip_byte(file, offset)


def test_a_file_is_cut(tmp_path):
    file = tmp_path / "page"
    file.write_bytes(b"abcdef")
    truncate(file, size_bytes=2)
    assert file.read_bytes() == b"ab"
    with pytest.raises(UsageError, match="cannot be cut to 2"):
        truncate(file, size_bytes=2)

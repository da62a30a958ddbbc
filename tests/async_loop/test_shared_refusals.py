"""Refusals of the buffer of several processes, and bytes that changed in it."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primeblocks.async_loop import AsyncLoop, StalenessPolicy
from primeblocks.async_loop.shared import SharedRolloutBuffer, arena, file
from primeblocks.async_loop.shared import buffer as shared_buffer
from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    UnsupportedError,
    UsageError,
)
from tests.deadlines import HANG_S

from .conftest import make_group
from .shared_site import SHM, Child, name

__all__ = ["name"]  # A fixture.
ROOM = {"capacity": 4, "capacity_bytes": 64 << 10, "staleness": StalenessPolicy(0, "drop")}
pytestmark = pytest.mark.stress


@pytest.fixture
def buffer(name):
    with SharedRolloutBuffer.create(name, **ROOM) as buffer:
        yield buffer


def test_sizes_and_names_that_cannot_be_are_refused(name, buffer):
    for change, error, said in (
        ({"capacity": 0}, UsageError, "1 group.*got 0"),
        ({"capacity_bytes": 1023}, UsageError, "1,024 bytes.*1,023"),
        ({"capacity_bytes": 1 << 50}, CapacityError, "/dev/shm has"),
    ):
        with pytest.raises(error, match=said):
            SharedRolloutBuffer.create(f"{name}-2", **ROOM | change)
    for wrong in ("", "../x", "a/b", "ü"):
        with pytest.raises(UsageError, match="a name is made of"):
            SharedRolloutBuffer.create(wrong, **ROOM)
    with pytest.raises(UsageError, match="Create it first"):
        SharedRolloutBuffer.attach(f"{name}-2")
    with pytest.raises(UsageError, match="cannot take 5 groups"):
        buffer.take(5, version=0, timeout_s=0)
    with pytest.raises(CapacityError, match=r"6\d,\d\d\d bytes.*65,536\. Raise capacity_bytes"):
        buffer.put(make_group("a" * (65 << 10)), timeout_s=0)
    with pytest.raises(UnsupportedError, match=r"ordinal 0\['prompt'\] is a set"):
        buffer.put(make_group({1}), timeout_s=0)
    assert buffer.held_bytes == 0
    assert not (SHM / f"primeblocks-{name}-2").exists()


def test_only_this_user_may_open_it_and_only_with_the_same_fields(name, monkeypatch, tmp_path):
    path = SHM / f"primeblocks-{name}"
    SharedRolloutBuffer.create(name, **ROOM).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        for call in (SharedRolloutBuffer.attach, lambda it: SharedRolloutBuffer.create(it, **ROOM)):
            with pytest.raises(UsageError, match="belongs to user"):
                call(name)
    with monkeypatch.context() as newer:
        newer.setattr(shared_buffer, "_FIELDS", [["prompt"], ["tokens"]])
        with pytest.raises(UnsupportedError, match="same version"):
            SharedRolloutBuffer.attach(name)
    with monkeypatch.context() as without:
        without.setattr(file, "_FOLDER", tmp_path / "shm")
        with pytest.raises(UnsupportedError, match="no file can be made in"):
            SharedRolloutBuffer.create(name, **ROOM)
    SharedRolloutBuffer.attach(name).close()  # All as it was.


def test_a_loop_that_records_what_it_starts_refuses_groups_of_others(buffer):
    with pytest.raises(UsageError, match=r"RolloutBuffer of its own; got a SharedRolloutBuffer"):
        AsyncLoop(
            prompts=(), generate=None, train=None, publish=None, buffer=buffer,
            batch_size=1, max_in_flight=1,
        )  # fmt: skip


def test_a_process_opens_a_buffer_once_and_a_fork_for_itself(name, buffer):
    for again in (
        SharedRolloutBuffer.attach,
        lambda name: SharedRolloutBuffer.create(name, **ROOM),
    ):
        with pytest.raises(UsageError, match="open already"):
            again(name)

    def body(say):
        with pytest.raises(UsageError, match="fork"):
            buffer.put(make_group("a"), timeout_s=0)
        attached = SharedRolloutBuffer.attach(name)
        buffer.close()  # Does not end the locks of the other.
        gc.collect()
        say(os.getpid())
        attached.put(make_group("a"), timeout_s=0)
        signal.pause()

    child = Child(body)
    taken = buffer.take(1, version=0, timeout_s=HANG_S)
    assert [group.prompt for group in taken] == ["a"]
    buffer.close()
    with pytest.raises(ClosedError, match="closed in this process"):
        buffer.take(1, version=0, timeout_s=0)
    with pytest.raises(UsageError, match="has it open"):  # The child has.
        SharedRolloutBuffer.create(name, **ROOM)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    SharedRolloutBuffer.create(name, **ROOM).close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_changed_byte_of_a_group_is_found(name, data):
    with SharedRolloutBuffer.create(name, **ROOM) as buffer:
        path = SHM / f"primeblocks-{name}"
        empty = read(path)
        buffer.put(make_group("first"), timeout_s=0)
        before = read(path)
        entry = before.index(b'{"dict"') // 1024 * 1024  # Cells are aligned to their size.
        size = before.index(b"\0" * 1024, entry) - entry
        assert empty[entry : entry + size] == bytes(size)
        at = entry + data.draw(st.integers(0, size - 1))
        flip(path, at, data.draw(st.integers(1, 255)))
        buffer.put(make_group("second"), timeout_s=0)
        with pytest.raises(CorruptionError, match=r"ordinal was 0.*ask its prompt again"):
            buffer.take(1, version=0, timeout_s=0)
        assert [group.prompt for group in buffer.take(1, version=0, timeout_s=0)] == ["second"]
        assert buffer.held_bytes == 0


@pytest.mark.parametrize("word", ["SIZE", "HEADER_SIZE", "OLDEST_VERSION", "DIGEST"])
@pytest.mark.parametrize("by", [1, 64, 255])
def test_a_changed_word_of_a_group_is_found(name, buffer, word, by):
    buffer.put(make_group("first"), timeout_s=0)
    first = file.HEADER_BYTES + 8 * arena.WORDS
    flip(SHM / f"primeblocks-{name}", first + 8 * arena.Word[word], by)
    with pytest.raises(CorruptionError, match="checksum"):
        buffer.take(1, version=0, timeout_s=0)
    assert (len(buffer), buffer.held_bytes) == (0, 0)


def test_a_file_that_was_damaged_is_refused(name):
    path = SHM / f"primeblocks-{name}"
    for damage, said in (
        (lambda: flip(path, 0, 1), "damaged"),
        (lambda: flip(path, 30, 1), "damaged"),
        (lambda: os.truncate(path, 8192), "settings ask for"),
        (lambda: os.truncate(path, 0), "less than its header"),
    ):
        SharedRolloutBuffer.create(name, **ROOM).close()
        damage()
        with pytest.raises(CorruptionError, match=said):
            SharedRolloutBuffer.attach(name)


def read(path):
    # Never closed, as long as the buffer is in use: that would end its locks.
    fd = os.open(path, os.O_RDONLY)
    return os.pread(fd, os.fstat(fd).st_size, 0)


def flip(path, at, by):
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ by]), at)

"""What every tier does, and what only a disk can suffer."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from primeblocks.errors import CapacityError, CorruptionError, PlanError, UsageError
from primeblocks.kvoffload import DiskTier, HostTier, PageKey
from primeblocks.kvoffload.page import checksum

PAGE, EXTRA = 48, 64


def key_of(number, version=None):
    return PageKey("s", bytes([number]), version=version)


def content(number, extra=0):
    return np.full(PAGE + extra, number, dtype=np.uint8)


def put(tier, number, extra=0):
    data = content(number, extra)
    tier.put(key_of(number), data, checksum(key_of(number), data))


def get(tier, number):
    into = np.zeros(PAGE + EXTRA, np.uint8)
    found = tier.get(key_of(number), into=into)
    return None if found is None else (into[: found[0]].tobytes(), found[1])


@pytest.fixture(params=["host", "disk"])
def tier(request, host, disk):
    with_room = {"host": host, "disk": disk}[request.param](3)
    yield with_room
    with_room.close()


def test_a_tier_gives_back_what_it_was_given(tier):
    for number, extra in ((1, 0), (2, EXTRA), (1, 5)):
        put(tier, number, extra)
        data = content(number, extra)
        assert get(tier, number) == (data.tobytes(), checksum(key_of(number), data))
    assert tier.keys() == [key_of(1), key_of(2)]
    assert len(tier) == 2


def test_a_full_tier_refuses_and_keeps_what_it_has(tier):
    for number in range(3):
        put(tier, number)
    with pytest.raises(CapacityError, match="3"):
        put(tier, 3)
    put(tier, 2, 5)
    assert [get(tier, n) is not None for n in range(4)] == [True, True, True, False]
    tier.drop(key_of(0))
    tier.drop(key_of(0))
    put(tier, 3)
    assert get(tier, 0) is None
    assert get(tier, 3)[0] == content(3).tobytes()


@pytest.mark.parametrize("sizes", [(0, 0, 100), (48, -1, 100), (48, 64, 111)])
def test_a_tier_without_room_for_a_page_is_refused(sizes, tmp_path):
    page, extra, capacity = sizes
    how = {"page_bytes": page, "attachment_bytes": extra, "capacity_bytes": capacity}
    with pytest.raises(PlanError, match=str(capacity)):
        HostTier(**how)
    with pytest.raises(PlanError, match=str(capacity)):
        DiskTier(tmp_path, **how)


def test_a_disk_survives_a_restart_and_forgets_what_it_dropped(disk):
    first = disk(3)
    for number in range(3):
        put(first, number, number)
    first.drop(key_of(1))
    first.close()
    second = disk(3)
    assert get(second, 2)[0] == content(2, 2).tobytes()
    assert get(second, 1) is None
    assert {*second.keys()} == {key_of(0), key_of(2)}
    second.close()
    assert len(disk(1)) == 1


def test_a_restart_throws_away_what_is_no_page(disk, tmp_path):
    first = disk(3)
    for number in range(3):
        put(first, number)
    first.close()
    torn, swapped, whole = sorted((tmp_path / "pages").glob("??/*.page"))
    torn.write_bytes(torn.read_bytes()[:20])
    swapped.write_bytes(whole.read_bytes())
    torn.with_suffix(".tmp").write_bytes(b"left by a crash")
    second = disk(3)
    assert len(second) == 1
    assert [*(tmp_path / "pages").glob("??/*")] == [whole]


def test_a_directory_has_one_owner(disk):
    first = disk(2)
    with pytest.raises(UsageError, match="another store"):
        disk(2)
    first.close()
    disk(2).close()


OWN = """
import sys
from primeblocks.kvoffload import DiskTier
tier = DiskTier(sys.argv[1], capacity_bytes=1000, page_bytes=100)
print("owned", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_the_directory_free(tmp_path):
    command = [sys.executable, "-c", OWN, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "owned\n"
        with pytest.raises(UsageError, match="another store"):
            DiskTier(tmp_path, capacity_bytes=1000, page_bytes=100)
        other.kill()
        other.wait()
    DiskTier(tmp_path, capacity_bytes=1000, page_bytes=100).close()


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        DiskTier(tmp_path / "file" / "pages", capacity_bytes=1000, page_bytes=100)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EROFS, OSError)],
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_write_leaves_nothing_behind(disk, tmp_path, number, kind, at):
    calls = []

    def write(descriptor, data):
        calls.append(len(data))
        if broken and len(calls) > at:
            raise OSError(number, os.strerror(number))
        return os.write(descriptor, data)

    broken = False
    tier = disk(3, write=write)
    put(tier, 0)
    calls.clear()
    broken = True
    for victim in (0, 1):
        with pytest.raises(kind) as caught:
            put(tier, victim, 7)
        assert os.strerror(number) in str(caught.value)
        calls.clear()
    assert [*(tmp_path / "pages").glob("??/*.tmp")] == []
    assert get(tier, 0)[0] == content(0).tobytes()
    assert get(tier, 1) is None
    broken = False
    put(tier, 1)
    assert get(tier, 1)[0] == content(1).tobytes()


def test_short_writes_are_continued(disk):
    tier = disk(1, write=lambda descriptor, data: os.write(descriptor, data[:7]))
    put(tier, 5, 9)
    assert get(tier, 5)[0] == content(5, 9).tobytes()


def test_every_torn_or_changed_byte_is_noticed(disk, tmp_path):
    tier = disk(2)
    put(tier, 1, 3)
    (file,) = (tmp_path / "pages").glob("??/*.page")
    whole = file.read_bytes()
    good = get(tier, 1)
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            file.write_bytes(damaged)
            try:
                data, digest = get(tier, 1)
            except CorruptionError:
                continue
            assert checksum(key_of(1), np.frombuffer(data, np.uint8)) != digest
    file.write_bytes(whole)
    assert get(tier, 1) == good


def test_a_vanished_file_is_noticed(disk, tmp_path):
    tier = disk(2)
    put(tier, 1)
    for file in (tmp_path / "pages").glob("??/*.page"):
        file.unlink()
    with pytest.raises(CorruptionError, match="vanished"):
        get(tier, 1)

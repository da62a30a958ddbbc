"""Versioned files in one directory: what is reused and what is kept, and what is left alone."""

import errno
import gc
import os
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from primeblocks.errors import CapacityError, CorruptionError, TransferError, UsageError
from primeblocks.weightsync import describe, plan_sync
from primeblocks.weightsync.held import copy_bucket
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import blobs, directory, directory_commits
from primeblocks.weightsync.transports.blobs import DiskBlobs, MemoryBlobs
from primeblocks.weightsync.transports.place import DiskPlace, PrivatePlace
from tests.weightsync.contents import Versions, plan_of_bytes

SIZE = 1000


@pytest.fixture(params=[False, True], ids=["reused", "durable"])
def make(request, tmp_path):
    """Views of one directory of commits, of one kind. They are closed at the end."""
    made = []

    def build(*, owner):
        made.append(commits_at(tmp_path, owner=owner, durable=request.param))
        return made[-1]

    build.durable = request.param
    yield build
    for one in made:
        one.close()


def commits_at(path, *, owner=True, durable=False):
    place = DiskPlace(str(path / "versions")) if durable else PrivatePlace("versions", str(path))
    kind = DiskBlobs(None) if durable else MemoryBlobs()
    return Versions({}, place, kind, owner=owner)


def files(tmp_path):
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    return [name for name in names if not name.startswith("primeblocks")]


def marker_of(version, *, base=None):
    return Marker.make(run="r", version=version, plan="", base=base, sizes=(), buckets=())


def put(owner, version, value, *, writer=None):
    owner.allocate(version, size_bytes=SIZE)
    (writer or owner).writable(version, size_bytes=SIZE).fill_(value)
    marker = marker_of(version)
    owner.commit(marker)
    return marker


def put_delta(owner, version, text):
    owner.allocate(version, size_bytes=SIZE, delta=True)
    write_part(owner, version, 0, text)
    owner.commit(marker_of(version, base=version - 1))


def write_part(writer, version, rank, text):
    writer.commits.write(f"version-{version}.{rank}.delta", [memoryview(text)])


def read_part(reader, version, at, size):
    """Read the second bucket of a part of a delta, which is behind `at` bytes."""
    source = describe({"a": torch.zeros(16), "b": torch.zeros(16)})
    plan = plan_sync([source], source, bucket_bytes=64)
    sizes = (at, size)
    marker = Marker.make(run="r", version=version, plan="", base=0, sizes=sizes, buckets=("", ""))
    return directory._Incoming(reader, plan, marker, 0).payload(1)


def values(reader, marker, *, size_bytes=SIZE):
    """The values of the bytes of a version."""
    held, plan = reader.open(marker, size_bytes=size_bytes), plan_of_bytes(size_bytes)
    found = torch.empty(size_bytes, dtype=torch.uint8)
    copy_bucket(plan, 0, held, [found])
    held.close()
    return found.unique().tolist()


def test_a_version_can_be_read_the_moment_it_is_seen(make, monkeypatch):
    owner, reader = make(owner=True), make(owner=False)
    write, seen = owner.commits._write_commits, []

    def write_and_look(markers):
        write(markers)
        seen.append(values(reader, reader.markers()[-1]))

    monkeypatch.setattr(owner.commits, "_write_commits", write_and_look)
    put(owner, 1, 5)
    assert seen == [[5]]


def test_beginning_again_forgets_the_first_attempt(make):
    owner = make(owner=True)
    owner.allocate(1, size_bytes=SIZE)
    late = owner.writable(1, size_bytes=SIZE)
    marker = put(owner, 1, 8)
    late.fill_(66)  # A rank that hung in the first attempt and wakes up now.
    assert values(owner, marker) == [8]


def test_sizes_may_change_between_versions(make):
    owner = make(owner=True)
    for version, size in enumerate((100, 5000, 10, 300)):
        owner.allocate(version, size_bytes=size)
        owner.writable(version, size_bytes=size).fill_(version)
        marker = marker_of(version)
        owner.commit(marker)
        assert values(owner, marker, size_bytes=size) == [version]


def test_a_blob_of_another_size_is_refused(make):
    owner = make(owner=True)
    owner.allocate(1, size_bytes=SIZE)
    with pytest.raises(TransferError, match=f"{SIZE} bytes, but the plan needs 7"):
        owner.writable(1, size_bytes=7)
    with pytest.raises(TransferError, match="None bytes, but the plan"):
        owner.writable(2, size_bytes=SIZE)
    owner.abort(1)
    marker = put(owner, 1, 0)
    with pytest.raises(CorruptionError, match="1000 bytes, but 999 bytes were sent"):
        owner.open(marker, size_bytes=SIZE - 1)


def test_one_owner_at_a_time(make):
    owner = make(owner=True)
    with pytest.raises(UsageError, match="living owner"):
        make(owner=True)
    owner.close()
    make(owner=True)


def test_a_full_disk_is_a_typed_error_and_changes_nothing(make, monkeypatch, tmp_path):
    owner = make(owner=True)
    marker = put(owner, 1, 3)

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match="needs 1,000"):
            owner.allocate(2, size_bytes=SIZE)
    assert owner.markers() == (marker,)
    assert values(owner, marker) == [3]
    assert "version-2.safetensors" not in files(tmp_path)
    put(owner, 2, 5)


def test_more_than_there_is_room_for_is_refused():
    owner = commits_at(Path("/dev/shm"))
    with closing(owner), pytest.raises(CapacityError, match="bytes free"):
        owner.allocate(0, size_bytes=1 << 50)


def test_the_owner_cleans_up_when_it_is_forgotten(tmp_path):
    owner = commits_at(tmp_path)
    put(owner, 1, 1)
    assert owner.directory.is_dir()
    del owner
    assert list(tmp_path.iterdir()) == []


def test_what_a_delta_leads_back_to_is_kept(make, tmp_path):
    owner, reader = make(owner=True), make(owner=False)
    put(owner, 0, 0)
    put(owner, 1, 1)
    for version in (2, 3):
        put_delta(owner, version, b"delta %d" % version)
    assert [marker.version for marker in reader.markers()] == [1, 2, 3]
    assert bytes(read_part(reader, 2, 2, 5)) == b"lta 2"
    assert values(reader, reader.markers()[0]) == [1]
    put(owner, 4, 4)  # Full: the next one needs nothing before it.
    assert [marker.version for marker in reader.markers()] == [1, 2, 3, 4]
    put_delta(owner, 5, b"delta 5")
    assert [marker.version for marker in reader.markers()] == [4, 5]
    kept = [name for name in files(tmp_path) if name.startswith("version")]
    assert kept == ["version-4.safetensors", "version-5.0.delta"]
    with pytest.raises(TransferError, match="version 3 was retired while it was read"):
        read_part(reader, 3, 0, 1)


def test_a_full_disk_under_a_delta_is_a_typed_error(make, monkeypatch):
    owner = make(owner=True)
    put(owner, 0, 0)
    owner.allocate(1, size_bytes=SIZE, delta=True)

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CapacityError, match="bytes free"):
        write_part(owner, 1, 0, b"a")


def test_a_commit_that_is_seen_stays_though_it_was_reported_to_fail(tmp_path, monkeypatch):
    with closing(commits_at(tmp_path, durable=True)) as owner:
        owner.allocate(1, size_bytes=SIZE)
        with monkeypatch.context() as patch:
            patch.setattr(
                directory_commits, "fsync", Mock(side_effect=OSError(errno.EIO, "I/O error"))
            )
            with pytest.raises(OSError, match="I/O error"):
                owner.commit(marker_of(1))
        owner.abort(1)
        (marker,) = owner.markers()
        owner.open(marker, size_bytes=SIZE).close()


def test_a_version_that_goes_while_it_is_opened_is_a_typed_error(make, monkeypatch):
    owner, reader = make(owner=True), make(owner=False)
    marker = put(owner, 1, 7)
    path, hold = owner._path(1), blobs.Hold

    def gone(fd, how):
        path.unlink(missing_ok=True)
        return hold(fd, how)

    monkeypatch.setattr(blobs, "Hold", gone)
    if make.durable:  # The open file is there still.
        assert values(reader, marker) == [7]
    else:
        with pytest.raises(TransferError, match="retired while it was being opened"):
            reader.open(marker, size_bytes=SIZE)


@pytest.mark.parametrize("call", ["markers", "hold", "open", "read"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_opened_is_a_typed_error(call, code, make, monkeypatch):
    owner, reader = make(owner=True), make(owner=False)
    put(owner, 0, 0)
    put_delta(owner, 1, b"text")
    full, held = owner.markers()[0], marker_of(2)
    owner.commits.begin(2, keep=owner.markers(), deadline=0.0)
    owner.commits.commit(held, deadline=0.0)
    calls = {
        "markers": reader.markers,
        "hold": lambda: reader.commits.hold(held, deadline=0.0).close(),
        "open": lambda: values(reader, full),
        "read": lambda: read_part(reader, 1, 0, 4),
    }
    files = {"markers": "commits.json", "hold": "lock", "open": "safetensors", "read": "delta"}

    def failing(inner):
        def fails(path, *args, **options):
            if str(path).endswith(files[call]):
                raise OSError(code, os.strerror(code), str(path))
            return inner(path, *args, **options)

        return fails

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(os.open))
        patch.setattr(os, "readlink", failing(os.readlink))
        if code == errno.ESTALE and call == "markers":
            assert calls[call]() == ()
        else:
            wanted = "was retired" if code == errno.ESTALE else os.strerror(code)
            with pytest.raises(TransferError, match=wanted):
                calls[call]()
    calls[call]()


def test_a_shared_disk_is_looked_at_less_often_than_memory(make):
    assert make(owner=True).commits.look_s == (0.1 if make.durable else 0.002)


def test_nothing_is_leaked(make):
    owner, reader = make(owner=True), make(owner=False)
    put(owner, 0, 0)

    def once(version):
        marker = put(owner, version, 1)
        values(reader, marker)
        put_delta(owner, version + 1, b"x")
        read_part(reader, version + 1, 0, 1)
        owner.allocate(version + 2, size_bytes=SIZE)
        owner.abort(version + 2)

    for version in (1, 4, 7):  # Files that take turns stay mapped.
        once(version)
    gc.collect()  # What tests before this one left.
    before = in_use()
    for version in range(10, 60, 10):
        once(version)
    gc.collect()
    assert in_use() == before


def in_use():
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return len(os.listdir("/proc/self/fd")), mappings

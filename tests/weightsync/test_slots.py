"""Versioned files in a directory, in shared memory and on a disk; then what is special to one."""

import errno
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing.faults import truncate
from primeblocks.weightsync import (
    FileTransport,
    SharedMemoryTransport,
    Transport,
    open_transport,
)
from primeblocks.weightsync.marker import Marker

SIZE = 1000


@pytest.fixture(params=["shared_memory", "file"])
def make(request, tmp_path):
    """Transports of one kind that all mean the same place; closed at the end."""
    made = []

    def build(*, owner):
        transport = Slots(tmp_path / "versions", owner=owner, durable=request.param == "file")
        made.append(transport)
        return transport

    yield build
    for transport in made:
        transport.close()


def files(tmp_path):
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


def put(transport, version, value, *, writer=None):
    transport.allocate(version, size_bytes=SIZE)
    (writer or transport).writable(version, size_bytes=SIZE).fill_(value)
    (writer or transport).flush(version)
    marker = Marker.make(run=transport.run, version=version, plan="", sizes=(), buckets=())
    transport.commit(marker)
    return marker


def values(transport, marker, *, size_bytes=SIZE):
    lease = transport.lease(marker, size_bytes=size_bytes)
    value = lease.blob.unique().tolist()
    lease.close()
    return value


def test_it_is_a_transport(make):
    owner = make(owner=True)
    assert isinstance(owner, Transport)
    assert type(open_transport(owner.spec())) is type(owner)


def test_what_is_committed_is_read_elsewhere(make):
    owner, writer = make(owner=True), make(owner=False)
    reader = open_transport(owner.spec())
    assert reader.markers() == ()
    marker = put(owner, 1, 7, writer=writer)
    assert reader.markers() == (marker,)
    assert values(reader, marker) == [7]


def test_nothing_is_seen_before_the_commit_and_the_old_version_stays(make):
    owner, reader = make(owner=True), make(owner=False)
    markers = [put(owner, version, version) for version in (1, 2)]
    owner.allocate(3, size_bytes=SIZE)
    owner.writable(3, size_bytes=SIZE).fill_(99)
    assert reader.markers() == (markers[1],)
    assert values(reader, markers[1]) == [2]
    owner.abort(3)
    assert reader.markers() == (markers[1],)
    put(owner, 3, 3)
    assert [marker.version for marker in reader.markers()] == [2, 3]


def test_a_version_can_be_read_the_moment_it_is_seen(make, monkeypatch):
    owner, reader = make(owner=True), make(owner=False)
    write, seen = owner._write_commits, []

    def write_and_look(markers):
        write(markers)
        seen.append(values(reader, reader.markers()[-1]))

    monkeypatch.setattr(owner, "_write_commits", write_and_look)
    put(owner, 1, 5)
    assert seen == [[5]]


def test_two_versions_are_kept(make, tmp_path):
    owner, reader = make(owner=True), make(owner=False)
    markers = [put(owner, version, version) for version in range(5)]
    assert [values(reader, marker) for marker in reader.markers()] == [[3], [4]]
    blobs = [name for name in files(tmp_path) if name.endswith(".safetensors")]
    assert blobs == ["version-3.safetensors", "version-4.safetensors"]
    with pytest.raises(TransferError, match="version 1 was retired"):
        reader.lease(markers[1], size_bytes=SIZE)


def test_a_lease_never_changes(make):
    owner, reader = make(owner=True), make(owner=False)
    lease = reader.lease(put(owner, 0, 5), size_bytes=SIZE)
    for version in range(1, 6):
        put(owner, version, 100 + version)
    assert lease.blob.unique().tolist() == [5]
    lease.close()
    lease.close()


def test_writing_to_a_lease_harms_nobody(make):
    owner, reader = make(owner=True), make(owner=False)
    marker = put(owner, 0, 5)
    lease = reader.lease(marker, size_bytes=SIZE)
    lease.blob.fill_(1)
    assert values(reader, marker) == [5]
    lease.close()


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
        marker = Marker.make(run="", version=version, plan="", sizes=(), buckets=())
        owner.commit(marker)
        assert values(owner, marker, size_bytes=size) == [version]


def test_a_blob_of_another_size_is_refused(make, tmp_path):
    owner = make(owner=True)
    owner.allocate(1, size_bytes=SIZE)
    with pytest.raises(TransferError, match=f"{SIZE} bytes, the plan 7"):
        owner.writable(1, size_bytes=7)
    with pytest.raises(TransferError, match="None bytes, the plan"):
        owner.writable(2, size_bytes=SIZE)
    owner.abort(1)
    marker = put(owner, 1, 0)
    truncate(next(tmp_path.rglob("version-1.safetensors")), size_bytes=500)
    with pytest.raises(CorruptionError, match="500 bytes; 1000 were sent"):
        owner.lease(marker, size_bytes=SIZE)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b'["{}"]'])
def test_broken_commits_are_refused(make, tmp_path, content):
    owner = make(owner=True)
    put(owner, 1, 0)
    next(tmp_path.rglob("commits.json")).write_bytes(content)
    with pytest.raises(CorruptionError):
        owner.markers()


def test_only_the_owner_begins_and_commits(make):
    owner, other = make(owner=True), make(owner=False)
    with pytest.raises(UsageError, match="owner=True"):
        other.allocate(1, size_bytes=SIZE)
    with pytest.raises(UsageError, match="owner=True"):
        other.abort(1)
    with pytest.raises(UsageError, match="not begun"):
        owner.commit(Marker.make(run="", version=1, plan="", sizes=(), buckets=()))


def test_one_owner_at_a_time(make):
    owner = make(owner=True)
    with pytest.raises(UsageError, match="living owner"):
        make(owner=True)
    owner.close()
    make(owner=True)


def test_close_leaves_nothing(make, tmp_path):
    owner, reader = make(owner=True), make(owner=False)
    put(owner, 1, 0)
    owner.allocate(2, size_bytes=SIZE)
    owner.close()
    owner.close()
    assert list(tmp_path.iterdir()) == []
    assert reader.markers() == ()
    with pytest.raises(ClosedError):
        owner.markers()


def _die(kind, path):
    if kind == "file":
        owner = FileTransport(path, owner=True)
    else:
        owner = SharedMemoryTransport("policy", owner=True, root=path)
    put(owner, 8, 1)
    owner.allocate(9, size_bytes=SIZE)
    os._exit(1)


def test_a_new_owner_clears_what_a_dead_one_left(make, tmp_path):
    spec = make(owner=False).spec()
    path = spec.get("path", spec.get("root"))
    process = multiprocessing.get_context("forkserver").Process(
        target=_die, args=(spec["kind"], path)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 1
    reader = make(owner=False)
    assert [marker.version for marker in reader.markers()] == [8]
    owner = make(owner=True)
    assert reader.markers() == ()
    assert files(tmp_path) == ["owner.lock"]
    assert values(reader, put(owner, 1, 4)) == [4]


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


def test_more_than_there_is_room_for_is_refused(tmp_path):
    with (
        SharedMemoryTransport("primeblocks-test-full", owner=True) as owner,
        pytest.raises(CapacityError, match="bytes free"),
    ):
        owner.allocate(0, size_bytes=1 << 50)


def test_pages_of_a_retired_version_are_used_again(tmp_path):
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as owner:
        inodes = []
        for version in range(6):
            marker = put(owner, version, version)
            inodes.append(next(tmp_path.rglob(f"version-{version}.safetensors")).stat().st_ino)
            if version == 3:  # Its pages are held, and must not be used again.
                lease = owner.lease(marker, size_bytes=SIZE)
        assert inodes[2] == inodes[0] == inodes[4]
        assert inodes[3] == inodes[1] != inodes[5]
        lease.close()


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with FileTransport(tmp_path, owner=True) as owner:
        put(owner, 1, 1)
    assert files(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name", ["", "a/b", "/dev/shm"])
def test_a_name_is_one_path_component(name):
    with pytest.raises(UsageError, match="path component"):
        SharedMemoryTransport(name)


def test_shared_memory_refuses_where_it_cannot_work(monkeypatch, tmp_path):
    with pytest.raises(UnsupportedError, match="is no directory"):
        SharedMemoryTransport("a", root=str(tmp_path / "none"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin. Use FileTransport"):
        SharedMemoryTransport("a")


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnsupportedError, match="known: shared_memory, file"):
        open_transport({"kind": "pigeon"})


def test_the_owner_cleans_up_when_it_is_forgotten(tmp_path):
    owner = SharedMemoryTransport("policy", owner=True, root=str(tmp_path))
    put(owner, 1, 1)
    assert Path(tmp_path, "primeblocks-policy").is_dir()
    del owner
    assert list(tmp_path.iterdir()) == []

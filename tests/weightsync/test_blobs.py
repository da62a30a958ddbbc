"""Versions in memory that is sealed: who can write to it, who holds it, and when it is mapped."""

import fcntl
import mmap
import os
import struct

import pytest
import torch

from primeblocks.errors import CorruptionError, TransferError, UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import SharedMemoryTransport
from primeblocks.weightsync.held import Boxes
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import blobs
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import plan_of_bytes
from tests.weightsync.one_pair import Setup


class Site(Setup):
    """A trainer and an engine of one process. The engine keeps what `take` makes of each tensor."""

    def __init__(self, root, *, check="before", take=torch.clone):
        self.kept, self.take = {}, take
        self.reader = SharedMemoryTransport("policy", root=str(root))
        super().__init__(
            SharedMemoryTransport("policy", owner=True, root=str(root)),
            root,
            weights={f"t{i}": torch.zeros(500, 3) for i in range(4)},
            bucket_bytes=7000,
            reader=self.reader,
            load=self.load,
            check=check,
        )

    def load(self, tensors):
        self.kept = {name: self.take(tensor) for name, tensor in tensors}

    def sync(self, version):
        """To the engine, which has to serve it then."""
        self.publish(version)
        assert self.subscriber.receive(timeout_s=TIMEOUT_S).version == version
        assert set(self.kept) == set(self.weights)
        assert all(tensor.eq(version).all() for tensor in self.kept.values())


@pytest.fixture(params=["before", "ahead"])
def site(request, tmp_path):
    site = Site(tmp_path, check=request.param)
    yield site
    site.subscriber.close()
    site.reader.close()
    site.transport.close()


def _overwrite(fd):
    os.pwrite(fd, b"bad", 100)


def _cut(fd):
    os.ftruncate(fd, 10)


def _grow(fd):
    os.ftruncate(fd, 1 << 20)


def _map(fd):
    mmap.mmap(fd, 4096)


def _allocate(fd):
    os.posix_fallocate(fd, 0, 1 << 20)


def _through_torch(fd):
    torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=100, dtype=torch.uint8)


@pytest.mark.parametrize("harm", [_overwrite, _cut, _grow, _map, _allocate, _through_torch])
def test_what_is_committed_cannot_be_changed_by_who_opens_it(site, harm):
    site.sync(1)
    site.publish(2)
    before = site.blob(2).read_bytes()
    fd = os.open(site.blob(2), os.O_RDWR)
    with pytest.raises((OSError, RuntimeError), match="ermi"):
        harm(fd)
    os.close(fd)
    with pytest.raises(OSError, match="ermi"):
        site.blob(2).open("wb")
    assert site.blob(2).read_bytes() == before
    site.sync(3)


def test_memory_that_was_not_sealed_is_not_loaded(site, monkeypatch):
    monkeypatch.setattr(
        blobs.MemoryBlobs,
        "seal",
        lambda self, path: fcntl.flock(self._owned[path.name], fcntl.LOCK_UN),
    )
    site.publish(1)
    with pytest.raises(CorruptionError, match="may still be written to"):
        site.subscriber.receive(timeout_s=TIMEOUT_S)
    assert not site.kept


def test_a_tensor_that_a_load_keeps_stays_as_it_is(site):
    """Its memory is held; the trainer goes on in other memory."""
    site.take = lambda tensor: tensor
    site.sync(1)
    old = site.kept
    for version in range(2, 8):
        site.sync(version)
        assert all(tensor.eq(1).all() for tensor in old.values())
    owned = site.transport._memory._owned
    assert len(owned) == 2


def test_memory_takes_turns_once_nothing_of_it_is_kept(site):
    inodes = []
    for version in range(8):
        site.sync(version)
        inodes.append(site.blob(version).stat().st_ino)
    assert len(set(inodes)) <= 3
    assert len(set(inodes[4:])) < 4


def test_nothing_is_mapped_or_copied_anew_for_a_version_in_known_memory(site, monkeypatch):
    for version in range(6):
        site.sync(version)
    made = []
    inner = blobs.mapped
    monkeypatch.setattr(
        blobs, "mapped", lambda *args, **how: made.append(args) or inner(*args, **how)
    )
    monkeypatch.setattr(Boxes, "__init__", lambda *args, **how: made.append(args))
    for version in range(6, 12):
        site.sync(version)
    assert made == []


def _through_numpy(tensor):
    copy = tensor.clone()
    tensor.numpy()[:] = 66  # torch counts no such write.
    return copy


def _in_place(tensor):
    copy = tensor.clone()
    with torch.inference_mode():
        tensor.fill_(66)
    return copy


@pytest.mark.parametrize("take", [_in_place, _through_numpy])
def test_what_a_load_writes_stays_in_its_process_and_in_its_version(site, take):
    site.take = take
    site.sync(0)
    for version in range(1, 9):
        site.sync(version)
    assert struct.unpack("<f", site.blob(8).read_bytes()[-4:]) == (8.0,)


def test_a_load_under_inference_mode(site):
    with torch.inference_mode():
        for version in range(6):
            site.sync(version)


def test_a_trainer_rank_that_joins_anew_fails_one_publish(tmp_path):
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as owner:
        size = 1000

        def put(version, writer):
            owner._allocate(version, size, delta=False)
            try:
                writer._writable(version, size).fill_(version)
            except TransferError:
                owner.abort(version)
                raise
            owner.commit(
                Marker.make(run="r", version=version, plan="", base=None, sizes=(), buckets=()),
                deadline=0.0,
            )

        first = SharedMemoryTransport("policy", root=str(tmp_path))
        for version in range(5):
            put(version, first)
        second = SharedMemoryTransport("policy", root=str(tmp_path))
        with pytest.raises(TransferError, match="before this rank began.*Publish again"):
            put(5, second)
        for version in range(5, 12):
            put(version, second)
        first.close()
        second.close()


def _publish_and_die(root):
    site = Site(root)
    site.sync(1)
    ranks.kill(0)


def test_versions_end_with_a_killed_owner_and_leave_no_memory(tmp_path):
    ranks.run(_publish_and_die, tmp_path, world_size=1)
    link = next(tmp_path.iterdir()) / "version-1.safetensors"
    assert link.is_symlink()
    assert not link.exists()
    reader = SharedMemoryTransport("policy", root=str(tmp_path))
    with pytest.raises(TransferError, match="has ended, or has freed the memory"):
        reader._open(reader.markers()[0], plan_of_bytes(1000), start=0)
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)):
        assert not link.is_symlink()


def test_memory_of_another_name_is_not_taken_for_a_version(site):
    """A process may have got the number of one that ended, and its descriptor."""
    site.publish(1)
    fd = blobs.allocate("primeblocks-other", site.blob(1).stat().st_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, blobs._FUTURE_WRITE)
    link = site.blob(1)
    link.unlink()
    link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    with pytest.raises(TransferError, match="is not available"):
        site.subscriber.receive(timeout_s=TIMEOUT_S)
    os.close(fd)


@pytest.mark.parametrize("target", ["/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/../exe"])
def test_a_link_to_anything_else_is_not_followed(site, target):
    site.publish(1)
    link = site.blob(1)
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(UsageError, match="was refused"):
        site.subscriber.receive(timeout_s=TIMEOUT_S)

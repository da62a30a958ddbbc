"""What ranks hold in a test, what an engine should then have, and both sides of a sync."""

from pathlib import Path

import torch
import torch.distributed as dist

from primeblocks.layout import Layout
from primeblocks.testing.faults import flip_byte
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from primeblocks.weightsync.transports import (
    FileTransport,
    GroupTransport,
    IpcTransport,
    PullTransport,
    TcpWire,
    open_transport,
)
from primeblocks.weightsync.transports.directory import DirectoryTransport
from tests.deadlines import HANG_S
from tests.weightsync.reference import gather_whole, slice_again

# Packed buffers: commits and the carrier.
PACKED = ("directory-handles", "store-tcp")
# Of "group" all readers commit, or none.
KINDS = ("shared_memory", "file", "group", *PACKED)


class Engine:
    """A load callable that keeps what it got, and counts."""

    def __init__(self):
        self.tensors, self.loads = {}, 0

    def __call__(self, tensors):
        self.tensors = {name: tensor.clone() for name, tensor in tensors}
        self.loads += 1


def same_bytes(have, want):
    return list(have) == list(want) and all(
        have[name].dtype == want[name].dtype
        and have[name].shape == want[name].shape
        and have[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(want[name].contiguous().view(-1).view(torch.uint8))
        for name in want
    )


def flip_sent(transport, root, version, at):
    """Change a byte of a full version; `at` counts from the end where it is negative."""
    path = next(Path(root).rglob(f"version-{version}.safetensors"))
    if path.is_symlink():  # Sealed memory: whoever wrote it still can.
        as_written(transport, path, version)[at] ^= 0xFF
    else:
        flip_byte(path, at)


def as_written(transport, path, version):
    """The bytes of a version in shared memory as the process that wrote them has them."""
    return transport._writable(version, path.stat().st_size)


def random_tensor(dtype, shape, generator):
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    limit = 127  # No NaN of float8: equal bits are compared anyway.
    raw = torch.randint(0, limit, shape, generator=generator)
    return raw.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else raw.to(dtype)


def contents(sources, seed, *, sparse=None):
    """Local parts of every source rank, cut from the same whole tensors.

    `sparse` sets an element of each: contents of one seed differ little then.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    for source in sources:
        for name, spec in source.items():
            if name not in whole:
                whole[name] = random_tensor(spec.dtype, spec.shape, generator)
    for tensor in whole.values():
        if sparse is not None and tensor.numel():
            tensor.view(-1)[sparse % tensor.numel()] = sparse % 100
    return [slice_again(whole, source) for source in sources]


def oracle(sources, parts, target):
    whole = Manifest(
        tuple((name, TensorSpec(s.dtype, Layout.whole(s.shape))) for name, s in target.items())
    )
    return slice_again(gather_whole(sources, parts, whole), target)


def transport_of(kind, where, plan):
    """This rank's end of a transport at a folder, or at a store; collective."""
    if kind == "group":
        return joined(store_at(where), plan)
    owner, made = dist.get_rank() == 0, None
    if owner:
        made = directory(kind, where, owner=True)
    dist.barrier()
    return made or directory(kind, where, owner=False)


def directory(kind, where, *, owner):
    if kind in PACKED:
        return packed_end(kind, where, owner=owner, keep=True)
    if kind == "file":
        return FileTransport(f"{where}/blobs", owner=owner)
    return SharedMemoryTransport("policy", owner=owner, root=str(where))


def joined(store, plan):
    """Trainer ranks construct it; readers open what rank 0 says."""
    rank, spec, made = dist.get_rank(), [None], None
    if rank < plan.world_size:
        counts = {"trainers": plan.world_size, "readers": len(plan.wants)}
        made = GroupTransport(store=store, **counts, rank=rank)
    if rank == 0:
        spec = [made.spec()]
    dist.broadcast_object_list(spec, 0)
    return made or open_transport(spec[0])


def packed_end(kind, where, *, wire=None, **options):
    """One process's end of packed buffers, at a folder or a store."""
    if kind == "directory-handles":
        return IpcTransport("policy", root=str(where), **options)
    return PullTransport(store_at(where), wire or TcpWire("127.0.0.1"), **options)


def store_at(where):
    """A store in a folder, or at an address."""
    return (
        dist.TCPStore(*where)
        if isinstance(where, tuple | list)
        else dist.FileStore(f"{where}/store")
    )


class Side:
    """This rank of a sync: a Publisher of its parts, or a Subscriber that feeds an Engine.

    The first `plan.world_size` ranks are the trainer's; the others are the readers, in order.
    """

    def __init__(self, plan, transport, parts, *, load=None, **options):
        self.plan, self.transport, rank = plan, transport, dist.get_rank()
        self.reader = rank - plan.world_size
        self.is_engine, self.engine = self.reader >= 0, Engine()
        group = dist.new_group(list(range(plan.world_size)), backend="gloo")
        if self.is_engine:
            self.subscriber = Subscriber(plan, load or self.engine, transport, reader=self.reader)
        else:
            self.publisher = Publisher(plan, parts, transport, group=group, **options)

    def sync(self, version, *, timeout_s=HANG_S):
        if self.is_engine:
            return self.subscriber.receive(version, timeout_s=timeout_s)
        return self.publisher.publish(version, timeout_s=timeout_s)


def plan_of_bytes(size_bytes):
    source = describe({"w": torch.zeros(size_bytes, dtype=torch.uint8)})
    return plan_sync([source], source, bucket_bytes=max(64, size_bytes))


class Versions(DirectoryTransport):
    """A transport whose steps are taken one by one."""

    directory = property(lambda self: self.commits.directory)

    def allocate(self, version, *, size_bytes, delta=False):
        self._allocate(version, size_bytes, delta=delta)

    def writable(self, version, *, size_bytes):
        return self._writable(version, size_bytes)

    def commit(self, marker):
        super().commit(marker, deadline=0.0)

    def open(self, marker, *, size_bytes):
        return self._open(marker, plan_of_bytes(size_bytes), start=0)

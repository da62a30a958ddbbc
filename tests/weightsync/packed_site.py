"""A trainer and an engine over each transport that reads trainer ranks' memory."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.transports.ipc import IpcTransport
from primeblocks.weightsync.transports.pull import PullTransport
from tests.weightsync.contents import Engine, same_bytes
from tests.weightsync.process_wire import ProcessWire

TIMEOUT_S = 10.0
NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed; scripts/peers does"
)
KINDS = ["ipc", "process", pytest.param("nixl", marks=NEEDS_NIXL)]


def wire(kind, *, serves):
    if kind == "process":
        return ProcessWire()
    from primeblocks.weightsync.adapters.nixl import NixlWire

    return NixlWire(serves=serves)


def end(kind, path, **options):
    """One process's end of a transport at a folder."""
    if kind == "ipc":
        return IpcTransport("policy", root=str(path), **options)
    store = dist.FileStore(f"{path}/store")
    return PullTransport(store, wire(kind, serves="owner" in options), **options)


def parameters(value):
    generator = torch.Generator().manual_seed(value)
    return {
        "a": torch.randn(400, 3, generator=generator).bfloat16(),
        "b": torch.randint(0, 99, (5,), generator=generator),
        "c": torch.randn(7, generator=generator),
    }


class Site:
    """A trainer of one rank and an engine in this process."""

    def __init__(self, kind, path, *, keep=False, full_every=1):
        self.kind, self.path, self.weights = kind, path, parameters(0)
        manifest = describe(self.weights)
        self.plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1000)
        self.full_every, self.reading = full_every, lambda: None
        self.owner, self.publisher = self.trainer()
        self.reader = end(kind, path, keep=keep)
        self.engine = Engine()
        self.subscriber = Subscriber(self.plan, self.load, self.reader)
        if kind != "ipc":
            read, self.reader._wire.read = self.reader._wire.read, self.read
            self.inner_read = read

    def trainer(self):
        owner = end(self.kind, self.path, owner=True)
        publisher = Publisher(self.plan, self.weights, owner, full_every=self.full_every)
        return owner, publisher

    def publish(self, version, timeout_s=TIMEOUT_S):
        for name, tensor in parameters(version).items():
            self.weights[name].copy_(tensor)
        return self.publisher.publish(version, timeout_s=timeout_s)

    def receive(self, version=None, timeout_s=TIMEOUT_S):
        return self.subscriber.receive(version, timeout_s=timeout_s)

    def load(self, tensors):
        if self.kind == "ipc":  # Here it holds the version: it is read in place.
            self.reading()
        self.engine(tensors)

    def read(self, reads, *, deadline):
        self.reading()
        self.inner_read(reads, deadline=deadline)

    def has(self, version):
        return same_bytes(self.engine.tensors, parameters(version))

    def buffer(self, version):
        """The trainer's own, of a version."""
        if self.kind == "ipc":
            return self.owner._pool.by_version()[version].buffer
        return self.owner._full.by_version()[version][0]

    def close(self):
        for one in (self.subscriber, self.publisher, self.reader, self.owner):
            one.close()

"""A trainer and an engine over packed buffers: each kind of commits with each carrier."""

import importlib.util

import pytest
import torch

from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import PACKED, Engine, packed_end, same_bytes

NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed; scripts/peers does"
)
KINDS = [*PACKED, pytest.param("store-nixl", marks=NEEDS_NIXL)]


def end(kind, path, **options):
    """One process's end of a transport at a folder."""
    if kind == "store-nixl":
        from primeblocks.weightsync.adapters.nixl import NixlWire

        options["wire"] = NixlWire(serves="owner" in options)
    return packed_end(kind, path, **options)


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
        # Here it holds the version, whatever carries it.
        self.inner_fetch, self.reader._carrier.fetch = self.reader._carrier.fetch, self.fetch

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
        self.engine(tensors)

    def fetch(self, spans, **how):
        self.reading()
        return self.inner_fetch(spans, **how)

    def has(self, version):
        return same_bytes(self.engine.tensors, parameters(version))

    def buffer(self, version):
        """The trainer's own, of a version."""
        return self.owner._full.used[version].buffer

    def close(self):
        for one in (self.subscriber, self.publisher, self.reader, self.owner):
            one.close()

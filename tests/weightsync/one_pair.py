"""One trainer rank and one engine in this process."""

import torch

from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from tests.deadlines import HANG_S as TIMEOUT_S


class Engine:
    """Serves a copy of what it loaded last; `fail_at` breaks that load after so many tensors."""

    def __init__(self):
        self.serves, self.loads, self.fail_at = {}, 0, {}

    def load(self, tensors):
        self.loads += 1
        fail_at = self.fail_at.get(self.loads)
        for taken, (name, tensor) in enumerate(tensors):
            if taken == fail_at:
                raise RuntimeError("out of memory")
            self.serves[name] = tensor.clone()


class Setup:
    """A publisher of some tensors, and a subscriber; `path` is where their transport lies."""

    def __init__(
        self, transport, path, *, weights=None, bucket_bytes=64, reader=None, load=None, **options
    ):
        self.path = path
        self.weights = weights or {"a": torch.zeros(40, 3), "b": torch.zeros(5, dtype=torch.int64)}
        manifest = describe(self.weights)
        self.plan = plan_sync([manifest], manifest.whole(), bucket_bytes=bucket_bytes)
        self.transport, self.engine = transport, Engine()
        self.publisher = Publisher(self.plan, self.weights, transport)
        load = load or self.engine.load
        self.subscriber = Subscriber(self.plan, load, reader or transport, **options)

    def publish(self, version):
        for tensor in self.weights.values():
            tensor.fill_(version)
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def receive(self, version=None, timeout_s=TIMEOUT_S):
        return self.subscriber.receive(version, timeout_s=timeout_s)

    def blob(self, version):
        return next(self.path.rglob(f"version-{version}.safetensors"))

    def served(self):
        """The one version that every tensor has."""
        (value,) = {float(v) for t in self.engine.serves.values() for v in t.flatten()}
        return value

"""A trainer with real memory and a fake engine that allocates, loads and frees real memory."""

import torch
import torch.distributed as dist
from torch import nn

from primeblocks.parallel.memory import HostMemory
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
from primeblocks.weightsync.engines.colocated import Colocated, ColocatedEngine
from primeblocks.weightsync.manifest import gather_manifests
from tests.deadlines import HANG_S

TIMEOUT_S = HANG_S
MIB = 1 << 20
TO_ENGINE = ["publish", "release", "wake weights", "update", "wake kv_cache"]
TO_TRAINER = ["sleep", "restore"]


class FakeEngine:
    """Holds real memory while awake. Weights that it wakes with are garbage until an update."""

    def __init__(self, plan, transport, cache_bytes):
        self.weights, self.cache = {}, None
        self._plan, self._transport, self._cache_bytes = plan, transport, cache_bytes

    def sleep(self, timeout_s):
        self.weights, self.cache = {}, None

    def wake(self, part, timeout_s):
        target = self._plan.target
        if part == "weights" and not self.weights:
            self.weights = {
                n: torch.full(target[n].shape, 9.0, dtype=target[n].dtype) for n in target
            }
        if part == "kv_cache" and self.cache is None:
            self.cache = torch.ones(self._cache_bytes, dtype=torch.uint8)

    def update(self, receipt, timeout_s):
        # A new one each time: one that holds the version would not load it again.
        with Subscriber(self._plan, self._load, self._transport) as subscriber:
            subscriber.receive(receipt.version, timeout_s=timeout_s)

    def _load(self, tensors):
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)


class Site:
    """A trainer, an engine, and faults: `faults[name]` is raised once by the call of that name."""

    def __init__(self, path, *, shape=(4, 4), cache_bytes=64, drives=True, chunk_bytes=MIB):
        torch.manual_seed(0)
        self.model = nn.Linear(*shape, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()
        self.host = HostMemory(self.model, self.optimizer, chunk_bytes=chunk_bytes)
        manifests = gather_manifests(describe(self.model)) if dist.is_initialized() else None
        manifests = manifests or [describe(self.model)]
        target = manifests[0].whole(dtype=torch.bfloat16)
        self.plan = plan = plan_sync(manifests, target, bucket_bytes=64 * MIB)
        owner = not dist.is_initialized() or dist.get_rank() == 0
        self.transport = SharedMemoryTransport("policy", owner=owner, root=str(path))
        self.publisher = Publisher(plan, self.model, self.transport)
        self.engine = FakeEngine(plan, self.transport, cache_bytes) if drives else None
        self.faults, self.calls = {}, []
        self.memory = int
        self.colocated = Colocated(
            trainer=self,
            engine=self._driven() if drives else None,
            publish=self._faulty("publish", lambda v, s: self.publisher.publish(v, timeout_s=s)),
            memory=self._bytes,
        )

    def _bytes(self):
        return self.memory()

    def _driven(self):
        wakes = {p: self._faulty(f"wake {p}", self.engine.wake) for p in ("weights", "kv_cache")}
        return ColocatedEngine(
            sleep=self._faulty("sleep", self.engine.sleep),
            wake=lambda part, s: wakes[part](part, s),
            update=self._faulty("update", self.engine.update),
        )

    def _faulty(self, name, call):
        def run(*args):
            self.calls.append(name)
            if name in self.faults:
                raise self.faults.pop(name)
            return call(*args)

        return run

    def release(self):
        return self._faulty("release", self.host.release)()

    def restore(self):
        return self._faulty("restore", self.host.restore)()

    def step(self):
        """Train. Needs all of the trainer's memory."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.model.in_features)).square().sum().backward()
        self.optimizer.step()

    def state(self):
        """Who holds memory, and what is in it."""
        engine = {} if self.engine is None else self.engine.weights
        cache = self.engine is not None and self.engine.cache is not None
        here = [p.detach() for p in self.model.parameters()] if not self.host.away else []
        return {
            "turn": self.colocated.turn,
            "away": self.host.away,
            "cache": cache,
            "trainer": [x.clone() for x in here],
            "engine": {name: x.clone() for name, x in engine.items()},
        }

    def close(self):
        self.publisher.close()
        self.transport.close()


def assert_same_state(now, before):
    for key in ("turn", "away", "cache"):
        assert now[key] == before[key], key
    assert now["engine"].keys() == before["engine"].keys()
    pairs = [(now["engine"][name], x) for name, x in before["engine"].items()]
    for got, want in (*pairs, *zip(now["trainer"], before["trainer"], strict=True)):
        assert_same_bits(got, want)


def assert_serves(site, weights):
    assert_same_bits(site.engine.weights["weight"], weights.bfloat16())
    assert site.engine.cache is not None
    assert site.host.away == ("weights", "gradients", "optimizer")
    assert site.colocated.turn == "engine"

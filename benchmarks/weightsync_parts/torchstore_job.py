"""Run by `torchstore_peer` in a Python that has torchstore: prints seconds by step as JSON.

Arguments: scale, timed rounds, threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict

import torchstore
from monarch.actor import Actor, endpoint, this_host
from torchstore.strategy import ControllerStorageVolumes
from torchstore.transport import TransportType

from .shared_memory import WARM
from .sides import Engine, Trainer


class TrainerActor(Actor):
    def __init__(self, name: str, scale: float, threads: int) -> None:
        self.side = Trainer(name, scale, threads)

    @endpoint
    async def change(self, version: int) -> str:
        return self.side.change(version)

    @endpoint
    async def publish(self, version: int) -> float:
        return self.side.publish(version)

    @endpoint
    async def put(self) -> float:
        start = time.perf_counter()
        await torchstore.put_batch(self.side.parameters)
        return time.perf_counter() - start

    @endpoint
    async def close(self) -> None:
        self.side.close()


class EngineActor(Actor):
    def __init__(self, name: str, scale: float, threads: int) -> None:
        self.side = Engine(name, scale, threads)

    @endpoint
    async def forget(self) -> None:
        self.side.forget()

    @endpoint
    async def receive(self, version: int) -> float:
        return self.side.receive(version)[0]

    @endpoint
    async def get(self) -> float:
        start = time.perf_counter()
        await torchstore.get_batch(dict(self.side.parameters))
        return time.perf_counter() - start

    @endpoint
    async def digest(self) -> str:
        return self.side.digest()

    @endpoint
    async def close(self) -> None:
        self.side.close()


async def measure(scale: float, runs: int, threads: int) -> dict[str, list[float]]:
    """Both transfers of every version, in turn; each has to bring the trainer's bytes."""
    name = f"weightsync-torchstore-{os.getpid()}"
    await torchstore.initialize(
        strategy=ControllerStorageVolumes(default_transport_type=TransportType.SharedMemory)
    )
    hosts = [this_host().spawn_procs(per_host={"p": 1}) for _ in range(2)]
    trainer = hosts[0].spawn("trainer", TrainerActor, name, scale, threads)
    engine = hosts[1].spawn("engine", EngineActor, name, scale, threads)
    seconds: dict[str, list[float]] = defaultdict(list)
    for version in range(WARM + runs):
        sent = await trainer.change.call_one(version)
        taken = {}
        await engine.forget.call_one()
        taken["publish"] = await trainer.publish.call_one(version)
        taken["receive"] = await engine.receive.call_one(version)
        ours = await engine.digest.call_one()
        await engine.forget.call_one()
        taken["put"] = await trainer.put.call_one()
        taken["get"] = await engine.get.call_one()
        theirs = await engine.digest.call_one()
        if {ours, theirs} != {sent}:
            raise AssertionError(f"version {version}: sent {sent}, got {ours} and {theirs}")
        if version >= WARM:
            for key, value in taken.items():
                seconds[key].append(value)
    await engine.close.call_one()
    await trainer.close.call_one()
    await torchstore.shutdown()
    for host in hosts:
        await host.stop()
    return seconds


if __name__ == "__main__":
    measured = asyncio.run(measure(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(measured))

"""The two processes of a transfer over shared memory: what a trainer does, what an engine does.

Seconds are those of the process that does the work; agreement is compared outside them, by a
digest of all parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from primeblocks.weightsync import (
    Plan,
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    load_into,
    plan_sync,
)
from primeblocks.weightsync.manifest import Manifest
from primeblocks.weightsync.marker import Receipt

from .model import tensors

__all__ = ["Engine", "Trainer", "digest"]

BUCKET_BYTES = 32 << 20
TIMEOUT_S = 120.0
# To a link so slow deltas are always sent, where they are sent at all.
SLOW_BYTES_PER_S = 1.0


def _plan(manifest: Manifest) -> Plan:
    """From one process that holds everything to engines that want everything."""
    return plan_sync([manifest], manifest.whole(), bucket_bytes=BUCKET_BYTES)


def digest(parameters: Mapping[str, Tensor]) -> str:
    """One pass over all bytes."""
    running = xxhash.xxh3_128()
    for tensor in parameters.values():
        running.update(_bytes(tensor))
    return running.hexdigest()


class _Side:
    """Parameters, and for `copy` a file in shared memory as large, mapped at its first use."""

    def __init__(self, name: str, scale: float, threads: int, *, seed: int, owner: bool) -> None:
        torch.set_num_threads(threads)
        self.parameters = tensors(scale, seed=seed)
        self.plan = _plan(describe(self.parameters))
        self.file = Path(f"/dev/shm/{name}.roofline")
        self.transport = SharedMemoryTransport(name, owner=owner)

    @cached_property
    def room(self) -> list[Tensor]:
        sizes = [tensor.nbytes for tensor in self.parameters.values()]
        room = torch.from_file(str(self.file), shared=True, size=sum(sizes), dtype=torch.uint8)
        return [
            part.view(torch.bfloat16).view(tensor.shape)
            for part, tensor in zip(room.split(sizes), self.parameters.values(), strict=True)
        ]

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters.values())

    def digest(self) -> str:
        return digest(self.parameters)

    def copy(self) -> float:
        """The same bytes by `copy_`, through shared memory that is mapped already."""
        return _seconds(lambda: self.copy_through(self.room))

    def copy_through(self, room: Iterable[Tensor]) -> None:
        """Between the parameters and `room`."""
        raise NotImplementedError


class Trainer(_Side):
    """Owns the transport; its parameters differ in every version."""

    def __init__(self, name: str, scale: float, threads: int, full_every: int = 1) -> None:
        super().__init__(name, scale, threads, seed=0, owner=True)
        self.publisher = Publisher(
            self.plan,
            self.parameters,
            self.transport,
            full_every=full_every,
            link_bytes_per_s=SLOW_BYTES_PER_S,
        )
        self.receipt: Receipt | None = None

    def change(self, version: int) -> str:
        """Another element of every tensor takes another value. Returns the digest."""
        for tensor in self.parameters.values():
            tensor.view(-1)[version % tensor.numel()] = version
        return self.digest()

    def step(self, share: float, version: int) -> str:
        """About `share` of all elements move by one unit in the last place."""
        generator = np.random.default_rng(version)
        for tensor in self.parameters.values():
            words = tensor.view(-1).view(torch.int16).numpy()
            chosen = generator.integers(0, len(words), max(1, int(share * len(words))))
            words[chosen] += generator.choice(np.array([-1, 1], dtype=np.int16), len(chosen))
        return self.digest()

    def publish(self, version: int) -> float:
        def publish() -> None:
            self.receipt = self.publisher.publish(version, timeout_s=TIMEOUT_S)

        return _seconds(publish)

    def sent_bytes(self) -> int:
        return 0 if self.receipt is None else self.receipt.bytes

    def copy_through(self, room: Iterable[Tensor]) -> None:
        for target, tensor in zip(room, self.parameters.values(), strict=True):
            target.copy_(tensor)

    def close(self) -> None:
        self.publisher.close()
        self.transport.close()
        self.file.unlink(missing_ok=True)


class Engine(_Side):
    """Copies what arrives into its own parameters."""

    def __init__(
        self,
        name: str,
        scale: float,
        threads: int,
        check: Literal["before", "ahead"] = "ahead",
    ) -> None:
        super().__init__(name, scale, threads, seed=1, owner=False)
        load = load_into(self.parameters, self.plan)

        def timed(named: Iterable[tuple[str, Tensor]]) -> None:
            self.loaded_s = _seconds(lambda: load(named))

        self.loaded_s = 0.0
        self.subscriber = Subscriber(
            self.plan, load if check == "ahead" else timed, self.transport, check=check
        )

    def forget(self) -> None:
        """Nothing that arrived before is left."""
        for tensor in self.parameters.values():
            tensor.zero_()

    def receive(self, version: int) -> tuple[float, float]:
        """Seconds, and those inside `load`, which an engine that checks ahead does not tell."""
        whole = _seconds(lambda: self.subscriber.receive(version, timeout_s=TIMEOUT_S))
        return whole, self.loaded_s

    def copy_through(self, room: Iterable[Tensor]) -> None:
        for source, tensor in zip(room, self.parameters.values(), strict=True):
            tensor.copy_(source)

    def close(self) -> None:
        self.subscriber.close()
        self.transport.close()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data

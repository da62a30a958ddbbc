"""Weights to another process of the same device: `python -m benchmarks.weightsync_parts.gpu`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

4 GiB of bfloat16 in tensors of 32 MiB over `IpcTransport`: seconds of a publish and of a receive,
in full and after 1 % of the elements changed, over a plain copy of the same bytes on the device.
The reader compares every tensor, bit for bit, by a sum of its bits before anything is timed. Then
it is killed while it holds a version, and another one reads the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from primeblocks import weightsync
from primeblocks.weightsync.transports import IpcTransport, open_transport

from ..harness import compare, main
from .worker import Worker

__all__ = ["SMALL", "TIMEOUT_S", "Reader", "Sizes", "change", "figures"]

Figures = dict[str, tuple[float, str, str]]
TIMEOUT_S = 60.0
CHANGED = 0.01


@dataclass(frozen=True)
class Sizes:
    """Tensors of `[rows, columns]`, and the bytes of a bucket."""

    tensors: int = 128
    rows: int = 4096
    columns: int = 4096
    bucket_bytes: int = 512 << 20
    runs: int = 5


SMALL = Sizes(tensors=3, rows=16, columns=32, bucket_bytes=1 << 10, runs=2)


class Reader:
    """The engine's process: it copies what it receives into tensors of its own."""

    def __init__(self, plan: str, spec: Mapping[str, Any], device: str) -> None:
        self._held: dict[str, Tensor] = {}
        self._device = device
        self._transport = open_transport(spec)
        self._subscriber = weightsync.Subscriber(
            weightsync.Plan.from_json(plan), self._load, self._transport
        )

    def receive(self, version: int) -> float:
        """Return the seconds that it took."""
        begun = time.perf_counter()
        self._subscriber.receive(version, timeout_s=TIMEOUT_S)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def sums(self) -> dict[str, int]:
        return {name: bits_of(tensor) for name, tensor in self._held.items()}

    def close(self) -> None:
        self._subscriber.close()
        self._transport.close()

    def _load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            if name in self._held:
                self._held[name].copy_(tensor)
            else:
                self._held[name] = tensor.to(self._device, copy=True)


def bits_of(tensor: Tensor) -> int:
    """Return a sum of the bits in which no two elements can be exchanged unseen."""
    bits = tensor.view(torch.int16).view(-1).long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum())


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """Seconds over those of a copy, full and after few changes; what a kill costs.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.weightsync_parts.gpu needs a CUDA device")
    sizes = sizes or Sizes()
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        f"layer{i}.weight": torch.randn(
            sizes.rows, sizes.columns, generator=generator, device=device, dtype=torch.bfloat16
        )
        for i in range(sizes.tensors)
    }
    copies = [torch.empty_like(x) for x in weights.values()]
    (plain,) = compare(
        lambda: torch._foreach_copy_(copies, [*weights.values()]), agree=lambda: None
    )
    source = weightsync.describe(weights)
    plan = weightsync.plan_sync([source], source.whole(), bucket_bytes=sizes.bucket_bytes)
    for kind, every in (("full", 1), ("delta", 1000)):
        name = f"weights-{kind}-{time.monotonic_ns()}"
        with (
            IpcTransport(name, owner=True, device=device, keep=kind == "delta") as transport,
            weightsync.Publisher(plan, weights, transport, full_every=every) as publisher,
        ):
            make = partial(Worker, Reader, plan.to_json(), transport.spec(), device)
            publish, receive = _timed(publisher, make, weights, sizes, generator)
        found: Figures = {}
        for what, seconds in (("publish", publish), ("receive", receive)):
            row = f"weightsync.ipc.gpu.{kind}.{what}"
            found[f"{row}_s"] = seconds, "s", ""
            found[f"{row}_over_copy"] = seconds / plain.median, "ratio", "a copy on the device"
        yield found


def _timed(
    publisher: Any, make: Any, weights: dict[str, Tensor], sizes: Sizes, generator: torch.Generator
) -> tuple[float, float]:
    """Return medians of publishing and receiving, after the reader was seen to hold the weights."""
    published, received = [], []
    reader = make()
    try:
        for version in range(1, sizes.runs + 3):
            change(weights, generator)
            begun = time.perf_counter()
            publisher.publish(version=version, timeout_s=TIMEOUT_S)
            took_s = time.perf_counter() - begun
            took_there_s = reader.call("receive", version)
            wanted = {name: bits_of(tensor) for name, tensor in weights.items()}
            assert reader.call("sums") == wanted, f"version {version} arrived changed"
            if version > 2:  # Buffers and mappings are made by the first two.
                published.append(took_s)
                received.append(took_there_s)
        reader.kill()
        change(weights, generator)
        publisher.publish(version=version + 1, timeout_s=TIMEOUT_S)
        reader = make()
        reader.call("receive", version + 1)
        wanted = {name: bits_of(tensor) for name, tensor in weights.items()}
        assert reader.call("sums") == wanted, "a reader behind a killed one holds other weights"
    finally:
        reader.close()
    return median(published), median(received)


def change(weights: dict[str, Tensor], generator: torch.Generator) -> None:
    """Flip the last bit of some elements, as a small step of an optimizer does."""
    for tensor in weights.values():
        lots = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        tensor.view(torch.int16).bitwise_xor_((lots < CHANGED).short())


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

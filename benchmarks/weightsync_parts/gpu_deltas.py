"""Digests and deltas on a CUDA device: `python -m benchmarks.weightsync_parts.gpu_deltas`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

2 GiB of bfloat16 in tensors of 32 MiB, of which 1 % of the elements change. A digest, a cast and a
digest to the host and on the device, a delta made and applied: each must give the host's bytes,
and is timed beside pinned copies over the bus and copies on the device. Then a `Publisher` of these
tensors and a `Subscriber` that loads into others of the device, over shared memory, full and as
deltas; what is loaded is compared bit for bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from primeblocks import weightsync
from primeblocks.weightsync.delta import apply_delta, encode_delta
from primeblocks.weightsync.digest import bucket_digest, cast_and_digest

from ..harness import Timing, compare, main
from .gpu import TIMEOUT_S, change

__all__ = ["SMALL", "Sizes", "figures"]

Figures = dict[str, tuple[float, str, str]]
# To a link so slow deltas are always sent, where they are sent at all.
SLOW_BYTES_PER_S = 1.0


@dataclass(frozen=True)
class Sizes:
    """Tensors of `[rows, columns]`, and the bytes of a bucket."""

    tensors: int = 64
    rows: int = 4096
    columns: int = 4096
    bucket_bytes: int = 256 << 20
    runs: int = 3


SMALL = Sizes(tensors=3, rows=16, columns=64, bucket_bytes=1 << 12, runs=2)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """GB/s of each step, its share of plain copies' rate, and seconds of whole versions.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.weightsync_parts.gpu_deltas needs a CUDA device")
    sizes = sizes or Sizes()
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        f"layer{i}.weight": torch.randn(
            sizes.rows, sizes.columns, generator=generator, device=device
        )
        for i in range(sizes.tensors)
    }
    yield _digested(list(weights.values()), device, sizes)
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    yield _compared(weights, generator, sizes)
    for kind, every in (("full", 1), ("delta", 1000)):
        yield _sent(kind, every, weights, generator, sizes)


def _digested(wide: list[Tensor], device: str, sizes: Sizes) -> Figures:
    """Digests of bfloat16, and casts to it from float32 to the host and on the device."""
    narrow = [tensor.bfloat16() for tensor in wide]
    dtypes = [tensor.dtype for tensor in narrow]
    there = [torch.empty_like(tensor) for tensor in narrow]
    here = [torch.empty_like(tensor, device="cpu") for tensor in narrow]
    pinned = torch.empty_like(narrow[0], device="cpu", pin_memory=device == "cuda")

    def agree() -> None:
        host = [tensor.cpu() for tensor in wide]
        digest = cast_and_digest(host, dtypes, None)
        assert bucket_digest(narrow) == digest
        for into in (here, there):
            assert cast_and_digest(wide, dtypes, into) == digest
            assert all(map(_same_bits, into, narrow))

    def over_the_bus() -> None:
        for tensor in narrow:
            pinned.copy_(tensor)

    *ours, bus, copies = compare(
        lambda: bucket_digest(narrow),
        lambda: cast_and_digest(wide, dtypes, here),
        lambda: cast_and_digest(wide, dtypes, there),
        over_the_bus,
        lambda: torch._foreach_copy_(there, narrow),
        agree=agree,
        runs=sizes.runs,
    )
    found: Figures = {}
    size = sum(tensor.nbytes for tensor in narrow)
    for what, timing in zip(("digest", "pack_to_host", "pack_on_device"), ours, strict=True):
        found |= _rates(f"weightsync.{what}.gpu", size, timing, copies)
        found[f"weightsync.{what}.gpu.pcie_fraction"] = (
            bus.median / timing.median, "ratio", "pinned copies to the host",
        )  # fmt: skip
    return found


def _compared(weights: dict[str, Tensor], generator: torch.Generator, sizes: Sizes) -> Figures:
    """Deltas between two versions on the device."""
    old = [tensor.clone() for tensor in weights.values()]
    change(weights, generator)
    new, targets = list(weights.values()), [tensor.clone() for tensor in old]
    room = [torch.empty_like(tensor) for tensor in old]
    deltas = [_delta(*pair) for pair in zip(new, old, strict=True)]

    def encode() -> None:
        for pair in zip(new, old, strict=True):
            encode_delta(*pair)

    def apply() -> None:
        for target, delta in zip(targets, deltas, strict=True):
            apply_delta(target, delta)

    def agree() -> None:
        host = [_delta(x.cpu(), y.cpu()) for x, y in zip(new, old, strict=True)]
        assert deltas == host, "a delta made on the device is not the host's"
        apply()
        assert all(map(_same_bits, targets, new))

    *ours, copies = compare(
        encode, apply, lambda: torch._foreach_copy_(room, new), agree=agree, runs=sizes.runs
    )
    found: Figures = {}
    size = sum(tensor.nbytes for tensor in new)
    for what, timing in zip(("encode", "apply"), ours, strict=True):
        found |= _rates(f"weightsync.delta.gpu.{what}", size, timing, copies)
    share = sum(map(len, deltas)) / size
    return found | {"weightsync.delta.gpu.bytes_ratio": (share, "ratio", "full tensors")}


def _sent(
    kind: str, every: int, weights: dict[str, Tensor], generator: torch.Generator, sizes: Sizes
) -> Figures:
    """Whole versions from the device to the device, through the host's memory."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    source = weightsync.describe(weights)
    plan = weightsync.plan_sync([source], source.whole(), bucket_bytes=sizes.bucket_bytes)
    size = sum(tensor.nbytes for tensor in engine.values())
    taken: dict[str, list[float]] = {"publish": [], "receive": []}
    name = f"deltas-{time.monotonic_ns()}"
    with (
        weightsync.SharedMemoryTransport(name, owner=True) as transport,
        weightsync.Publisher(
            plan, weights, transport, full_every=every, link_bytes_per_s=SLOW_BYTES_PER_S
        ) as publisher,
        weightsync.Subscriber(plan, weightsync.load_into(engine, plan), transport) as subscriber,
    ):
        for version in range(1, sizes.runs + 3):
            change(weights, generator)
            sent = publisher.publish(version, timeout_s=TIMEOUT_S)
            received = subscriber.receive(version, timeout_s=TIMEOUT_S)
            assert all(_same_bits(engine[name], tensor) for name, tensor in weights.items()), (
                version
            )
            if version > 2:  # Memory is made by the first two.
                assert (sent.bytes < size) is (kind == "delta"), f"{kind}: {sent.bytes} bytes sent"
                taken["publish"].append(sent.seconds)
                taken["receive"].append(received.seconds)
    return {
        f"weightsync.shared_memory.gpu.{kind}.{what}_ms": (1e3 * median(seconds), "ms", "")
        for what, seconds in taken.items()
    }


def _rates(name: str, size_bytes: int, ours: Timing, copies: Timing) -> Figures:
    fraction = copies.median / ours.median
    return {
        f"{name}.gb_per_s": (size_bytes / ours.median / 1e9, "GB/s", ""),
        f"{name}.copy_bandwidth_fraction": (fraction, "ratio", "copies on the device"),
        f"{name}.spread": (ours.spread, "ratio", ""),
    }


def _delta(new: Tensor, old: Tensor) -> bytes:
    delta = encode_delta(new, old)
    assert delta is not None, "the delta is no smaller than the tensor"
    return delta


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.to(one.device).view(torch.int16))


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

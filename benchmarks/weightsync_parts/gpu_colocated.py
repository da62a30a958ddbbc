"""Trainer and engine in turns on one device: `python -m benchmarks.weightsync_parts.gpu_colocated`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

A trainer of 2 GiB (float32 weights, gradients and AdamW's states under `HostMemory`) and an engine
of bfloat16 weights and a cache, a toy that allocates and frees them. `Colocated` publishes over
shared memory and takes turns, with a step of training between. At each stage the bytes of either
side leave the allocator or return; the engine's weights are the trainer's, and the trainer comes
back, bit for bit. Milliseconds of each stage, beside pinned copies of what moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from primeblocks import weightsync
from primeblocks.parallel.memory import HostMemory
from primeblocks.weightsync.engines import Colocated, ColocatedEngine, ColocatedTurn
from primeblocks.weightsync.transports import Transport

from ..harness import compare, main
from .gpu import TIMEOUT_S

__all__ = ["SMALL", "Engine", "Sizes", "Trainer", "figures"]

Figures = dict[str, tuple[float, str, str]]
# A device's allocator rounds up; nothing that moves is as small.
SLACK_BYTES = 32 << 20


@dataclass(frozen=True)
class Sizes:
    """Square layers, the engine's cache, and turns that are timed after the first."""

    width: int = 4096
    layers: int = 8
    cache_bytes: int = 2 << 30
    bucket_bytes: int = 256 << 20
    turns: int = 3


SMALL = Sizes(width=32, layers=2, cache_bytes=1 << 10, bucket_bytes=1 << 11, turns=1)


class Trainer:
    """A stack of layers and its optimizer."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        self.model = _layers(sizes, torch.float32, device)
        self.optimizer = AdamW(self.model.parameters(), fused=True)
        self._x = torch.randn(8, sizes.width, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Weights, their gradients, and the optimizer's states."""
        found = []
        for weight in self.model.parameters():
            assert weight.grad is not None
            found += [weight.detach(), weight.grad, *self.optimizer.state[weight].values()]
        return found


class Engine:
    """Weights and a cache, allocated while it is awake. It wakes with weights of NaN."""

    def __init__(
        self, plan: weightsync.Plan, transport: Transport, sizes: Sizes, device: str
    ) -> None:
        self._plan, self._sizes, self._device = plan, sizes, device
        self._subscriber = weightsync.Subscriber(plan, self._load, transport)
        self.model: nn.Module | None = None
        self.cache: Tensor | None = None
        self.close = self._subscriber.close
        self.calls = ColocatedEngine(
            sleep=self._sleep,
            wake=self._wake,
            update=lambda receipt, s: self._subscriber.receive(receipt.version, timeout_s=s),
        )

    def tensors(self) -> list[Tensor]:
        weights = [] if self.model is None else [x.detach() for x in self.model.parameters()]
        return weights if self.cache is None else [*weights, self.cache]

    def _sleep(self, timeout_s: float) -> None:
        self.model = self.cache = None

    @torch.no_grad()
    def _wake(self, part: str, timeout_s: float) -> None:
        if part == "weights":
            self.model = _layers(self._sizes, torch.bfloat16, self._device)
            for weight in self.model.parameters():
                weight.fill_(torch.nan)
        else:
            size = self._sizes.cache_bytes
            self.cache = torch.ones(size, dtype=torch.uint8, device=self._device)

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        assert self.model is not None
        weightsync.load_into(self.model, self._plan)(named)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Figures:
    """Milliseconds of each stage, and the share of the bus that the trainer's moves get.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.weightsync_parts.gpu_colocated needs a CUDA device")
    sizes = sizes or Sizes()
    trainer = Trainer(sizes, device)
    trainer.step()
    source = weightsync.describe(trainer.model)
    target = source.whole(dtype=torch.bfloat16)
    plan = weightsync.plan_sync([source], target, bucket_bytes=sizes.bucket_bytes)
    with (
        weightsync.SharedMemoryTransport(f"turns-{time.monotonic_ns()}", owner=True) as transport,
        weightsync.Publisher(plan, trainer.model, transport) as publisher,
        closing(Engine(plan, transport, sizes, device)) as engine,
    ):

        def in_use() -> int:
            if device == "cuda":
                return torch.cuda.memory_allocated()
            return sum(
                x.untyped_storage().nbytes() for x in (*trainer.tensors(), *engine.tensors())
            )

        turns = Colocated(
            trainer=HostMemory(trainer.model, trainer.optimizer),
            engine=engine.calls,
            publish=lambda version, timeout_s: publisher.publish(version, timeout_s=timeout_s),
            memory=in_use,
        )
        taken = []
        for version in range(1, sizes.turns + 2):
            trainer.step()
            taken.append(_both_ways(version, turns, trainer, engine))
    print(taken[-1][0].table(), taken[-1][1].table(), sep="\n")
    return _told(taken[1:], trainer, device)


def _both_ways(
    version: int, turns: Colocated, trainer: Trainer, engine: Engine
) -> tuple[ColocatedTurn, ColocatedTurn]:
    """Take the engine's turn and the trainer's; check contents and bytes."""
    before = [x.cpu() for x in trainer.tensors()]
    weights = [x.detach().bfloat16().cpu() for x in trainer.model.parameters()]
    size = sum(x.nbytes for x in before)
    there = turns.to_engine(version, timeout_s=TIMEOUT_S)
    *loaded, cache = engine.tensors()
    assert all(map(_same_bits, loaded, weights)), f"it serves other weights than {version}"
    loaded_bytes, cache_bytes = sum(x.nbytes for x in weights), cache.nbytes
    del loaded, cache
    _check(there, (0, -size, loaded_bytes, 0, cache_bytes))
    back = turns.to_trainer(timeout_s=TIMEOUT_S)
    assert all(map(_same_bits, trainer.tensors(), before)), "the trainer came back changed"
    _check(back, (-loaded_bytes - cache_bytes, size))
    return there, back


def _check(turn: ColocatedTurn, wanted: Iterable[int]) -> None:
    """Check by how many bytes each stage changed what is in use."""
    slack = SLACK_BYTES if torch.cuda.is_available() else 0
    before = turn.bytes_before
    for stage, change in zip(turn.stages, wanted, strict=True):
        found, before = stage.bytes - before, stage.bytes
        assert abs(found - change) <= slack, f"{stage.name}: {found:+,} bytes, not {change:+,}"


def _told(
    taken: list[tuple[ColocatedTurn, ColocatedTurn]], trainer: Trainer, device: str
) -> Figures:
    name = "weightsync.colocated.gpu"
    seconds: dict[str, list[float]] = {}
    for turn in (turn for both in taken for turn in both):
        for stage in turn.stages:
            seconds.setdefault(stage.name.replace(" ", "_"), []).append(stage.seconds)
    found: Figures = {
        f"{name}.{stage}_ms": (1e3 * median(each), "ms", "") for stage, each in seconds.items()
    }
    tensors = trainer.tensors()
    largest = max(tensors, key=lambda x: x.nbytes)
    pinned = torch.empty_like(largest, device="cpu", pin_memory=device == "cuda")
    down, up = compare(
        lambda: pinned.copy_(largest), lambda: largest.copy_(pinned), agree=lambda: None
    )
    parts = sum(x.nbytes for x in tensors) / largest.nbytes
    for stage, timing in (("trainer_away", down), ("trainer_back", up)):
        share = parts * timing.median / median(seconds[stage])
        found[f"{name}.{stage}.pcie_fraction"] = share, "ratio", "pinned copies"
    return found


def _layers(sizes: Sizes, dtype: torch.dtype, device: str) -> nn.Module:
    shape = sizes.width, sizes.width
    made = (nn.Linear(*shape, bias=False, dtype=dtype, device=device) for _ in range(sizes.layers))
    return nn.Sequential(*made)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(x.cpu().view(-1).view(torch.uint8) for x in (one, other)))


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

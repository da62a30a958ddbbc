"""Device memory lent and given back: `python -m benchmarks.parallel_parts.gpu_memory`.

On an H100 it timed out at larger sizes (docs/gpu.md), and at these it has not run on a GPU.
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

512 MiB of float32 weights with gradients and AdamW's states: `HostMemory` away and back against one
pinned copy of as many bytes each way. Bytes are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW

from primeblocks.parallel.memory import HostMemory

from ..harness import compare, main

__all__ = ["SMALL", "Sizes", "figures"]

Figures = dict[str, tuple[float, str, str]]


@dataclass(frozen=True)
class Sizes:
    """Square layers."""

    width: int = 4096
    layers: int = 8


SMALL = Sizes(width=32, layers=2)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """Rates of what moves.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.parallel_parts.gpu_memory needs a CUDA device")
    sizes = sizes or Sizes()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers))
    ).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    yield _moved(model, device)


def _moved(model: nn.Module, device: str) -> Figures:
    optimizer = AdamW(model.parameters(), fused=True)
    optimizer.step()
    memory = HostMemory(model, optimizer)
    before = [x.detach().cpu() for x in model.parameters()]
    size = memory.release().total_bytes
    memory.restore()
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")

    def both() -> None:
        memory.release()
        memory.restore()

    def agree() -> None:
        both()
        kept = zip(model.parameters(), before, strict=True)
        assert all(torch.equal(x.detach().cpu(), y) for x, y in kept)

    def copies() -> None:
        pinned.copy_(on_device)
        on_device.copy_(pinned)

    ours, plain = compare(both, copies, agree=agree, runs=3)
    name = "parallel.host_memory.gpu"
    return {
        f"{name}.pcie_fraction": (plain.median / ours.median, "ratio", "pinned copies both ways"),
        f"{name}.gb_per_s": (2 * size / ours.median / 1e9, "GB/s", ""),
        f"{name}.spread": (ours.spread, "ratio", ""),
    }


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

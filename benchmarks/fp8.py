"""How fast quantizers are on a CPU, against torch operation by operation and against a copy."""

import torch

from primeblocks.fp8 import Quantized, Tile, measure_error, quantize
from primeblocks.fp8.adapters.numba import NumbaQuantizer
from primeblocks.fp8.quantize import scales_of, tiled

from .harness import compare, copy_bandwidth, main
from .peers import restart_where

COMPILED = NumbaQuantizer()
TILES = {"1x128": Tile(1, 128), "128x128": Tile(128, 128), "1x32": Tile(1, 32)}
SIZES = (8192, 2048)


def eager(x: torch.Tensor, tile: Tile) -> Quantized:
    """The definition over the whole matrix at once, one torch operation after another."""
    values = tiled(x, tile).float()
    scales, factor = scales_of(values.abs().amax(dim=(-3, -1)), "float32", "reciprocal")
    codes = (values * factor[..., None, :, None]).to(torch.float8_e4m3fn)
    return Quantized(codes.reshape(x.shape), scales, tile)


def one(size: int, tile: Tile, bandwidth: float) -> dict[str, tuple[float, str, str]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, size, generator=generator).bfloat16()
    error = measure_error(x, quantize(x, tile))

    def agree() -> None:
        assert error < 0.03, f"the relative error is {error}"
        expected = eager(x, tile)
        for other in (quantize(x, tile), COMPILED(x, tile)):
            same = torch.equal(other.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert same
            assert torch.equal(other.scales, expected.scales)

    plain, default, fused = compare(
        lambda: eager(x, tile), lambda: quantize(x, tile), lambda: COMPILED(x, tile), agree=agree
    )
    moved = x.numel() * (x.element_size() + 1)  # bfloat16 read, a code written
    return {
        "speedup_vs_eager": (plain.median / fused.median, "ratio", "eager torch"),
        "copy_bandwidth_fraction": (moved / fused.median / bandwidth, "ratio", "torch copy_"),
        "spread": (fused.spread, "ratio", ""),
        "torch.speedup_vs_eager": (plain.median / default.median, "ratio", "eager torch"),
        "torch.copy_bandwidth_fraction": (
            moved / default.median / bandwidth, "ratio", "torch copy_"
        ),
        "relative_error": (error, "ratio", ""),
    }  # fmt: skip


def measure() -> dict[str, tuple[float, str, str]]:
    """Every size, tile and number of threads; the plain names are those of the first of each."""
    figures: dict[str, tuple[float, str, str]] = {}
    every = torch.get_num_threads()
    for threads in sorted({every, 1}):
        torch.set_num_threads(threads)
        bandwidth = copy_bandwidth()
        for size in SIZES:
            for name, tile in TILES.items():
                at = f"fp8.quantize.cpu.{threads}_threads.{size}.{name}"
                found = one(size, tile, bandwidth)
                figures |= {f"{at}.{key}": figure for key, figure in found.items()}
                for key in ("speedup_vs_eager", "copy_bandwidth_fraction"):
                    figures.setdefault(f"fp8.quantize.cpu.{key}", found[key])
    return figures


if __name__ == "__main__":
    restart_where("torch", module="benchmarks.fp8")
    main(measure)

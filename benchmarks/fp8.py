"""How fast the quantizer is against a copy, and what it costs in precision."""

import torch

from primeblocks.fp8 import Tile, measure_error, quantize

from .harness import compare, copy_bandwidth, main


def measure() -> dict[str, tuple[float, str, str]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 2048, generator=generator).bfloat16().to(device)
    tile = Tile(1, 128)
    error = measure_error(x, quantize(x, tile))

    def agree() -> None:
        assert error < 0.03, f"the relative error is {error}"

    (timing,) = compare(lambda: quantize(x, tile), agree=agree)
    moved = x.numel() * (x.element_size() + 1)  # bfloat16 read, a code written
    fraction = moved / timing.median / copy_bandwidth(device=device)
    return {
        "fp8.quantize.1x128.copy_bandwidth_fraction": (fraction, "ratio", "torch copy_"),
        "fp8.quantize.1x128.relative_error": (error, "ratio", ""),
        "fp8.quantize.1x128.spread": (timing.spread, "ratio", ""),
    }


if __name__ == "__main__":
    main(measure)

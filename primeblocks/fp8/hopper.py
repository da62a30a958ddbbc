"""Checks that kernels of Hopper's block-scaled products share. No check reads from the device."""

from __future__ import annotations

import torch

from ..errors import ShapeError, UnsupportedError
from .quantize import Quantized, Tile

__all__ = ["ROW", "SIDE", "SQUARE", "check_hopper", "check_operands"]

SIDE = 128
ROW, SQUARE = Tile(1, SIDE), Tile(SIDE, SIDE)

_OTHERS = (
    "Use primeblocks.fp8.adapters.triton.TritonGemm(), or "
    "primeblocks.fp8.reference.ReferenceGemm()."
)


def check_hopper(device: torch.device, engine: str) -> None:
    """Check that `device` has Hopper's block-scaled products. Local. The host does not wait.

    Later GPUs are refused, too. Their float8 products have tiles of 1 x 32 and UE8M0 scales. A
    library would have to cast float32 scales to UE8M0, which changes the numbers.

    Raises:
        UnsupportedError: the device is not CUDA of compute capability 9.0.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"{engine} multiplies on a CUDA device; got {device}. {_OTHERS}")
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise UnsupportedError(
            f"{engine} multiplies 1 x 128 tiles with float32 scales only on GPUs of compute "
            f"capability 9.0; {device} has {major}.{minor}. {_OTHERS}"
        )


def check_operands(a: Quantized, b: Quantized, engine: str) -> None:
    """Refuse tiles, layouts and sizes that `a @ b.T` does not support. Local.

    Raises:
        ShapeError: the inner dims or the devices differ.
        UnsupportedError: tiles of `a` are not 1 x 128, or tiles of `b` are neither 1 x 128 nor
            128 x 128.
        UnsupportedError: the inner dim, or a side of a weight in 128 x 128 tiles, is not a multiple
            of 128.
        UnsupportedError: codes are not contiguous.
    """
    if a.shape[-1] != b.shape[-1] or a.codes.device != b.codes.device:
        raise ShapeError(
            f"a {list(a.shape)} on {a.codes.device} and b {list(b.shape)} on {b.codes.device} do "
            "not multiply: inner dims and devices must be equal."
        )
    if a.tile != ROW or b.tile not in (ROW, SQUARE):
        raise UnsupportedError(
            f"{engine} multiplies tiles of 1 x 128 by tiles of 1 x 128 or 128 x 128; got "
            f"{a.tile.rows} x {a.tile.columns} by {b.tile.rows} x {b.tile.columns}. {_OTHERS}"
        )
    inner, out = b.shape[-1], b.shape[-2]
    if inner % SIDE or (b.tile == SQUARE and out % SIDE):
        raise UnsupportedError(
            f"{engine} needs an inner dim, and sides of weights in 128 x 128 tiles, that are "
            f"multiples of 128; got an inner dim of {inner} and {out} outputs. Exclude the layer, "
            'or pad the tokens to a multiple of 128 if they are the inner dim (wgrad="float8"). '
            + _OTHERS
        )
    for name, x in (("a", a), ("b", b)):
        if not x.codes.is_contiguous():
            raise UnsupportedError(
                f"{engine} needs contiguous codes (k_major); the codes of {name} have shape "
                f"{list(x.shape)} and strides {list(x.codes.stride())}. Copy them once per "
                "version, as quantize_both_ways does."
            )

"""DeepGEMM's block-scaled products, dense and of experts: run on one H100.

    recipe = fp8.Recipe(gemm=DeepGemm(k_groups=TritonGemm()))

It ran with sgl-deep-gemm 0.1.5, apache-tvm-ffi 0.1.11 and torch 2.11. **A wheel belongs to one
torch**: 0.2.2, built for a newer one, loads beside 2.11 and misreads every tensor. On a CPU a fake
holds calls to the checks of the library's source (2.6.1, and sgl-deep-gemm 0.2.5). The library
compiles a kernel for each shape of weights when it is first used.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import MissingPackageError, ShapeError, UnsupportedError
from ..hopper import SIDE, SQUARE, check_groups, check_hopper, check_operands
from ..quantize import Quantized
from ..recipe import Gemm

__all__ = ["DeepGemm", "check_device"]

_ENGINE = "DeepGemm"
# sgl-deep-gemm on PyPI installs the first of these names too.
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm", "sgl_deep_gemm")
_SYMBOLS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
_COLUMNS = 64  # Of a result: its tiles are that wide, or a multiple.
_ROWS = 64  # With tiles of 1 x 128 on both sides: for 4 its kernel did not compile.


def check_device(device: torch.device) -> None:
    """Refuse where the library is not, or a device for which it would alter scales. Local.

    For compute capability 10 it casts float32 scales to UE8M0, rounding them.

    Raises:
        UnsupportedError: no CUDA device of compute capability 9.0.
        MissingPackageError: no module has the library's functions.
    """
    check_hopper(device, _ENGINE)
    _library()


@dataclass(frozen=True)
class DeepGemm:
    """Products of quantized matrices by DeepGEMM; see `Gemm`.

    `a` has tiles of 1 x 128. With weights of 128 x 128 the result is bfloat16; with tiles of
    1 x 128 on both sides, as gradients of weights have, float32. The inner dim, and both sides of
    weights, are multiples of 128; otherwise outputs are of 64, and rows 64 or more. Codes are not
    copied.

    Every expert's rows end at a multiple of `alignment`, so a dispatcher pads its groups; rows of
    padding belong to the expert before them. Whether offsets do so is asserted on the device, where
    they are, so no host waits: a failed assertion ends the CUDA context at a later call.

    The library's product over each expert's tokens needs their numbers on the host, all multiples
    of 128, and each expert's codes in a block of their own. It belongs to another engine,
    `k_groups`.

    Args:
        k_groups: multiplies over experts' tokens, for `wgrad="float8"`.

    Source: github.com/deepseek-ai/DeepGEMM.
    """

    k_groups: Gemm | None = None
    k_major: ClassVar[bool] = True
    alignment: ClassVar[int] = SIDE

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`. Local.

        Raises:
            ShapeError: no two matrices, or their inner dims differ.
            UnsupportedError: sizes, tiles or a device that the library does not take.
            MissingPackageError: it is not installed; says where it was sought.
        """
        if a.codes.ndim != 2 or b.codes.ndim != 2:
            raise ShapeError(
                f"DeepGemm multiplies matrices; got {list(a.shape)} by {list(b.shape)}"
            )
        _check(a, b)
        rows, columns = a.shape[0], b.shape[0]
        if b.tile == SQUARE:
            out = a.scales.new_empty(rows, columns, dtype=torch.bfloat16)
            _library().fp8_gemm_nt(*_pairs(a, b), out, recipe=(1, SIDE, SIDE))
            return out
        if rows < _ROWS:
            raise UnsupportedError(
                f"DeepGemm needs {_ROWS} rows where both sides have tiles of 1 x {SIDE}; got "
                f"{rows}. Use primeblocks.fp8.adapters.triton.TritonGemm()."
            )
        # Its kernel of 1 x 128 by 1 x 128 adds to what is there, and has no other form.
        out = a.scales.new_zeros(rows, columns)
        _library().fp8_gemm_nt(*_pairs(a, b), out, c=out, recipe=(1, 1, SIDE))
        return out

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows of `a` by `b[expert].T`; zeros past the last offset. Local.

        Raises:
            ShapeError: dims or devices do not fit.
            UnsupportedError, MissingPackageError: as for `a @ b.T`.
        """
        check_groups(a, b, offsets, _ENGINE)
        if b.tile != SQUARE:
            raise UnsupportedError(
                f"DeepGemm multiplies experts in tiles of 128 x 128; got {b.tile.rows} x "
                f"{b.tile.columns}. Use primeblocks.fp8.adapters.triton.TritonGemm()."
            )
        _check(a, b)
        # Zeros: rows that are nobody's are not written.
        out = a.scales.new_zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        if out.numel():
            layout = _layout(offsets, a.shape[0])
            _library().m_grouped_fp8_gemm_nt_contiguous(
                *_pairs(a, b), out, layout, recipe=(1, SIDE, SIDE)
            )
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Let `k_groups` multiply over each expert's tokens. Local.

        Raises:
            UnsupportedError: there is none.
        """
        if self.k_groups is None:
            raise UnsupportedError(
                "DeepGEMM's product over experts' tokens needs their numbers on the host, which "
                'would wait for the GPU. Use wgrad="bfloat16", or pass an engine that does '
                "without: DeepGemm(k_groups=primeblocks.fp8.adapters.triton.TritonGemm())."
            )
        return self.k_groups.k_grouped(a, b, offsets)


def _check(a: Quantized, b: Quantized) -> None:
    check_operands(a, b, _ENGINE)
    if b.shape[-2] % _COLUMNS:
        raise UnsupportedError(
            f"DeepGemm needs outputs in multiples of {_COLUMNS}; got {b.shape[-2]}. Exclude the "
            "layer, or use primeblocks.fp8.adapters.triton.TritonGemm()."
        )
    check_device(a.codes.device)


def _pairs(a: Quantized, b: Quantized) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Operands as the library takes them; it lays the scales of `a` out by itself."""
    return (a.codes, a.scales.contiguous()), (b.codes, b.scales.contiguous())


def _layout(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, -1 past the last offset; int32, made on the device."""
    # The kernel asks for the expert of a tile's first row, and takes it for all 128.
    aligned = (offsets % SIDE).any().logical_not()
    torch._assert_async(aligned, f"every offset must be a multiple of {SIDE}; pad the groups")
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, positions, right=True, out_int32=True)
    return expert.masked_fill_(expert == len(offsets), -1)


@functools.cache
def _library() -> Any:
    """Import the first module that has the functions, by name of function and not of version.

    Raises:
        MissingPackageError: with the reason for which each was passed over.
    """
    passed_over = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # Its shared library asks for CUDA's when loaded (OSError, RuntimeError), and one of
            # its versions asserts that there is a CUDA toolkit.
            first = str(error).splitlines()[0] if str(error) else "no reason given"
            passed_over.append(f"{name}: {type(error).__name__}, {first}")
            continue
        lacking = [symbol for symbol in _SYMBOLS if not hasattr(module, symbol)]
        if not lacking:
            return module
        passed_over.append(f"{name}: has no {' and no '.join(lacking)}")
    raise MissingPackageError(
        "DeepGEMM",
        remedy="pip install sgl-deep-gemm, or vLLM for CUDA brings it; deep_gemm 1.0.0 on PyPI is "
        f"another interface. Passed over: {'; '.join(passed_over)}.",
    )

"""Block-scaled products of DeepGEMM: dense, and grouped by expert.

    recipe = fp8.Recipe(gemm=DeepGemm(k_groups=TritonGemm()))

`DeepGemm` ran on one H100 with sgl-deep-gemm 0.1.5, apache-tvm-ffi 0.1.11 and torch 2.11. On a CPU,
tests replace DeepGEMM by a fake that repeats the checks in the source of DeepGEMM 2.6.1. DeepGEMM
compiles a kernel at the first use of each shape of weights.

**Use a wheel only with the torch version for which the wheel was built.**
For example, sgl-deep-gemm 0.2.2 was built for a newer torch than 2.11. With torch 2.11,
sgl-deep-gemm 0.2.2 loads without an error, but misreads every tensor.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import MissingPackageError, ShapeError, UnsupportedError
from ..hopper import SIDE, SQUARE, check_hopper, check_operands
from ..quantize import Quantized
from ..recipe import Gemm

__all__ = ["DeepGemm", "check_device"]

_ENGINE = "DeepGemm"
# sgl-deep-gemm on PyPI also installs the first of these names.
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm", "sgl_deep_gemm")
_SYMBOLS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
_COLUMNS = 64  # The library's tiles of a result are this wide, or a multiple of it.
_ROWS = 64  # Fewest rows if both tiles are 1 x 128: for 4 rows the kernel did not compile.


def check_device(device: torch.device) -> None:
    """Check that DeepGEMM is installed, and that `device` is a Hopper GPU. Local.

    Newer GPUs are refused. For example, on compute capability 10, DeepGEMM would round float32
    scales to UE8M0, which changes the results.

    Raises:
        UnsupportedError: the device is not a GPU of compute capability 9.0.
        MissingPackageError: a module with DeepGEMM's functions is not installed.
    """
    check_hopper(device, _ENGINE)
    _library()


@dataclass(frozen=True)
class DeepGemm:
    """A `Gemm` for dense and grouped products with DeepGEMM.

    Tiles of `a` must be 1 x 128. If `b` has tiles of 128 x 128, as weights do, the result is
    bfloat16. If `b` has tiles of 1 x 128, the result is float32. Sizes must meet two conditions:

    - The inner dim is a multiple of 128. The number of rows of `b` is also a multiple of 128 if
      `b` has tiles of 128 x 128.
    - If `b` has tiles of 1 x 128, the number of rows is at least 64 for `a`, and a multiple of 64
      for `b`.

    Each expert's rows must end at a multiple of `alignment`, so let the dispatcher pad groups. Rows
    of padding belong to the expert before the padding. An assertion on the device checks the
    alignment, so that the host does not wait. A failed assertion ends the CUDA context, and a later
    CUDA call raises the error.

    Args:
        k_groups: the `Gemm` for `k_grouped`, which recipes with `wgrad="float8"` call. DeepGEMM's
            own kernel for this product would need the number of tokens per expert on the host.

    Source: github.com/deepseek-ai/DeepGEMM.
    """

    k_groups: Gemm | None = None
    k_major: ClassVar[bool] = True
    alignment: ClassVar[int] = SIDE

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`. Local.

        Raises:
            ShapeError: the operands are not two matrices, or their inner dims differ.
            UnsupportedError: DeepGEMM does not support the sizes, the tiles or the device.
            MissingPackageError: DeepGEMM is not installed. The message lists the tried modules.
        """
        if a.codes.ndim != 2 or b.codes.ndim != 2:
            raise ShapeError(
                f"DeepGemm multiplies matrices; got {list(a.shape)} by {list(b.shape)}."
            )
        _check(a, b)
        rows, columns = a.shape[0], b.shape[0]
        if b.tile == SQUARE:
            out = a.scales.new_empty(rows, columns, dtype=torch.bfloat16)
            with torch.cuda.device_of(out):
                _library().fp8_gemm_nt(*_pairs(a, b), out, recipe=(1, SIDE, SIDE))
            return out
        if rows < _ROWS:
            raise UnsupportedError(
                f"DeepGemm needs at least {_ROWS} rows if both sides have tiles of 1 x {SIDE}; "
                f"got {rows}. Use primeblocks.fp8.adapters.triton.TritonGemm()."
            )
        # The library's kernel of 1 x 128 by 1 x 128 always adds to its output.
        out = a.scales.new_zeros(rows, columns)
        with torch.cuda.device_of(out):
            _library().fp8_gemm_nt(*_pairs(a, b), out, c=out, recipe=(1, 1, SIDE))
        return out

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows of `a` by `b[expert].T`. Local.

        Rows of the result after the last offset are zero.

        Raises:
            ShapeError: shapes or devices do not match, or `offsets` is not int32.
            UnsupportedError, MissingPackageError: as for `__call__`.
        """
        if a.codes.ndim != 2 or b.codes.ndim != 3 or offsets.shape != b.shape[:1]:
            raise ShapeError(
                "DeepGemm groups rows [tokens, in] by experts [experts, out, in] with offsets "
                f"[experts]; got {list(a.shape)}, {list(b.shape)} and {list(offsets.shape)}."
            )
        if offsets.dtype != torch.int32 or offsets.device != a.codes.device:
            raise ShapeError(
                f"offsets must be int32 on {a.codes.device}; got {offsets.dtype} on "
                f"{offsets.device}."
            )
        if b.tile != SQUARE:
            raise UnsupportedError(
                f"DeepGemm multiplies experts in tiles of 128 x 128; got {b.tile.rows} x "
                f"{b.tile.columns}. Use primeblocks.fp8.adapters.triton.TritonGemm()."
            )
        _check(a, b)
        # Zeros, because the library does not write rows without an expert.
        out = a.scales.new_zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        if out.numel():
            layout = _layout(offsets, a.shape[0])
            with torch.cuda.device_of(out):
                _library().m_grouped_fp8_gemm_nt_contiguous(
                    *_pairs(a, b), out, layout, recipe=(1, SIDE, SIDE)
                )
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Compute `a @ b.T` over each expert's tokens with the kernel `k_groups`. Local.

        Raises:
            UnsupportedError: `DeepGemm` was constructed without `k_groups`.
        """
        if self.k_groups is None:
            raise UnsupportedError(
                "DeepGEMM's product over experts' tokens needs the number of tokens per expert on "
                'the host, which would wait for the GPU. Use wgrad="bfloat16", or pass a kernel '
                "that does not need these numbers: "
                "DeepGemm(k_groups=primeblocks.fp8.adapters.triton.TritonGemm())."
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
    """Return operands as the library takes them. The library rearranges the scales of `a`."""
    return (a.codes, a.scales.contiguous()), (b.codes, b.scales.contiguous())


def _layout(offsets: Tensor, rows: int) -> Tensor:
    """Return each row's expert, int32, computed on the device. It is -1 after the last offset."""
    # The kernel reads the expert of a tile's first row and uses it for all 128 rows.
    aligned = (offsets % SIDE).any().logical_not()
    torch._assert_async(aligned, f"every offset must be a multiple of {SIDE}. Pad the groups")
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, positions, right=True, out_int32=True)
    return expert.masked_fill_(expert == len(offsets), -1)


@functools.cache
def _library() -> Any:
    """Import the first module that has the functions, whatever its version."""
    passed_over = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # The library loads CUDA's libraries (OSError, RuntimeError), and one of its versions
            # asserts that a CUDA toolkit exists.
            first = str(error).splitlines()[0] if str(error) else "no reason given"
            passed_over.append(f"{name}: {type(error).__name__}, {first}")
            continue
        lacking = [symbol for symbol in _SYMBOLS if not hasattr(module, symbol)]
        if not lacking:
            return module
        passed_over.append(f"{name}: has no {' and no '.join(lacking)}")
    raise MissingPackageError(
        "DeepGEMM",
        remedy="Run: pip install sgl-deep-gemm, or install vLLM for CUDA, which includes it. "
        f"deep_gemm 1.0.0 on PyPI has another interface. Tried: {'; '.join(passed_over)}.",
    )

"""Attention over selected rows in Triton: launches and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from ....errors import ShapeError, UnsupportedError
from ...attention.dsa.kernel import Rows
from .backward import add_to_rows, find_slopes
from .forward import attend
from .rows import INTERPRETED, check_device, columns_of

__all__ = ["TritonSparseKernel", "launch_of"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TritonSparseKernel:
    """A `SparseKernel` in Triton, for float16, bfloat16 and float32.

    Forward launches one kernel. Backward sets the gradient of kv to zero and launches two kernels.
    The host does not wait. The kernels support latent attention with keys of at most 576 columns.
    The first columns of a key are its value. If an id is beyond the last row, the output of the
    query is NaN. The sizes of tiles are chosen for Hopper. Other GPUs and float32 are supported,
    but not tuned. Float32 does not use tensor cores. An operand whose columns are not adjacent in
    memory is copied first. An operand is also copied if a token's first and last head (or group)
    are 2**31 numbers or more apart.

    The programs of backward add gradients to the same rows in any order, so the rounding of the
    gradient of kv can differ between calls. Under `torch.use_deterministic_algorithms`, backward
    raises an error. With `warn_only=True`, backward runs without a warning.
    """

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of each query to its selected rows. Local.

        Raises:
            ShapeError: shapes, dtypes or devices do not fit together.
            UnsupportedError: the dtype is float64, `rows` are not rows of latent attention, or
                tensors are on a CPU.
        """
        columns, heads = _check(q, kv, indices, rows), q.shape[1] // kv.shape[1]
        out = q.new_empty(*q.shape[:2], rows.value_dim)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        launch = launch_of("forward", q.dtype, heads, hopper=_on_hopper(q))
        if q.numel():
            q, kv = _by_row(q), _by_row(kv)
            grid = q.shape[0] * kv.shape[1] * triton.cdiv(heads, launch["HEADS"])
            with torch.cuda.device_of(q):
                attend[(grid,)](
                    q,
                    kv,
                    indices.contiguous(),
                    out,
                    lse,
                    heads,
                    kv.shape[1],
                    kv.shape[0],
                    indices.shape[2],
                    scale * math.log2(math.e),
                    *q.stride()[:2],
                    *kv.stride()[:2],
                    SPAN=_span(indices),
                    **columns,
                    **launch,
                )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        rows: Rows,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of q, and the gradient of kv in float32. Local.

        Raises:
            ShapeError, UnsupportedError: the errors of `forward`.
            UnsupportedError: torch demands deterministic algorithms.
        """
        columns = _check(q, kv, indices, rows)
        _check_order_is_free()
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        if not q.numel():
            return dq, dkv
        queries, groups, k = indices.shape
        heads = q.shape[1] // groups
        grad, q, kv = (_by_row(x) for x in (grad, q, kv))
        indices, out, lse = indices.contiguous(), out.contiguous(), lse.contiguous()
        delta = torch.empty_like(lse)
        sizes = heads, groups, kv.shape[0], k, scale
        strides = [n for x in (grad, q, kv) for n in x.stride()[:2]]
        hopper = _on_hopper(q)
        by_query, by_row = (
            launch_of(kernel, q.dtype, heads, hopper=hopper) for kernel in ("queries", "rows")
        )
        programs = queries * groups * triton.cdiv(heads, by_query["HEADS"])
        tiles = queries * groups * triton.cdiv(k, by_row["TILE"])
        with torch.cuda.device_of(q):
            find_slopes[(programs,)](
                grad,
                q,
                kv,
                indices,
                out,
                lse,
                dq,
                delta,
                *sizes,
                *strides,
                SPAN=_span(indices),
                **columns,
                **by_query,
            )
            if tiles:
                add_to_rows[(tiles,)](
                    grad,
                    q,
                    kv,
                    indices,
                    lse,
                    delta,
                    dkv,
                    *sizes,
                    kv.shape[2],
                    *strides,
                    **columns,
                    **by_row,
                )
        return dq, dkv


def _check_order_is_free() -> None:
    wanted = torch.are_deterministic_algorithms_enabled()
    if wanted and not torch.is_deterministic_algorithms_warn_only_enabled() and not INTERPRETED:
        raise UnsupportedError(
            "TritonSparseKernel adds gradients of rows in any order, and torch demands "
            "deterministic algorithms. Use ReferenceKernel()."
        )


def launch_of(
    kernel: Literal["forward", "queries", "rows"],
    dtype: torch.dtype,
    heads: int,
    *,
    hopper: bool = True,
) -> dict[str, int]:
    """Return the sizes of a kernel's tiles, and the number of warps that share a tile. Pure.

    With 64 heads and 576 columns of 2 bytes, a thread takes 255 registers. A program then takes 221
    to 226 KiB of the 227 KiB of shared memory that it has on Hopper. On other GPUs, and for
    float32, tiles are small.

    Args:
        heads: heads of a group.
    """
    if dtype == torch.float32:
        some, tile, warps = 16, 16, 8
    elif not hopper:
        some, tile, warps = 16, 32 if kernel == "forward" else 16, 8
    else:
        # Hopper's warps multiply at least 64 lines together.
        some = max(16, min(32 if kernel == "rows" else 64, triton.next_power_of_2(heads)))
        tile = 32 if kernel == "queries" else 64
        warps = 4 if some == 16 and kernel != "rows" else 8
    return {"HEADS": some, "TILE": tile, "STAGES": 2, "num_warps": warps}


def _on_hopper(x: Tensor) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(x.device)[0] == 9


def _span(indices: Tensor) -> int:
    return max(16, min(1024, triton.next_power_of_2(indices.shape[2])))


def _by_row(x: Tensor) -> Tensor:
    """Make the numbers of each vector contiguous, and distances of heads fit the kernels' int32."""
    fits = x.stride(-1) == 1 and (x.shape[1] - 1) * x.stride(1) < 2**31
    return x if fits else x.contiguous()


def _check(q: Tensor, kv: Tensor, indices: Tensor, rows: Rows) -> dict[str, int]:
    check_device(q, kv, indices)
    shapes = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, indices {tuple(indices.shape)}"
    if not q.ndim == kv.ndim == indices.ndim == 3:
        raise ShapeError(
            "q must be [queries, heads, key_dim], kv [entries, groups, width] and indices "
            f"[queries, groups, k]; got {shapes}."
        )
    if (
        q.shape[2] != rows.key_dim
        or kv.shape[2] < rows.width
        or indices.shape[:2] != (q.shape[0], kv.shape[1])
        or not kv.shape[1]
        or q.shape[1] % kv.shape[1]
    ):
        raise ShapeError(f"{shapes} do not fit each other and {rows}.")
    if q.dtype != kv.dtype or indices.dtype != torch.int32:
        raise ShapeError(
            f"q and kv need one dtype, and indices int32; got {q.dtype}, {kv.dtype} and "
            f"{indices.dtype}."
        )
    if q.dtype not in _DTYPES:
        raise UnsupportedError(
            f"the kernel takes float16, bfloat16 and float32; got {q.dtype}. Use ReferenceKernel()."
        )
    return columns_of(rows)

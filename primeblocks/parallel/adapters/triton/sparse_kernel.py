"""Attention over selected rows as a Triton engine: launches and checks."""

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
from .fixed_point import scale_back
from .forward import attend
from .rows import INTERPRETED, Columns, check_device, columns_of

__all__ = ["TritonSparseKernel", "launch_of"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BACK = 4096


@dataclass(frozen=True)
class TritonSparseKernel:
    """A `SparseKernel` in Triton, for float16, bfloat16 and float32.

    Forward is one launch. Backward sets dkv to zero and launches two kernels, or three if the
    result must be equal bit for bit. The host does not wait. Rows span at most 576 columns. An id
    beyond the rows makes its query's output NaN. Tiles are chosen for Hopper. Other GPUs, and
    float32, which does not use tensor cores, work but are not tuned.

    By default the programs of backward add to the same rows in any order, so results differ by
    rounding between runs. If `deterministic`, sums are made of 64-bit integers and do not differ.
    That doubles the traffic of these additions and needs 8 more bytes per number of dkv. A NaN or
    an infinity then makes all of dkv NaN.

    Args:
        deterministic: make dkv equal bit for bit. None: follow
            `torch.use_deterministic_algorithms`.
    """

    deterministic: bool | None = None

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend from each query to its rows. Local.

        Raises:
            ShapeError: shapes, dtypes or devices do not fit.
            UnsupportedError: the dtype is float64, rows are wider, or tensors are on a CPU.
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
                    **columns.constants(),
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
        """Return the gradients of q, and of kv in float32. Local. Raises as `forward` does."""
        columns = _check(q, kv, indices, rows)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not q.numel():
            return dq, torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        fixed = self.deterministic
        if fixed is None:
            fixed = torch.are_deterministic_algorithms_enabled()
        grad, q, kv = (_by_row(x) for x in (grad, q, kv))
        indices, out, lse = indices.contiguous(), out.contiguous(), lse.contiguous()
        call = _Backward(grad, q, kv, indices, lse, torch.empty_like(lse), columns, scale, fixed)
        if fixed:  # The number behind the sums is the largest contribution.
            sums = torch.zeros(kv.numel() + 1, dtype=torch.int64, device=kv.device)
            largest = sums[-1:].view(torch.int32)
        else:
            sums = largest = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        with torch.cuda.device_of(q):
            call.find_slopes(out, dq, largest)
            call.add_to_rows(sums, largest)
            return dq, call.scale_back(sums, largest) if fixed else sums


@dataclass(frozen=True)
class _Backward:
    """The kernels of one backward, which share their operands."""

    grad: Tensor
    q: Tensor
    kv: Tensor
    indices: Tensor
    lse: Tensor
    delta: Tensor
    columns: Columns
    scale: float
    fixed: bool

    @property
    def _sizes(self) -> tuple[float, ...]:
        entries, groups, _ = self.kv.shape
        return self.q.shape[1] // groups, groups, entries, self.indices.shape[2], self.scale

    @property
    def _strides(self) -> tuple[int, ...]:
        return tuple(n for x in (self.grad, self.q, self.kv) for n in x.stride()[:2])

    def _launch(self, kernel: Literal["queries", "rows"]) -> dict[str, int]:
        heads = self.q.shape[1] // self.kv.shape[1]
        return launch_of(kernel, self.q.dtype, heads, hopper=_on_hopper(self.q))

    @property
    def _programs(self) -> int:
        """The number of programs of `find_slopes`, which bounds the contributions to one row."""
        queries, groups, _ = self.indices.shape
        heads = self.q.shape[1] // groups
        return queries * groups * triton.cdiv(heads, self._launch("queries")["HEADS"])

    @property
    def _room(self) -> int:
        # Twice the bound, to allow for the rounding of weights and slopes.
        return math.ceil(math.log2(2 * self._programs))

    def find_slopes(self, out: Tensor, dq: Tensor, largest: Tensor) -> None:
        find_slopes[(self._programs,)](
            self.grad,
            self.q,
            self.kv,
            self.indices,
            out,
            self.lse,
            dq,
            self.delta,
            largest,
            *self._sizes,
            *self._strides,
            FIXED=self.fixed,
            SPAN=_span(self.indices),
            **self.columns.constants(),
            **self._launch("queries"),
        )

    def add_to_rows(self, sums: Tensor, largest: Tensor) -> None:
        queries, groups, k = self.indices.shape
        launch = self._launch("rows")
        if tiles := triton.cdiv(k, launch["TILE"]):
            add_to_rows[(queries * groups * tiles,)](
                self.grad,
                self.q,
                self.kv,
                self.indices,
                self.lse,
                self.delta,
                sums,
                largest,
                *self._sizes,
                self.kv.shape[2],
                *self._strides,
                FIXED=self.fixed,
                ROOM=self._room,
                **self.columns.constants(),
                **launch,
            )

    def scale_back(self, sums: Tensor, largest: Tensor) -> Tensor:
        dkv = torch.empty(self.kv.shape, dtype=torch.float32, device=self.kv.device)
        if dkv.numel():
            scale_back[(triton.cdiv(dkv.numel(), _BACK),)](
                sums, largest, dkv, dkv.numel(), ROOM=self._room, SIZE=_BACK, num_warps=4
            )
        return dkv


def launch_of(
    kernel: Literal["forward", "queries", "rows"],
    dtype: torch.dtype,
    heads: int,
    *,
    hopper: bool = True,
) -> dict[str, int]:
    """Return the sizes of a kernel's tiles, and the number of warps that share one. Pure.

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
    """Make the numbers of each vector contiguous. Vectors may be at any distance."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(q: Tensor, kv: Tensor, indices: Tensor, rows: Rows) -> Columns:
    check_device(q, kv, indices)
    shapes = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, indices {tuple(indices.shape)}"
    if not q.ndim == kv.ndim == indices.ndim == 3:
        raise ShapeError(
            "needs q [queries, heads, key_dim], kv [entries, groups, width] and indices "
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

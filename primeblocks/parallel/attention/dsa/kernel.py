"""Attention of each query to its selected rows, and to no other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ....errors import PlanError
from ..kernel import accumulator_dtype

__all__ = ["ReferenceKernel", "Rows", "SparseKernel", "row_scores", "selected_rows"]


@dataclass(frozen=True)
class Rows:
    """The columns of a row that are its key and its value. Key and value may overlap.

    Ranks send whole rows, also if queries read only some columns of a row.

    - `Rows.latent(512, 64)` describes latent attention (MLA).
    - `Rows.heads(128, 128)` describes grouped heads: a key of 128 columns, and then a value of 128
      columns.
    - `Rows((0, 512), (0, 512))` describes one vector that is both key and value.

    Attributes:
        key: the first column of the key, and the column after its last column.
        value: the first column of the value, and the column after its last column.
    """

    key: tuple[int, int]
    value: tuple[int, int]

    def __post_init__(self) -> None:
        for name, (start, stop) in (("key", self.key), ("value", self.value)):
            if not 0 <= start < stop:
                raise PlanError(
                    f"{name} needs columns (start, stop), ascending; got {start, stop}."
                )

    @classmethod
    def latent(cls, latent_dim: int, rope_dim: int = 0) -> Rows:
        """Describe rows that contain first a latent, and then the rotated part of the key."""
        return cls((0, latent_dim + rope_dim), (0, latent_dim))

    @classmethod
    def heads(cls, key_dim: int, value_dim: int) -> Rows:
        """Describe rows that contain first a key, and then a value."""
        return cls((0, key_dim), (key_dim, key_dim + value_dim))

    @property
    def key_dim(self) -> int:
        return self.key[1] - self.key[0]

    @property
    def value_dim(self) -> int:
        return self.value[1] - self.value[0]

    @property
    def width(self) -> int:
        return max(self.key[1], self.value[1])


@runtime_checkable
class SparseKernel(Protocol):
    """Forward and backward of attention over selected rows. Local.

    Query head h reads group `h // (heads // groups)`. In `indices`, the ids of a query come before
    every -1, so a kernel may stop at the first -1. A query without ids has an output of 0 and an
    `lse` of -inf. A kernel does not allocate tensors as large as all selected rows together.
    """

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the logarithm (base e) of the sum of exponentials, `lse`.

        Args:
            q: `[queries, heads, key_dim]`.
            kv: `[entries, groups, width]`.
            indices: int32 `[queries, groups, k]`, ids of the rows of `kv` that a query reads,
                followed by -1.

        Returns:
            The output, `[queries, heads, value_dim]` in the dtype of q, and `lse`,
            `[queries, heads]` in float32, or in float64 for float64 operands.
        """
        ...

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
        """Return the gradient of q in the dtype of q, and the gradient of kv in the dtype of `lse`.

        `out` and `lse` may include keys that are not in `indices`, such as an attention sink.
        """
        ...


class ReferenceKernel:
    """A `SparseKernel` in plain torch, which computes one chunk of queries at a time.

    Sums are in float32, or in float64 for float64 operands.

    Args:
        chunk_bytes: the approximate memory of a chunk of queries, in bytes. A chunk has at least
            one query.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self.chunk_bytes = chunk_bytes

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulator_dtype(q)
        out = q.new_empty(*q.shape[:2], rows.value_dim)
        lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
        for some, ids in self._chunks(q, kv, indices):
            chosen = selected_rows(kv, ids, dtype)
            scores = row_scores(q[some], chosen, ids, rows, scale)
            total = scores.logsumexp(-1)
            weights = (scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1)).exp()
            values = chosen[..., slice(*rows.value)]
            out[some] = (weights @ values).flatten(1, 2).to(q.dtype)
            lse[some] = total.flatten(1, 2)
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
        dtype, groups = accumulator_dtype(q), kv.shape[1]
        dq = torch.empty_like(q)
        dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
        for some, ids in self._chunks(q, kv, indices):
            chosen = selected_rows(kv, ids, dtype)
            scores = row_scores(q[some], chosen, ids, rows, scale)
            total = lse[some].unflatten(1, (groups, -1)).unsqueeze(-1)
            weights = (scores - total.masked_fill(total == -torch.inf, 0.0)).exp()
            slope, result = (x[some].to(dtype).unflatten(1, (groups, -1)) for x in (grad, out))
            delta = (slope * result).sum(-1, keepdim=True)
            of_rows = torch.zeros_like(chosen)
            of_rows[..., slice(*rows.value)] += weights.transpose(2, 3) @ slope
            slope = weights * (slope @ chosen[..., slice(*rows.value)].transpose(2, 3) - delta)
            slope *= scale
            queries = q[some].to(dtype).unflatten(1, (groups, -1))
            of_rows[..., slice(*rows.key)] += slope.transpose(2, 3) @ queries
            dq[some] = (slope @ chosen[..., slice(*rows.key)]).flatten(1, 2).to(q.dtype)
            dkv.view(-1, kv.shape[2]).index_add_(0, _flat(ids).flatten(), of_rows.flatten(0, 2))
        return dq, dkv

    def _chunks(self, q: Tensor, kv: Tensor, indices: Tensor) -> Iterator[tuple[slice, Tensor]]:
        size = accumulator_dtype(q).itemsize
        # Numbers per query: rows, their gradients and a copy, then scores, weights and gradients.
        a_query = indices.shape[1:].numel() * kv.shape[2] * 3 + q.shape[1] * indices.shape[2] * 4
        step = max(1, self.chunk_bytes // max(1, a_query * size))
        for start in range(0, q.shape[0], step):
            some = slice(start, min(start + step, q.shape[0]))
            ids = indices[some]
            if ids.device.type == "cpu":  # On another device the host would have to wait.
                ids = ids[..., : max(1, int((ids >= 0).sum(-1).max()))]
            yield some, ids


def _flat(ids: Tensor) -> Tensor:
    """Return rows of `kv.view(-1, width)`, and any row for a missing id."""
    groups = ids.shape[1]
    return ids.clamp_min(0).long() * groups + torch.arange(groups, device=ids.device)[:, None]


def selected_rows(kv: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[queries, groups, k, width]`, with zeros for a missing id."""
    chosen = kv.reshape(-1, kv.shape[2])[_flat(ids)].to(dtype)
    return chosen.masked_fill_((ids < 0).unsqueeze(-1), 0.0)


def row_scores(q: Tensor, chosen: Tensor, ids: Tensor, rows: Rows, scale: float) -> Tensor:
    """Return `[queries, groups, heads of a group, k]`, with -inf for a missing id."""
    queries = q.to(chosen.dtype).unflatten(1, (ids.shape[1], -1))
    scores = queries @ chosen[..., slice(*rows.key)].transpose(2, 3) * scale
    return scores.masked_fill_((ids < 0).unsqueeze(2), -torch.inf)

"""attn_gym's gather attention as an engine of sparse attention. Its kernels failed on an H100.

    dsa_attention(..., kernel=AttnGymKernel())

On a CPU the package's reference runs, and on CUDA its fused kernels. These read one vector as key
and value. So the adapter sets a query to zero outside of the key, and keeps the value's columns of
the output. Groups become the batch.

Some kernels of version 0.0.17 work on tiles. They need compute capability 10 or more, bfloat16, and
16 to 128 heads per group. They take 512 columns, or a multiple of 16 up to 128. All other kernels
are unrolled over the selected rows when they are compiled. That takes a minute for 32 rows of 512
columns, so the adapter refuses more. Hopper then has no kernel for DSA.

The 576 columns of latent attention would be padded to 1024, and each thread would spill 9 to 12
KiB. The adapter therefore refuses more than 512 columns on every device. Use
`primeblocks.parallel.adapters.triton.TritonSparseKernel()`.

The package's `lightning_indexer` is not an engine here, for three reasons. It takes whole
documents, and a rank has only some of a document's queries. It selects and does not return scores,
which selectors need. Its ids have no fixed order, and ties go to any id, except in one backend in
deterministic mode. Tests use it as an oracle, with sorted ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import MissingPackageError, UnsupportedError
from ...parallel.attention.dsa.kernel import Rows
from ...parallel.attention.kernel import accumulator_dtype

try:
    from attn_gym.sparse import AuxRequest, gather_attn
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "attn_gym":
        raise
    raise MissingPackageError("attn_gym", "attn_gym") from error

__all__ = ["AttnGymKernel"]

_OTHER = "Use primeblocks.parallel.adapters.triton.TritonSparseKernel(), or ReferenceKernel()."
_UNROLLED = 32
_WIDEST = 512


class AttnGymKernel:
    """A `SparseKernel` by attn_gym.

    The reference makes the matrix of all scores in float32 or float64, so it is for small tests.
    Its backward computes the forward again, with a graph.

    The fused backward calls only the package's operator, which takes `out` and `lse`, and sorts all
    ids. The gradient of kv is rounded to the dtype of kv and returned in float32. Results repeat
    bit for bit under `torch.use_deterministic_algorithms`. Kernels that do not work on tiles store
    a gradient of kv per head.

    Source: github.com/meta-pytorch/attention-gym.
    """

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend from each query to its rows. Local.

        Raises:
            UnsupportedError: the kernels do not take the device, the dtype, columns, heads or k.
        """
        if not q.numel():
            lse = torch.empty(q.shape[:2], dtype=accumulator_dtype(q), device=q.device)
            return q.new_empty(*q.shape[:2], rows.value_dim), lse
        view = _View(q, kv, indices, rows)
        out, aux = gather_attn(
            view.place(q, rows.key), *view.pools(kv), view.ids(indices),
            sliding_window_size=0, impl=view.impl, scale=scale, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return view.take(out, rows.value), view.flat(aux.lse).contiguous()

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
        """Return the gradients of q and kv. Local. Raises as `forward` does."""
        dtype = accumulator_dtype(q)
        if not q.numel():
            return torch.empty_like(q), torch.zeros(kv.shape, dtype=dtype, device=kv.device)
        view = _View(q, kv, indices, rows)
        find = _reference_backward if view.impl == "reference" else _fused_backward
        dq, of_rows = find(view, grad, q, kv, indices, out, lse, rows, scale)
        dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
        dkv[..., view.first : view.stop] = of_rows[:, 0].transpose(0, 1)
        return view.take(dq, rows.key).to(q.dtype), dkv


class _View:
    """Tensors of a call as gather_attn takes them: groups, heads, tokens, columns."""

    def __init__(self, q: Tensor, kv: Tensor, indices: Tensor, rows: Rows) -> None:
        self.first = min(rows.key[0], rows.value[0])
        self.stop = rows.width
        self.groups, self.tokens = kv.shape[1], q.shape[0]
        self.impl = "reference" if q.device.type == "cpu" else "fused"
        if self.impl == "fused":
            _check_fused(q, q.shape[1] // self.groups, self.stop - self.first, indices.shape[2])

    def place(self, x: Tensor, columns: tuple[int, int]) -> Tensor:
        """Turn `[tokens, heads, dim]` into the columns of a row, with zeros in the others."""
        wide = x.new_zeros(self.groups, x.shape[1] // self.groups, self.tokens, self._width)
        wide[..., self._of(columns)] = x.unflatten(1, (self.groups, -1)).permute(1, 2, 0, 3)
        return wide

    def take(self, x: Tensor, columns: tuple[int, int]) -> Tensor:
        """Turn the columns of a row into `[tokens, heads, dim]`."""
        return self.flat(x[..., self._of(columns)]).contiguous()

    def flat(self, x: Tensor) -> Tensor:
        """Put tokens first, and concatenate the heads of all groups."""
        return x.flatten(0, 1).movedim(1, 0)

    def pools(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a window, which is empty, and the rows to select from."""
        pool = kv[..., self.first : self.stop].transpose(0, 1).unsqueeze(1).contiguous()
        return pool.new_zeros(self.groups, 1, self.tokens, self._width), pool

    def ids(self, indices: Tensor) -> Tensor:
        return indices.transpose(0, 1).contiguous()

    @property
    def _width(self) -> int:
        return self.stop - self.first

    def _of(self, columns: tuple[int, int]) -> slice:
        return slice(columns[0] - self.first, columns[1] - self.first)


def _reference_backward(
    view: _View, grad: Tensor, q: Tensor, kv: Tensor, indices: Tensor,
    out: Tensor, lse: Tensor, rows: Rows, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiate a second forward, whose keys are a part of those of `out` and `lse`.

    These keys have the share s = exp(own lse - lse) of all weights, so the weights are s times
    those of the forward. A gradient of the forward's lse adds the missing part.
    """
    dtype = accumulator_dtype(q)
    grad, out = grad.to(dtype), out.to(dtype)
    queries = view.place(q, rows.key).to(dtype).requires_grad_()
    window, pool = (x.to(dtype) for x in view.pools(kv))
    pool.requires_grad_()
    with torch.enable_grad():
        wide, aux = gather_attn(
            queries, window, pool, view.ids(indices),
            sliding_window_size=0, impl="reference", scale=scale, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    own, own_lse = view.take(wide.detach(), rows.value), view.flat(aux.lse.detach())
    share = (own_lse - lse).exp().masked_fill(own_lse == -torch.inf, 0.0)
    rest = share * ((grad * own).sum(-1) - (grad * out).sum(-1))
    of_lse = rest.unflatten(1, (view.groups, -1)).movedim(0, 2)
    slopes = view.place(grad * share.unsqueeze(-1), rows.value)
    dq, of_rows = torch.autograd.grad((wide, aux.lse), (queries, pool), (slopes, of_lse))
    return dq, of_rows


def _fused_backward(
    view: _View, grad: Tensor, q: Tensor, kv: Tensor, indices: Tensor,
    out: Tensor, lse: Tensor, rows: Rows, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the package's operator, which takes weights from `lse`, and their slopes from `out`."""
    from attn_gym.sparse.gather_attn.impl.triton.backward import _build_index_query_map

    window, pool = view.pools(kv)
    ids = view.ids(indices)
    # As the package's own forward does: find the queries of each row by a sort.
    queries_of, starts = _build_index_query_map(ids, pool.shape[2], None, None)
    heads = q.shape[1] // view.groups
    no_sinks = torch.full((heads,), -torch.inf, dtype=q.dtype, device=q.device)
    result = view.place(out.to(q.dtype), rows.value)
    total = lse.float().unflatten(1, (view.groups, -1)).movedim(0, 2).contiguous()
    dq, of_rows, _, _ = torch.ops.attn_gym._gather_attn_bwd(
        view.place(q, rows.key), pool, window, ids, queries_of, starts, no_sinks, None, None,
        result, total, view.place(grad, rows.value), 0, True, scale,
    )  # fmt: skip
    return dq, of_rows


def _check_fused(q: Tensor, heads: int, width: int, k: int) -> None:
    if q.dtype == torch.float64:
        raise UnsupportedError(f"attn_gym's kernels have no float64. {_OTHER}")
    if width > _WIDEST:
        raise UnsupportedError(
            f"attn_gym's kernels read vectors of up to {_WIDEST} columns; got {width}, which they "
            f"would pad to 1024 and spill. {_OTHER}"
        )
    capability = torch.cuda.get_device_capability(q.device)
    in_tiles = (
        capability[0] >= 10
        and q.dtype == torch.bfloat16
        and 16 <= heads <= 128
        and (width == _WIDEST or (width <= 128 and width % 16 == 0))
    )
    if not in_tiles and k > _UNROLLED:
        raise UnsupportedError(
            f"attn_gym's kernels for {heads} heads of {width} columns in {q.dtype}, on compute "
            f"capability {capability[0]}.{capability[1]}, are unrolled over the selected rows when "
            f"they are compiled; got k={k}, over {_UNROLLED}. {_OTHER}"
        )

"""attn_gym's gather attention as an engine of sparse attention: its kernels failed on an H100.

    dsa_attention(..., kernel=AttnGymKernel())

On a CPU its reference runs, on CUDA its fused kernels. These read one vector as key and value: a
query is set to zero outside the key, and of the output the value is kept. Groups become its batch.

Of its kernels (0.0.17) those that work on tiles are for GPUs of compute capability 10 or more, in
bfloat16, for 16 to 128 heads of a group, and 512 columns or a multiple of 16 up to 128. All others
are unrolled over the selected rows when they are compiled, which takes a minute for 32 rows of 512
columns: more are refused, and on Hopper that leaves nothing for DSA. The 576 columns of latent
attention would be padded to 1024, and 9 to 12 KiB a thread spilled: more than 512 are refused
everywhere. Use `primeblocks.parallel.adapters.triton.TritonSparseKernel()`.

Its `lightning_indexer` is no engine here. It processes whole documents, where a rank has some of a
document's queries; it chooses and keeps the scores to itself, where selectors take scores; the ids
that it returns are in no order and, of equal scores, any, but for one backend in deterministic
mode. As an oracle it is used in tests, its ids sorted.
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
    """Attention over selected rows; see `SparseKernel`.

    The reference makes the matrix of all scores, of all queries and rows, in float32 or float64:
    it is for small tests. Its backward computes the forward once more, with a graph.

    The fused backward is its operator alone, which takes `out` and `lse` as they are, beside a sort
    of all ids; dkv is rounded to the dtype of kv before it is returned in float32. It repeats to
    the bit under `torch.use_deterministic_algorithms`; kernels that do not work on tiles keep a
    gradient of kv for each head.

    Source: github.com/meta-pytorch/attention-gym.
    """

    def forward(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend. Local.

        Raises:
            UnsupportedError: the device, the dtype, columns, heads or k that its kernels lack.
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
        """Return the gradients of q and kv. Local; errors are those of forward."""
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
    """Tensors of a call as gather_attn wants them: groups, heads, tokens, columns."""

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
        """Put tokens first, and heads of all groups side by side."""
        return x.flatten(0, 1).movedim(1, 0)

    def pools(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of a window, of which there is none, and those to select from."""
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

    With the share s = exp(own lse - lse) of these keys in all weights, the weights are s times
    those of the forward; what they lack in its gradient is one of its lse.
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
    """Call its operator, which takes the weights from `lse`, and their slopes from `out`."""
    from attn_gym.sparse.gather_attn.impl.triton.backward import _build_index_query_map

    window, pool = view.pools(kv)
    ids = view.ids(indices)
    # As its forward does when it is differentiated: the queries of each row, found by a sort.
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

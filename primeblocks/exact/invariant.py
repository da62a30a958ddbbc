"""The switch `batch_invariant()`, inside of which torch gives a row the same bits in any batch.

Two modes of torch see the calls of a model. One replaces attention before torch takes it apart. The
other sees each operation of `aten`, and does one of four things:

- It computes in one order: products, sums, means, softmax and norms (`ORDERED`, with `Kernels`),
  and top-k.
- It computes in whole vectors on a CPU: rounded functions of single elements, such as `silu`.
- It leaves the operation alone. IEEE 754 defines the results of operations in `DEFINED` to the bit.
  Operations in `MOVED` move or compare elements. Operations in `INDEXED` add elements, on a CPU in
  the order of an index. Operations that make no floating-point numbers are left alone too.
- It refuses the operation by name.

Backward passes are left to torch, because an engine has no backward pass to compare with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError
from . import cpu, rows
from .attention import scaled_dot_product_attention
from .kernels import Kernels

__all__ = ["batch_invariant"]

aten = torch.ops.aten


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DEFINED = _words("""
abs add ceil clamp clamp_max clamp_min copy div eq fill floor floor_divide ge gt le lt
masked_fill maximum minimum mul ne neg relu remainder round rsub sign sqrt square sub to
_to_copy trunc where zero
""")
MOVED = _words("""
alias amax amin argmax argmin arange cat chunk clone constant_pad_nd contiguous
detach embedding empty empty_like empty_strided eye flip full full_like gather histc index
index_copy index_put index_select lift_fresh _local_scalar_dense masked_select max min new_empty
new_empty_strided new_full new_ones new_zeros ones ones_like repeat _reshape_copy roll
scalar_tensor scatter select_scatter slice_scatter sort split stack tril triu
unbind _unsafe_view zeros zeros_like
""")
# A GPU adds by index in any order, because its threads take turns by chance.
INDEXED = _words("bincount cumsum index_add scatter_add")
# Collectives between processes: a gather moves elements, and a sum has the order of ranks.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "fsdp"})


@contextmanager
def batch_invariant(*, kernels: Kernels | None = None) -> Iterator[None]:
    """Make the bits of a row independent of the rest of the batch, in a `with` block.

    Local. The block applies to forward passes in this thread. Without `kernels`, tensors must be on
    a CPU. You may call backward inside or outside of the block. `topk` returns equal elements in
    the order of their indices. Models must meet three conditions:

    - Attention calls torch's `scaled_dot_product_attention`. In transformers set
      `attn_implementation="sdpa"`.
    - Experts use transformers' default grouped products, a loop over experts, or expert parallelism
      with the default dispatcher of `parallelize`.
    - Activation checkpoints enter `batch_invariant()` again to recompute a layer. Pass
      `context_fn=lambda: (nullcontext(), batch_invariant())` to torch's `checkpoint`.

    Args:
        kernels: the functions that compute products, sums, softmax and attention, such as the
            module `exact.adapters.triton`. With `kernels`, tensors may be on every device that
            `kernels` supports.

    Raises (inside):
        UnsupportedError: an operation has no batch-invariant form. The message names the operation.

        UnsupportedError: without `kernels`, a tensor is not on a CPU, or products on this CPU
            depend on the batch.
    """
    with _Attention(kernels or cpu), _Operations(kernels):
        yield


class _Attention(TorchFunctionMode):
    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.attention = partial(scaled_dot_product_attention, attend=kernels.attend)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        return (self.attention if is_attention else func)(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, kernels: Kernels | None) -> None:
        super().__init__()
        self.kernels: Kernels = kernels or cpu
        self.on_cpu = kernels is None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_backward() or _is_exact(func, args, kwargs):
            return func(*args, **kwargs)
        if func == aten.topk.default:
            return _topk(*args, **kwargs)
        if func in ORDERED:
            self._check_device(func, args)
            with torch.no_grad():
                return ORDERED[func](self.kernels, *args, **kwargs)
        is_whole = not any(isinstance(each, Tensor) for each in kwargs.values())
        if torch.Tag.pointwise in func.tags and is_whole and _makes_floats(func, args):
            self._check_device(func, args)
            name = _name(func)
            if not name.endswith("_"):
                return rows.pointwise(func, *args, **kwargs)
            return args[0].copy_(rows.pointwise(getattr(aten, name[:-1]), *args, **kwargs))
        with self:
            found = func.decompose(*args, **kwargs)
        if found is NotImplemented:
            found = func(*args, **kwargs)
            if any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(found)):
                raise UnsupportedError(
                    f"{func} has no batch-invariant form; compute it outside, or use another one."
                )
        return found

    def _check_device(self, func: Any, args: Any) -> None:
        if self.on_cpu and (device := _device_besides_cpu(args)):
            raise UnsupportedError(f"{func} is batch-invariant on a CPU, not on {device}.")


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _is_exact(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether torch's own operation has the same bits in any batch."""
    if func.namespace in COLLECTIVES or func.is_view:
        return True
    plain = _name(func).rstrip("_")
    if func.namespace != "aten" or plain not in DEFINED | MOVED | INDEXED:
        return False
    if plain in INDEXED or "reduce" in func._overloadname:
        return not (_device_besides_cpu(args) and _makes_floats(func, args))
    if plain == "index_put":  # It adds in several threads, in any order.
        return not (kwargs.get("accumulate") or args[3:4] == (True,))
    # With a scale, torch may round once or twice.
    return plain not in ("add", "sub", "rsub") or (*args[2:3], kwargs.get("alpha", 1))[0] == 1


def _makes_floats(func: Any, args: Any) -> bool:
    makes_tensor = [str(each.type) for each in func._schema.returns] == ["Tensor"]
    return makes_tensor and any(
        isinstance(each, Tensor) and each.is_floating_point() for each in tree_leaves(args)
    )


def _is_backward() -> bool:
    """Return whether autograd is the caller, and not a checkpoint that recomputes a forward."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _device_besides_cpu(args: Any) -> torch.device | None:
    devices = (each.device for each in tree_leaves(args) if isinstance(each, Tensor))
    return next((each for each in devices if each.type != "cpu"), None)


def _addmm(
    kernels: Kernels,
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise UnsupportedError(
            f"addmm with beta={beta} and alpha={alpha} has no batch-invariant form. Scale its "
            "operands instead."
        )
    return kernels.matmul(left, right) + bias


def _bmm(kernels: Kernels, left: Tensor, right: Tensor) -> Tensor:
    if left.shape[-1] != 1:
        raise UnsupportedError(
            "a batch of products may add over the tokens of a sequence, in an order that depends "
            "on their number. Let attention call torch's scaled_dot_product_attention "
            '(transformers: attn_implementation="sdpa") and experts grouped_mm.'
        )
    return left * right


def _grouped_mm(
    kernels: Kernels, left: Tensor, right: Tensor, offs: Tensor | None = None, *more: Any
) -> Tensor:
    if (
        left.dim() != 2
        or right.dim() != 3
        or offs is None
        or any(each is not None for each in more)
    ):
        raise UnsupportedError(
            f"grouped_mm of {tuple(left.shape)} and {tuple(right.shape)} is not supported. Pass "
            "[rows, in], [groups, in, out] and the ends of the groups."
        )
    return kernels.grouped_matmul(left, right, offs)


def _embedding_bag(
    kernels: Kernels,
    table: Tensor,
    chosen: Tensor,
    starts: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the experts of a token as expert parallelism does: first products, then their sum."""
    size = len(chosen) // max(len(starts), 1)
    bags = chosen.view(-1, size) if size and len(chosen) % size == 0 else chosen[:, None]
    even = torch.arange(0, len(chosen), max(size, 1), device=starts.device)
    is_even = torch.equal(starts, even)
    in_two = size % 2 == 0 and torch.equal(bags[:, 0::2], bags[:, 1::2])
    if mode != 0 or include_last_offset or padding_idx != -1 or not is_even or in_two:
        raise UnsupportedError(
            "embedding_bag must add equally many rows for each token, each row once. For experts "
            "keep the default dispatcher, and a model in float32 if its router's weights are."
        )
    each = table.index_select(0, chosen)
    each = each if weights is None else each * weights[:, None]
    found = _total(kernels, each.view(len(starts), size, table.shape[1]), (1,)).to(table.dtype)
    none = chosen.new_empty(0)
    return found, none, none, none


def _total(kernels: Kernels, values: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    """Return sums in the dtype of sums: float32, or float64 for float64."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    dims = sorted(range(max(values.dim(), 1))[dim] for dim in dims)
    if not values.dim():
        return values.to(dtype, copy=True)
    kept = [dim for dim in range(values.dim()) if dim not in dims]
    work = values.permute(*kept, *dims).flatten(len(kept))
    found = kernels.total(work, dtype=dtype)
    for dim in dims if keepdim else ():
        found = found.unsqueeze(dim)
    return found


def _sum(
    kernels: Kernels,
    values: Tensor,
    dims: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    work = values if dtype is None else values.to(dtype)
    if not work.is_floating_point():
        return torch.sum(values, dims, keepdim, dtype=dtype)
    return _total(kernels, work, tuple(dims or range(work.dim())), keepdim).to(work.dtype)


def _mean(
    kernels: Kernels,
    values: Tensor,
    dims: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    work = values if dtype is None else values.to(dtype)
    found = _total(kernels, work, tuple(dims or range(work.dim())), keepdim)
    return (found / (work.numel() // max(found.numel(), 1))).to(work.dtype)


def _along(function: Callable[..., Tensor], values: Tensor, dim: int, in_float32: bool) -> Tensor:
    """Apply a function of the last dim to another dim."""
    work = torch.atleast_1d(values).movedim(dim, -1)
    found = function(work, dtype=torch.float32 if in_float32 else values.dtype)
    return found.movedim(-1, dim).reshape(values.shape).contiguous()


def _logsumexp(kernels: Kernels, values: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    work = rows.wide(values)
    greatest = work.amax(tuple(dims), keepdim=True)
    greatest = torch.where(greatest.isinf(), 0.0, greatest)
    left = work - greatest
    sums = _total(kernels, rows.pointwise(torch.exp, left), dims, keepdim=True)
    found = greatest + rows.pointwise(torch.log, sums)
    return (found if keepdim else found.squeeze(tuple(dims))).to(values.dtype)


def _topk(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Take the first of all sorted elements. Of equal elements, the lowest index comes first."""
    both = torch.sort(torch.atleast_1d(values), dim=dim, descending=largest, stable=True)
    found, at = (each.narrow(dim, 0, k).contiguous() for each in both)
    return (found, at) if values.dim() else (found[0], at[0])


def _layer_norm(
    kernels: Kernels,
    values: Tensor,
    shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    mean = _mean(kernels, rows.wide(values), dims, True)
    apart = rows.wide(values) - mean
    inverse = 1.0 / torch.sqrt(_mean(kernels, apart * apart, dims, True) + eps)
    found = apart * inverse if weight is None else apart * inverse * weight
    if values.device.type == "cpu" and (weight is None or weight.dtype == values.dtype):
        mean, inverse = mean.to(values.dtype), inverse.to(values.dtype)  # as torch's backward needs
    return (found if bias is None else found + bias).to(values.dtype), mean, inverse


def _rms_norm(
    kernels: Kernels, values: Tensor, shape: Any, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    work = rows.wide(values)
    least = torch.finfo(values.dtype).eps if eps is None else eps
    inverse = 1.0 / torch.sqrt(_mean(kernels, work * work, dims, True) + least)
    found = work * inverse
    return (found if weight is None else found * weight).to(values.dtype), inverse


ORDERED: dict[Any, Callable[..., Any]] = {
    aten.mm.default: lambda kernels, left, right: kernels.matmul(left, right),
    aten.mm.out: lambda kernels, left, right, *, out: out.copy_(kernels.matmul(left, right)),
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten._grouped_mm.default: _grouped_mm,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten._softmax.default: lambda kernels, *args: _along(kernels.softmax, *args),
    aten._log_softmax.default: lambda kernels, *args: _along(kernels.log_softmax, *args),
    aten.logsumexp.default: _logsumexp,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _rms_norm,
}

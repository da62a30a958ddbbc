"""A device that is none: its tensors lie on the host, and mix with the host's no more than a GPU's.

Importing this registers it with torch, for the whole process and for good: see `--pretend`.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

__all__ = ["Device"]

# Operators that a GPU too lets take tensors of both sides.
_COPIES = {"copy_", "_to_copy"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("pretend", _Backend())
_DEVICE = torch.device("pretend", 0)


class _There(Tensor):
    """A tensor of the device. `host` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        found = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=_DEVICE,
        )
        found.host = host
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _run(operator, args, kwargs or {})

    def __repr__(self):
        return f"there({self.host})"

    def tolist(self):
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Within it, `device="pretend"` makes such tensors, and operators that mix them raise."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return _run(operator, args, kwargs or {})


def _run(operator, args, kwargs):
    name = operator.name().partition("::")[2].partition(".")[0]
    leaves = tree_leaves((args, kwargs))
    there = any(isinstance(x, _There) for x in leaves)
    wanted = torch.device(kwargs.get("device") or (_DEVICE if there else "cpu"))
    if not there and wanted.type == "cpu":
        return operator(*args, **kwargs)
    here = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, _There) and x.ndim]
    if there and here and name not in _COPIES | _INDEXED:
        raise RuntimeError(
            f"{operator} of tensors of a device and of the host {[[*x.shape] for x in here]}"
        )
    if name in _INDEXED and not isinstance(args[0], _There):
        raise RuntimeError(f"{operator}: a tensor of the host at places of a device")
    given, named = tree_map_only(_There, lambda x: x.host, (args, kwargs))
    if "device" in named:
        named |= {"device": torch.device("cpu")}
    if operator.namespace == "primeblocks":  # What it calls has the device.
        with Device():
            found = operator(*given, **named)
    else:
        found = _KERNELS.get(name, operator)(*given, **named)
    if wanted.type == "cpu":
        return found
    if name == "copy_" and not isinstance(args[0], _There):
        return args[0]
    found = tree_map_only(Tensor, lambda x: x if isinstance(x, _There) else _There(x), found)
    return return_and_correct_aliasing(operator, args, kwargs, found) if there else found


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert q.shape[3] <= 256  # As torch's kernel asks.
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, scale=scale
    )
    none = q.new_empty(0)
    return *found, None, None, q.shape[2], k.shape[2], none, none, none


def _flash_backward(grad, q, k, v, out, lse, *rest, scale=None):
    _, _, queries, keys, dropout_p, is_causal, *_ = rest
    assert (queries, keys) == (q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale
    )


# What torch makes by itself, where no mode sees it.
_MADE = torch.library.Library("aten", "IMPL")
for _name in ("empty.memory_format", "empty_strided"):
    _of_host = getattr(torch.ops.aten, _name.partition(".")[0])
    _MADE.impl(
        _name,
        lambda *args, _of_host=_of_host, device=None, **kwargs: _There(_of_host(*args, **kwargs)),
        "PrivateUse1",
    )


def _copy_from(source, into, _=False):
    into.host.copy_(source)
    return into


_MADE.impl("_copy_from", _copy_from, "PrivateUse1")

# Those that a CPU has not.
_KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "histc": lambda x, *rest, **named: torch.histc(x.float(), *rest, **named).to(x.dtype),
}

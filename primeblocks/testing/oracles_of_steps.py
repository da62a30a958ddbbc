"""Counts of one step without a GPU: operators, host reads, collectives, and live bytes.

A `StepCounter` counts inside its `with` block. A result of `cpu()` counts as a host tensor, and so
does a tensor that is computed only from host tensors. All other CPU tensors stand for device
tensors. An operator for which the host needs a value of a device tensor counts as a host read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from primeblocks.errors import UnsupportedError

__all__ = ["StepCounter"]

# The shapes or checks of these operators depend on values, so on CUDA the host waits in them.
_SHAPED_BY_VALUES = {
    "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "is_nonzero",
    "masked_select", "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_COPIES = {"_to_copy", "copy_"}


class StepCounter(TorchDispatchMode):
    """A counter of the work of a step on a device, used as `with StepCounter() as step`. Local.

    Each CPU tensor stands for a device tensor, except for results of `cpu()` and tensors that are
    computed only from results of `cpu()`. If a script makes a tensor on the host and reads it, the
    read therefore counts, too. With `device="cpu"`, copies from the host to the device are not
    counted.

    With tensors on the meta device, the counter counts steps of any size, but a read of values
    raises an error. With `FakeTensorMode`, enter the mode before the counter. A read of a fake
    tensor needs a `ShapeEnv`, and `tolist` counts as one read per number. If torch was built
    without CUDA, fake CUDA tensors support few operators and do not support gradients. The counter
    does not count operators inside `torch.library` operators, FlexAttention or compiled kernels.

    Args:
        device: the device type of the counted tensors.

    Attributes:
        operators: number of calls per operator that is not a view. Allocations count as operators.
        host_reads: per operator, the number of calls in which the host would wait for the device.
            An operator counts if it reads values, or if the shape of its result depends on values.
            A copy between host and device counts if it does not use `non_blocking`.
        collectives: number of calls per collective.
        received_bytes: bytes from other ranks, per collective. For an all-reduce, the counter
            counts the bytes of the ring algorithm.
        peak_bytes: the peak memory of all storages that the step made, in bytes.
    """

    supports_higher_order_operators = True

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.host_reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        self._device, self._live_bytes = device, 0
        self._live: set[int] = set()
        self._on_host: set[int] = set()
        self._calls = _Calls(self)

    def __enter__(self) -> Self:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._calls.__exit__(*problem)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        name = function.name().rpartition("::")[2].partition(".")[0]
        given = list(_tensors((args, named)))
        before = {_key(x) for x in given}
        on_host = self._device == "cpu" and given and all(self._is_of_host(x) for x in given)
        out = function(*args, **named)
        if function.namespace in _RECEIVED:
            self._count_collective(function.namespace, name, args, out)
            return out
        if function.namespace != "prim" and not getattr(function, "is_view", False):
            self.operators[name] += 1
        if self._waits(name, args, named, out):
            self.host_reads[name] += 1
        for x in _tensors(out):
            if _key(x) not in before:
                self._keep(x, on_host=bool(on_host))
        return out

    def read(self, name: str, x: Tensor) -> bool:
        """Count a read of `x` that calls no operator. Return whether the host would wait.

        A read such as `tolist` calls an operator on a GPU, but not on a CPU.
        """
        counted = self._device == "cpu" and not self._is_of_host(x)
        if counted:
            self.host_reads[name] += 1
        return counted

    def to_host(self, x: Tensor) -> None:
        """Treat `x` as a host tensor in later counts."""
        self._remember(self._on_host, x)

    def _waits(self, name: str, args: Sequence[Any], named: Mapping[str, Any], out: Any) -> bool:
        if name in _COPIES:
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            blocking = not (named.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            sides = {x.device.type for x in (source, target)}
            # A scalar of the host becomes an argument of the kernel, without a wait.
            number = source.device.type == "cpu" and source.ndim == 0 and name == "copy_"
            return blocking and len(sides) > 1 and self._device in sides and not number
        first = next(_tensors(args), None)
        if first is None or self._is_of_host(first):
            return False
        if name == "repeat_interleave":
            return named.get("output_size") is None
        if name in _INDEXING:
            masks = [x for x in _tensors(args[1]) if x.dtype in (torch.bool, torch.uint8)]
            # torch fills through a single mask without looking up the masked positions.
            fills = len(args) > 2 and len(args[1]) == 1 and args[2].numel() == 1
            return bool(masks) and not fills
        return name in _SHAPED_BY_VALUES

    def _is_of_host(self, x: Tensor) -> bool:
        return x.device.type != self._device or _key(x) in self._on_host

    def _keep(self, x: Tensor, *, on_host: bool) -> None:
        if on_host:
            self.to_host(x)
        elif not self._is_of_host(x) and _key(x) not in self._live:
            storage = x.untyped_storage()
            self._remember(self._live, x)
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _free(self, size: int) -> None:
        self._live_bytes -= size

    def _remember(self, among: set[int], x: Tensor) -> None:
        key = _key(x)
        among.add(key)
        weakref.finalize(x.untyped_storage(), among.discard, key)

    def _count_collective(self, space: str, name: str, args: Sequence[Any], out: Any) -> None:
        received = _RECEIVED[space].get(name)
        if received is None:
            raise UnsupportedError(
                f"StepCounter does not know how many bytes {space}.{name} receives. It knows "
                f"{sorted(_RECEIVED[space])}."
            )
        self.collectives[name] += 1
        self.received_bytes[name] += received(out, *args)


class _Calls(TorchFunctionMode):
    """Counts the methods that read a CPU tensor without an operator."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            return function(*args, **named)
        if name in ("tolist", "numpy", "__array__"):
            self._counter.read(name, x)
        elif name == "cpu" or (name == "to" and _to_host(*args[1:], **named)):
            if self._counter.read(name, x):
                x = x.clone()
                self._counter.to_host(x)
            return function(x, *args[1:], **named)
        return function(*args, **named)


def _to_host(*args: Any, device: Any = None, **_: Any) -> bool:
    asked = [device, *args[:1]]
    return any(isinstance(x, str | torch.device) and torch.device(x).type == "cpu" for x in asked)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _of_rows(out: Any, target: Tensor, source: Tensor, group: Any, splits: Any, *_: Any) -> int:
    ranks = dist.ProcessGroup.unbox(group)
    if not splits:
        return target.nbytes // ranks.size() * (ranks.size() - 1)
    return (sum(splits) - splits[ranks.rank()]) * target[:1].nbytes


def _of_sums(out: Any, tensors: Sequence[Tensor], group: Any, *_: Any) -> int:
    size = dist.ProcessGroup.unbox(group).size()
    return sum(2 * x.nbytes * (size - 1) // size for x in tensors)


def _of_lists(out: Any, lists: Any, parts: Sequence[Tensor], *_: Any) -> int:
    return sum(x.nbytes for x in _tensors(lists)) - sum(x.nbytes for x in parts)


def _of_gather(out: Any, lists: Any, parts: Sequence[Tensor], *_: Any) -> int:
    return max(0, _of_lists(out, lists, parts))  # Only the target rank has lists.


def _of_broadcast(out: Any, tensors: Sequence[Tensor], group: Any, root: int, *_: Any) -> int:
    own = dist.ProcessGroup.unbox(group).rank() == root
    return 0 if own else sum(x.nbytes for x in tensors)


_RECEIVED: dict[str, dict[str, Callable[..., int]]] = {
    "c10d": {
        "_allgather_base_": lambda out, whole, part, *_: whole.nbytes - part.nbytes,
        "_reduce_scatter_base_": lambda out, part, whole, *_: whole.nbytes - part.nbytes,
        "allgather_": _of_lists,
        "allreduce_": _of_sums,
        "alltoall_base_": _of_rows,
        "barrier": lambda *_: 0,
        "broadcast_": _of_broadcast,
        "gather_": _of_gather,
        "recv_": lambda out, tensors, *_: sum(x.nbytes for x in tensors),
        "send": lambda *_: 0,
    },
    "_c10d_functional": {
        "all_gather_into_tensor": lambda out, part, *_: out.nbytes - part.nbytes,
        "all_reduce": lambda out, x, op, name: 2 * x.nbytes * (_size(name) - 1) // _size(name),
        "reduce_scatter_tensor": lambda out, whole, *_: whole.nbytes - out.nbytes,
        "wait_tensor": lambda *_: 0,
    },
}  # fmt: skip


def _size(group_name: Any) -> int:
    return dist.distributed_c10d._resolve_process_group(group_name).size()

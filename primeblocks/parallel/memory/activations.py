"""Activations that wait on the host for their backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from ...errors import UsageError
from .storages import bytes_of, plain_tensors

__all__ = ["OffloadedBytes", "offload_activations"]

# A smaller part of a storage stays with it: moving all of it would cost more than it frees.
_LEAST_PART = 1 / 8


@dataclass
class OffloadedBytes:
    """Bytes copied to the host so far, as measured by the sizes of storages."""

    bytes_offloaded: int = 0
    storages: int = 0
    shared: int = 0  # Saved tensors that needed no copy: their storage was there already.


@contextmanager
def offload_activations(
    model: nn.Module, *, min_bytes: int = 1 << 20, prefetch: int = 2
) -> Iterator[OffloadedBytes]:
    """Keep large saved activations on the host from forward to backward; gradients keep their bits:

        with offload_activations(model) as offloaded:
            loss = loss_of(model(tokens))
        loss.backward()  # Inside or outside of the `with`.

    Unlike `torch.autograd.graph.save_on_cpu`, this leaves parameters and buffers where they are
    (FSDP2's gathered ones too, which are freed and gathered again anyway), leaves small tensors,
    copies a storage once however many operations saved it or a view of it, copies on a CUDA stream
    of its own, and starts to copy back before the tensor is needed. Inside a checkpointed region
    torch's hooks come first: there the region's inputs are moved. DTensors stay on the device.
    Local. On other devices than CUDA the copies are made at once; on a CPU they save nothing.

    A tensor must not be written in place between being saved and its backward: autograd, which
    refuses that otherwise, cannot see it here.

    Args:
        model: whose parameters and buffers stay; the hooks on its modules leave with the `with`.
        min_bytes: smaller storages stay.
        prefetch: this many storages are copied back ahead of use; they take memory.

    Raises:
        UsageError: `min_bytes` or `prefetch` is negative.
    """
    if min_bytes < 0 or prefetch < 0:
        raise UsageError(f"min_bytes={min_bytes} and prefetch={prefetch} must be 0 or more.")
    offload = _Offload(min_bytes, prefetch)
    hooks = []
    for module in model.modules():
        offload.keep(module)
        if [*module.parameters(recurse=False)]:
            # Behind FSDP2's own hook: the parameters are the gathered ones by then.
            hooks.append(module.register_forward_pre_hook(lambda m, _: offload.keep(m)))
    try:
        with saved_tensors_hooks(offload.pack, offload.unpack):
            yield offload.counts
    finally:
        for hook in hooks:
            hook.remove()


class _View(NamedTuple):
    """A saved tensor's view of its storage."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Offload:
    def __init__(self, min_bytes: int, prefetch: int) -> None:
        self.counts = OffloadedBytes()
        self._min_bytes, self._prefetch = min_bytes, prefetch
        self._kept: WeakSet[UntypedStorage] = WeakSet()
        self._known: WeakKeyDictionary[UntypedStorage, tuple[int, ref[_Moved]]]
        self._known = WeakKeyDictionary()
        self._last: ref[_Moved] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def keep(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            self._kept.update(x.untyped_storage() for _, x in plain_tensors(tensor))

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._worth_moving(tensor):
            return tensor.detach()  # The tensor itself would close a cycle with its graph.
        moved = self._move(tensor)
        offset = int(tensor.storage_offset())
        return _View(moved, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved, dtype, size, stride, offset = packed
        storage = moved.take()
        for earlier in islice(moved.chain(), self._prefetch):
            earlier.fetch()
        x = torch.empty(0, dtype=dtype, device=storage.device)
        return x.set_(storage, offset, size, stride)

    def _worth_moving(self, tensor: Tensor) -> bool:
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg():  # Not as its bytes say.
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and tensor.nbytes >= storage.nbytes() * _LEAST_PART
            and storage not in self._kept
        )

    def _move(self, tensor: Tensor) -> _Moved:
        storage = tensor.untyped_storage()
        version, known = self._known.get(storage, (-1, None))
        moved = None if known is None else known()
        if moved is not None and version == tensor._version:
            self.counts.shared += 1
            return moved
        moved = _Moved(storage, self._last, self._stream(tensor.device))
        self._last = ref(moved)
        self._known[storage] = tensor._version, ref(moved)
        self.counts.bytes_offloaded += storage.nbytes()
        self.counts.storages += 1
        return moved

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Moved:
    """A storage's bytes on the host, and for a while on the device again."""

    def __init__(
        self, storage: UntypedStorage, earlier: ref[_Moved] | None, stream: torch.cuda.Stream | None
    ) -> None:
        self._earlier = earlier
        self._stream, self._device = stream, storage.device
        size, pin = storage.nbytes(), stream is not None
        self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self._copy(self._host, bytes_of(storage))
        self._arriving: Tensor | None = None
        self._taken: ref[UntypedStorage] | None = None

    def chain(self) -> Iterator[_Moved]:
        """Yield the storages moved before, last first: the order in which backward needs them."""
        earlier = self._earlier
        while earlier is not None and (moved := earlier()) is not None:
            yield moved
            earlier = moved._earlier

    def fetch(self) -> None:
        """Start to copy the bytes to the device, unless they are there."""
        if self._arriving is None and self._in_use() is None:
            self._arriving = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            self._copy(self._arriving, self._host)

    def take(self) -> UntypedStorage:
        """The bytes on the device; views that are in use together share them."""
        if (storage := self._in_use()) is None:
            self.fetch()
            assert self._arriving is not None
            storage, self._arriving = self._arriving.untyped_storage(), None
            self._taken = ref(storage)
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return storage

    def _in_use(self) -> UntypedStorage | None:
        return None if self._taken is None else self._taken()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()
        for x in (target, source):
            if x.is_cuda:  # Its memory is not given away before the copy is done.
                x.record_stream(self._stream)

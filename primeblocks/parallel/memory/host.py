"""Move a trainer's device memory to the host while another program needs the device.

Between two phases of reinforcement learning the trainer is idle, and the engine on the same device
needs the trainer's memory. `HostMemory` moves whole storages. The tensor objects stay, so
parameters, their aliases, optimizers and FSDP2 keep working.

Each kind ("weights", "gradients", "optimizer") is either on the device or away on the host. Only
`release` and `restore` change that. While a kind is away, hooks refuse the calls that would read
it, because torch itself would read freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import CapacityError, ShapeError, UnsupportedError, UsageError, check_counts
from ..gathered import reshard

__all__ = ["HostMemory", "MovedBytes"]

KINDS = ("weights", "gradients", "optimizer")
_ALIGN_BYTES = 512


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that one call freed on the device, or allocated on the device again, by kind."""

    num_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())

    def table(self) -> str:
        """Return one line per kind of memory, and the total."""
        rows = self.num_bytes | {"total": self.total_bytes}
        return "\n".join(f"{kind:<12}{size:>18,} bytes" for kind, size in rows.items())


class _Held(NamedTuple):
    """Facts of a plain tensor that must be unchanged when its bytes return."""

    storage: UntypedStorage
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """The place of a storage on the host."""

    storage: UntypedStorage
    start: int
    size: int


class _Away(NamedTuple):
    """One kind that is on the host: its tensors, and the storages under them."""

    tensors: dict[str, _Held]
    places: list[_Place]

    @property
    def num_bytes(self) -> int:
        return sum(place.size for place in self.places)


class HostMemory:
    """Moves a model's and its optimizer's memory to the host and back, bit for bit:

        memory = HostMemory(model, optimizer)
        with memory.released() as moved:  # or release() ... restore()
            print(moved.table())
            rollout()

    Each storage is moved once, even if several tensors share the storage. If FSDP2 pads a shard,
    the padding is moved too. The kinds of memory are "weights" (parameters and buffers),
    "gradients" and "optimizer" (optimizer states). You can move the kinds of memory one by one. For
    example, `restore("weights")` is enough to publish weights. The first release allocates host
    memory, page-locked for CUDA, and later releases reuse the host memory. Local.

    While a kind of memory is on the host, calls of `forward`, `state_dict`, `load_state_dict` and
    `step` that need this memory raise UsageError. All other uses of a released tensor, such as
    arithmetic, read freed memory, because torch does not check for released tensors. If another
    process has mapped a tensor by CUDA IPC, the memory of the tensor stays allocated.

    `release` first reshards FSDP2 modules. Call `release` between optimizer steps. Gradients that
    FSDP2 still accumulates unsharded (`set_requires_gradient_sync(False)`) stay on the device
    unchanged.

    Args:
        model: the module whose tensors are moved. `release` moves tensors and DTensors that are on
            the device of the first parameter. The device may be a CPU.
        optimizer: the optimizer whose states are moved. With `optimizer=None`, optimizer states
            stay on the device.
        chunk_bytes: the host memory of each kind grows in steps of `chunk_bytes` bytes. If the
            memory is page-locked, torch rounds each step up to a power of two.

    Raises:
        UsageError: the model is not a module or has no parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, chunk_bytes: int = 64 << 20
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model must be a module; got a {type(model).__name__}. Pass the trained nn.Module."
            )
        first = next(model.parameters(), None)
        if first is None:
            raise UsageError("the model does not have parameters. Pass a model with parameters.")
        check_counts(chunk_bytes=chunk_bytes)
        self._model, self._optimizer = model, optimizer
        self._device = first.device
        pin = self._device.type == "cuda"
        self._host = {kind: _HostBuffer(chunk_bytes, pin=pin) for kind in KINDS}
        self._away: dict[str, _Away] = {}
        self._guards: list[RemovableHandle] = []

    @property
    def host_bytes(self) -> int:
        """Bytes of allocated host memory, used or unused."""
        return sum(host.num_bytes for host in self._host.values())

    @property
    def away(self) -> tuple[str, ...]:
        """The kinds of memory that are on the host at the moment."""
        return tuple(self._away)

    def release(self, *kinds: str) -> MovedBytes:
        """Copy storages to the host and free the device memory. Local.

        The call waits for the device, and returns torch's unused device memory to the driver, so
        that other processes can use the memory.

        Args:
            kinds: the kinds of memory to move. Default: all kinds of memory that are on the device.

        Raises:
            UsageError: a kind of memory is unknown or already on the host. Also raised without
                `kinds` if all kinds are on the host. Nothing was changed.
            UnsupportedError: a storage cannot shrink, because it is shared memory or belongs to
                another library. No memory was moved, but FSDP2 modules stay resharded.
        """
        here = [kind for kind in KINDS if kind not in self._away]
        wanted = self._wanted(kinds, here, "release")
        reshard(self._model)
        away = self._places(wanted)
        self._wait()
        for kind, (_, places) in away.items():
            self._host[kind].reserve(max((start + size for _, start, size in places), default=0))
        for kind, (_, places) in away.items():
            for storage, start, _ in places:
                for host, device in self._host[kind].pairs(start, storage):
                    host.copy_(device, non_blocking=True)
        self._wait()
        for storage, _, _ in chain.from_iterable(places for _, places in away.values()):
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._away |= away
        if not self._guards:
            self._guards = _guard(self._model, self._optimizer, self._away)
        return MovedBytes({kind: held.num_bytes for kind, held in away.items()})

    def restore(self, *kinds: str) -> MovedBytes:
        """Allocate the storages again and copy their bytes back. Local.

        The call waits for the device.

        Args:
            kinds: the kinds of memory to move. Default: all kinds of memory that are on the host.

        Raises:
            UsageError: a kind of memory is not on the host. Also raised without `kinds` if all
                kinds are on the device.
            ShapeError: a tensor has another storage, shape or dtype than when it was released. A
                removed tensor, such as a gradient after `zero_grad`, is not an error.
            CapacityError: the device lacks memory. Nothing was changed. Free memory, and call
                `restore` again.
        """
        wanted = self._wanted(kinds, list(self._away), "restore")
        self._check_unchanged(wanted)
        away = {kind: self._away[kind] for kind in wanted}
        _allocate([place for kind in away.values() for place in kind.places])
        for kind, (_, places) in away.items():
            for storage, start, _ in places:
                for host, device in self._host[kind].pairs(start, storage):
                    device.copy_(host, non_blocking=True)
            del self._away[kind]
        self._wait()
        if not self._away:
            for handle in self._guards:
                handle.remove()
            self._guards = []
        return MovedBytes({kind: held.num_bytes for kind, held in away.items()})

    @contextmanager
    def released(self, *kinds: str) -> Iterator[MovedBytes]:
        """Call `release` at the start of a `with` block.

        At the end of the block, kinds of memory that are still on the host are restored. Kinds that
        were on the host before the block stay on the host.
        """
        before = set(self._away)
        moved = self.release(*kinds)
        try:
            yield moved
        finally:
            if still := [kind for kind in self._away if kind not in before]:
                self.restore(*still)

    def _wanted(self, kinds: tuple[str, ...], possible: list[str], verb: str) -> list[str]:
        wanted = list(kinds) or possible
        if not wanted or any(kind not in possible for kind in wanted):
            raise UsageError(
                f"cannot {verb} {', '.join(kinds) or 'anything'}. The host stores "
                f"{', '.join(self._away) or 'none'} of {', '.join(KINDS)}."
            )
        return [kind for kind in KINDS if kind in wanted]

    def _places(self, wanted: list[str]) -> dict[str, _Away]:
        """Give each storage of the wanted kinds a place on the host."""
        seen: set[UntypedStorage] = set()
        away = {}
        for kind in wanted:
            tensors, places, start = self._tensors(kind), [], 0
            for name, (storage, *_) in tensors.items():
                size = storage.nbytes()
                if storage in seen or size == 0:
                    continue
                if not storage.resizable():
                    raise UnsupportedError(
                        f"{name} is in memory that torch cannot free ({size} bytes: shared, "
                        "mapped or of another library). Clone it first."
                    )
                seen.add(storage)
                places.append(_Place(storage, start, size))
                start += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
            away[kind] = _Away(tensors, places)
        return away

    def _tensors(self, kind: str) -> dict[str, _Held]:
        return {
            f"{kind}: {name}{part}": _Held(x.untyped_storage(), x.dtype, tuple(x.shape))
            for name, tensor in self._named(kind)
            for part, x in _plain_tensors(tensor)
            if x.device == self._device
        }

    def _named(self, kind: str) -> Iterable[tuple[str, Tensor]]:
        model, optimizer = self._model, self._optimizer
        if kind == "weights":
            return chain(model.named_parameters(), model.named_buffers())
        if kind == "gradients":
            return ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        states = [] if optimizer is None else optimizer.state.values()
        return (
            (f"state[{i}].{name}", value)
            for i, state in enumerate(states)
            for name, value in state.items()
            if isinstance(value, Tensor)
        )

    def _check_unchanged(self, wanted: list[str]) -> None:
        for kind in wanted:
            now, (tensors, places) = self._tensors(kind), self._away[kind]
            for name, held in tensors.items():
                if now.get(name, held) != held:
                    raise ShapeError(
                        f"{name} was {held.dtype} {list(held.shape)} when it was released, and is "
                        f"now {now[name].dtype} {list(now[name].shape)} in other memory. Assign "
                        "the old tensor again, and change it only after restore()."
                    )
            if written := [storage.nbytes() for storage, _, _ in places if storage.nbytes()]:
                raise ShapeError(
                    f"{len(written)} released {kind} were allocated again ({sum(written)} bytes). "
                    "Free them, because restore() allocates the released ones."
                )

    def _wait(self) -> None:
        # Wait for the whole device, because FSDP2 uses streams of its own.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _HostBuffer:
    """Host memory that only grows: equal chunks with one range of addresses.

    torch rounds each pinned allocation up to a power of two. Chunks of such a size waste no memory.
    """

    def __init__(self, chunk_bytes: int, *, pin: bool) -> None:
        self._chunk_bytes, self._pin = chunk_bytes, pin
        self._chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return self._chunk_bytes * len(self._chunks)

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least `num_bytes`."""
        while self.num_bytes < num_bytes:
            size, pin = self._chunk_bytes, self._pin
            chunk = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._chunks.append(chunk)

    def pairs(self, start: int, storage: UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the host memory from `start`, each with its part of the storage."""
        x = torch.empty(0, dtype=torch.uint8, device=storage.device)
        x.set_(storage, 0, (storage.nbytes(),), (1,))
        done = 0
        while done < x.numel():
            index, at = divmod(start + done, self._chunk_bytes)
            size = min(self._chunk_bytes - at, x.numel() - done)
            yield self._chunks[index][at : at + size], x[done : done + size]
            done += size


def _plain_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with own memory inside a DTensor or other wrapper, by name."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        # A DTensor also lists its mesh.
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from ((f".{name}{part}", x) for part, x in _plain_tensors(inner))


def _allocate(places: list[_Place]) -> None:
    """Allocate all storages or none."""
    try:
        for storage, _, size in places:
            storage.resize_(size)
    except RuntimeError as error:  # torch.OutOfMemoryError is a subclass. A CPU raises the base.
        for storage, _, _ in places:
            storage.resize_(0)
        total = sum(place.size for place in places)
        raise CapacityError(
            f"the device has no room for {total} bytes: {error}. Free device memory, and restore "
            "again."
        ) from error


def _guard(
    model: nn.Module, optimizer: Optimizer | None, away: Container[str]
) -> list[RemovableHandle]:
    """Install hooks that raise UsageError if a call needs a kind that is then in `away`."""

    def refuse(what: str, *kinds: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            # A forward pass without gradients does not touch gradients that are away.
            skip = "gradients" if what == "forward" and not torch.is_grad_enabled() else None
            if out := [kind for kind in kinds if kind in away and kind != skip]:
                raise UsageError(
                    f"{what} needs {', '.join(out)}, which HostMemory stores on the host. Call "
                    f"restore({', '.join(map(repr, out))}) first."
                )

        return hook

    handles: list[RemovableHandle] = []
    forward = refuse("forward", "weights", "gradients")
    save, load = refuse("state_dict", "weights"), refuse("load_state_dict", "weights")
    for module in model.modules():
        handles += [
            # Runs before FSDP2's own hook, which gathers the parameters.
            module.register_forward_pre_hook(forward, prepend=True),
            module.register_state_dict_pre_hook(save),
            module.register_load_state_dict_pre_hook(load),
        ]
    if optimizer is not None:
        step = refuse("step", "weights", "gradients", "optimizer")
        save, load = refuse("state_dict", "optimizer"), refuse("load_state_dict", "optimizer")
        handles += [
            optimizer.register_step_pre_hook(step),
            optimizer.register_state_dict_pre_hook(save),
            optimizer.register_load_state_dict_pre_hook(load),
        ]
    return handles

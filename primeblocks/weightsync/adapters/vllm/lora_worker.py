"""The LoRA adapters that a vLLM worker holds, by version.

vLLM loads adapters from folders. Here a worker keeps the tensors of every version, and passes them
to vLLM's loader instead of a folder. So vLLM may evict an adapter from its slots, or drop all
adapters after an update of the base weights. Afterwards, vLLM gets the same bits again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ....errors import (
    CapacityError,
    PlanError,
    ShapeError,
    TransferError,
    UnsupportedError,
    UsageError,
    needs,
)
from ...engines.lora import AdapterSpec
from ...plan import Plan
from ...receive import Subscriber
from ..wires import open_transport

with needs("vllm", extra="vllm"):
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters", "is_versioned", "versioned_request"]

_TESTED = "0.32."
_SCHEME = "primeblocks:"
_PREFIX = "base_model.model."
_FIRST_ID = 1 << 30  # Above the ids that users choose by hand.


def versioned_request(name: str, version: int, digest: str) -> LoRARequest:
    """Return a version's request. Its path separates prefix caches, and is never opened."""
    path = f"{_SCHEME}{name}@{version}:{digest}"
    # Computed, so that it is equal in all processes, and differs for other bytes.
    number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % _FIRST_ID
    return LoRARequest(f"{name}@{version}", _FIRST_ID + number, path)


def is_versioned(request: LoRARequest) -> bool:
    """Whether `versioned_request` made this request."""
    return request.lora_path.startswith(_SCHEME)


class _Source(NamedTuple):
    """The source of one adapter's versions, and the tensors of the version received last."""

    spec: AdapterSpec
    keep: int
    tensors: dict[str, Tensor]
    subscriber: Subscriber


class _Held(NamedTuple):
    """A version in a worker."""

    request: LoRARequest
    spec: AdapterSpec
    tensors: dict[str, Tensor]


class Adapters:
    """The versions of LoRA adapters that a worker holds.

    Replaces the function by which vLLM loads adapters.

    Raises:
        UnsupportedError: this vLLM version loads adapters in another way.
    """

    def __init__(self, manager: Any) -> None:
        import vllm
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        kind = type(manager)
        if not vllm.__version__.startswith(_TESTED) or kind is not LRUCacheWorkerLoRAManager:
            raise UnsupportedError(
                f"adapters from memory were tested with vLLM {_TESTED}x and its "
                f"LRUCacheWorkerLoRAManager; this is {vllm.__version__} with {kind.__name__}. "
                "Install the tested version."
            )
        self._manager, self._from_path = manager, manager._load_adapter
        self._sources: dict[str, _Source] = {}
        self._held: dict[int, _Held] = {}
        # vLLM has no documented hook for this, because LoRAResolver and add_lora need a folder.
        manager._load_adapter = self._load

    def attach(self, told: dict[str, Any], text: str, transport: dict[str, Any], keep: int) -> None:
        """Open a transport for the versions of one adapter, given its spec and plan."""
        spec, plan = AdapterSpec(**told), Plan.from_json(text)
        _check_fits(self._manager, spec, plan)
        tensors: dict[str, Tensor] = {}

        def take(given: Iterable[tuple[str, Tensor]]) -> None:
            tensors.update((name, tensor.clone()) for name, tensor in given)

        source = _Source(spec, keep, tensors, Subscriber(plan, take, open_transport(transport)))
        if spec.name in self._sources:
            self._sources[spec.name].subscriber.close()
        self._sources[spec.name] = source

    def load(self, name: str, version: int, digest: str, timeout_s: float) -> None:
        """Receive a version and pass it to vLLM."""
        if name not in self._sources:
            raise TransferError(f"{name!r} is not attached. Call attach_lora() first.")
        source, request = self._sources[name], versioned_request(name, version, digest)
        if request.lora_int_id in self._held:
            return
        self._check_room(source, request)
        received = source.subscriber.receive(version, timeout_s=timeout_s)
        if received.digest != digest:
            raise TransferError(
                f"{request.lora_name!r} has digest {received.digest} in the transport, but "
                f"{digest} in the receipt. Use the receipt of the last publish."
            )
        self._held[request.lora_int_id] = _Held(request, source.spec, dict(source.tensors))
        try:
            # Added now, so that an error is reported. Within a step, an error would end the engine.
            self._manager.add_adapter(request)
        except BaseException:
            self.remove(request.lora_int_id)
            raise

    def remove(self, lora_id: int) -> None:
        """Remove a version."""
        if lora_id not in self._held:
            raise UsageError(
                f"this version is not loaded. The loaded versions are {self._names()}. Pass a "
                "request that update_lora() returned."
            )
        del self._held[lora_id]
        self._manager.remove_adapter(lora_id)

    def _check_room(self, source: _Source, request: LoRARequest) -> None:
        if request.lora_name in self._names():
            raise UsageError(
                f"{request.lora_name!r} is already loaded with other bytes. Remove that version "
                "first, or publish a new version."
            )
        if request.lora_int_id in self._manager.list_adapters():
            raise UsageError(
                f"{request.lora_name!r} needs id {request.lora_int_id}, which another adapter has. "
                "Remove that adapter, or publish a new version."
            )
        held = [each for each in self._held.values() if each.spec.name == source.spec.name]
        if len(held) >= source.keep:
            raise CapacityError(
                f"{len(held)} versions of {source.spec.name!r} are loaded, and "
                f"keep={source.keep}: {self._names()}. Remove one with remove_lora()."
            )

    def _names(self) -> list[str]:
        return [held.request.lora_name for held in self._held.values()]

    def _load(self, request: LoRARequest) -> Any:
        held = self._held.get(request.lora_int_id)
        if held is not None:
            return _build(self._manager, held)
        if is_versioned(request):
            raise UsageError(
                f"{request.lora_name!r} is not loaded. The loaded versions are {self._names()}."
            )
        return self._from_path(request)


def _build(manager: Any, held: _Held) -> Any:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    spec = held.spec
    return LoRAModel.from_lora_tensors(
        held.request.lora_int_id,
        # vLLM multiplies B by the scale in place.
        {name: tensor.clone() for name, tensor in held.tensors.items()},
        PEFTHelper(spec.rank, spec.alpha, [], use_rslora=spec.rslora),  # type: ignore[arg-type]
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(manager),
    )


def _check_fits(manager: Any, spec: AdapterSpec, plan: Plan) -> None:
    """Refuse tensors that vLLM would silently crop or leave out."""
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    most = manager.lora_config.max_lora_rank
    if spec.rank > most:
        raise UnsupportedError(
            f"adapter {spec.name!r} has rank {spec.rank}, but this engine takes at most {most}. "
            "Start the engine with a larger max_lora_rank."
        )
    adapted = _adapted(manager)
    for module, sizes in spec.modules(plan.target).items():
        name, _ = parse_fine_tuned_lora_name(f"{_PREFIX}{module}.lora_A.weight", _mapper(manager))
        if is_pp_missing_parameter(name, manager._adapter_manager.model):
            continue  # Another pipeline stage has it.
        if name not in adapted:
            raise PlanError(
                f"this engine cannot adapt the module {name!r}. The engine can adapt "
                f"{len(adapted)} modules, such as {min(adapted, default=None)!r}. See "
                "target_modules and lora_target_modules."
            )
        if sizes != adapted[name]:
            raise ShapeError(
                f"{module!r} has {adapted[name][0]} inputs and {adapted[name][1]} outputs, but "
                f"the adapter has {sizes[0]} and {sizes[1]}. Train the adapter on the engine's "
                "model."
            )


def _adapted(manager: Any) -> dict[str, tuple[int, int]]:
    """Return the sizes, in and out, of modules that vLLM can adapt, by their checkpoint names."""
    from vllm.model_executor.layers.linear import LinearBase

    sizes: dict[str, tuple[int, int]] = {}
    for name, wrapper in manager._adapter_manager.modules.items():
        layer: Any = getattr(wrapper, "base_layer", None)
        if not isinstance(layer, LinearBase):
            continue
        parts = manager._adapter_manager.packed_modules.get(name)
        if parts is None:
            sizes[name] = (layer.input_size, layer.output_size)
            continue
        for index, part in enumerate(parts):
            # vLLM counts copies of key-value heads as outputs.
            copies = getattr(layer, "num_kv_head_replicas", 1) if index else 1
            sizes[part] = (layer.input_size, layer.output_sizes[index] // copies)
    return sizes


def _mapper(manager: Any) -> Any:
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()

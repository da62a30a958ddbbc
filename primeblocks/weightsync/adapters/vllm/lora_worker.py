"""The adapters that a vLLM worker holds, by version.

vLLM loads adapters from folders. Here a worker keeps the tensors of every version that it holds,
and hands them to vLLM's loader where it would open the folder. So vLLM may evict an adapter from
its slots, or drop all of them after an update of the base weights, and gets the same bits again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ....errors import (
    CapacityError,
    EngineError,
    MissingPackageError,
    PlanError,
    PrimeblocksError,
    ShapeError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ...engines.lora import AdapterSpec
from ...engines.remote import WorkerState
from ...marker import Receipt
from ...plan import Plan
from ...receive import Subscriber
from ..wires import open_transport
from .worker import WorkerExtension

try:
    from vllm.lora.request import LoRARequest
except ModuleNotFoundError as error:
    raise MissingPackageError("vllm", "vllm") from error

__all__ = ["LoraWorkerExtension", "is_versioned", "versioned_request"]

_TESTED = "0.32."
_SCHEME = "primeblocks:"
_PREFIX = "base_model.model."
_FIRST_ID = 1 << 30  # Above the ids that people number by hand.


def versioned_request(name: str, receipt: Receipt) -> LoRARequest:
    """Return a version's request. Its path is never opened; it keeps prefix caches apart."""
    path = f"{_SCHEME}{name}@{receipt.version}:{receipt.digest}"
    # Equal in every process without asking, and another one for other bytes.
    number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % _FIRST_ID
    return LoRARequest(f"{name}@{receipt.version}", _FIRST_ID + number, path)


def is_versioned(request: LoRARequest) -> bool:
    """Tell whether `versioned_request` made a request."""
    return request.lora_path.startswith(_SCHEME)


class LoraWorkerExtension(WorkerExtension):
    """Mixin of vLLM's worker, named by `lora_engine_args`. Its calls report errors, raise none."""

    model_runner: Any
    _primeblocks_adapters: _Adapters | None = None

    def primeblocks_attach_lora(
        self, spec: str, plan: str, transport: dict[str, Any], keep: int
    ) -> dict[str, Any]:
        """Open a transport for the versions of one adapter."""

        def attach() -> None:
            if self._primeblocks_adapters is None:
                self._primeblocks_adapters = _Adapters(self.model_runner.lora_manager)
            self._primeblocks_adapters.attach(
                AdapterSpec.from_json(spec), Plan.from_json(plan), transport, keep
            )

        return _told(attach)

    def primeblocks_load_lora(
        self, name: str, version: int, digest: str, timeout_s: float
    ) -> dict[str, Any]:
        """Receive a version and give it to vLLM."""
        receipt = Receipt(version, 0, timeout_s, digest)
        return _told(lambda: self._attached().load(name, receipt, timeout_s))

    def primeblocks_remove_lora(self, lora_id: int) -> dict[str, Any]:
        """Forget a version."""
        return _told(lambda: self._attached().remove(lora_id))

    def _attached(self) -> _Adapters:
        if self._primeblocks_adapters is None:
            raise TransferError("no adapter is attached; call attach_lora() first")
        return self._primeblocks_adapters


def _told(work: Callable[[], None]) -> dict[str, Any]:
    state = WorkerState()
    try:
        work()
    except PrimeblocksError as met:
        state = WorkerState(error=type(met).__name__, message=str(met))
    except Exception as met:  # Reported like any other: raised, it would jam the executor.
        # Only the text reaches the front end.
        logging.getLogger(__name__).warning("adapter not loaded", exc_info=met)
        state = WorkerState(error=EngineError.__name__, message=f"{type(met).__name__}: {met}")
    return asdict(state)


class _Source:
    """The source of one adapter's versions, and the tensors of the last one received."""

    def __init__(self, spec: AdapterSpec, plan: Plan, transport: dict[str, Any], keep: int) -> None:
        self.spec, self.keep = spec, keep
        self.tensors: dict[str, Tensor] = {}
        self.subscriber = Subscriber(plan, self._take, open_transport(transport))

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors}


@dataclass(frozen=True)
class _Held:
    """A version in a worker."""

    request: LoRARequest
    spec: AdapterSpec
    tensors: dict[str, Tensor]


class _Adapters:
    """The versions that a worker holds, and vLLM's way to them."""

    def __init__(self, manager: Any) -> None:
        import vllm
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        kind = type(manager)
        if not vllm.__version__.startswith(_TESTED) or kind is not LRUCacheWorkerLoRAManager:
            raise UnsupportedError(
                f"adapters from memory were tested with vLLM {_TESTED}x and its "
                f"LRUCacheWorkerLoRAManager; this is {vllm.__version__} with {kind.__name__}."
            )
        self._manager, self._from_path = manager, manager._load_adapter
        self._sources: dict[str, _Source] = {}
        self._held: dict[int, _Held] = {}
        # There is no documented hook: LoRAResolver and add_lora both end at a folder.
        manager._load_adapter = self._load

    def attach(self, spec: AdapterSpec, plan: Plan, transport: dict[str, Any], keep: int) -> None:
        _check_fits(self._manager, spec, plan)
        source = _Source(spec, plan, transport, keep)
        if spec.name in self._sources:
            self._sources[spec.name].subscriber.close()
        self._sources[spec.name] = source

    def load(self, name: str, receipt: Receipt, timeout_s: float) -> None:
        if name not in self._sources:
            raise TransferError(f"{name!r} is not attached; call attach_lora() first")
        source, request = self._sources[name], versioned_request(name, receipt)
        if request.lora_int_id in self._held:
            return
        self._check_room(source, request)
        received = source.subscriber.receive(receipt.version, timeout_s=timeout_s)
        if received.digest != receipt.digest:
            raise TransferError(
                f"{request.lora_name!r} in the transport has digest {received.digest}, the receipt "
                f"{receipt.digest}. Use the receipt of the last publish."
            )
        self._held[request.lora_int_id] = _Held(request, source.spec, source.tensors)
        try:
            # Now, so that what fails is reported; within a step it would end the engine.
            self._manager.add_adapter(request)
        except BaseException:
            self.remove(request.lora_int_id)
            raise

    def remove(self, lora_id: int) -> None:
        if lora_id not in self._held:
            raise UsageError(f"no such version is held: {self._names()}")
        del self._held[lora_id]
        self._manager.remove_adapter(lora_id)

    def _check_room(self, source: _Source, request: LoRARequest) -> None:
        if request.lora_name in self._names():
            raise UsageError(
                f"{request.lora_name!r} is held with other bytes. Remove it first, or publish "
                "a new version."
            )
        if request.lora_int_id in self._manager.list_adapters():
            raise UsageError(
                f"{request.lora_name!r} needs id {request.lora_int_id}, which another adapter has. "
                "Remove that one, or publish a new version."
            )
        held = [each for each in self._held.values() if each.spec.name == source.spec.name]
        if len(held) >= source.keep:
            raise CapacityError(
                f"{len(held)} versions of {source.spec.name!r} are held and keep={source.keep}: "
                f"{self._names()}. Remove one with remove_lora()."
            )

    def _names(self) -> list[str]:
        return [held.request.lora_name for held in self._held.values()]

    def _load(self, request: LoRARequest) -> Any:
        held = self._held.get(request.lora_int_id)
        if held is not None:
            return _build(self._manager, held)
        if is_versioned(request):
            raise UsageError(f"{request.lora_name!r} is not held; these are: {self._names()}.")
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
    """Refuse what vLLM would cut to size or leave out without a word."""
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    most = manager.lora_config.max_lora_rank
    if spec.rank > most:
        raise UnsupportedError(
            f"adapter {spec.name!r} has rank {spec.rank}, this engine takes {most}. "
            "Start it with a larger max_lora_rank."
        )
    adapted = _adapted(manager)
    for module, sizes in spec.modules(plan.target).items():
        name, _ = parse_fine_tuned_lora_name(f"{_PREFIX}{module}.lora_A.weight", _mapper(manager))
        if is_pp_missing_parameter(name, manager._adapter_manager.model):
            continue  # Another pipeline stage has it.
        if name not in adapted:
            raise PlanError(
                f"this engine adapts no module {name!r}. It has {len(adapted)}, such as "
                f"{min(adapted, default=None)!r}: see target_modules and lora_target_modules."
            )
        if sizes != adapted[name]:
            raise ShapeError(
                f"{module!r} takes {adapted[name][0]} inputs to {adapted[name][1]} outputs; "
                f"the adapter {sizes[0]} to {sizes[1]}."
            )


def _adapted(manager: Any) -> dict[str, tuple[int, int]]:
    """Return the sizes, in and out, of modules that vLLM can adapt, by their checkpoint names."""
    from vllm.model_executor.layers.linear import LinearBase

    sizes: dict[str, tuple[int, int]] = {}
    for name, wrapper in manager._adapter_manager.modules.items():
        layer: Any = getattr(wrapper, "base_layer", None)
        linear = isinstance(layer, LinearBase)
        if not linear:
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

"""LoRA adapters in a running vLLM. Versions are served in parallel, by name, without a pause.

Build the engine with `lora_engine_args()`, and call `attach_lora` once. Call `update_lora` after
each publish. `update_lora` returns a LoRARequest for the version. Requests that you pass with this
LoRARequest use exactly its version, until you call `remove_lora`. Offline code uses the functions
whose names end in `_llm`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ....errors import (
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
    needs,
)
from ...engines.lora import AdapterSpec
from ...engines.remote import EngineCall, Steps, ask, drive, drive_sync
from ...marker import Receipt
from ...plan import Plan
from ...transports.transport import Transport
from .front import refuse_replicas
from .lora_worker import is_versioned, versioned_request
from .server import engine_args

with needs("vllm", extra="vllm"):
    from vllm.exceptions import VLLMValidationError
    from vllm.lora.request import LoRARequest

__all__ = [
    "attach_lora",
    "attach_lora_llm",
    "lora_engine_args",
    "remove_lora",
    "remove_lora_llm",
    "update_lora",
    "update_lora_llm",
]

_LORA = "primeblocks_lora"


def lora_engine_args() -> dict[str, Any]:
    """Return `engine_args()` with LoRA enabled. Add max_lora_rank and max_loras yourself. Local."""
    return {**engine_args(), "enable_lora": True}


class _Gate:
    """Refuses requests for versions that an engine lacks, because they would end its workers.

    The gate wraps `add_request` of vLLM's output processor, which every request of this front end
    passes.
    """

    def __init__(self, processor: Any) -> None:
        self.held: set[int] = set()
        self._add, self._states = processor.add_request, processor.request_states
        processor.add_request = self

    @classmethod
    def of(cls, engine: Any) -> _Gate:
        """Return the engine's gate. Installs it at the first call."""
        processor = engine.output_processor
        found = processor.add_request
        return found if isinstance(found, cls) else cls(processor)

    def __call__(self, request: Any, *arguments: Any, **named: Any) -> None:
        lora = request.lora_request
        if lora is not None and is_versioned(lora) and lora.lora_int_id not in self.held:
            # vLLM's own type, because AsyncLLM drops the messages of other types.
            raise VLLMValidationError(
                f"this engine does not hold {lora.lora_name!r}: it was removed, or not loaded "
                "here. Use the request that update_lora() returned last."
            )
        self._add(request, *arguments, **named)

    def close(self, lora: LoRARequest) -> None:
        """Refuse further requests. Raises UsageError, and stays open, if requests still run."""
        inside = [
            state.external_req_id
            for state in self._states.values()
            if state.lora_request is not None and state.lora_request.lora_int_id == lora.lora_int_id
        ]
        if inside:
            raise UsageError(
                f"{len(inside)} requests such as {inside[0]!r} still use {lora.lora_name!r}. "
                "Wait for them, or abort them."
            )
        self.held.discard(lora.lora_int_id)


async def attach_lora(
    engine: Any,
    spec: AdapterSpec,
    plan: Plan,
    transport: Transport,
    *,
    keep: int = 4,
    timeout_s: float,
) -> None:
    """Connect every worker of an `AsyncLLM` to the transport of an adapter.

    The call compares the names and shapes of the adapter's tensors with the model. Updates do not
    repeat this check. If you attach a name again, the new transport replaces the old transport. The
    engine keeps the versions that it holds.

    Args:
        engine: an `AsyncLLM` built with `lora_engine_args()`.
        plan: the plan of the tensors of `adapter_parameters`. The target of the plan has whole
            tensors.
        transport: the publisher's transport, or a reader's transport.
        keep: the largest number of versions that the engine holds at a time. In each worker, a
            version needs memory for twice its bytes.

    Raises:
        UnsupportedError: the engine was built without LoRA, has too low a max_lora_rank, or runs
            replicas. Also raised if the transport is a process group.
        PlanError: this engine does not adapt one of the modules, or names are not PEFT names.
        ShapeError: a tensor does not fit its module.
        DeadlineError: the workers did not answer in time.
        EngineError: the engine is dead, or was built without `lora_engine_args()`.
    """
    _check_engine(engine)
    steps = _attach_steps(spec, plan, transport, keep)
    await drive(engine, steps, "attach the adapter", time.monotonic() + timeout_s)


async def update_lora(engine: Any, name: str, receipt: Receipt, *, timeout_s: float) -> LoRARequest:
    """Load a published version of an adapter into an `AsyncLLM` that may be generating.

    Returns the request to pass to vLLM for this version. The request's lora_name is "name@version".
    Versions that the engine holds stay unchanged, and requests for these versions go on. You may
    call `update_lora` again after a failure. If `update_lora` raises CorruptionError or
    TransferError, the engine is unchanged.

    Raises:
        CorruptionError: the received bytes differ from the published bytes.
        TransferError: the name was not attached, or the version was retired.
        CapacityError: the engine already holds `keep` versions. Remove one version.
        UsageError: the engine holds this version with other bytes, or another adapter has the id of
            this version.
        DeadlineError: the workers did not answer in time, and may still finish. Call again.
        EngineError: the engine is dead, or refused the call. If the engine refused the call, its
            adapters are unchanged.
    """
    deadline = time.monotonic() + timeout_s
    steps = _load_steps(name, receipt, deadline)
    request: LoRARequest = await drive(engine, steps, "load the adapter", deadline)
    _Gate.of(engine).held.add(request.lora_int_id)
    return request


async def remove_lora(engine: Any, request: LoRARequest, *, timeout_s: float) -> None:
    """Remove a version from an engine.

    New requests for a removed version raise vLLM's VLLMValidationError. If several front ends share
    an engine, a request of another front end for a removed version ends the engine.

    Raises:
        UsageError: requests of this front end still use the version, or the engine does not hold
            it.
        DeadlineError: the workers did not answer in time.
        EngineError: the engine is dead.
    """
    _Gate.of(engine).close(request)
    steps, deadline = ask(_LORA, "remove", request.lora_int_id), time.monotonic() + timeout_s
    await drive(engine, steps, "remove the adapter", deadline)


def attach_lora_llm(
    llm: Any, spec: AdapterSpec, plan: Plan, transport: Transport, *, keep: int = 4
) -> None:
    """Attach an adapter to an offline `LLM`. Blocks. Raises the errors of `attach_lora`."""
    _check_engine(llm.llm_engine)
    drive_sync(llm, _attach_steps(spec, plan, transport, keep))


def update_lora_llm(llm: Any, name: str, receipt: Receipt, *, timeout_s: float) -> LoRARequest:
    """Load a version of an adapter into an offline `LLM`. Raises the errors of `update_lora`.

    `timeout_s` limits how long each worker waits and checks, but not the whole call.
    """
    steps = _load_steps(name, receipt, time.monotonic() + timeout_s)
    request: LoRARequest = drive_sync(llm, steps)
    _Gate.of(llm.llm_engine).held.add(request.lora_int_id)
    return request


def remove_lora_llm(llm: Any, request: LoRARequest) -> None:
    """Remove a version from an offline `LLM`. Raises the errors of `remove_lora`."""
    _Gate.of(llm.llm_engine).close(request)
    drive_sync(llm, ask(_LORA, "remove", request.lora_int_id))


def _attach_steps(spec: AdapterSpec, plan: Plan, transport: Transport, keep: int) -> Steps:
    if (end := transport.spec())["kind"] == "group":
        raise UnsupportedError(
            "an adapter is received after publish returns, but over a process group publish waits "
            "until the readers receive. Pass another transport."
        )
    return ask(_LORA, "attach", asdict(spec), plan.to_json(), end, keep)


def _load_steps(name: str, receipt: Receipt, deadline: float) -> Steps:
    # Less than the time that is left, so that a worker can still report its own error.
    left_s = 0.9 * max(0.0, deadline - time.monotonic())
    request = versioned_request(name, receipt.version, receipt.digest)
    try:
        yield from ask(_LORA, "load", name, receipt.version, receipt.digest, left_s)
    except PrimeblocksError:
        # Either all workers hold it or none does. Errors of workers without it are ignored.
        yield EngineCall("collective_rpc", (_LORA, None, ("remove", request.lora_int_id)))
        raise
    return request


def _check_engine(engine: Any) -> None:
    """Refuse an engine that cannot load adapters, or install its gate."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from .worker import WorkerExtension

    config = engine.vllm_config
    refuse_replicas(config.parallel_config.data_parallel_size)
    if config.lora_config is None:
        raise UnsupportedError(
            "this engine was built without enable_lora. Build it with lora_engine_args()."
        )
    extension = config.parallel_config.worker_extension_cls
    if not extension or not issubclass(resolve_obj_by_qualname(extension), WorkerExtension):
        raise EngineError(
            f"this engine's worker_extension_cls is {extension!r}, not a WorkerExtension. "
            "Build it with lora_engine_args()."
        )
    _Gate.of(engine)

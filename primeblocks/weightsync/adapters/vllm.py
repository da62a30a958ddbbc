"""Weights into a running vLLM: an engine for its workers, and calls for its front end.

`primeblocks.plugins.vllm` calls `register` in every process of vLLM. The front end then builds its
engine with `engine_args()`, calls `attach` once and `update` after each publish; offline code uses
`attach_llm` and `update_llm`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from torch import Tensor

from ...errors import MissingPackageError, PrimeblocksError, TransferError, UnsupportedError
from ..marker import Receipt
from ..plan import Plan
from ..receive import Subscriber
from ..remote import Step, WorkerState, attach_steps, call, drive, drive_sync, update_steps
from ..transport import Transport, open_transport

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferInitRequest,
        WeightTransferUpdateInfo,
        WeightTransferUpdateRequest,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
except ModuleNotFoundError as error:
    raise MissingPackageError("vllm", "vllm") from error

__all__ = [
    "BACKEND",
    "InFlight",
    "PrimeblocksEngine",
    "UpdateReport",
    "WorkerExtension",
    "attach",
    "attach_llm",
    "engine_args",
    "register",
    "update",
    "update_llm",
]

BACKEND = "primeblocks"

InFlight = Literal["continue", "recompute", "abort"]
_PAUSE: dict[str, dict[str, Any]] = {
    "continue": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "abort": {"mode": "abort", "clear_cache": True},
}


def register() -> None:
    """Make the backend known to vLLM in this process. Idempotent; local."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "PrimeblocksEngine")


# --- in a worker -------------------------------------------------------------------------------


@dataclass
class _InitInfo(WeightTransferInitInfo):
    transport: dict[str, Any]
    plan: str


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    version: int
    timeout_s: float


class PrimeblocksEngine(WeightTransferEngine[_InitInfo, _UpdateInfo]):
    """A Subscriber inside a vLLM worker.

    The whole update happens in `receive_weights`, between two engine steps: bytes that fail their
    digest never touch the model, and a load that fails is undone by loading the version before.
    It does not raise; the front end asks for `state`.
    """

    init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
    supports_draft_weight_update = False
    state = WorkerState(error="TransferError", message="not attached; call attach() first")
    _subscriber: Subscriber | None = None

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Open the transport. Called again, it replaces the one before; no weights change."""
        self.shutdown()
        with self._reported():
            _refuse_unpatched_experts(self.model)
            plan = Plan.from_json(init_info.plan)
            self._subscriber = Subscriber(plan, self._load, open_transport(init_info.transport))

    def start_weight_update(self) -> None:
        """Nothing: parameters stay where they are until a version has passed its digests."""

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        """Verify, load, finish; or leave the old weights in place."""
        if self._subscriber is not None:
            with self._reported():
                self._subscriber.receive(update_info.version, timeout_s=update_info.timeout_s)

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has finished."""

    def shutdown(self) -> None:
        """Let go of the transport; the loaded weights stay."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        self.state = type(self).state

    @contextmanager
    def _reported(self) -> Iterator[None]:
        error, message, cause = "", "", None
        try:
            yield
        except PrimeblocksError as met:
            error, message, cause = type(met).__name__, str(met), met.__cause__
        except Exception as met:  # Reported like any other: raised, it would jam the executor.
            error, message, cause = "EngineError", f"{type(met).__name__}: {met}", met
        if error:
            # Only the text reaches the front end.
            logging.getLogger(__name__).warning("weights not updated: %s", message, exc_info=cause)
        version = None if self._subscriber is None else self._subscriber.version
        self.state = WorkerState(version, error=error, message=message)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.model)
        try:
            expected = {name for name, _ in self.model.named_parameters()}
            loaded: set[str] | None = cast(Any, self.model).load_weights(tensors)
            missing = sorted(expected - loaded) if loaded is not None else []
            if missing and self.model_config.quantization is None:
                raise TransferError(
                    f"{len(missing)} of {len(expected)} parameters would keep their old values, "
                    f"such as {missing[0]}. Add their names to the target manifest."
                )
        except BaseException:
            _forget_buffered(self.model)
            raise
        finally:
            reload.finalize_layerwise_reload(self.model, self.model_config)


class WorkerExtension:
    """Mixed into vLLM's worker by `engine_args`. Subclass it to add calls of your own."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def primeblocks_state(self) -> dict[str, Any]:
        """How the last attach or update went, for the front end."""
        state = self.weight_transfer_engine.state
        return asdict(replace(state, active=self._weight_update_active))


def _forget_buffered(model: Any) -> None:
    """Let `finalize_layerwise_reload` put the old tensors back where a layer is incomplete."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights = []


def _refuse_unpatched_experts(model: Any) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.platforms import current_platform

    stock = UnquantizedFusedMoEMethod._setup_kernel.__module__.startswith("vllm.")
    experts = any(
        isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
        for layer in model.modules()
    )
    if current_platform.is_cpu() and stock and experts:
        raise UnsupportedError(
            "vLLM on CPU corrupts expert weights at every update, and the patch "
            "'moe_reload_on_cpu' of primeblocks.plugins.vllm is not applied. Switch it on."
        )


# --- in the front end --------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateReport:
    """What an update cost: in all, and while nothing was generated."""

    version: int
    seconds: float
    pause_seconds: float


def engine_args() -> dict[str, Any]:
    """Keyword arguments for `AsyncEngineArgs` or `LLM`. Local."""
    from vllm.config import WeightTransferConfig

    register()
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
    }


async def attach(engine: Any, plan: Plan, transport: Transport, *, timeout_s: float) -> None:
    """Tell every worker of an `AsyncLLM` where weights will come from. No weights change.

    Raises:
        UnsupportedError: the workers cannot take updates safely, or there are replicas.
        DeadlineError: they did not answer in time.
        EngineError: the engine is dead, or was built without `engine_args()`.
    """
    replicas = engine.vllm_config.parallel_config.data_parallel_size
    if replicas > 1:
        raise UnsupportedError(
            f"one AsyncLLM with {replicas} replicas reports on the first of them only. "
            "Start one engine for each replica, and update each."
        )
    steps = attach_steps(_ASK, _init_request(plan, transport))
    await drive(engine, steps, "attach", time.monotonic() + timeout_s)


async def update(
    engine: Any, receipt: Receipt, *, in_flight: InFlight = "continue", timeout_s: float
) -> UpdateReport:
    """Load a published version into an `AsyncLLM` that may be generating.

    Generation pauses between two steps and is resumed whatever happens. Output tokens carry the
    version as the label `str(version)`. Calling it again after a failure is safe.

    Args:
        receipt: what `publish` returned.
        in_flight: requests under way keep the KV cache of the old weights ("continue"),
            recompute it with the new ones ("recompute"), or end with finish reason "abort".
            Under "continue" the prefix cache keeps old pages: use one `cache_salt` a version.
        timeout_s: for everything; a fifth of it is kept for resuming.

    Raises:
        CorruptionError: bytes are not what was sent. The old weights are served.
        TransferError: the version is gone, or loading failed. The old weights are served.
        DeadlineError: it took longer; the workers may still finish. Update again before you
            trust the label.
        EngineError: the engine is dead, or its weights are torn: restart it.
    """
    start = time.monotonic()
    work_by, resume_by = start + 0.8 * timeout_s, start + timeout_s
    try:
        await call(engine, engine.pause_generation(**_PAUSE[in_flight]), "pause", work_by)
        steps = update_steps(_ASK, receipt.version, lambda version: _request(version, work_by))
        await drive(engine, steps, "update", work_by)
    finally:
        # A dead engine would only hide its first error behind a second one.
        if not engine.errored:
            await call(engine, engine.resume_generation(), "resume", resume_by)
    seconds = time.monotonic() - start
    return UpdateReport(receipt.version, seconds, seconds)


def attach_llm(llm: Any, plan: Plan, transport: Transport) -> None:
    """`attach` for an offline `LLM`. Blocks until the engine answers.

    Raises:
        UnsupportedError: the workers cannot take updates safely.
    """
    drive_sync(llm, attach_steps(_ASK, _init_request(plan, transport)))


def update_llm(llm: Any, receipt: Receipt, *, timeout_s: float) -> UpdateReport:
    """`update` for an offline `LLM`, between two calls of `generate`; clears its prefix cache.

    `timeout_s` bounds each worker's wait and check; the call returns when the engine answers.

    Raises:
        PrimeblocksError: as `update`.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    drive_sync(
        llm, update_steps(_ASK, receipt.version, lambda version: _request(version, deadline))
    )
    llm.reset_prefix_cache()
    seconds = time.monotonic() - start
    return UpdateReport(receipt.version, seconds, seconds)


_ASK = Step("collective_rpc", (WorkerExtension.primeblocks_state.__name__,))


def _init_request(plan: Plan, transport: Transport) -> WeightTransferInitRequest:
    return WeightTransferInitRequest(asdict(_InitInfo(transport.spec(), plan.to_json())))


def _request(version: int, deadline: float) -> WeightTransferUpdateRequest:
    # Less than is left, so that a worker can still say what it waited for.
    left_s = 0.9 * max(0.0, deadline - time.monotonic())
    return WeightTransferUpdateRequest(asdict(_UpdateInfo(version, left_s)))

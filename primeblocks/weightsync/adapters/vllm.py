"""Weights into a running vLLM: an engine for its workers, and calls for its front end.

`primeblocks.plugins.vllm` calls `register` in every process of vLLM. The front end then builds its
engine with `engine_args()`, calls `attach` once and `update` after each publish; offline code uses
`attach_llm` and `update_llm`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from torch import Tensor

from ...errors import (
    DeadlineError,
    EngineError,
    MissingPackageError,
    PrimeblocksError,
    TransferError,
    UnsupportedError,
)
from ..marker import Receipt
from ..plan import Plan
from ..receive import Subscriber
from ..remote import call, tagged, untagged
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
# Of the time allowed, what is kept for going back and resuming.
_RESERVED = 0.2


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
    """

    init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
    supports_draft_weight_update = False
    _subscriber: Subscriber | None = None

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Open the transport. Called again, it replaces the one before; no weights change."""
        try:
            _refuse_unpatched_experts(self.model)
            transport = open_transport(init_info.transport)
            plan = Plan.from_json(init_info.plan)
        except PrimeblocksError as error:
            raise tagged(error) from error
        self.shutdown()
        self._subscriber = Subscriber(plan, self._load, transport)

    def start_weight_update(self) -> None:
        """Nothing: parameters stay where they are until a version has passed its digests."""

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        """Verify, load, finish; or leave the old weights in place and raise."""
        if self._subscriber is None:
            raise tagged(TransferError("no transport; call attach() before update()"))
        try:
            self._subscriber.receive(update_info.version, timeout_s=update_info.timeout_s)
        except PrimeblocksError as error:
            raise tagged(error) from error

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has finished."""

    def shutdown(self) -> None:
        """Let go of the transport; the loaded weights stay."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

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
    return {"weight_transfer_config": WeightTransferConfig(backend=BACKEND)}


async def attach(engine: Any, plan: Plan, transport: Transport, *, timeout_s: float) -> None:
    """Tell every worker of an `AsyncLLM` where weights will come from. No weights change.

    Raises:
        UnsupportedError: the workers cannot take updates safely.
        DeadlineError: they did not answer in time.
        EngineError: the engine is dead.
    """
    deadline = time.monotonic() + timeout_s
    request = WeightTransferInitRequest(_init(plan, transport))
    await call(engine, engine.init_weight_transfer_engine(request), "attach", deadline)


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

    Raises:
        CorruptionError: bytes are not what was sent. The old weights are served.
        TransferError: the version is gone, or loading failed. The old weights are served.
        DeadlineError: it took longer than `timeout_s`; the workers may still finish. Update
            again before trusting the label.
        EngineError: the engine is dead, or its weights are torn: restart it.
    """
    start = time.monotonic()
    work_by = start + timeout_s * (1 - _RESERVED)
    resume_by = start + timeout_s
    before = await call(engine, engine.get_weight_version(), "ask for its version", work_by)
    paused = time.monotonic()
    try:
        await call(engine, engine.pause_generation(**_PAUSE[in_flight]), "pause", work_by)
        try:
            await _round(engine, receipt.version, str(receipt.version), work_by)
        except (EngineError, DeadlineError):
            raise
        except PrimeblocksError as error:
            await _make_agree(engine, before, error, resume_by)
            raise
    finally:
        if not engine.errored:
            await call(engine, engine.resume_generation(), "resume", resume_by)
    end = time.monotonic()
    return UpdateReport(receipt.version, end - start, end - paused)


def attach_llm(llm: Any, plan: Plan, transport: Transport) -> None:
    """`attach` for an offline `LLM`. Blocks until the engine answers.

    Raises:
        UnsupportedError: the workers cannot take updates safely.
    """
    try:
        llm.init_weight_transfer_engine({"init_info": _init(plan, transport)})
    except Exception as error:  # vLLM hands on other types than the worker raised.
        raise untagged(error) from error


def update_llm(llm: Any, receipt: Receipt, *, timeout_s: float) -> UpdateReport:
    """`update` for an offline `LLM`, between two calls of `generate`; clears its prefix cache.

    `timeout_s` bounds each worker's wait and check; the call returns when the engine answers.

    Raises:
        CorruptionError, TransferError, DeadlineError, EngineError: as `update`.
    """
    start = time.monotonic()
    info = asdict(_UpdateInfo(receipt.version, timeout_s))
    try:
        _start_llm(llm)
        llm.update_weights({"update_info": info})
        llm.finish_weight_update(str(receipt.version))
        llm.reset_prefix_cache()
    except Exception as error:  # vLLM hands on other types than the worker raised.
        raise untagged(error) from error
    seconds = time.monotonic() - start
    return UpdateReport(receipt.version, seconds, seconds)


def _init(plan: Plan, transport: Transport) -> dict[str, Any]:
    return asdict(_InitInfo(transport.spec(), plan.to_json()))


async def _round(engine: Any, version: int, label: str, deadline: float) -> None:
    """The three calls of vLLM's protocol."""
    left = deadline - time.monotonic()
    request = WeightTransferUpdateRequest(asdict(_UpdateInfo(version, max(0.0, left))))
    try:
        await call(engine, engine.start_weight_update(), "start an update", deadline)
    except TransferError as error:
        if not _left_open(error):
            raise
        await call(engine, engine.finish_weight_update(), "close an old update", deadline)
        await call(engine, engine.start_weight_update(), "start an update", deadline)
    await call(engine, engine.update_weights(request), "update", deadline)
    await call(engine, engine.finish_weight_update(label), "finish the update", deadline)


def _start_llm(llm: Any) -> None:
    try:
        llm.start_weight_update()
    except Exception as error:
        if not _left_open(error):
            raise
        llm.finish_weight_update()
        llm.start_weight_update()


def _left_open(error: Exception) -> bool:
    # An update whose caller ran into its deadline was never finished.
    return "a weight update is already active" in str(error)


async def _make_agree(engine: Any, before: str, error: Exception, deadline: float) -> None:
    """After a failure, bring workers that had loaded the new version back to the old one."""
    config = engine.vllm_config.parallel_config
    if config.world_size * config.data_parallel_size == 1:
        return
    if not before.isdecimal():
        raise EngineError(
            f"an update failed on some workers ({error}), and there is no published version to "
            "bring all back to. Restart the engine; publish and update once before training."
        ) from error
    try:
        await _round(engine, int(before), before, deadline)
    except PrimeblocksError as second:
        raise EngineError(
            f"an update failed ({error}), and so did going back to version {before}: {second}. "
            "Workers may disagree: restart the engine."
        ) from error

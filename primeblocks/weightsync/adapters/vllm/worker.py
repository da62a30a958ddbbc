"""Worker side of vLLM: a `Subscriber` in each worker, and the calls of the front end.

The front end calls these methods of a worker:

- `init_transfer_engine` opens the transport.
- `verify` checks a version in a thread, while the engine takes its steps.
- `receive_weights` loads the checked version between two steps.
- `state` returns the outcome of the last call.

These methods never raise, because an error in a worker would jam vLLM's executor. A version that
fails in `verify` never touches the model. If a load fails, the previous version is loaded again.
`UpdateInfo.transaction` identifies an attempt, and a late call of an attempt that was given up is
ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import (
    PlanError,
    PrimeblocksError,
    TransferError,
    UnsupportedError,
    needs,
)
from ....layout import Layout
from ...convert.conversion import Reads, Wiring, filling
from ...digest import pool_of
from ...engines.remote import WorkerState
from ...manifest import Manifest
from ...observed import Observed
from ...plan import Plan
from ...receive import Subscriber
from ..wires import open_transport
from .kernels import observe_worker
from .loads import (
    WithDrafts,
    begin_reload,
    captured_kernels,
    casts_untold,
    give_memory,
    record_load,
    refresh_captured,
    refresh_copies,
    unfilled,
    with_drafts,
)
from .lora_worker import Adapters

with needs("vllm", extra="vllm"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

__all__ = ["InitInfo", "PrimeblocksEngine", "UpdateInfo", "WorkerExtension"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The arguments of `attach` for a worker, with the transport's spec and the plan as JSON."""

    transport: dict[str, Any]
    plan: str
    first_reader: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to load, and the attempt that loads it."""

    version: int
    transaction: str
    timeout_s: float


class PrimeblocksEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A `Subscriber` inside a vLLM worker. The head of this file lists the methods."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False  # `receive_weights` loads the drafter with the target.
    drafter: nn.Module | None = None
    _NEVER = WorkerState(error="TransferError", message="not attached. Call attach() first.")
    _state, _transaction = _NEVER, ""
    _subscriber: Subscriber | None = None
    _checking: Future[WorkerState] | None = None
    # Recordings for the last plan, to which an engine that sleeps is attached again and again.
    _known: tuple[str, int] | None = None
    _role: tuple[int, Wiring | None] = 0, None
    _reads: Reads | None = None
    _direct: Sequence[str] = ()
    _updated: nn.Module | None = None
    _captured: list[tuple[Any, Any]] | None = None  # Since the first attach, before any update.

    @property
    def state(self) -> WorkerState:
        """The outcome of the last call, with `busy` set while `verify` runs."""
        if self._checking is not None and self._checking.done():
            self._wait()
        return replace(self._state, busy=self._checking is not None)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the transport. A second call replaces the transport. Changes no weights."""
        self.shutdown()
        # Its own stream: the model's stream would wait for messages and copies of a check.
        self._thread = pool_of(1, apart=True)

        def subscribe() -> None:
            _refuse_spoiled_kernels(self.model)
            if self.parallel_config.enable_eplb:
                raise UnsupportedError(
                    "vLLM's loader puts experts where they were before enable_eplb moved them. "
                    "Start the engine without enable_eplb."
                )
            if self._captured is None:
                models = [one for one in (self.model, self.drafter) if one is not None]
                self._captured = captured_kernels(models, self.vllm_config)
            plan = Plan.from_json(init_info.plan)
            key = plan.fingerprint(), init_info.first_reader
            if self._known != key:
                self._known = None  # The recordings are replaced even if the plan is refused.
                self._role = self._role_in(plan, init_info.first_reader)
                self._known = key
            reader, wiring = self._role
            transport = open_transport(init_info.transport)
            self._subscriber = Subscriber(
                plan, self._load, transport, reader=reader, convert=wiring
            )

        self._report(subscribe)

    def reads(self, checkpoint: Manifest) -> Reads:
        """Record the boxes of a checkpoint that this worker's loader reads. Changes no weights."""
        model = self._with_drafts(checkpoint) or self.model
        return record_load(model, checkpoint, self.vllm_config).reads

    def _with_drafts(self, checkpoint: Manifest) -> WithDrafts | None:
        return with_drafts(self.model, self.drafter, checkpoint, self.vllm_config)

    def _role_in(self, plan: Plan, first_reader: int) -> tuple[int, Wiring | None]:
        """Return the number of this worker's reader, and a wiring unless it reads whole tensors.

        Raises:
            PlanError: the plan has no such reader, the reader lacks boxes of this worker, or the
                target manifest lacks elements of a parameter.
            UnsupportedError: the model's loader fails on the target manifest without values.
        """
        rank = self.parallel_config.rank % self.parallel_config.world_size
        reader = first_reader + rank if len(plan.wants) > 1 else 0
        plan.check_reader(reader)
        wants = plan.wants[reader]
        self._updated = self._with_drafts(plan.target) or self.model
        reads, self._direct, lacking = record_load(self._updated, plan.target, self.vllm_config)
        self._reads = reads
        if len(reads.lost) == len(plan.target):  # Otherwise nothing would check an update.
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be updated: "
                f"{next(iter(reads.lost.values()))}. Plan with the names and shapes of the "
                "checkpoint that this engine was started with, unless the loader needs values."
            )
        if lacking:
            raise PlanError(
                f"the target manifest lacks elements of {len(lacking)} parameters, such as "
                f"{lacking[0]}. They would be undefined after an update. Add the names of the "
                "missing tensors to the manifest."
            )
        if lacking := reads.lacking(wants):
            raise PlanError(
                f"worker {rank} reads elements of {len(lacking)} tensors, such as {lacking[0]!r}, "
                f"that reader {reader} of {len(plan.wants)} does not want. Plan for the targets "
                "that describe() returns for this engine, and pass the number of the first "
                "target as first_reader=."
            )
        is_whole = all(
            boxes == (Layout.whole(plan.target[name].shape).shard,) for name, boxes in wants.items()
        )
        return reader, None if is_whole else filling(plan.target, wants)

    def observe(self) -> Observed:
        """Return digests of the weights that this worker computes with."""
        self._wait()
        return observe_worker(self._updated or self.model, self._subscriber, self._reads)

    def verify(self, info: UpdateInfo) -> None:
        """Start to check a version.

        After this call, `receive_weights` loads nothing if it is called for another update.
        """
        self._transaction = info.transaction
        if (subscriber := self._subscriber) is not None:
            self._checking = self._thread.submit(
                _told, lambda: subscriber.verify(info.version, timeout_s=info.timeout_s)
            )

    def start_weight_update(self) -> None:
        """Do nothing.

        Parameters keep their values until all digests of the new version were checked.
        """

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the checked version, or leave the old weights in place."""
        subscriber, version = self._subscriber, update_info.version
        if update_info.transaction != self._transaction:
            logging.getLogger(__name__).warning(
                "version %d was not loaded, because its update was given up", version
            )
        elif subscriber is not None:
            self._wait()
            self._report(lambda: subscriber.receive(version, timeout_s=update_info.timeout_s))

    def finish_weight_update(self) -> None:
        """Do nothing. `receive_weights` has finished the load."""

    def shutdown(self) -> None:
        """Close the subscriber. The loaded weights stay."""
        if self._subscriber is not None:
            # A running check may last until its deadline. It releases its bytes when it ends.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._subscriber.close()
            self._subscriber = self._checking = None
            self._transaction = ""  # An update that was under way must not load.
        self._state = self._NEVER

    def _wait(self) -> None:
        # The check ends by itself at the deadline of its update.
        if self._checking is not None:
            self._note(self._checking.result())
            self._checking = None

    def _report(self, act: Callable[[], object]) -> None:
        self._note(_told(act))

    def _note(self, state: WorkerState) -> None:
        version = None if self._subscriber is None else self._subscriber.version
        self._state = replace(state, version=version, value=None)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        model: Any = self._updated
        for layer in model.modules():
            if getattr(layer, "is_amx_bmm_enabled", False):  # It packed and freed this weight.
                info = layerwise.get_layerwise_info(layer.kv_b_proj)
                weight = torch.empty_like(info.restore_metadata[0]["weight"], device="cpu")
                layer.kv_b_proj.weight = nn.Parameter(weight, requires_grad=False)
        expected = begin_reload(model)
        direct = [model.get_submodule(prefix) for prefix in self._direct]
        try:
            for layer in direct:
                give_memory(layer)
            with casts_untold():
                loaded = model.load_weights(tensors)
            if missing := unfilled(expected, loaded, self.vllm_config):
                raise TransferError(
                    f"{len(missing)} parameters would keep their old values, such as {missing[0]}. "
                    "Add their names to the target manifest."
                )
            for layer in direct:  # Otherwise vLLM would put the old tensors back.
                info = layerwise.get_layerwise_info(layer)
                info.load_numel = max(1, info.load_numel)
        except BaseException:
            _forget_buffered(model)
            raise
        finally:
            _finalize(model, self.model_config)
            refresh_captured(self._captured or ())


class WorkerExtension:
    """A mixin for vLLM's worker. `engine_args` passes the mixin's name to vLLM.

    To add methods of your own to the worker, subclass this mixin.
    """

    weight_transfer_engine: Any
    model_runner: Any
    _weight_update_active: bool
    _primeblocks_adapters: Adapters | None = None

    def _primeblocks_engine(self) -> Any:
        # vLLM gives a weight-transfer engine only the target model.
        self.weight_transfer_engine.drafter = self.model_runner.get_draft_model()
        return self.weight_transfer_engine

    def primeblocks_state(self) -> dict[str, Any]:
        """Return the outcome of the last attach or update, for the front end."""
        state = self._primeblocks_engine().state
        return asdict(replace(state, active=self._weight_update_active))

    def primeblocks_describe(self, checkpoint: str) -> dict[str, Any]:
        """Return the boxes of a checkpoint that this worker reads."""

        def read() -> str:
            reads: Reads = self._primeblocks_engine().reads(Manifest.from_json(checkpoint))
            return reads.to_json()

        return asdict(_told(read))

    def primeblocks_observe(self) -> dict[str, Any]:
        """Return digests of the weights that this worker computes with, for the front end."""
        return asdict(_told(lambda: self.weight_transfer_engine.observe().to_json()))

    def primeblocks_verify(self, info: dict[str, Any]) -> None:
        """Start to check a version, while the engine takes its steps."""
        self.weight_transfer_engine.verify(UpdateInfo(**info))

    def primeblocks_lora(self, act: str, *arguments: Any) -> dict[str, Any]:
        """Call the method "attach", "load" or "remove" of `Adapters`."""

        def do() -> None:
            if self._primeblocks_adapters is None:
                self._primeblocks_adapters = Adapters(self.model_runner.lora_manager)
            getattr(self._primeblocks_adapters, act)(*arguments)

        return asdict(_told(do))


def _told(act: Callable[[], object]) -> WorkerState:
    """Act, and return the value or the error. A raised error would jam the executor."""
    try:
        return WorkerState(value=act())
    except PrimeblocksError as met:
        state, cause = WorkerState(error=type(met).__name__, message=str(met)), met.__cause__
    except Exception as met:
        state, cause = WorkerState(error="EngineError", message=f"{type(met).__name__}: {met}"), met
    # Logged with its traceback, because only the text reaches the front end.
    logging.getLogger(__name__).warning(
        "the weights were not updated: %s", state.message, exc_info=cause
    )
    return state


def _finalize(model: Any, config: Any) -> None:
    """End vLLM's reload. An error leaves the tensors of layers that were not finished as before."""
    from vllm.model_executor.model_loader import reload

    try:
        reload.finalize_layerwise_reload(model, config)
    except BaseException:  # Such as no memory for a layer that vLLM processes here.
        _forget_buffered(model)
        reload.finalize_layerwise_reload(model, config)
        raise
    finally:
        refresh_copies(model)


def _forget_buffered(model: Any) -> None:
    """Let `finalize_layerwise_reload` restore the old tensors of incomplete layers."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights = []


def _refuse_spoiled_kernels(model: Any) -> None:
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
            "'moe_reload_on_cpu' of primeblocks.plugins.vllm is not applied. Switch that patch on."
        )
    schemes = (getattr(layer, "scheme", None) for layer in model.modules())
    kernels = {type(getattr(scheme, "kernel", None)).__name__ for scheme in schemes}
    if "CPUInt8ScaledMMLinearKernel" in kernels:
        raise UnsupportedError(
            "vLLM's int8 kernels on a CPU compute wrongly after an update of their weights. Serve "
            "weights in bfloat16, or start the engine again for new weights."
        )

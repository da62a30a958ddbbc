"""vLLM's entry point (`vllm.general_plugins`), loaded by vLLM in every process that it starts.

It registers the blocks' adapters with vLLM's factories and patches what has no hook, most of it on
the CPU platform only. Each patch names its reason and symbols, has a self-test, and is applied to
the tested versions only; any other vLLM is left alone with one warning, so that installing
primeblocks never breaks an engine. `PRIMEBLOCKS_VLLM_PATCHES_OFF="name,name"` switches patches off
(why that is a variable: docs/decisions/vllm_plugin.md).
"""

import inspect
import logging
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from ..errors import MissingPackageError, UnsupportedError, UsageError
from .patch import Patch, SelfTest, ours, stock

__all__ = ["OFF", "PATCHES", "TESTED", "refusals", "register", "require"]

TESTED = "0.32"
OFF = "PRIMEBLOCKS_VLLM_PATCHES_OFF"

_VERIFY = "vllm.config.vllm:VllmConfig._verify_aux_output_compatibility"
_CREATE = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
_RUNNER = "vllm.v1.worker.cpu_worker:CPUModelRunner"
_STORE = "vllm.distributed.aux_output_connector.worker:BlockObjectStore"
_SETUP = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
    "UnquantizedFusedMoEMethod._setup_kernel"
)


# --- routed_experts_on_cpu -------------------------------------------------------------------


class _AsModelRunnerV2:
    """A view of a VllmConfig for the one check that asks which model runner it has."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _verify(stock_verify: Callable[[Any], None]) -> Callable[[Any], None]:
    def verify(config: Any) -> None:
        stock_verify(_AsModelRunnerV2(config))  # every other in-tree refusal stays

    return verify


def _create_engine_config(stock_create: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(args: Any, *more: Any, **kwargs: Any) -> Any:
        config = stock_create(args, *more, **kwargs)
        # Not inside VllmConfig: pydantic would turn our error into its own.
        _check_capture(config)
        return config

    return create_engine_config


def _check_capture(config: Any) -> None:
    if not config.aux_output_config.enabled or config.use_v2_model_runner:
        return
    from vllm.config import CompilationMode

    mode = config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise UnsupportedError(
            "routed experts cannot be captured under torch.compile on CPU: the router is traced "
            "before the capture hook is bound, and every captured expert would be 0 "
            f"(compilation mode {mode.name}). Pass enforce_eager=True."
        )
    if config.speculative_config is not None:
        raise UnsupportedError(
            "routed experts cannot be captured with speculative decoding on CPU: rows of rejected "
            "tokens would be kept. Drop speculative_config."
        )


def _runner(base: type) -> type:
    """Give the V1 runner the calls that Model Runner V2 makes on the in-tree connector."""

    class RoutedExpertsRunner(base):
        aux_output_connector: Any = None

        def initialize_kv_cache(
            self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
        ) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
            if is_profiling or not self.vllm_config.aux_output_config.enabled:
                return
            from vllm.distributed.aux_output_connector import worker

            _check_capture(self.vllm_config)  # for a VllmConfig made without EngineArgs
            self._close_connector()
            self.aux_output_connector = worker.get_aux_output_connector(
                self.model, self.vllm_config, kv_cache_config
            )

        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.aux_output_connector is not None:
                self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
            return super().execute_model(scheduler_output, *args, **kwargs)

        def sample_tokens(self, grammar_output: Any) -> Any:
            pending = None
            if self.aux_output_connector is not None and self.execute_model_state is not None:
                pending = self.aux_output_connector.prepare_output(_batch_of(self))
            output = super().sample_tokens(grammar_output)
            if pending is not None:
                import numpy as np

                # A request in the middle of its prefill samples nothing.
                sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

        def shutdown(self) -> None:
            self._close_connector()
            super().shutdown()

        def _close_connector(self) -> None:
            if self.aux_output_connector is not None:
                self.aux_output_connector.close()
                self.aux_output_connector = None

    return RoutedExpertsRunner


def _batch_of(runner: Any) -> SimpleNamespace:
    """Copy the fields of V2's input batch that the connector keeps; V1 reuses its arrays."""
    batch = runner.input_batch
    return SimpleNamespace(
        req_ids=list(batch.req_ids),
        query_start_loc_np=runner.query_start_loc.np[: batch.num_reqs + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
    )


def _test_routed_experts() -> SelfTest:
    """Ask vLLM's own check about a valid and an invalid configuration; no engine starts."""

    def refusal(verify: Callable[[Any], None], *, prefix_caching: bool) -> str:
        config = SimpleNamespace(
            aux_output_config=SimpleNamespace(enabled=True),
            use_v2_model_runner=False,
            model_config=SimpleNamespace(runner_type="generate", is_moe=True),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
            speculative_config=None,
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            kv_transfer_config=None,
        )
        try:
            verify(config)
        except ValueError as error:
            return str(error)
        return ""

    step = inspect.unwrap(stock(_RUNNER).execute_model).__code__.co_names
    refused = "Model Runner V2" in refusal(stock(_VERIFY), prefix_caching=True)
    accepted = refusal(ours(_VERIFY), prefix_caching=True) == ""
    still_checked = "prefix caching" in refusal(ours(_VERIFY), prefix_caching=False)
    return SelfTest(
        needed=refused and "aux_output_connector_metadata" not in step,
        effective=accepted and still_checked and hasattr(ours(_RUNNER), "aux_output_connector"),
    )


# --- moe_reload_on_cpu -----------------------------------------------------------------------


def _setup_kernel(stock_setup: Callable[..., None]) -> Callable[..., None]:
    def setup_kernel(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = method.moe_kernel is not None
        stock_setup(method, layer=layer, w13=w13, w2=w2)
        if is_update:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _test_moe_reload() -> SelfTest:
    """Send raw weights through an update of one tiny layer, with vLLM's own packing kernel."""
    import torch
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    raw = torch.arange(2 * 64 * 32, dtype=torch.float32).reshape(2, 64, 32)
    experts: Any = object.__new__(CPUUnquantizedExperts)
    experts.moe_config = SimpleNamespace(
        intermediate_size_per_partition=32, activation=MoEActivation.SILU
    )

    def layer() -> Any:
        module: Any = torch.nn.Module()
        module.w13_weight = torch.nn.Parameter(raw.clone(), requires_grad=False)
        module.w2_weight = torch.nn.Parameter(raw[:, :32].clone(), requires_grad=False)
        module.moe_config = None
        return module

    def updated(setup: Callable[..., None]) -> torch.Tensor:
        method: Any = object.__new__(methods.UnquantizedFusedMoEMethod)
        method.unquantized_backend = methods.UnquantizedMoeBackend.CPU
        method.moe_kernel = SimpleNamespace(fused_experts=experts)
        module = layer()
        setup(method, module, module.w13_weight, module.w2_weight)
        return module.w13_weight

    packed = layer()
    experts.process_weights_after_loading(packed)
    return SelfTest(
        needed=not torch.equal(updated(stock(_SETUP)), packed.w13_weight),
        effective=torch.equal(updated(ours(_SETUP)), packed.w13_weight),
    )


# --- missing_routes_survive ------------------------------------------------------------------


def _captured_pages(stock_store: type) -> type:
    from ..replay.adapters.vllm import CapturedPages

    return type(CapturedPages.__name__, (CapturedPages,), {})


def _test_missing_routes() -> SelfTest:
    """Ask the stock store and ours for a page that nobody stored."""

    def survives(store: Any) -> bool:
        try:
            found = store(max_bytes=8, object_nbytes=4).get_concatenated(["gone"])
        except RuntimeError:
            return False
        return bool(found == b"\xff" * 4)

    return SelfTest(needed=not survives(stock(_STORE)), effective=survives(ours(_STORE)))


# --- the table and its switch ----------------------------------------------------------------

PATCHES = (
    Patch(
        name="routed_experts_on_cpu",
        reason="Routed-expert return is wired to Model Runner V2 only, which needs a Triton with a "
        "CPU backend; the V1 CPU runner lacks a few calls on the same in-tree connector.",
        tested=f"vllm=={TESTED}.*",
        replacements={_VERIFY: _verify, _CREATE: _create_engine_config, _RUNNER: _runner},
        self_test=_test_routed_experts,
    ),
    Patch(
        name="moe_reload_on_cpu",
        reason="Expert weights are packed for the CPU kernel on the first load only, so every "
        "weight update, even to the same values, silently corrupts all experts.",
        tested=f"vllm=={TESTED}.*",
        replacements={_SETUP: _setup_kernel},
        self_test=_test_moe_reload,
    ),
    Patch(
        name="missing_routes_survive",
        reason="A KV page that hits after its captured routes were evicted, or that a tier kept "
        "over a reset of the prefix cache, raises in the worker and ends the engine.",
        tested=f"vllm=={TESTED}.*",
        replacements={_STORE: _captured_pages},
        self_test=_test_missing_routes,
        cpu_only=False,
    ),
)


def _is_tested(version: str) -> bool:
    return version.split(".")[:2] == TESTED.split(".")


def refusals(*, version: str, is_cpu: bool, off: str) -> dict[str, str]:
    """Say, for each patch that is not to be applied, why and what to do. Local; pure."""
    switched_off = {name.strip() for name in off.split(",")}
    refused = {}
    for patch in PATCHES:
        if not _is_tested(version):
            refused[patch.name] = f"vLLM {version} was not tested; install {patch.tested}"
        elif patch.cpu_only and not is_cpu:
            refused[patch.name] = "it is for vLLM's CPU platform; other platforms need no patch"
        elif patch.name in switched_off:
            refused[patch.name] = f"{OFF} names it; take it out of that variable"
    return refused


def _here() -> dict[str, Any]:
    """Collect the facts about this process that `refusals` asks for."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise MissingPackageError("vllm", "vllm") from error
    off = os.environ.get(OFF, "")
    return {"version": vllm.__version__, "is_cpu": current_platform.is_cpu(), "off": off}


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


def register() -> None:
    """Register adapters with vLLM and apply the patches; what does not fit is left out.

    vLLM calls this in the front end, the engine and every worker. Idempotent; local; on the CPU
    platform it imports vLLM's model runner, about a second. Warns once instead of raising.
    """
    here = _here()
    names = [patch.name for patch in PATCHES]
    if not _is_tested(here["version"]):
        _warn_once(
            f"primeblocks does nothing in vLLM {here['version']}: it was tested with {TESTED}.*. "
            f"Left out: {', '.join(names)} and the weight-transfer engines."
        )
        return
    if unknown := {name.strip() for name in here["off"].split(",")} - {"", *names}:
        _warn_once(f"{OFF} names no patch: {sorted(unknown)}. There are: {', '.join(names)}.")
    refused = refusals(**here)
    for patch in PATCHES:
        if patch.name not in refused:
            try:
                patch.apply()
            except UnsupportedError as error:
                _warn_once(f"primeblocks leaves out a patch of vLLM: {error}")
    from ..weightsync.adapters import vllm as engines

    engines.register()


def require(name: str) -> None:
    """Demand a patch: apply it in this process, as vLLM will in the processes that it starts.

    Raises:
        UsageError: no patch has this name.
        UnsupportedError: it cannot be applied; the message says why and what to do.
        MissingPackageError: vLLM is not installed.
    """
    patches = {patch.name: patch for patch in PATCHES}
    if name not in patches:
        raise UsageError(f"no patch is named {name!r}; there are: {', '.join(patches)}.")
    if (refusal := refusals(**_here()).get(name)) is not None:
        raise UnsupportedError(f"{name} is not applied: {refusal}.")
    patches[name].apply()

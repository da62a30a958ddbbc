"""vLLM's routed-expert return on the V1 model runner of the CPU platform."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ...errors import UnsupportedError
from ..patch import Patch, SelfTest, ours, stock

__all__ = ["PATCH", "VERIFY", "check_capture", "refusal"]

VERIFY = "vllm.config.vllm:VllmConfig._verify_aux_output_compatibility"
_RUNNER = "vllm.v1.worker.cpu_worker:CPUModelRunner"


class _AsModelRunnerV2:
    """A view of a VllmConfig for the one check that asks for the model runner."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _verify(stock_verify: Callable[[Any], None]) -> Callable[[Any], None]:
    def verify(config: Any) -> None:
        stock_verify(_AsModelRunnerV2(config))  # Every other refusal of vLLM stays.

    return verify


def check_capture(config: Any) -> None:
    """Refuse a `VllmConfig` under which captured rows would be wrong. Local.

    Raises:
        UnsupportedError: capture under torch.compile.
    """
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


def _runner(base: type) -> type:
    """Give the V1 runner the calls that Model Runner V2 makes on the in-tree connector."""

    class RoutedExpertsRunner(base):
        aux_output_connector: Any = None
        _drafts: Mapping[str, Sequence[int]] = MappingProxyType({})

        def initialize_kv_cache(
            self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
        ) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
            if is_profiling or not self.vllm_config.aux_output_config.enabled:
                return
            from vllm.distributed.aux_output_connector import worker

            check_capture(self.vllm_config)  # for a VllmConfig made without EngineArgs
            self._close_connector()
            self.aux_output_connector = worker.get_aux_output_connector(
                self.model, self.vllm_config, kv_cache_config
            )

        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.aux_output_connector is not None:
                self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
                self._drafts = scheduler_output.scheduled_spec_decode_tokens
            return super().execute_model(scheduler_output, *args, **kwargs)

        def sample_tokens(self, grammar_output: Any) -> Any:
            pending, drafts = None, self._drafts
            if self.aux_output_connector is not None and self.execute_model_state is not None:
                pending = self.aux_output_connector.prepare_output(_batch_of(self))
            output = super().sample_tokens(grammar_output)
            if pending is not None:
                import numpy as np

                # A request in the middle of its prefill samples nothing.
                sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
                drafted = np.array([len(drafts.get(each, ())) for each in pending.request_ids])
                # The token after the last accepted draft is sampled too. Without drafts no token
                # is rejected, whether a token was sampled or not.
                rejected = np.where(drafted > 0, drafted + 1 - sampled, 0)
                pending.enqueue_cpu_copy(sampled, rejected)
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
    """Copy the fields of V2's input batch that the connector keeps. V1 reuses its arrays."""
    batch = runner.input_batch
    return SimpleNamespace(
        req_ids=list(batch.req_ids),
        query_start_loc_np=runner.query_start_loc.np[: batch.num_reqs + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
    )


def refusal(
    verify: Callable[[Any], None], *, v2: bool = False, prefix_caching: bool = True,
    transfer: Any = None,
) -> str:  # fmt: skip
    """Return the refusal of vLLM's check for a configuration, without starting an engine."""
    config = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=True),
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(runner_type="generate", is_moe=True),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        kv_transfer_config=transfer,
    )
    try:
        verify(config)
    except ValueError as error:
        return str(error)
    return ""


def _test_routed_experts() -> SelfTest:
    """Ask vLLM's own check about a valid and an invalid configuration."""
    step = inspect.unwrap(stock(_RUNNER).execute_model).__code__.co_names
    refused = "Model Runner V2" in refusal(stock(VERIFY))
    accepted = refusal(ours(VERIFY)) == ""
    still_checked = "prefix caching" in refusal(ours(VERIFY), prefix_caching=False)
    return SelfTest(
        needed=refused and "aux_output_connector_metadata" not in step,
        effective=accepted and still_checked and hasattr(ours(_RUNNER), "aux_output_connector"),
    )


PATCH = Patch(
    name="routed_experts_on_cpu",
    reason="Routed-expert return is wired to Model Runner V2 only, which needs a Triton with a CPU "
    "backend; the V1 CPU runner lacks a few calls on the same in-tree connector.",
    tested="vllm==0.32.*",
    replacements={VERIFY: _verify, _RUNNER: _runner},
    self_test=_test_routed_experts,
    asked=lambda config: config.aux_output_config.enabled,
)

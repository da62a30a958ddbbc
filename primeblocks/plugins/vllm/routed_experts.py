"""Routed-expert return on the CPU platform's V1 runner, and with engines joined by NIXL."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ...errors import UnsupportedError
from ..patch import Patch

__all__ = ["OVER_NIXL", "PATCH", "check_capture"]

_VERIFY = "vllm.config.vllm:VllmConfig._verify_aux_output_compatibility"
_RUNNER = "vllm.v1.worker.cpu_worker:CPUModelRunner"
_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


class _Seen:
    """A view of a VllmConfig for one of vLLM's checks, with other values for some names."""

    def __init__(self, config: Any, **values: Any) -> None:
        self._config = config
        self.__dict__ |= values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _verify(stock_verify: Callable[[Any], None]) -> Callable[[Any], None]:
    def verify(config: Any) -> None:
        # Every other refusal of vLLM stays.
        stock_verify(_Seen(config, use_v2_model_runner=True))

    return verify


def _verify_over_nixl(inner: Callable[[Any], None]) -> Callable[[Any], None]:
    def verify(config: Any) -> None:
        inner(_Seen(config, kv_transfer_config=None) if _is_over_nixl(config) else config)

    return verify


def _is_over_nixl(config: Any) -> bool:
    return getattr(config.kv_transfer_config, "kv_connector", None) in _NIXL


def check_capture(config: Any) -> None:
    """Refuse a `VllmConfig` under which captured rows would be wrong. Local.

    Raises:
        UnsupportedError: capture under torch.compile on a CPU, or with several micro-batches per
            step in vLLM 0.32.
    """
    if not config.aux_output_config.enabled:
        return
    import vllm
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if config.parallel_config.use_ubatching and vllm.__version__.startswith("0.32."):
        raise UnsupportedError(
            "vLLM 0.32 cannot capture routed experts with micro-batches, because each micro-batch "
            "of a step overwrites the rows of the first. Leave out enable_dbo and ubatch_size."
        )
    if config.use_v2_model_runner or not current_platform.is_cpu():
        return
    mode = config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise UnsupportedError(
            "routed experts cannot be captured under torch.compile on CPU. The router is traced "
            "before the capture hook is bound, so every captured expert would be 0 (compilation "
            f"mode {mode.name}). Pass enforce_eager=True."
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


PATCH = Patch(
    name="routed_experts_on_cpu",
    reason="Routed-expert return is wired to Model Runner V2 only, which needs a Triton with a CPU "
    "backend; the V1 CPU runner lacks a few calls on the same in-tree connector.",
    tested="vllm==0.32.*",
    replacements={_VERIFY: _verify, _RUNNER: _runner},
    asked=lambda config: config.aux_output_config.enabled,
)
OVER_NIXL = Patch(
    name="routes_over_nixl",
    reason="Capture is refused with NIXL, because an engine has no rows of pages that another "
    "engine computed, and would end. With `routes_with_pages` such rows come back missing.",
    tested="vllm==0.32.*",
    replacements={_VERIFY: _verify_over_nixl},
    asked=lambda config: config.aux_output_config.enabled and _is_over_nixl(config),
    cpu_only=False,
    needs=("routes_with_pages", "missing_routes_survive"),  # Else missing rows end the engine.
)

"""Captured routes that vLLM has dropped become missing rows. Without this the engine dies."""

from typing import Any

from ..patch import Patch, SelfTest, ours, stock

__all__ = ["PATCH"]

_STORE = "vllm.distributed.aux_output_connector.worker:BlockObjectStore"


def _captured_pages(stock_store: type) -> type:
    from ...replay.adapters.vllm import CapturedPages

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


PATCH = Patch(
    name="missing_routes_survive",
    reason="A KV page that hits after its captured routes were evicted, or that a tier kept over a "
    "reset of the prefix cache, raises in the worker and ends the engine.",
    tested="vllm==0.32.*",
    replacements={_STORE: _captured_pages},
    self_test=_test_missing_routes,
    asked=lambda config: config.aux_output_config.enabled,
    cpu_only=False,
)

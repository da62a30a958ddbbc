"""Captured routes with separate engines for prefill and decode, joined by NIXL."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..patch import Patch, SelfTest, ours, stock
from .routed_experts import VERIFY, refusal

__all__ = ["PATCH"]

_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


class _NoTransfer:
    """A view of a VllmConfig for the one check that looks for connectors by name."""

    kv_transfer_config = None

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _over_nixl(config: Any) -> bool:
    return getattr(config.kv_transfer_config, "kv_connector", None) in _NIXL


def _verify(inner: Callable[[Any], None]) -> Callable[[Any], None]:
    def verify(config: Any) -> None:
        inner(_NoTransfer(config) if _over_nixl(config) else config)

    return verify


def _test() -> SelfTest:
    """Ask the check about NIXL, and about connectors that stay refused."""

    def refused(verify: Callable[[Any], None], connector: str) -> str:
        transfer = SimpleNamespace(kv_connector=connector, has_connector=connector.__eq__)
        return refusal(verify, v2=True, transfer=transfer)

    others = all(refused(ours(VERIFY), name) for name in ("MooncakeConnector", "MoRIIOConnector"))
    return SelfTest(
        needed=all("PD auxiliary output" in refused(stock(VERIFY), name) for name in _NIXL),
        effective=others and not any(refused(ours(VERIFY), name) for name in _NIXL),
    )


PATCH = Patch(
    name="routes_over_nixl",
    reason="Capture is refused beside NIXL: an engine has no rows of pages that another computed, "
    "and would end. With `routes_with_pages` such rows come back missing.",
    tested="vllm==0.32.*",
    replacements={VERIFY: _verify},
    self_test=_test,
    asked=lambda config: config.aux_output_config.enabled and _over_nixl(config),
    cpu_only=False,
    needs=("routes_with_pages", "missing_routes_survive"),  # Else rows that miss end the engine.
)

"""The protocol of a host's router."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..errors import PlanError, ShapeError, UsageError, shown

__all__ = ["INTEGERS", "Router", "check_routers", "chosen_ids"]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@runtime_checkable
class Router(Protocol):
    """One router of a model: a module that runs once per forward, and how to read its output.

    Adapters make routers (`adapters.transformers.routers(model)`). For your own model write a few
    lines, as `docs/replay.md` shows. The block itself does not know any host.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose output contains scores and choices."""

    @property
    def layer_id(self) -> int:
        """Index among all hidden layers of the model."""

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    def experts(self, output: Any) -> torch.Tensor:
        """The chosen ids in the module's output, integers `[tokens, top_k]`."""

    def gates(self, output: Any, experts: torch.Tensor) -> torch.Tensor:
        """Return gate weights of other choices, int64 `[tokens, columns]`, by this router's rule.

        They come from the live scores in the output, so gradients reach the router. There may be
        more columns than `top_k`, and a row may name an expert twice: `impose(min_score_ratio=)`
        compares a row's own choices with the replayed ones in one call.
        """

    def replace(self, output: Any, experts: torch.Tensor, gates: torch.Tensor) -> Any:
        """Return the output with these choices and weights, in the module's shapes and dtypes."""


def check_routers(routers: Sequence[Router]) -> tuple[Router, ...]:
    """Return the routers in layer order.

    Raises:
        UsageError: `routers` is empty, or is not a list of routers.
        PlanError: two routers have one layer id, or they differ in experts or top_k.
    """
    if isinstance(routers, nn.Module):
        raise UsageError(
            f"pass the routers of the model, not the {type(routers).__name__} itself:"
            " replay.adapters.transformers.routers(model), or your own (docs/replay.md)"
        )
    if not isinstance(routers, Iterable) or not all(hasattr(r, "layer_id") for r in routers):
        raise UsageError(f"pass the routers of the model, a list of them; got {shown(routers)}")
    ordered = tuple(sorted(routers, key=lambda router: router.layer_id))
    if not ordered:
        raise UsageError("the list of routers is empty, so there are no choices to replay")
    layer_ids = [router.layer_id for router in ordered]
    if len(set(layer_ids)) != len(layer_ids):
        raise PlanError(f"two routers share a layer: {layer_ids}")
    sizes = {(router.num_experts, router.top_k) for router in ordered}
    if len(sizes) != 1:
        raise PlanError(f"routers differ in (num_experts, top_k): {sorted(sizes)}")
    return ordered


def chosen_ids(router: Router, output: Any) -> torch.Tensor:
    """Read and check `router.experts`, `[tokens, top_k]`. Local.

    Raises:
        ShapeError: `router.experts` returns something else.
    """
    ids = router.experts(output)
    if ids.ndim != 2 or ids.shape[1] != router.top_k or ids.dtype not in INTEGERS:
        raise ShapeError(
            f"layer {router.layer_id}: Router.experts must return integers"
            f" [tokens, {router.top_k}]; got {ids.dtype} {list(ids.shape)}"
        )
    return ids

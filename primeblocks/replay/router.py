"""The protocol of a host's router, and functions that read and check routers and routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64
from torch import nn

from ..errors import PlanError, ShapeError, UsageError, shown
from .routes import Routes

__all__ = [
    "INTEGERS",
    "Router",
    "allow_compile",
    "check_routers",
    "check_routes",
    "chosen_ids",
    "keep_scored",
]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@runtime_checkable
class Router(Protocol):
    """One router of a model: a module that runs once per forward, and functions to read its output.

    Adapters make routers (`adapters.transformers.routers(model)`). For your own model, write a
    class as `docs/replay.md` shows. The block itself does not depend on any host.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose output contains scores and choices."""

    @property
    def layer_id(self) -> int:
        """The index of the router's layer among all hidden layers of the model."""

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    def experts(self, output: Any) -> torch.Tensor:
        """The ids of chosen experts in the module's output, integers `[tokens, top_k]`."""

    def gates(self, output: Any, experts: torch.Tensor) -> torch.Tensor:
        """Return the gate weights of `experts` by this router's rule.

        Compute the gate weights from the scores in the output, so that gradients reach the router.
        `experts` is int64 `[tokens, columns]`. It may have more columns than `top_k`, and a row may
        name an expert twice. The reason is that `impose(min_score_ratio=)` passes the trainer's
        and the replayed choices in one call.
        """

    def replace(self, output: Any, experts: torch.Tensor, gates: torch.Tensor) -> Any:
        """Return the output with `experts` and `gates`, in the module's shapes and dtypes."""


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
        raise UsageError(f"pass a list of the model's routers; got {shown(routers)}")
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


def check_routes(**given: object) -> None:
    """Raise UsageError if an argument is not `Routes`. Local."""
    for name, routes in given.items():
        if not isinstance(routes, Routes):
            raise UsageError(
                f"{name} must be Routes, such as tape.routes; got {type(routes).__name__}. For "
                "other ids, call Routes.from_array."
            )


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


def allow_compile(routers: Sequence[Router]) -> None:
    """Let `impose` and `record` work on a model that torch compiles. Local. Call before compiling.

    torch does not look for hooks again on a module that had no hooks when torch compiled it.
    `allow_compile` leaves an empty hook on each router, so that torch guards on the number of
    hooks. The first context of `impose` or `record` compiles the model once more, and later
    contexts reuse the compiled code. Idempotent.
    """
    for router in check_routers(routers):
        if _nothing not in router.module._forward_hooks.values():
            router.module.register_forward_hook(_nothing)


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing. See `allow_compile`."""


def keep_scored(
    router: Router,
    output: Any,
    own: Int64[torch.Tensor, "tokens top_k"],
    replayed: Int64[torch.Tensor, "tokens top_k"],
    *,
    ratio: float,
    exempt: Bool[torch.Tensor, " tokens"] | None = None,
) -> tuple[Int64[torch.Tensor, "tokens top_k"], Int64[torch.Tensor, ""]]:
    """Replace replayed experts that the trainer scores far below its own choices.

    An expert stays if its score is at least `ratio` times the lowest score of the token's `own`
    choices. The slots of other experts, from left to right, get the `own` choices that `replayed`
    does not name, best first. So no row names an expert twice. Local. The host does not wait.

    Args:
        ratio: in (0, 1]. An expert that the trainer chose itself is always kept.
        exempt: True for rows to leave unchanged, such as padding.

    Returns:
        The rows, and how many slots were replaced (on the device).

    Source: prime-rl pull request 2703.
    """
    with torch.no_grad():
        # Score both in one call, so that one sum normalises both.
        scores = router.gates(output, torch.cat([own, replayed], dim=1))
        of_own, of_replayed = scores.split([own.shape[1], replayed.shape[1]], dim=1)
        kept = of_replayed >= ratio * of_own.amin(dim=1, keepdim=True)
        if exempt is not None:
            kept = kept | exempt[:, None]
        best_first = own.gather(1, of_own.argsort(dim=1, descending=True, stable=True))
        twice = (best_first[:, :, None] == replayed[:, None, :]).any(-1)
        # Free choices first, in their order. A replayed own choice is kept, so there are at least
        # as many free choices as slots to fill.
        free_first = best_first.gather(1, twice.to(torch.uint8).argsort(dim=1, stable=True))
        turn = (~kept).cumsum(dim=1) - 1
        rows = torch.where(kept, replayed, free_first.gather(1, turn.clamp(min=0)))
        return rows, (~kept).sum()

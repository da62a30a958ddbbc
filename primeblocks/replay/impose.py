"""Force choices on a model, keep the gradients of its gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import PlanError, ShapeError, UsageError
from .router import Router, check_routers
from .routes import Routes

__all__ = ["impose"]


@contextmanager
def impose(routers: Sequence[Router], routes: Routes) -> Iterator[None]:
    """Make the routers follow `routes` while the context is open.

    Only the indices are replayed. Gate weights are computed again from the live scores, so that
    gradients reach the gate; a missing token chooses for itself. The rows are those of the
    flattened input, `[batch * sequence]`, and nothing is consumed: a layer that runs again gets
    the same rows, which is what activation checkpointing needs. One context is one micro-batch;
    with activation checkpointing its backward belongs inside too. Local; uses documented forward
    hooks, and copies one layer of ids at a time to the device.

    Args:
        routers: the routers of the model, from an adapter.
        routes: one row for each token of the micro-batch.

    Raises:
        PlanError: the routes are of a different model.
        ShapeError: the model runs on another number of tokens (from within the forward).
        UsageError: the routers are under another `impose` already; on leaving, a router never
            ran or would be recomputed without its routes; from within backward, a layer was
            recomputed under the routes of another micro-batch.

    Source: arXiv:2510.11370, routing replay.
    """
    layers = _plan(check_routers(routers), routes)
    nested = [layer.router.layer_id for layer in layers if _is_imposed(layer.router.module)]
    if nested:
        raise UsageError(
            f"layers {nested} are imposed already: recomputation could not tell the micro-batches"
            " apart. Close the first context before the second."
        )
    differentiating = torch.is_grad_enabled()
    handles = [layer.router.module.register_forward_hook(layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        layer.check_done(differentiating)


def _plan(routers: tuple[Router, ...], routes: Routes) -> list[_ImposedLayer]:
    layer_ids = tuple(router.layer_id for router in routers)
    if set(layer_ids) != set(routes.layer_ids):
        raise PlanError(
            f"the model routes in layers {layer_ids}, the routes in {routes.layer_ids}."
            " A part of a model takes routes.only(layer_ids)."
        )
    ours = routers[0].num_experts, routers[0].top_k
    if ours != (routes.num_experts, routes.top_k):
        raise PlanError(
            f"the model chooses {ours[1]} of {ours[0]} experts,"
            f" the routes {routes.top_k} of {routes.num_experts}"
        )
    missing = torch.from_numpy(routes.missing.copy()) if routes.missing.any() else None
    return [
        _ImposedLayer(router, routes.experts[:, routes.layer_ids.index(router.layer_id)], missing)
        for router in routers
    ]


def _is_imposed(module: nn.Module) -> bool:
    return any(isinstance(hook, _ImposedLayer) for hook in module._forward_hooks.values())


class _ImposedLayer:
    """The forward hook of one router: read-only rows, so running twice is harmless."""

    def __init__(self, router: Router, rows: np.ndarray, missing: torch.Tensor | None) -> None:
        self.router = router
        self._rows = rows
        self._missing = missing
        self._ran_with_grad = False
        self._ran_without_grad = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        own = self.router.experts(output)
        if len(own) != len(self._rows):
            raise ShapeError(
                f"layer {self.router.layer_id} runs on {len(own)} tokens, the routes hold"
                f" {len(self._rows)}. Rows follow the flattened input [batch * sequence]; fill up"
                " with routes.pad(tokens)."
            )
        if torch.is_grad_enabled():
            self._ran_with_grad = True
        else:
            self._ran_without_grad = True
        # Contiguous and narrow over the bus, wide only on the device.
        rows = torch.from_numpy(np.array(self._rows)).to(own.device).to(torch.int64)
        if self._missing is not None:
            rows = torch.where(self._missing.to(own.device)[:, None], own.to(torch.int64), rows)
        gates = self.router.gates(output, rows)
        assert gates.shape == rows.shape
        return self.router.replace(output, rows, _SameMicroBatch.apply(gates, self))

    def check_done(self, differentiating: bool) -> None:
        if not (self._ran_with_grad or self._ran_without_grad):
            raise UsageError(
                f"layer {self.router.layer_id} never ran, so nothing was imposed on it. A model"
                " compiled before the context was opened does not call hooks."
            )
        suspended = self._ran_without_grad and not self._ran_with_grad
        if differentiating and suspended and self.router.module.training:
            raise UsageError(
                f"layer {self.router.layer_id} ran without gradients in a context opened with"
                " them. Under reentrant checkpointing backward would now recompute without the"
                " routes: call backward inside. If no gradient is wanted, open it in no_grad()."
            )


class _SameMicroBatch(torch.autograd.Function):
    """The identity; its backward refuses a recomputation under another context's routes.

    Checkpointing computes saved tensors again and keeps attributes of `ctx`: where the two
    disagree, forward ran in one context and its recomputation in another.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, layer: _ImposedLayer) -> torch.Tensor:
        ctx.layer = layer
        # An id stays unique while ctx keeps its owner alive.
        ctx.save_for_backward(torch.tensor(id(layer), device="cpu"))
        return gates.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (recomputed,) = ctx.saved_tensors
        if recomputed.item() != id(ctx.layer):
            raise UsageError(
                f"layer {ctx.layer.router.layer_id} was recomputed under the routes of another"
                " micro-batch. With activation checkpointing call backward inside the impose"
                " context of the same micro-batch."
            )
        return grad, None

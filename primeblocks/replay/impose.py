"""Imposed choices for a model, which keep the gradients of its gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import PlanError, ShapeError, UsageError
from .imposed_layer import ImposedLayer, ImposedRows, Tally, check_ratio, is_imposed
from .router import Router, check_routers
from .routes import Routes

__all__ = ["Imposed", "allow_compile", "impose"]


@contextmanager
def impose(
    routers: Sequence[Router],
    routes: Routes,
    *,
    gates: np.ndarray | torch.Tensor | None = None,
    min_score_ratio: float | None = None,
) -> Iterator[Imposed]:
    """Make the routers follow `routes` while the context is open.

    Only the indices are replayed, in their order. Gate weights are computed again from the live
    scores, so that gradients reach the gate. A missing token uses the trainer's own choice. The
    rows are those of the flattened input, `[batch * sequence]`. Open one context per micro-batch.
    With activation checkpointing call backward inside it too.

    Local. Uses forward hooks. On entering, the ids are copied once to the device of each router's
    weights, from pinned memory and without waiting. They stay there in the narrow dtype until the
    context closes.

    Args:
        routers: the routers of the model, from an adapter.
        routes: one row per token of the micro-batch.
        gates: the engine's weights of its choices, float32 `[tokens, layers, top_k]`, as
            `Tape.gates`. The model then computes with exactly these values, in its own dtype.
            Gradients are those of the live weights. Missing tokens keep the live weights.
        min_score_ratio: in (0, 1]. Keep a replayed expert only if the trainer's score for it is at
            least this fraction of the weakest score of its own choices. Otherwise the best own
            choice that is not in the row takes the slot. Padding keeps its experts.

    Raises:
        PlanError: the routes are of a different model.
        ShapeError: the gates do not fit the routes. From within the forward: the model runs on
            another number of tokens, or a router's output gets other shapes or dtypes.
        UsageError: the routers are under another `impose` already, or the ratio is outside (0, 1]
            or is given together with gates. On leaving: a router never ran, or would be recomputed
            without its routes. From within backward: a layer was recomputed under the routes of
            another micro-batch. Code that torch compiled outside a checkpoint does not notice that.

    Source: arXiv:2510.11370, routing replay; miles #2722, gates; prime-rl #2703, score filter.
    """
    _check_options(routes, gates, min_score_ratio)
    layers = _plan(check_routers(routers), routes, gates, min_score_ratio)
    nested = [layer.router.layer_id for layer in layers if is_imposed(layer.router.module)]
    if nested:
        raise UsageError(
            f"layers {nested} are already under impose, and a recomputation could not know which "
            "micro-batch it belongs to. Close the first context before you open the second."
        )
    differentiating = torch.is_grad_enabled()
    known_slots = int((~(routes.missing | routes.padding)).sum()) * routes.top_k
    imposed = Imposed({layer.router.layer_id: layer.tally for layer in layers}, known_slots)
    handles = [layer.router.module.register_forward_hook(layer) for layer in layers]
    try:
        yield imposed
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        layer.check_done(differentiating)


def allow_compile(routers: Sequence[Router]) -> None:
    """Let `impose` and `record` reach a model that torch compiles. Local. Call before compiling.

    torch does not look for hooks again on a module that had none when it was compiled. This call
    leaves an empty hook on each router, so that torch guards on the number of hooks. The first
    context then compiles once more, and later contexts reuse that code. Idempotent.
    """
    for router in check_routers(routers):
        if _nothing not in router.module._forward_hooks.values():
            router.module.register_forward_hook(_nothing)


class Imposed:
    """The outcome of an `impose`.

    Read it after the model has run. The context may be closed by then.
    """

    def __init__(self, tallies: dict[int, Tally], known_slots: int) -> None:
        self._tallies = tallies
        self._known_slots = known_slots

    @property
    def replacement_rates(self) -> dict[int, float]:
        """Fraction of known slots that `min_score_ratio` replaced, by layer id.

        Waits for the device.

        Raises:
            UsageError: a layer has not run.
        """
        silent = [layer for layer, tally in self._tallies.items() if tally.replaced is None]
        if silent:
            raise UsageError(f"layers {silent} have not run. Read the rates after the forward.")
        slots = max(1, self._known_slots)
        return {layer: int(tally.replaced) / slots for layer, tally in self._tallies.items()}

    @property
    def replacement_rate(self) -> float:
        """The fraction of known slots that `min_score_ratio` replaced, over all layers."""
        rates = self.replacement_rates
        return sum(rates.values()) / len(rates)


def _check_options(
    routes: Routes, gates: np.ndarray | torch.Tensor | None, min_score_ratio: float | None
) -> None:
    if gates is not None:
        shape, dtype = tuple(gates.shape), str(gates.dtype).removeprefix("torch.")
        if shape != routes.experts.shape or dtype != "float32":
            raise ShapeError(
                f"gates must be float32 {list(routes.experts.shape)}, as the routes;"
                f" got {dtype} {list(shape)}"
            )
    check_ratio(min_score_ratio)
    if gates is not None and min_score_ratio is not None:
        raise UsageError(
            "min_score_ratio puts experts into slots that have no recorded gate. Use "
            "min_score_ratio or gates, not both."
        )


def _plan(
    routers: tuple[Router, ...],
    routes: Routes,
    gates: np.ndarray | torch.Tensor | None,
    min_score_ratio: float | None,
) -> list[ImposedLayer]:
    layer_ids = tuple(router.layer_id for router in routers)
    if set(layer_ids) != set(routes.layer_ids):
        raise PlanError(
            f"the model has routers in layers {layer_ids}, but the routes are for layers "
            f"{routes.layer_ids}. A part of a model takes routes.select_layers(layer_ids)."
        )
    ours = routers[0].num_experts, routers[0].top_k
    if ours != (routes.num_experts, routes.top_k):
        raise PlanError(
            f"the model chooses {ours[1]} of {ours[0]} experts, but the routes have "
            f"{routes.top_k} of {routes.num_experts}"
        )
    devices = [_device_of(router.module) for router in routers]
    columns = [routes.layer_ids.index(layer_id) for layer_id in layer_ids]
    ids = _upload(routes.experts, devices, columns)
    missing = _upload_mask(routes.missing, devices)
    padding = _upload_mask(routes.padding, devices)
    weights: list[torch.Tensor] | list[None] = [None] * len(routers)
    if gates is not None:
        weights = _upload(np.asarray(gates), devices, columns)
    return [
        ImposedLayer(router, ImposedRows(*rows), min_score_ratio)
        for router, rows in zip(
            routers, zip(ids, missing, padding, weights, strict=True), strict=True
        )
    ]


def _device_of(module: nn.Module) -> torch.device:
    """Guess the device of a router's rows. A wrong guess (offloaded weights) costs copies."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


def _upload(
    array: np.ndarray, devices: Sequence[torch.device], columns: Sequence[int]
) -> list[torch.Tensor]:
    """Return each router's column on its device. Copies once per device, only needed columns."""
    if len(set(devices)) == 1:
        whole = _copy(array, devices[0])
        return [whole[:, column] for column in columns]
    wanted = {d: [c for c, at in zip(columns, devices, strict=True) if at == d] for d in devices}
    parts = {device: _copy(array[:, own], device) for device, own in wanted.items()}
    return [
        parts[device][:, wanted[device].index(column)]
        for column, device in zip(columns, devices, strict=True)
    ]


def _upload_mask(
    mask: np.ndarray, devices: Sequence[torch.device]
) -> list[torch.Tensor] | list[None]:
    if not mask.any():
        return [None] * len(devices)
    copies = {device: _copy(mask, device) for device in set(devices)}
    return [copies[device] for device in devices]


def _copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # Pinned, because the copy would otherwise wait for all work queued on the device.
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing. See `allow_compile`."""

"""Impose choices on the routers of a model, and keep the gradients of gate weights.

A layer's rows are fixed while the context is open, so a second run gives the same result. On
leaving, each layer must have run, with gradients if the context was opened with gradients. With
activation checkpoints, backward must run in the context of the same micro-batch, because autograd
recomputes a layer under the context that is then open. `_SameMicroBatch` checks this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import nn

from ..errors import PlanError, ShapeError, UsageError, shown
from .router import Router, check_routers, check_routes, chosen_ids, keep_scored
from .routes import Routes

__all__ = ["Imposed", "ImposedRows", "impose", "is_imposed", "replaced", "weigh"]


@contextmanager
def impose(
    routers: Sequence[Router],
    routes: Routes,
    *,
    gates: np.ndarray | torch.Tensor | None = None,
    min_score_ratio: float | None = None,
) -> Iterator[Imposed]:
    """Make the routers follow `routes` while the context is open.

    Without `gates`, only the ids of experts are replayed, in the order of `routes`. The trainer
    computes gate weights from its own scores, so that gradients reach the router. A token whose
    route is missing uses the trainer's own choice. Row i of `routes` belongs to token i of the
    flattened input, `[batch * sequence]`. Open one context per micro-batch. With activation
    checkpointing, call backward inside the context too.

    Local. Uses forward hooks. When the context opens, the ids are copied once to the device of each
    router's weights, from pinned memory and without waiting. The copies stay on the devices, in the
    dtype of `routes`, until the context closes.

    Args:
        routers: the routers of the model, from an adapter.
        routes: one row per token of the micro-batch.
        gates: the engine's gate weights, float32 `[tokens, layers, top_k]`, such as `Tape.gates`.
            The model uses these values, cast to the dtype of the model's gate weights. Gradients
            go to the trainer's gate weights. Tokens without a route use the trainer's gate weights.
        min_score_ratio: in (0, 1]. A replayed expert is kept only if its trainer score is at least
            `min_score_ratio` times the lowest score of the trainer's own choices. The slots of the
            other experts get the trainer's best choices that are not yet in the row. Padding rows
            keep their experts. If `min_score_ratio` is 1, all other rows get the trainer's own
            choices, except for ties, and except in routers with a correction bias or groups.

    Raises:
        PlanError: `routes` come from a different model.
        ShapeError: the gates do not fit the routes. Raised within the forward if model and routes
            have different numbers of tokens, or if a router's output would change shape or dtype.
        UsageError: `routes` is not `Routes`, the routers are under another `impose`, the ratio is
            outside (0, 1], or you pass `min_score_ratio` and `gates`. Raised when the context
            closes if a router never ran, or if a model in train mode with reentrant checkpoints did
            not run backward inside. Raised in backward if a layer was recomputed under other
            routes. This is not detected if torch first compiled the code without its checkpoint.

    Source: arXiv:2510.11370, routing replay; miles #2722, gates; prime-rl #2703, score filter.
    """
    check_routes(routes=routes)
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


class Imposed:
    """The outcome of a call of `impose`. Read the rates after the model has run."""

    def __init__(self, tallies: dict[int, _Tally], known_slots: int) -> None:
        self._tallies = tallies
        self._known_slots = known_slots

    @property
    def replacement_rates(self) -> dict[int, float]:
        """Fraction of slots that `min_score_ratio` replaced, by layer id. Waits for the device.

        Slots of missing tokens and of padding do not count.

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
        """The mean of `replacement_rates` over all layers."""
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
    ratio = min_score_ratio
    if ratio is not None and (not isinstance(ratio, Real) or not 0 < ratio <= 1):
        raise UsageError(f"min_score_ratio must be in (0, 1]; got {shown(ratio)}")
    if gates is not None and ratio is not None:
        raise UsageError(
            "min_score_ratio puts experts into slots that have no recorded gate. Use "
            "min_score_ratio or gates, not both."
        )


def _plan(
    routers: tuple[Router, ...],
    routes: Routes,
    gates: np.ndarray | torch.Tensor | None,
    min_score_ratio: float | None,
) -> list[_ImposedLayer]:
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
        host = gates.detach().cpu() if isinstance(gates, torch.Tensor) else gates
        weights = _upload(np.asarray(host), devices, columns)
    return [
        _ImposedLayer(router, ImposedRows(*rows), min_score_ratio)
        for router, rows in zip(
            routers, zip(ids, missing, padding, weights, strict=True), strict=True
        )
    ]


def _device_of(module: nn.Module) -> torch.device:
    """Guess the device of a router's rows. With offloaded weights, a wrong guess costs copies."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


def _upload(
    array: np.ndarray, devices: Sequence[torch.device], columns: Sequence[int]
) -> list[torch.Tensor]:
    """Return each router's column on its device. Copies the needed columns once per device."""
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
    host = torch.empty(array.shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)


class _Tally:
    """The number of slots that the filter replaced in a layer's latest run, on the device, or 0."""

    replaced: Any = None


class ImposedRows(NamedTuple):
    """The choices of one micro-batch in one layer."""

    ids: torch.Tensor
    """Integers `[tokens, top_k]`, of any width."""
    missing: torch.Tensor | None = None
    """bool `[tokens]`: tokens that use the router's own choice. None if no token does."""
    padding: torch.Tensor | None = None
    """bool `[tokens]`: tokens that `min_score_ratio` does not change."""
    weights: torch.Tensor | None = None
    """Gates to compute with, `[tokens, top_k]`."""


class _ImposedLayer:
    """The forward hook of one router. torch.compile traces it once for all contexts."""

    def __init__(self, router: Router, rows: ImposedRows, min_score_ratio: float | None) -> None:
        self.router = router
        self.tally = _Tally()
        self._rows = rows
        self._min_score_ratio = min_score_ratio
        self._ran_with_grad = False
        self._ran_without_grad = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self._impose(output, check=True)
        if _inside_saved_tensor_hooks():
            return self._leave_what_is_compiled_inside_a_checkpoint(output)
        return self._impose(output, check=False)

    def _impose(self, output: Any, *, check: bool) -> Any:
        ids, gates, self.tally.replaced = weigh(
            self.router, output, self._rows, min_score_ratio=self._min_score_ratio
        )
        if torch.is_grad_enabled():
            self._ran_with_grad = True
        else:
            self._ran_without_grad = True
        if check:
            gates = _SameMicroBatch.apply(gates, self)
        return replaced(self.router, output, ids, gates)

    def _leave_what_is_compiled_inside_a_checkpoint(self, output: Any) -> Any:
        # Run it uncompiled, because compiled code cannot keep the object that `_SameMicroBatch`
        # compares. With fullgraph torch raises here: compile the checkpoint, not its content.
        return torch.compiler.disable(self._impose)(output, check=True)

    def check_done(self, differentiating: bool) -> None:
        if not (self._ran_with_grad or self._ran_without_grad):
            raise UsageError(
                f"layer {self.router.layer_id} never ran, so nothing was imposed on it. A model"
                " compiled before the context was opened does not call hooks: call"
                " allow_compile(routers) before compiling."
            )
        suspended = self._ran_without_grad and not self._ran_with_grad
        if differentiating and suspended and self.router.module.training:
            raise UsageError(
                f"layer {self.router.layer_id} ran without gradients, but its context was opened "
                "with gradients enabled. With reentrant checkpointing, backward would recompute "
                "without the routes, so call backward inside the context. If you need no "
                "gradients, open the context inside torch.no_grad()."
            )


def is_imposed(module: nn.Module) -> bool:
    """Say whether a router is under `impose`. Local."""
    return any(isinstance(hook, _ImposedLayer) for hook in module._forward_hooks.values())


def weigh(
    router: Router, output: Any, rows: ImposedRows, *, min_score_ratio: float | None = None
) -> tuple[Int64[torch.Tensor, "tokens top_k"], torch.Tensor, Any]:
    """Return the final choices, their gates, and how many choices the filter replaced. Local.

    Raises:
        ShapeError: rows of another number of tokens, or gates of another shape than the choices.
    """
    own = chosen_ids(router, output)
    tokens, known = own.shape[0], rows.ids.shape[0]
    if tokens != known:
        change = f"cut its routes to its tokens (for one sequence: routes[:{tokens}])"
        if known < tokens:
            change = "call with_missing(after=), or pad if all added tokens are padding"
        raise ShapeError(
            f"layer {router.layer_id} runs on {tokens} tokens, but the routes have {known}. Rows "
            f"follow the flattened input [batch * sequence]. For each sequence, {change}."
        )
    # The first `to` copies only if the device was guessed wrongly. Ids are widened on the device.
    ids = rows.ids.to(own.device).to(torch.int64)
    own = own.to(torch.int64)
    if rows.missing is not None:
        ids = _where(rows.missing, own, ids)
    count: Any = 0
    if min_score_ratio is not None:
        exempt = None if rows.padding is None else rows.padding.to(own.device)
        ids, count = keep_scored(router, output, own, ids, ratio=min_score_ratio, exempt=exempt)
    gates = router.gates(output, ids)
    if gates.shape != ids.shape:
        raise ShapeError(
            f"layer {router.layer_id}: Router.gates returns {list(gates.shape)} for"
            f" choices {list(ids.shape)}"
        )
    if rows.weights is not None:
        # The difference is 0, so values are the recorded ones and gradients the trainer's.
        recorded = rows.weights.to(own.device).to(gates.dtype) + (gates - gates.detach())
        gates = recorded if rows.missing is None else _where(rows.missing, gates, recorded)
    return ids, gates, count


def replaced(router: Router, output: Any, ids: torch.Tensor, gates: torch.Tensor) -> Any:
    """Call `Router.replace`. Raises ShapeError if shapes or dtypes of the output change."""
    changed = router.replace(output, ids, gates)
    _check_alike(router.layer_id, output, changed)
    return changed


def _where(mask: torch.Tensor, there: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.to(there.device)[:, None], there, here)


def _check_alike(layer_id: int, own: Any, replaced: Any) -> None:
    """Refuse an output that would change the host's arithmetic, such as float32 for bfloat16."""
    if isinstance(own, tuple | list) and isinstance(replaced, tuple | list):
        if len(own) != len(replaced):
            raise ShapeError(
                f"layer {layer_id}: Router.replace returns {len(replaced)} parts where the module"
                f" returns {len(own)}"
            )
        for before, after in zip(own, replaced, strict=True):
            _check_alike(layer_id, before, after)
        return
    are_tensors = isinstance(own, torch.Tensor) and isinstance(replaced, torch.Tensor)
    if are_tensors and (own.dtype != replaced.dtype or own.shape != replaced.shape):
        raise ShapeError(
            f"layer {layer_id}: Router.replace puts {replaced.dtype} {list(replaced.shape)} where "
            f"the module returns {own.dtype} {list(own.shape)}. Cast what Router.gates returns, "
            "for example gates.to(output[1].dtype) (docs/replay.md)."
        )


class _SameMicroBatch(torch.autograd.Function):
    """The identity. Its backward refuses a recomputation under another context's routes.

    Checkpointing recomputes saved tensors and keeps attributes of `ctx`. Under another context's
    routes, the saved id therefore differs from the id of the attribute.
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
                f"layer {ctx.layer.router.layer_id} was recomputed under the routes of another "
                "micro-batch. With activation checkpointing, call backward inside the impose "
                "context of the same micro-batch."
            )
        return grad, None


def _inside_saved_tensor_hooks() -> bool:
    """Return whether a checkpoint is around the traced code. Later checkpoints are not noticed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# torch.compiler.assume_constant_result does the same, but would import the compiler.
_inside_saved_tensor_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]

"""Choices of experts as an argument of the forward, like position ids.

`follow` adds hooks to a model until `close`. A call of the model passes the rows on to its layers.
The call of a layer keeps the layer's rows, until the router inside the layer has used them. Rows
are therefore kept only from a layer's call to its router's call. A recomputation starts with the
layer's call, which gets the same rows again. If rows did not reach a router, the model's call
raises an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, ShapeError, UsageError, shown
from .impose import ImposedRows, is_imposed, replaced, weigh
from .router import INTEGERS, Router, check_routers

__all__ = ["Following", "follow"]

_NAME = "routed_experts"
_WEIGHTS = "routed_experts_weights"
_KINDS = {
    _NAME: ("integers", (*INTEGERS, torch.uint16)),
    _WEIGHTS: (
        "float32 or float64 (FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False))",
        (torch.float32, torch.float64),
    ),
}


def follow(
    model: nn.Module,
    routers: Sequence[Router],
    *,
    layer_ids: Iterable[int] | None = None,
) -> Following:
    """Make `model(..., routed_experts=rows)` follow `rows`. Call `follow` before the first step.

    Call `follow` once per model. `Routes.tensor` makes the rows, integers
    `[batch, sequence, layers, top_k]`. If a row contains -1, the token uses the model's own choice
    in the row's layer. To replay gate weights too, pass `routed_experts_weights` to the model: a
    float32 or float64 tensor with the shape of the rows. A call without rows runs the model
    unchanged.

    Each layer gets its rows as an argument of its call, so any number of micro-batches may be in
    flight. An activation checkpoint of a whole layer recomputes the layer with the same rows. If
    the model's forward takes `routed_experts` or `**kwargs`, the forward must pass the rows on to
    its layers, as transformers does. If the forward takes neither of the two, hooks pass the rows
    to the layers, or to the `checkpoint_wrapper` around a layer.

    Local: adds forward hooks to the model, its layers and routers. Call `follow` before
    `torch.compile`.

    Args:
        model: the module that is called with the rows: the model, or this rank's pipeline stage.
        routers: the routers inside `model`, from an adapter. For a stage, call the adapter on the
            whole model, because layer ids count the layers of the whole model. Then pass only the
            stage's routers.
        layer_ids: the layer ids of the rows, in the order of the third dim of the rows. The default
            is the layers of the routers, ascending. Pass `routes.layer_ids` for rows of all layers.

    Returns:
        The hooks. `close()` or the end of a `with` block removes the hooks.

    Raises:
        PlanError: a router is not inside the model, two routers share a layer, `layer_ids` lacks a
            router's layer, or `layer_ids` names a layer twice.
        UsageError: a router is already followed, or not in an `nn.ModuleList` or `nn.ModuleDict`.
            Within the forward, also raised if the rows did not reach each router, or a router is
            also under `impose`. Also raised if a part of a layer was recomputed without the layer.
            On a CPU, also raised if a row contains an unknown expert id. On a GPU, such a row ends
            the process.
        ShapeError: the rows do not fit the model's tokens, layers or top_k. Raised within the
            forward. Also raised if the gates do not have the shape of the rows, or have a dtype
            narrower than float32. A different split of the same tokens into `[batch, sequence]`
            raises the error only if the layer's hidden states have three dims.

    Source: arXiv:2510.11370, routing replay; prime-rl, the argument's name and shape.
    """
    ordered = check_routers(routers)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"follow needs the model that is called with the rows; got {type(model).__name__}"
        )
    if not isinstance(layer_ids, Iterable | None):
        raise PlanError(f"layer_ids must name layers; got {shown(layer_ids)}")
    columns = tuple(layer_ids) if layer_ids is not None else tuple(r.layer_id for r in ordered)
    absent = [router.layer_id for router in ordered if router.layer_id not in columns]
    if absent or len(set(columns)) != len(columns):
        raise PlanError(f"layer_ids must name each layer once, including {absent}; got {columns}")
    again = [router.layer_id for router in ordered if _follows(router.module)]
    if again:
        raise UsageError(
            f"layers {again} already follow the rows of an earlier follow(). Call close() on what "
            "that call returned."
        )
    return Following(model, ordered, columns)


class Following:
    """The hooks that `follow` added. The hooks work until `close` is called."""

    def __init__(
        self, model: nn.Module, routers: Sequence[Router], columns: tuple[int, ...]
    ) -> None:
        places = _places(model, routers)
        parameters = inspect.signature(model.forward).parameters
        self._hands_on = _NAME in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        self._running = False
        self._given: dict[str, torch.Tensor] = {}
        self._layers: list[_Layer] = []
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for router, (outer, _) in zip(routers, places, strict=True):
            layer = _Layer(router, columns)
            self._layers.append(layer)
            self._handles += [
                outer.register_forward_pre_hook(self._hand_to, with_kwargs=True),
                _inside(outer).register_forward_pre_hook(layer.bind, with_kwargs=True),
                router.module.register_forward_hook(layer),
            ]
        followed = {outer for outer, _ in places}
        for other in {child for _, stack in places for child in stack.children()} - followed:
            self._handles.append(other.register_forward_pre_hook(_drop, with_kwargs=True))

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks. Local. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given, others = _taken_from(kwargs)
        self._running = True
        self._given = given
        for layer in self._layers:
            layer.forget()
            layer.reached = False
        return None if self._hands_on else (args, others)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        given, self._given, self._running = self._given, {}, False
        for layer in self._layers:
            layer.forget()  # An error between the calls of a layer and its router leaves rows.
        # Without an output, the forward raised an error of its own.
        if output is not None and given:
            silent = [layer.router.layer_id for layer in self._layers if not layer.reached]
            if silent:
                raise UsageError(
                    f"{_NAME} did not reach layers {silent}. Either "
                    f"{type(module).__name__}.forward does not pass it as a keyword to its "
                    "layers' calls, or the model was compiled before follow()."
                )

    def _hand_to(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give rows to a layer, or to its checkpoint, if the model's forward does not."""
        if self._hands_on or _NAME in kwargs:
            return None
        if not self._running:
            raise UsageError(
                "a layer runs outside of its model's call, and the model's forward does not take "
                f"{_NAME}. A checkpoint inside that forward cannot know the rows. Pass **kwargs "
                "on from the model to its layers, or use torch's checkpoint_wrapper on them."
            )
        return args, {**kwargs, **self._given}


class _Layer:
    """The rows of one layer, from the call of the layer to the call of its router."""

    def __init__(self, router: Router, columns: tuple[int, ...]) -> None:
        self.router = router
        self.reached = False
        self._layers = len(columns)
        # Plus 2, because torch compiles once for 0, once for 1, and once for all other numbers.
        self._column = columns.index(router.layer_id) + 2
        self._inside = False
        self._rows: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None

    def forget(self) -> None:
        self._inside, self._rows, self._weights = False, None, None

    def bind(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given, others = _taken_from(kwargs)
        self._inside = True
        self._rows = self._own_part(given, _NAME)
        self._weights = self._own_part(given, _WEIGHTS)
        self._check_layout(given, args[0] if args else others.get("hidden_states"))
        self.reached = self._rows is not None
        return args, others

    def _check_layout(self, given: dict[str, torch.Tensor], hidden: Any) -> None:
        """Refuse rows of another batch and sequence. `weigh` refuses another number of tokens."""
        if _NAME not in given:
            return
        rows = given[_NAME].shape
        if _WEIGHTS in given and given[_WEIGHTS].shape != rows:
            raise ShapeError(
                f"{_WEIGHTS} must have shape {list(rows)}; got {list(given[_WEIGHTS].shape)}"
            )
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            return
        tokens, count = rows[:2], rows[0] * rows[1]
        if tokens != hidden.shape[:2] and count == hidden.shape[0] * hidden.shape[1]:
            raise ShapeError(
                f"layer {self.router.layer_id} runs on [batch, sequence] "
                f"{list(hidden.shape[:2])}, but {_NAME} have {list(tokens)}. Rows would apply to "
                "other tokens."
            )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        inside, rows, weights = self._inside, self._rows, self._weights
        self.forget()
        if not inside:
            raise UsageError(
                f"the router of layer {self.router.layer_id} runs without its layer, because a "
                "checkpoint inside the layer recomputes the router without its rows. Checkpoint "
                "the whole layer."
            )
        if rows is None:
            return None
        if not torch.compiler.is_compiling() and is_imposed(module):
            raise UsageError(
                f"layer {self.router.layer_id} is given {_NAME} under impose. Use one of the two."
            )
        rows = rows.to(torch.int64)
        _check_range(self.router, rows)
        read = ImposedRows(rows, (rows == -1).any(-1), weights=weights)
        ids, gates, _ = weigh(self.router, output, read)
        return replaced(self.router, output, ids, gates)

    def _own_part(self, given: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
        tensor = given.get(name)
        if tensor is None:
            return None
        kind, dtypes = _KINDS[name]
        expected = (self._layers, self.router.top_k)
        is_kind = tensor.dtype in dtypes and tensor.layout == torch.strided
        if not is_kind or tensor.ndim != 4 or tuple(tensor.shape[2:]) != expected:
            raise ShapeError(
                f"{name} must be {kind} [batch, sequence, {expected[0]} layers, {expected[1]}]; "
                f"got {tensor.dtype} {list(tensor.shape)}. Make it with Routes.tensor(batch=). "
                "For a part of the model, use routes.select_layers(layer_ids)."
            )
        return tensor.select(2, self._column - 2).flatten(0, 1)


def _check_range(router: Router, ids: torch.Tensor) -> None:
    """Refuse unknown ids on a CPU. On a GPU a check would wait, and the GPU stops at such ids."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = (int(limit) for limit in ids.aminmax())
    if low < -1 or high >= router.num_experts:
        raise UsageError(
            f"{_NAME} of layer {router.layer_id} name experts {low} to {high}, but the layer has "
            f"experts 0 to {router.num_experts - 1}. Check that the routes belong to this model."
        )


def _taken_from(kwargs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split keywords into those of `follow` and the others."""
    ours = {name: kwargs[name] for name in (_NAME, _WEIGHTS) if kwargs.get(name) is not None}
    for name, given in ours.items():
        if not isinstance(given, torch.Tensor):
            raise UsageError(
                f"{name} must be a tensor, as Routes.tensor(batch=) makes it; got {given!r}"
            )
    if _WEIGHTS in ours and _NAME not in ours:
        raise UsageError(f"{_WEIGHTS} needs {_NAME}. Pass both.")
    return ours, {name: x for name, x in kwargs.items() if name not in (_NAME, _WEIGHTS)}


def _drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, _taken_from(kwargs)[1]


def _places(model: nn.Module, routers: Sequence[Router]) -> list[tuple[nn.Module, nn.Module]]:
    """Return for each router its layer, which is a child of a module list, and this list."""
    names = {module: name for name, module in model.named_modules()}
    places: list[tuple[nn.Module, nn.Module]] = []
    for router in routers:
        if router.module not in names:
            raise PlanError(
                f"the router of layer {router.layer_id} is not inside this "
                f"{type(model).__name__}. Pass only the routers of this stage, as found in the "
                "whole model."
            )
        for stack, child in _steps(model, names[router.module]):
            if isinstance(stack, nn.ModuleList | nn.ModuleDict):
                places.append((child, stack))
                break
        else:
            raise UsageError(
                f"the router {names[router.module]!r} is not in an nn.ModuleList or "
                "nn.ModuleDict, so follow cannot find its layer. Use impose."
            )
    if len({layer for layer, _ in places}) != len(routers):
        raise PlanError(
            "two routers are in one layer, but each call of a layer takes one row per token"
        )
    return places


def _steps(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    for part in name.split("."):
        child = model.get_submodule(part)
        yield model, child
        model = child


def _inside(layer: nn.Module) -> nn.Module:
    for name in ("_checkpoint_wrapped_module", "_orig_mod"):
        inner = layer._modules.get(name)
        if inner is not None:
            return _inside(inner)
    return layer


def _follows(module: nn.Module) -> bool:
    return any(isinstance(hook, _Layer) for hook in module._forward_hooks.values())

"""Imposed choices in one router's output, and the forward hook of `impose` that puts them there.

A layer's rows are fixed while the context is open, so running twice gives the same result. On
leaving, each layer must have run, with gradients if the context was opened with gradients. Backward
must run in the context of the same micro-batch. `_SameMicroBatch` checks that, because autograd
recomputes a checkpointed layer under the context that is open at that time.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import nn

from ..errors import ShapeError, UsageError, shown
from .router import Router, chosen_ids

__all__ = [
    "ImposedLayer",
    "ImposedRows",
    "Tally",
    "check_ratio",
    "is_imposed",
    "keep_scored",
    "replaced",
    "weigh",
]


class Tally:
    """Slots that the filter replaced in a layer's latest run, on the device. 0 without a filter."""

    replaced: Any = None


class ImposedRows(NamedTuple):
    """The choices of one micro-batch in one layer."""

    ids: torch.Tensor
    """Integers `[tokens, top_k]`, narrow or not."""
    missing: torch.Tensor | None = None
    """bool `[tokens]`: tokens that use the router's own choice. None if no token does."""
    padding: torch.Tensor | None = None
    """bool `[tokens]`: what the filter of scores leaves alone."""
    weights: torch.Tensor | None = None
    """Gates to compute with, `[tokens, top_k]`."""


class ImposedLayer:
    """The forward hook of one router. torch.compile traces it once for all contexts."""

    def __init__(self, router: Router, rows: ImposedRows, min_score_ratio: float | None) -> None:
        self.router = router
        self.tally = Tally()
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
        # Compiled code keeps no object to compare a recomputation with. Under fullgraph torch
        # raises here: compile the checkpoint instead of its content.
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
    return any(isinstance(hook, ImposedLayer) for hook in module._forward_hooks.values())


def check_ratio(ratio: float | None) -> None:
    """Check that a `min_score_ratio`, if given, is in (0, 1]. Raises UsageError. Pure."""
    if ratio is not None and (not isinstance(ratio, Real) or not 0 < ratio <= 1):
        raise UsageError(f"min_score_ratio must be in (0, 1]; got {shown(ratio)}")


def weigh(
    router: Router, output: Any, rows: ImposedRows, *, min_score_ratio: float | None = None
) -> tuple[Int64[torch.Tensor, "tokens top_k"], torch.Tensor, Any]:
    """Return the final choices, their live gates, and how many the filter replaced. Local.

    Raises:
        ShapeError: rows of another number of tokens, or gates of another shape than the choices.
    """
    own = chosen_ids(router, output)
    if own.shape[0] != rows.ids.shape[0]:
        raise ShapeError(
            f"layer {router.layer_id} runs on {own.shape[0]} tokens, the routes hold"
            f" {rows.ids.shape[0]}. Rows follow the flattened input [batch * sequence]. For"
            " one sequence call routes.pad(tokens). For a batch call with_missing(after=) on each"
            " sequence, and join them."
        )
    # Widened on the device only; a no-op copy unless the device was guessed wrongly.
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
        # Adding the zero leaves the recorded value as it is, and the gradient to the live one.
        recorded = rows.weights.to(own.device).to(gates.dtype) + (gates - gates.detach())
        gates = recorded if rows.missing is None else _where(rows.missing, gates, recorded)
    return ids, gates, count


def replaced(router: Router, output: Any, ids: torch.Tensor, gates: torch.Tensor) -> Any:
    """Call `Router.replace`, and check its result.

    Raises:
        ShapeError: the output would change the host's arithmetic.
    """
    changed = router.replace(output, ids, gates)
    _check_alike(router.layer_id, output, changed)
    return changed


def _where(mask: torch.Tensor, there: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.to(there.device)[:, None], there, here)


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

    An expert stays if its score is at least `ratio` times the weakest score among the row's own
    choices. The slots of other experts, from left to right, get the row's own choices that are not
    in the row, best first. So no row names an expert twice. Local. Does not wait for the device.

    Args:
        ratio: in (0, 1]. An expert that the trainer chose itself is always kept.
        exempt: True for rows to leave unchanged, such as padding.

    Returns:
        The rows, and how many slots were replaced (on the device).

    Source: prime-rl pull request 2703.
    """
    with torch.no_grad():
        # In one call, so that both are divided by the same number.
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
    if not isinstance(own, torch.Tensor) or not isinstance(replaced, torch.Tensor):
        return
    if own.dtype != replaced.dtype or own.shape != replaced.shape:
        raise ShapeError(
            f"layer {layer_id}: Router.replace puts {replaced.dtype} {list(replaced.shape)} where"
            f" the module returns {own.dtype} {list(own.shape)}. Cast what Router.gates returns:"
            " gates.to(output[1].dtype), say (docs/replay.md)."
        )


class _SameMicroBatch(torch.autograd.Function):
    """The identity. Its backward refuses a recomputation under another context's routes.

    Checkpointing recomputes saved tensors and keeps attributes of `ctx`, so the two then disagree.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, layer: ImposedLayer) -> torch.Tensor:
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


def _inside_saved_tensor_hooks() -> bool:
    """Whether a checkpoint is around code that is traced now. A later one is not noticed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# As torch.compiler.assume_constant_result does, which would import the compiler.
_inside_saved_tensor_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]

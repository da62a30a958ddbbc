"""Recording of a router's choices.

A tape belongs to one forward, in which each layer must run once. A layer may run again within
backward (activation checkpointing), with equal choices. A difference is kept on the device, because
reading it at once would wait. The error is raised when the context ends or the routes are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ShapeError, UsageError
from .codec import expert_dtype
from .router import Router, check_routers, chosen_ids
from .routes import Routes

__all__ = ["Tape", "record"]


@contextmanager
def record(routers: Sequence[Router], *, gates: bool = False) -> Iterator[Tape]:
    """Record the experts that routers choose in one forward.

    Open one context per forward. Activation checkpointing runs the routers again within backward,
    where they must make the same choices. A second forward, such as a step of `generate`, raises
    UsageError. If you open `record` inside `impose`, `record` records the imposed choices. If you
    open `impose` inside `record`, `record` records the model's own choices.

    Local. `record` keeps the expert ids on the device, in a narrow dtype. `record` waits for the
    device only when the tape is read, or when the context closes after a layer ran twice. If the
    model will be compiled, call `allow_compile` first.

    Args:
        gates: whether to keep the gate weights of the choices too. The gate weights take four more
            bytes per slot.

    Raises:
        UsageError: a layer ran a second time outside backward, or within backward on a
            different number of tokens. Raised by the second run. Also raised when the context
            closes, or when `tape.routes` is read, if a layer chose differently when it was
            recomputed.
        ShapeError: a router's ids are not `[tokens, top_k]` integers. Raised within the forward.
    """
    layers = [_RecordedLayer(router, gates) for router in check_routers(routers)]
    handles = [layer.router.module.register_forward_hook(layer) for layer in layers]
    tape = Tape(layers)
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()
    tape.check_repeats()


class Tape:
    """The experts that routers chose in one forward, by layer."""

    def __init__(self, layers: Sequence[_RecordedLayer]) -> None:
        self._layers = layers

    @cached_property
    def routes(self) -> Routes:
        """The recorded choices, copied to the host.

        Raises:
            UsageError: a layer has not run, or chose differently when it ran again.
            ShapeError: the layers saw different numbers of tokens.
        """
        self._check_complete()
        first = self._layers[0].router
        experts = _gather([layer.ids for layer in self._layers], expert_dtype(first.num_experts))
        layer_ids = tuple(layer.router.layer_id for layer in self._layers)
        missing = np.zeros(len(experts), dtype=np.bool_)
        return Routes(experts, first.num_experts, layer_ids, missing)

    @cached_property
    def gates(self) -> np.ndarray:
        """The gate weights of the choices on the host, float32 `[tokens, layers, top_k]`.

        You can pass the gate weights to `impose(..., gates=)`.

        Raises:
            UsageError: `record` was opened without `gates=True`. Also raised for the reasons given
                in `routes`.
            ShapeError: as for `routes`.
        """
        if not self._layers[0].keeps_gates:
            raise UsageError("no gates were recorded. Open record(routers, gates=True).")
        self._check_complete()
        return _gather([layer.gates for layer in self._layers], np.dtype(np.float32))

    def check_repeats(self) -> None:
        """Raise UsageError if a layer chose differently when it was recomputed. See `record`."""
        for layer in self._layers:
            if layer.changed is not None and bool(layer.changed):
                raise UsageError(
                    f"layer {layer.router.layer_id} was recomputed in backward with other "
                    "choices: the layer is not deterministic. Impose the routes."
                )

    def _check_complete(self) -> None:
        silent = [layer.router.layer_id for layer in self._layers if layer.ids is None]
        if silent:
            raise UsageError(
                f"layers {silent} have not run. Read the tape after the forward. A model that was "
                "compiled before the context was opened does not call hooks. Call "
                "allow_compile(routers) before compiling."
            )
        self.check_repeats()
        counts = {layer.router.layer_id: len(layer.ids) for layer in self._layers}
        if len(set(counts.values())) != 1:
            raise ShapeError(f"layers saw different numbers of tokens: {counts}")


class _RecordedLayer:
    """The forward hook of one router. torch.compile traces it once for all contexts."""

    def __init__(self, router: Router, keeps_gates: bool) -> None:
        self.router = router
        self.keeps_gates = keeps_gates
        self.ids: Any = None
        self.gates: Any = None
        self.changed: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        chosen = chosen_ids(self.router, output).detach()
        # int32 if uint8 is too small, because torch cannot compare uint16 on every device.
        narrow = torch.uint8 if self.router.num_experts <= 256 else torch.int32
        ids = chosen.to(narrow, copy=True)
        if self.ids is not None:
            # Not compiled, because each run must check whether it is within backward.
            torch.compiler.disable(self._check_again)(ids)
            return
        self.ids = ids
        if self.keeps_gates:
            with torch.no_grad():
                gates = self.router.gates(output, chosen.to(torch.int64))
                self.gates = gates.to(torch.float32, copy=True)

    def _check_again(self, ids: torch.Tensor) -> None:
        # Torch's checkpoints also detect recomputation like this: only backward has graph tasks.
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing or ids.shape != self.ids.shape:
            raise UsageError(
                f"layer {self.router.layer_id} ran twice in one record: {self.ids.shape[0]} "
                f"tokens, then {ids.shape[0]}. Open a new record for each forward. For a "
                "generated sequence, record one forward over the whole sequence."
            )
        # Kept on the device, because reading it here would wait for the device.
        changed = (ids != self.ids).any()
        self.changed = changed if self.changed is None else self.changed | changed


def _gather(layers: Sequence[torch.Tensor], dtype: np.dtype[Any]) -> np.ndarray:
    tokens, top_k = layers[0].shape
    out = np.empty((tokens, len(layers), top_k), dtype=dtype)
    for column, layer in enumerate(layers):
        out[:, column] = layer.cpu().numpy()
    return out

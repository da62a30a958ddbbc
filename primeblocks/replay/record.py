"""Write down a router's choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ShapeError, UsageError
from .codec import expert_dtype
from .router import Router, check_routers
from .routes import Routes

__all__ = ["Tape", "record"]


@contextmanager
def record(routers: Sequence[Router]) -> Iterator[Tape]:
    """Keep the choices of one forward.

    One context, one forward: recomputation under activation checkpointing runs the routers
    again, and is recognised because it chooses the same; anything else is refused. Opened
    inside `impose` the tape holds the imposed choices, opened around it the model's own.
    Local; keeps narrow ids on the device, waits for nothing until `tape.routes` is read.

    Raises:
        UsageError: a layer ran twice with different choices (from within the forward).
    """
    tape = Tape(check_routers(routers))
    with ExitStack() as stack:
        for router in tape.routers:
            stack.enter_context(_hooked(router.module, partial(tape.write, router)))
        yield tape


class Tape:
    """The choices of one forward, by layer."""

    def __init__(self, routers: tuple[Router, ...]) -> None:
        self.routers = routers
        self._rows: dict[int, torch.Tensor] = {}

    def write(self, router: Router, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of `router.module`."""
        # int32 where uint8 is too small: torch cannot compare uint16 on every device.
        narrow = torch.uint8 if router.num_experts <= 256 else torch.int32
        rows = router.experts(output).detach().to(narrow, copy=True)
        before = self._rows.setdefault(router.layer_id, rows)
        if before is not rows and not torch.equal(before, rows):
            raise UsageError(
                f"layer {router.layer_id} ran twice in one record: {len(before)} tokens, then"
                f" {len(rows)} with other choices. Open a new record for each forward; if this"
                " was recomputation in backward, it is not deterministic: impose the routes."
            )

    @cached_property
    def routes(self) -> Routes:
        """What was recorded. Copies to the host.

        Raises:
            UsageError: a layer has not run.
            ShapeError: the layers saw different numbers of tokens.
        """
        silent = [r.layer_id for r in self.routers if r.layer_id not in self._rows]
        if silent:
            raise UsageError(
                f"layers {silent} have not run. Read the tape after the forward; a model compiled"
                " before the context was opened does not call hooks, compile it inside."
            )
        counts = {layer: len(rows) for layer, rows in self._rows.items()}
        tokens = len(self._rows[self.routers[0].layer_id])
        if len(set(counts.values())) != 1:
            raise ShapeError(f"layers saw different numbers of tokens: {counts}")
        first = self.routers[0]
        shape = (tokens, len(self.routers), first.top_k)
        experts = np.empty(shape, dtype=expert_dtype(first.num_experts))
        for column, router in enumerate(self.routers):
            experts[:, column] = self._rows[router.layer_id].cpu().numpy()
        layer_ids = tuple(router.layer_id for router in self.routers)
        return Routes(experts, first.num_experts, layer_ids, np.zeros(tokens, dtype=np.bool_))


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()

"""Refuse to use a model whose memory is elsewhere: torch itself would read on, and crash."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import UsageError

__all__ = ["Handle", "guard"]


@runtime_checkable
class Handle(Protocol):
    """The handle that torch returns for a hook."""

    def remove(self) -> None: ...


def guard(model: nn.Module, optimizer: Optimizer | None, away: Container[str]) -> list[Handle]:
    """Place hooks that raise UsageError where a kind in `away` would be touched. Local.

    They stand before `forward`, `state_dict` and `load_state_dict` of every module, and before
    `step`, `state_dict` and `load_state_dict` of the optimizer.

    Args:
        away: of "weights", "gradients" and "optimizer"; looked at on every call.
    """

    def refuse(what: str, *kinds: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            # A forward pass without gradients does not touch those that are away.
            skip = "gradients" if what == "forward" and not torch.is_grad_enabled() else None
            if out := [kind for kind in kinds if kind in away and kind != skip]:
                raise UsageError(
                    f"{what} needs {', '.join(out)}, which HostMemory holds on the host. "
                    f"Call restore({', '.join(map(repr, out))}) first."
                )

        return hook

    handles: list[Handle] = []
    forward = refuse("forward", "weights", "gradients")
    save, load = refuse("state_dict", "weights"), refuse("load_state_dict", "weights")
    for module in model.modules():
        handles += [
            # Ahead of FSDP2's own hook, which gathers the parameters.
            module.register_forward_pre_hook(forward, prepend=True),
            module.register_state_dict_pre_hook(save),
            module.register_load_state_dict_pre_hook(load),
        ]
    if optimizer is not None:
        step = refuse("step", "weights", "gradients", "optimizer")
        save, load = refuse("state_dict", "optimizer"), refuse("load_state_dict", "optimizer")
        handles += [
            optimizer.register_step_pre_hook(step),
            optimizer.register_state_dict_pre_hook(save),
            optimizer.register_load_state_dict_pre_hook(load),
        ]
    return handles

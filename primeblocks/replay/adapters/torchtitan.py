"""Routers of torchtitan 0.3.0.

`TokenChoiceTopKRouter` returns `(gates, ids, scores)`, all of shape `[batch, sequence, ...]`.
`scores` has the score of every expert after the sigmoid or softmax, before any balancing bias. From
`scores`, a forward hook can compute the gate weights of the imposed experts. `MoE` counts its
tokens per expert from the output of the router module, so its balancing follows the imposed ids
too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError, needs

with needs("torchtitan", extra="torchtitan"):
    # Only the version, because an import of the MoE module takes seconds.
    from torchtitan import __version__ as _RELEASE

__all__ = ["TorchtitanRouter", "routers"]

_TESTED = "0.3.0"
_ROUTER = ("torchtitan.models.common.moe", "TokenChoiceTopKRouter")


@dataclass(frozen=True, eq=False)
class TorchtitanRouter:
    """A `replay.Router`."""

    module: nn.Module
    layer_id: int
    num_experts: int
    top_k: int

    def experts(self, output: Any) -> torch.Tensor:
        """Return the expert ids in a router's output.

        Raises:
            UnsupportedError: the output is a DTensor (tensor parallelism), or differs from the
                output of the tested version.
        """
        if isinstance(output, tuple) and any(isinstance(part, DTensor) for part in output):
            raise UnsupportedError(
                f"the router of layer {self.layer_id} returns DTensors, because with tensor "
                "parallelism a rank has only a part of the rows. Use tensor-parallel degree 1. "
                "FSDP and expert parallelism are supported."
            )
        if not isinstance(output, tuple) or [part.ndim for part in output] != [3, 3, 3]:
            raise UnsupportedError(
                f"layer {self.layer_id}: the router of torchtitan {_RELEASE} does not return "
                "(gates, ids, scores) of [batch, sequence, ...]. This adapter was tested with "
                f"{_TESTED}."
            )
        return output[1].flatten(0, 1)

    def gates(self, output: Any, experts: torch.Tensor) -> torch.Tensor:
        router: Any = self.module
        gates = output[2].flatten(0, 1).gather(-1, experts)
        if router.route_norm:
            # The host adds this number too, against a row of zeros.
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return gates * router.route_scale

    def replace(self, output: Any, experts: torch.Tensor, gates: torch.Tensor) -> Any:
        _, ids, scores = output
        return gates.view(ids.shape), experts.view(ids.shape).to(ids.dtype), scores


def routers(model: nn.Module) -> tuple[TorchtitanRouter, ...]:
    """Return every router of `model`, in layer order, for `record`, `impose` and `allow_compile`.

    Works before and after torchtitan shards the model, compiles the model, or adds activation
    checkpointing. Local.

    Raises:
        UnsupportedError: the model has no router, a router is not in a numbered layer, or
            torchtitan is not 0.3.0. Also raised if a router has another class or `forward` than the
            tested router.
    """
    if _RELEASE != _TESTED:
        raise UnsupportedError(
            f"this adapter was written for torchtitan {_TESTED}, and the router changes often; "
            f"found {_RELEASE}. Run: pip install torchtitan=={_TESTED}"
        )
    found = []
    for name, module in model.named_modules():
        if not _is_router(module):
            if "router" in type(module).__name__.lower():
                raise _unsupported(f"{name!r}, a {type(module).__name__}, is not")
            continue
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is None:
            raise UnsupportedError(f"router {name!r} is not in a numbered layer")
        sizes: Any = module
        found.append(TorchtitanRouter(module, int(layer[1]), sizes.num_experts, sizes.top_k))
    if not found:
        raise _unsupported(f"no module of {type(model).__name__} is")
    return tuple(sorted(found, key=lambda router: router.layer_id))


def _is_router(module: nn.Module) -> bool:
    # FSDP2 gives a module a new class that derives from its old class and inherits its forward.
    kind: Any = type(module)
    for cls in kind.__mro__:
        if (cls.__module__, cls.__name__) == _ROUTER:
            return kind.forward is cls.forward
    return False


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} a {'.'.join(_ROUTER)} of torchtitan {_TESTED}. Write a replay.Router for this "
        "model (docs/replay.md)."
    )

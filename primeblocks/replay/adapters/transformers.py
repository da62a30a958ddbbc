"""Routers of Hugging Face transformers models.

A supported router returns `(logits, gate weights, indices)`, and computes the weights only from
the logits. A forward hook can compute gate weights of other experts from the logits, without
running the router again. The adapter recognises a router by the source code of its `forward`
method, which many families share.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError, needs
from ..gates import chosen_softmax_gates, sigmoid_gates, softmax_gates

with needs("transformers", extra="transformers"):
    from transformers import __version__ as _RELEASE

__all__ = ["TransformersRouter", "routers"]

Gates = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _softmax(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return softmax_gates(logits, experts, renormalise=router.norm_topk_prob)


def _renormalised(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return softmax_gates(logits, experts, renormalise=True)


def _chosen(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return chosen_softmax_gates(logits, experts)


def _sigmoid(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return sigmoid_gates(
        logits, experts, renormalise=router.norm_topk_prob, scale=router.routed_scaling_factor
    )


def _plain_sigmoid(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return sigmoid_gates(logits.float(), experts, renormalise=True, epsilon=0.0)


def _afmoe(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return sigmoid_gates(logits, experts, renormalise=True, scale=router.route_scale)


# By the `_fingerprint` of a router's forward: the name of one class with this code, and the formula
# of its gate weights. The code is the same in transformers 5.17, 5.18 and 5.19.
_FORWARDS: dict[str, tuple[str, Gates]] = {
    "509cfa32c993": ("AfmoeTokenChoiceRouter", _afmoe),
    "6ca6d86fa438": ("AXK2TopkRouter", _sigmoid),
    "83db23c5ca62": ("DeepseekV3TopkRouter", _sigmoid),
    "48c285a3ed6b": ("GptOssTopKRouter", _chosen),
    "d2deeb08e9b2": ("LagunaTopKRouter", _plain_sigmoid),
    "070df759ac37": ("MiniMaxM2TopKRouter", _plain_sigmoid),
    "3755744bf3c9": ("MiniMaxM3VLTopKRouter", _plain_sigmoid),
    "172f8d0bb1fe": ("MixtralTopKRouter", _renormalised),
    "6db1f4493b6d": ("Qwen3_5MoeTopKRouter", _renormalised),
    "6f587193d1a0": ("Qwen3MoeTopKRouter", _softmax),
}


@dataclass(frozen=True, eq=False)
class TransformersRouter:
    """A `replay.Router`."""

    module: nn.Module
    layer_id: int
    num_experts: int
    top_k: int
    formula: Gates

    def experts(self, output: Any) -> torch.Tensor:
        """Return the expert ids in a router's output.

        Raises:
            UnsupportedError: the output differs from the output of the tested versions.
        """
        if not isinstance(output, tuple) or len(output) != 3:
            raise UnsupportedError(
                f"{type(self.module).__name__} of transformers {_RELEASE} does not return "
                "(logits, weights, indices). This adapter was tested with 5.17 to 5.19."
            )
        return output[2]

    def gates(self, output: Any, experts: torch.Tensor) -> torch.Tensor:
        # In the dtype of the host's weights, because some routers cast them at the end.
        return self.formula(self.module, output[0], experts).to(output[1].dtype)

    def replace(self, output: Any, experts: torch.Tensor, gates: torch.Tensor) -> Any:
        logits, _, ids = output
        return logits, gates, experts.to(ids.dtype)


def routers(model: nn.Module) -> tuple[TransformersRouter, ...]:
    """Return every router of `model`, in layer order, for `record` and `impose`. Local.

    Works before and after FSDP2, activation checkpointing and expert parallelism are applied,
    because routers run locally. If PEFT trains a copy of a router (`modules_to_save=["gate"]`), the
    result has PEFT's wrapper, which runs the router or its copy.

    Raises:
        UnsupportedError: the model has a router of an unsupported family, a router outside of
            numbered layers, several routers in one layer, or no routers. Also raised if
            transformers is older than 5.17, or is version 6 or newer.
    """
    release = tuple(int(part) for part in _RELEASE.split(".")[:2])
    if not (5, 17) <= release < (6, 0):
        raise UnsupportedError(
            f"this adapter was tested with transformers 5.17 to 5.19; found {_RELEASE}. Run in "
            "your clone of primeblocks: pip install '.[transformers]'"
        )
    found: dict[int, TransformersRouter] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if re.sub(r"\.(original_module|modules_to_save\.[^.]+)$", "", name) in names.values():
            continue
        gates = _gates_of(_trained_apart(module))
        if gates is not None:
            layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
            if layer is None:
                raise UnsupportedError(f"router {name!r} is not in a numbered layer")
            sizes: Any = module
            layer_id = int(layer[1])
            if layer_id in found:
                raise UnsupportedError(
                    f"layer {layer_id} has two routers, {names[layer_id]!r} and {name!r}. If PEFT "
                    "copies the module around the router, name the router itself: "
                    'modules_to_save=["gate"].'
                )
            names[layer_id] = name
            found[layer_id] = TransformersRouter(
                module, layer_id, sizes.num_experts, sizes.top_k, gates
            )
        elif any("router" in cls.__name__.lower() for cls in type(module).__mro__):
            raise _unsupported(f"{name!r}, a {type(module).__name__}, is not")
    if not found:
        raise _unsupported(f"no module of {type(model).__name__} is")
    return tuple(found[layer_id] for layer_id in sorted(found))


def _trained_apart(module: nn.Module) -> nn.Module:
    """Return the original in PEFT's ModulesToSaveWrapper, or the module itself."""
    inside = dict(module.named_children())
    return inside.get("original_module", module) if "modules_to_save" in inside else module


def _gates_of(module: nn.Module) -> Gates | None:
    # FSDP2 gives a module a new class that derives from its own, and inherits its forward.
    kind: Any = type(module)
    known = _FORWARDS.get(_fingerprint(kind.forward))
    return None if known is None else known[1]


@cache
def _fingerprint(forward: Callable[..., Any]) -> str:
    """Return a digest of a function's body, without its docstring and comments."""
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # A function made at run time, in C, or a lambda.
        return ""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    first = function.body[1 if ast.get_docstring(function) is not None else 0]
    body = "\n".join(source.splitlines()[first.lineno - 1 :])
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(body)).readline)
    words = " ".join(
        tokenize.tok_name[token.type] if token.type in _BLOCKS else token.string
        for token in tokens
        if token.type not in _LAYOUT
    )
    return hashlib.sha256(words.encode()).hexdigest()[:12]


_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
_BLOCKS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}  # By kind: widths are only style.


def _unsupported(what: str) -> UnsupportedError:
    known = ", ".join(name for name, _ in _FORWARDS.values())
    return UnsupportedError(
        f"{what} a router that this adapter was tested with: its forward differs from those of "
        f"{known} in transformers 5.17 to 5.19. Write a replay.Router for this model "
        "(docs/replay.md)."
    )

"""LoRA adapters as named tensors: their names, their shapes and their versions.

`adapter_parameters` returns an adapter's tensors by the names of PEFT's files. An ordinary plan and
`Publisher` send them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...errors import PlanError, ShapeError, UnsupportedError, UsageError
from ..manifest import Manifest, named_tensors

__all__ = ["AdapterSpec", "adapter_parameters"]

_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Settings of PEFT with which an adapter is more than A and B, or differs between modules.
_NOT_PLAIN = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Other values of `init_lora_weights`, such as PiSSA, also change the base weights.
_INITS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterSpec:
    """A LoRA adapter: y = W x + s B A x, with s = alpha / rank, or alpha / sqrt(rank) (rslora).

    Args:
        name: a name of letters, digits, ".", "_" and "-", which begins with a letter or a digit.
            Version 7 of "policy" is served as "policy@7".
        rank: the number of rows of A.
        alpha: the numerator of the scale s.
        rslora: whether s is alpha / sqrt(rank) instead of alpha / rank.

    Raises:
        UsageError: `name` is malformed, or `rank` is not positive.

    Source: arXiv:2106.09685; rslora arXiv:2312.03732.
    """

    name: str
    rank: int
    alpha: float
    rslora: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                'an adapter\'s name may have only letters, digits, ".", "_" and "-"; got '
                f"{self.name!r}. Rename the adapter."
            )
        if self.rank < 1:
            raise UsageError(
                f"the rank of {self.name!r} must be positive; got {self.rank}. Pass PEFT's r."
            )

    @classmethod
    def from_peft(cls, name: str, config: Mapping[str, Any]) -> AdapterSpec:
        """Read PEFT's settings: `LoraConfig.to_dict()`, or a parsed adapter_config.json. Local.

        Raises:
            UnsupportedError: the settings are not plain LoRA with one rank for all modules, for
                example because they turn on DoRA.
            UsageError: the settings lack rank or alpha.
        """
        found = [key for key in _NOT_PLAIN if config.get(key)]
        if config.get("bias", "none") != "none":
            found.append("bias")
        init = config.get("init_lora_weights", True)
        if isinstance(init, str) and init.lower() not in _INITS:
            found.append("init_lora_weights")
        if found:
            text = ", ".join(f"{key}={config[key]!r}" for key in found)
            raise UnsupportedError(
                f"settings of {name!r} have {text}, but only plain LoRA with one rank can be "
                "sent. Unset these settings."
            )
        lacks = [key for key in ("r", "lora_alpha") if config.get(key) is None]
        if lacks:
            raise UsageError(f"settings of {name!r} lack {lacks}. Pass LoraConfig.to_dict().")
        return cls(name, config["r"], config["lora_alpha"], bool(config.get("use_rslora")))

    def modules(self, manifest: Manifest) -> dict[str, tuple[int, int]]:
        """Return the modules that a manifest adapts, with their input and output sizes. Local.

        Raises:
            PlanError: a name is not a PEFT name, a module lacks its A or its B, or the manifest is
                empty.
            ShapeError: a shape is not [rank, inputs] or [outputs, rank].
            UnsupportedError: the manifest adapts experts.
        """
        parts: dict[str, dict[str, int]] = {}
        for name, tensor in manifest.items():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise PlanError(
                    f"{name!r} is not {_PREFIX}<module>.lora_A.weight or ...lora_B.weight. "
                    "Take the tensors from adapter_parameters()."
                )
            module, part = match["module"], match["part"]
            if "experts" in module.split("."):
                raise UnsupportedError(
                    f"LoRA on experts ({name!r}) is not supported. Leave experts out of the "
                    "adapter's target_modules."
                )
            wanted = f"[{self.rank}, inputs]" if part == "A" else f"[outputs, {self.rank}]"
            ranks, sizes = (0, 1) if part == "A" else (1, 0)
            if len(tensor.shape) != 2 or tensor.shape[ranks] != self.rank:
                raise ShapeError(
                    f"{name!r} has shape {list(tensor.shape)}, expected {wanted}. Pass the rank "
                    "that the adapter was made with."
                )
            parts.setdefault(module, {})[part] = tensor.shape[sizes]
        for module, found in parts.items():
            for part, other in ("AB", "BA"):
                if part not in found:
                    raise PlanError(
                        f"{module!r} has lora_{other} but no lora_{part}. Take the tensors from "
                        "adapter_parameters()."
                    )
        if not parts:
            raise PlanError(
                f"adapter {self.name!r} has no tensors. Take the tensors from adapter_parameters()."
            )
        return {module: (sizes["A"], sizes["B"]) for module, sizes in parts.items()}


def adapter_parameters(model: nn.Module, *, adapter: str = "default") -> dict[str, Tensor]:
    """Return the LoRA parameters of a PEFT model, under their names in PEFT's files. Local.

    The result contains the live parameters without copies, and DTensors stay sharded. Names come
    without the parts that torch.compile and activation checkpoints add.

    Args:
        adapter: PEFT's name of the adapter in the model.

    Raises:
        PlanError: the model has no such adapter, or as for `describe`.
        UnsupportedError: the adapter has parameters other than A and B, such as DoRA's magnitudes.
    """
    parts = re.compile(rf"(?P<stem>.+\.lora_[AB])\.{re.escape(adapter)}\.weight")
    others = re.compile(rf".+\.(lora_\w+|modules_to_save)\.{re.escape(adapter)}(\..+)?")
    found: dict[str, Tensor] = {}
    for name, parameter in named_tensors(model).items():
        match = parts.fullmatch(name)
        if match is not None:
            found[match["stem"] + ".weight"] = parameter
        elif others.fullmatch(name):
            raise UnsupportedError(
                f"{name!r}: this parameter is not the A or the B of plain LoRA, and cannot be "
                "sent. Train the adapter without this parameter."
            )
    if not found:
        raise PlanError(
            f"the model has no LoRA parameters of an adapter named {adapter!r}. Pass adapter=, "
            "the adapter's name in PEFT."
        )
    return found

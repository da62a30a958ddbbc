"""The shape of a model's rows, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import UnsupportedError, UsageError

__all__ = ["RouterShape"]

# A kind of layer for each, and what the ones with experts are called.
_LISTS = {
    "mlp_layer_types": ("sparse",),
    "layers_block_type": ("moe",),
    "hybrid_override_pattern": ("E",),
    "moe_layer_freq": (1, True),
}


@dataclass(frozen=True)
class RouterShape:
    """The shape of a model's captured rows.

    Args:
        num_layers: all hidden layers; vLLM returns a row for each, zeros for dense ones.
        moe_layers: which of them route, in rising order.
        num_experts: routed experts in each such layer, shared experts not counted.
        top_k: experts for each token.

    Raises:
        UsageError: a layer or a count is out of range.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @classmethod
    def from_config(cls, config: Any) -> RouterShape:
        """Read a model's configuration: transformers', or the dict of a `config.json`. Local.

        Of a model of several modalities it is the text model that counts.

        Raises:
            UnsupportedError: the number of experts, of choices or of layers is not in it.
        """
        values = _text_values(config)
        num_experts = _first(values, "num_experts", "num_local_experts", "n_routed_experts")
        top_k = _first(values, "num_experts_per_tok", "num_experts_per_token")
        kinds = _kinds(values)
        num_layers = len(kinds) if kinds else _first(values, "num_hidden_layers")
        routing = [i for i in range(num_layers) if _routes(values, kinds, i)]
        return cls(num_layers, tuple(routing), num_experts, top_k)

    def __post_init__(self) -> None:
        inside = all(0 <= layer < self.num_layers for layer in self.moe_layers)
        rising = list(self.moe_layers) == sorted(set(self.moe_layers))
        if not self.moe_layers or not inside or not rising:
            raise UsageError(
                f"moe_layers must rise within 0..{self.num_layers - 1}; got {self.moe_layers}."
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise UsageError(f"top_k must be in 1..{self.num_experts}; got {self.top_k}.")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of vLLM's rows and of ours: it follows the number of experts, never the ids."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


def _text_values(config: Any) -> Mapping[str, Any]:
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    values = config if isinstance(config, Mapping) else config.to_dict()
    for inner in ("thinker_config", "text_config"):
        values = values.get(inner) or values
    return values


def _first(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(values.get(name), int):
            return values[name]
    raise UnsupportedError(
        f"the configuration of {values.get('model_type', 'a model')!r} has none of {list(names)}."
        " Pass RouterShape(num_layers=, moe_layers=, num_experts=, top_k=) yourself."
    )


def _kinds(values: Mapping[str, Any]) -> list[bool] | None:
    """Whether each layer routes, where a list says so."""
    for name, experts in _LISTS.items():
        listed = values.get(name)
        if isinstance(listed, Sequence) and listed:
            return [kind in experts for kind in listed]
    return None


def _routes(values: Mapping[str, Any], kinds: list[bool] | None, layer: int) -> bool:
    if kinds:
        return kinds[layer]
    if isinstance(values.get("moe_layers"), Sequence):  # Llama 4 lists them.
        return layer in values["moe_layers"]
    dense = values.get("first_k_dense_replace") or values.get("num_dense_layers") or 0
    every = values.get("decoder_sparse_step") or values.get("interleave_moe_layer_step") or 1
    freq = values.get("moe_layer_freq") or 1
    period, offset = values.get("expert_layer_period") or 1, values.get("expert_layer_offset") or 0
    only = values.get("mlp_only_layers") or ()
    regular = (layer + 1) % every == 0 and layer % freq == 0 and (layer - offset) % period == 0
    return layer >= dense and layer not in only and regular

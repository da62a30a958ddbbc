"""Indexers of Hugging Face transformers models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError

__all__ = ["TransformersIndexer", "indexers"]

# Families whose indexer returns places of tokens, `[batch, tokens, k]`.
_INDEXERS = {
    "AXK2Indexer": "axk2",
    "DeepseekV32Indexer": "deepseek_v32",
    "Glm5NextTextIndexer": "glm5_next",
    "GlmMoeDsaIndexer": "glm_moe_dsa",
    "HYV4Indexer": "hy_v4",
}


@dataclass(frozen=True, eq=False)
class TransformersIndexer:
    """An `index_replay.Indexer` of a transformers model."""

    module: nn.Module
    layer_id: int

    def filled(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids in the form that the attention implementation of the model needs.

        Eager and SDPA attention scatter ids into a mask, and fail for the id -1. Each -1 becomes an
        id that the row already has, which does not change the attention mask.
        """
        config: Any = self.module.config
        takes = getattr(config, "_attn_implementation", "") not in ("eager", "sdpa")
        if takes or type(self.module).__name__ == "Glm5NextTextIndexer":
            return ids
        return torch.where(ids >= 0, ids, ids[:, :1])


def indexers(model: nn.Module) -> list[TransformersIndexer]:
    """Return every indexer of a transformers model whose selection can be replayed. Local.

    A layer that uses the selection of another layer has no indexer.

    Raises:
        UnsupportedError: the model has no indexer, or an indexer that does not select tokens.
    """
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Indexer"):
            continue
        if kind not in _INDEXERS:
            raise UnsupportedError(
                f"the selection of {name}, a {kind}, cannot be replayed, because it does not "
                f"consist of token positions. Use one of the models {sorted(_INDEXERS.values())}."
            )
        layer: Any = module
        found.append(TransformersIndexer(module, int(layer.layer_idx)))
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no indexer: nothing is selected.")
    return found

"""Indexers of Hugging Face transformers models, for `primeblocks.contrib.index_replay`."""

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
    """A `index_replay.Indexer`."""

    module: nn.Module
    layer_id: int

    def filled(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids as the attention that runs takes them.

        Eager and SDPA attention scatter ids into a mask and cannot take -1: an id that the row has
        is named again there, which changes nothing.
        """
        config: Any = self.module.config
        takes = getattr(config, "_attn_implementation", "") not in ("eager", "sdpa")
        if takes or type(self.module).__name__ == "Glm5NextTextIndexer":
            return ids
        return torch.where(ids >= 0, ids, ids[:, :1])


def indexers(model: nn.Module) -> list[TransformersIndexer]:
    """Every indexer of a transformers model whose selection `index_replay` can replay. Local.

    Layers that share the selection of another one have none of their own.

    Raises:
        UnsupportedError: there is none, or one that selects other things than tokens.
    """
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Indexer"):
            continue
        if kind not in _INDEXERS:
            raise UnsupportedError(
                f"{name} is a {kind}, which does not return places of tokens as those of "
                f"{sorted(_INDEXERS.values())} do"
            )
        layer: Any = module
        found.append(TransformersIndexer(module, int(layer.layer_idx)))
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no indexer: nothing is selected")
    return found

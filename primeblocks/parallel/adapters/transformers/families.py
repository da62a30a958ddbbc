"""Families of models that can be split, and in which ways: every row is a test."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]

_LIGHTNING = "its lightning attention has a decay of its own that is not built"


@dataclass(frozen=True)
class Family:
    """A family of models, and the splits of it that were compared with one rank.

    Attributes:
        experts: has experts that can be shared.
        context: "" if its sequences can be packed and split, otherwise why not.
        indexed: an indexer chooses the tokens that each query attends to.
    """

    experts: bool = True
    context: str = ""
    indexed: bool = False


_BOTH = Family()
_INDEXED = Family(indexed=True)

# By `model_type` of the configuration.
FAMILIES: dict[str, Family] = {
    "afmoe": _BOTH,
    "axk2": _INDEXED,
    "deepseek_v3": _BOTH,
    "deepseek_v32": _INDEXED,
    "dots1": _BOTH,
    "exaone_moe": _BOTH,
    "flex_olmo": _BOTH,
    "glm4_moe": _BOTH,
    "glm4_moe_lite": _BOTH,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": _BOTH,
    "hy_v4": _INDEXED,
    "laguna": _BOTH,
    "llama": Family(experts=False),
    "minimax": Family(context=_LIGHTNING),
    "minimax_m2": _BOTH,
    "mixtral": _BOTH,
    "nemotron_h": _BOTH,
    "olmoe": _BOTH,
    "qwen2_moe": _BOTH,
    "qwen3": Family(experts=False),
    "qwen3_5_moe_text": _BOTH,
    "qwen3_moe": _BOTH,
    "qwen3_next": _BOTH,
    "qwen3_vl_moe": _BOTH,
    "solar_open": _BOTH,
}

"""Families of models that can be split, and in which ways: every row is a test."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]

_SPARSE = (
    "its indexer chooses keys from the whole sequence, which ring and Ulysses attention do not "
    "gather"
)
_LIGHTNING = "its lightning attention has a decay of its own that is not built"


@dataclass(frozen=True)
class Family:
    """A family of models, and the splits of it that were compared with one rank.

    Attributes:
        experts: has experts that can be shared.
        context: "" if its sequences can be packed and split, otherwise why not.
    """

    experts: bool = True
    context: str = ""


_BOTH = Family()

# By `model_type` of the configuration.
FAMILIES: dict[str, Family] = {
    "afmoe": _BOTH,
    "deepseek_v3": _BOTH,
    "deepseek_v32": Family(context=_SPARSE),
    "dots1": _BOTH,
    "exaone_moe": _BOTH,
    "flex_olmo": _BOTH,
    "glm4_moe": _BOTH,
    "glm4_moe_lite": _BOTH,
    "glm_moe_dsa": Family(context=_SPARSE),
    "gpt_oss": _BOTH,
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

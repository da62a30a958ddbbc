"""Features of engines beside their shape, and the pairs of them that vLLM refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...errors import PlanError
from .arguments import Arguments

__all__ = ["FEATURES", "REFUSED", "features_of", "number_of"]

# Settings that no block makes; replay's capture and kvoffload's tiers come as those blocks' words.
FEATURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 8192},
        "fp8": {"quantization": "fp8"},
        "lora": {"enable_lora": True, "max_lora_rank": 16},
        "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        "ngram": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 4,
            }
        },
        "sleep": {"enable_sleep_mode": True},
    }
)

# Pairs that vLLM 0.32 refuses when an engine's configuration is made, and the way out. The tests
# ask vLLM for each pair of the features.
REFUSED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("replay", "pipeline"): (
            "vLLM captures routes on one pipeline stage only. Use tensor or expert parallelism."
        ),
        ("replay", "decode context"): (
            "vLLM does not put routes of context-parallel ranks together. Use "
            "decode_context_parallel_size=1."
        ),
        ("replay", "transfer without routes"): (
            "vLLM returns no routes beside Mooncake, MoRIIO, or NIXL within MultiConnector. Use "
            "NIXL alone, with our plug-in, or colocated()."
        ),
        ("replay", "no prefix cache"): (
            "vLLM keeps routes by the pages of its prefix cache. Leave the cache on."
        ),
    }
)


def _word(arguments: Arguments, flag: str) -> str:
    return " ".join(word for use in arguments.get(flag, ()) for word in use)


def number_of(arguments: Arguments, flag: str, *, default: int = 1) -> int:
    """Return the count that a flag was given. Pure.

    Raises:
        PlanError: it was given something else.
    """
    word = _word(arguments, flag) if flag in arguments else str(default)
    if not word.isdecimal() or len(word) > 18 or int(word) < default:  # Of 64 bits.
        raise PlanError(f"{flag} is a whole number from {default}; got {word!r:.80}")
    return int(word)


def _brings_none(transfer: str) -> bool:
    others = any(f'"{name}Connector"' in transfer for name in ("Mooncake", "MoRIIO"))
    return others or ('"MultiConnector"' in transfer and '"Nixl' in transfer)


_SIGNS: Mapping[str, Callable[[Arguments], bool]] = {
    "replay": lambda given: "--enable-return-routed-experts" in given,
    "prefill/decode": lambda given: "Nixl" in _word(given, "--kv-transfer-config"),
    "tiers": lambda given: "OffloadingConnector" in _word(given, "--kv-transfer-config"),
    "wide ep": lambda given: (
        "--enable-expert-parallel" in given and number_of(given, "--data-parallel-size") > 1
    ),
    "fp8": lambda given: _word(given, "--quantization") == "fp8",
    "lora": lambda given: "--enable-lora" in given,
    "mtp": lambda given: '"mtp"' in _word(given, "--speculative-config"),
    "ngram": lambda given: '"ngram"' in _word(given, "--speculative-config"),
    "sleep": lambda given: "--enable-sleep-mode" in given,
    "chunked prefill": lambda given: "--enable-chunked-prefill" in given,
    "pipeline": lambda given: number_of(given, "--pipeline-parallel-size") > 1,
    "decode context": lambda given: number_of(given, "--decode-context-parallel-size") > 1,
    "transfer without routes": lambda given: _brings_none(_word(given, "--kv-transfer-config")),
    "no prefix cache": lambda given: "--no-enable-prefix-caching" in given,
}


def features_of(arguments: Arguments) -> tuple[str, ...]:
    """Name what these arguments of an engine ask for. Pure."""
    return tuple(name for name, has in _SIGNS.items() if has(arguments))

"""The arguments of an engine with our tier, and the statistics of the tier in an engine."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.metrics.reader import Counter as EngineCounter
from vllm.v1.metrics.reader import get_metrics_snapshot

from ....errors import PlanError, UnsupportedError, check_counts
from . import spec, tier
from .tier import COUNTED, METRIC

__all__ = [
    "EngineStatistics",
    "command_line",
    "engine_args",
    "engine_statistics",
    "server_args",
    "transfer_settings",
]

# vLLM's name for reused tokens from a tier like ours. Its own pools are "device" and "host".
_TOKENS, _SOURCE = "vllm:prompt_tokens_cached_by_source", "external_unspecified"


def engine_args(
    *,
    primary_bytes: int,
    host_bytes: int,
    disk_path: str | os.PathLike[str] | None = None,
    disk_bytes: int = 0,
    max_staleness: int | None = None,
    evict: str = "versions",
    offload_prompt_only: bool = False,
    routes_bytes_per_token: int = 0,
    persist: str | None = None,
) -> dict[str, Any]:
    """Return arguments that put our store behind vLLM: `LLM(model, **engine_args(...))`. Pure.

    Give all requests of one policy version the same `cache_salt`, and each version its own salt.
    Hashes of pages include the salt, so pages of different weights never mix. The prefix cache of
    vLLM must stay on.

    Each data-parallel replica of the engine has its own pool and its own tiers, so the machine
    needs the three sizes once per replica. Tensor-parallel ranks of a replica share them.

    Args:
        primary_bytes: the size of vLLM's pool in shared memory.
        host_bytes: the bytes of host memory for our pages.
        disk_path: the folder of our pages on disk. Without `persist`, the folder is emptied when
            the engine starts and stops.
        disk_bytes: the largest size of our pages on disk, without the index.
        max_staleness: pages with a larger staleness than this number are evicted first. The version
            comes from `request_args`. With None, all versions are treated alike.
        evict: "versions" uses `VersionAware`, and "rollouts" uses `RolloutAware`. The page
            `docs/kvoffload_eviction.md` says which of them to choose.
        offload_prompt_only: whether to leave out the pages of generated tokens.
        routes_bytes_per_token: with routed-expert capture, the bytes captured per token
            (`bytes_per_token` of `replay.adapters.vllm.RouterShape`). With a number above 0, routes
            are stored with their pages. With 0, routes stay in vLLM.
        persist: a name for the pages on disk, under which the next engine finds these pages. Change
            `persist` if the engine starts with other weights, or after any other change that makes
            the stored pages wrong. Only engines with equal model, layout, parallel sizes and vLLM
            version find the pages. After `update_llm`, or a pause that empties the connector, the
            next engine does not find the pages of this engine. With None, the folder starts empty
            and is emptied at the end.

    Raises:
        PlanError: a size is out of range, or only one of `disk_path` and `disk_bytes` is given.
            Also raised if `evict` is unknown, or if `persist` is given without a disk.
        UnsupportedError: `host_bytes` is not positive.
    """
    if host_bytes <= 0:
        raise UnsupportedError(
            f"host_bytes={host_bytes} is too small, because a disk needs host memory. Raise "
            "host_bytes to the size of at least one page."
        )
    check_counts(primary_bytes=primary_bytes)
    check_counts(least=0, routes_bytes_per_token=routes_bytes_per_token)
    if (disk_path is None) != (disk_bytes == 0) or disk_bytes < 0:
        raise PlanError(
            f"got disk_path={disk_path!r} with disk_bytes={disk_bytes}. Pass both or neither."
        )
    if evict not in tier.EVICT:
        raise PlanError(f"evict must be one of {[*tier.EVICT]}; got {evict!r}")
    if persist is not None and disk_path is None:
        raise PlanError(f"persist={persist!r} needs a disk. Pass disk_path and disk_bytes.")
    ours = {
        "type": "StoreTier",
        "module_path": tier.__name__,
        "host_bytes": host_bytes,
        "disk_path": None if disk_path is None else os.fspath(disk_path),
        "disk_bytes": disk_bytes,
        "max_staleness": max_staleness,
        "evict": evict,
        "persist": persist,
    }
    extra = {
        "spec_name": "StoreOffloadingSpec",
        "spec_module_path": spec.__name__,
        "cpu_bytes_to_use": primary_bytes,
        "offload_prompt_only": offload_prompt_only,
        "secondary_tiers": [ours],
        spec.ROUTES: routes_bytes_per_token,
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=spec.__name__,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True}


def server_args(**settings: Any) -> list[str]:
    """Return a server's command-line arguments. Pure.

    Takes the arguments and raises the errors of `engine_args`.
    """
    return command_line(engine_args(**settings))


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments for `python -m vllm.entrypoints.openai.api_server`. Pure.

    Raises:
        PlanError: a value cannot be written on a command line.
    """
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, KVTransferConfig):
            words += [f"--{flag}", json.dumps(transfer_settings(value))]
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, (str, int, float)):
            words += [f"--{flag}", str(value)]
        else:
            raise PlanError(f"{name} is a {type(value).__name__}, not a number, text or mapping")
    return words


def transfer_settings(config: KVTransferConfig) -> dict[str, Any]:
    """Return the settings that differ from vLLM's defaults, without the engine's own identity."""
    default = KVTransferConfig()
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    return {
        name: value
        for name, value in settings.items()
        if name != "engine_id" and value != getattr(default, name)
    }


@dataclass(frozen=True)
class EngineStatistics:
    """Counts of what our tier did for the engines of this process.

    Args:
        hits: pages that our tier passed to the engine.
        tokens: prompt tokens that the engine did not compute, because their keys and values came
            from the pages that `hits` counts.
        tiers: the counts of `TierStatistics`, by tier name.
    """

    hits: int
    tokens: int
    tiers: Mapping[str, Mapping[str, int]]


def engine_statistics() -> EngineStatistics:
    """Return the counts of the engines of this process. Local.

    Call this function in the process of `LLM` or `AsyncLLM`, with the engine's statistics on
    (`disable_log_stats=False`). The engine reports after each step, so writes that end after the
    last step are counted later.
    """
    tokens, tiers = 0, defaultdict[str, Counter[str]](Counter)
    for metric in get_metrics_snapshot():
        if not isinstance(metric, EngineCounter):
            continue
        if metric.name.startswith(METRIC):
            tiers[metric.labels["tier"]][metric.name.removeprefix(METRIC)] += metric.value
        elif metric.name == _TOKENS and metric.labels["source"] == _SOURCE:
            tokens += metric.value
    counts = {each: {name: tiers[each][name] for name in COUNTED} for each in tiers}
    return EngineStatistics(sum(each["hits"] for each in counts.values()), tokens, counts)

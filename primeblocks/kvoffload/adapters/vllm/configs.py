"""Arguments of engines with vLLM's own KV tiers and transfers, in place of or beside our store.

Each builder returns what `vllm.LLM` and `AsyncEngineArgs` take as keywords. vLLM passes over
settings that it does not know and checks others only when its workers start; here a wrong value is
refused at once. Call a builder once for each engine: the configuration names its engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from vllm.config import KVTransferConfig

from ....errors import PlanError, UnsupportedError

__all__ = ["mooncake", "mooncake_settings", "native", "nixl"]

_CHUNK_ALIGNMENT = 4096  # vLLM rounds each page of its host pool up to this
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def native(
    *,
    cpu_bytes: int,
    disk_path: str | os.PathLike[str] | None = None,
    disk_threads: int = 16,
    eviction_policy: str = "lru",
    store_threshold: int = 0,
    blocks_per_chunk: int = 1,
    offload_prompt_only: bool = False,
    capture: bool = False,
) -> dict[str, Any]:
    """Configure vLLM's offloading to host memory, and to files if a path is given. Pure.

    Its files have no checksum, no quota and no policy version, and stay when the engine ends: use
    a new directory or new `cache_salt`s for each run. `engine_args` has none of these limits. It
    needs a GPU: on the CPU platform vLLM refuses to start it.

    Args:
        cpu_bytes: vLLM's pool in host memory, of all workers together.
        disk_path: directory of vLLM's file tier.
        disk_threads: threads that read, and as many that write.
        eviction_policy: that of the pool, "lru" or "arc".
        store_threshold: offload a page once it was computed this often; at once if below 2.
        blocks_per_chunk: engine pages that are moved as one.
        offload_prompt_only: leave generated tokens out; they are part of the next turn's prompt.
        capture: the engine returns routed experts.

    Raises:
        PlanError: a value that vLLM would refuse or misread.
        UnsupportedError: values that vLLM, or router replay, cannot have together.
    """
    if disk_path is not None and cpu_bytes == 0:
        raise UnsupportedError(
            "cpu_bytes=0: vLLM has no disk alone, pages pass through host memory. Give it room for "
            "the pages of the longest prompts in flight."
        )
    if not _is_int(cpu_bytes) or cpu_bytes < _CHUNK_ALIGNMENT:
        raise PlanError(
            f"cpu_bytes counts bytes and holds a page, at least {_CHUNK_ALIGNMENT}; got "
            f"{cpu_bytes!r}. For 4 GiB pass 4 << 30."
        )
    _one_of("eviction_policy", eviction_policy, ("lru", "arc"))
    _at_least("disk_threads", disk_threads, 1)
    _at_least("store_threshold", store_threshold, 0)
    _at_least("blocks_per_chunk", blocks_per_chunk, 1)
    if disk_path is not None and store_threshold >= 2:
        raise UnsupportedError(
            f"store_threshold={store_threshold} with a disk: vLLM counts uses without a disk only. "
            "Leave it 0, or drop disk_path."
        )
    if disk_path is not None and capture:
        raise UnsupportedError(
            "capture=True with vLLM's file tier: its files hold no routed experts and outlive "
            "those that vLLM keeps in memory; a hit would come without its routes. Use "
            "engine_args, whose pages carry them, or drop disk_path."
        )
    extra: dict[str, Any] = {
        "spec_name": "CPUOffloadingSpec" if disk_path is None else "TieringOffloadingSpec",
        "cpu_bytes_to_use": cpu_bytes,
        "eviction_policy": eviction_policy,
        "blocks_per_chunk": blocks_per_chunk,
        "offload_prompt_only": offload_prompt_only,
    }
    if disk_path is None:
        extra["store_threshold"] = store_threshold
    else:
        threads = {"n_read_threads": disk_threads, "n_write_threads": disk_threads}
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": os.fspath(disk_path), **threads}]
    # Host copies cannot fail in vLLM, and a failed file is a miss: there is no policy to choose.
    return _arguments("OffloadingConnector", "kv_both", extra) | {"enable_prefix_caching": True}


def nixl(
    role: str,
    *,
    push: bool = False,
    backends: Sequence[str] = ("UCX",),
    num_threads: int | None = None,
    lease_s: int = 30,
    bidirectional: bool = False,
    on_load_failure: str = "recompute",
    capture: bool = False,
) -> dict[str, Any]:
    """Configure transfers from engines that prefill to engines that decode, by NIXL. Pure.

    Across machines each engine needs its own `VLLM_NIXL_SIDE_CHANNEL_HOST` in its environment.

    Args:
        role: what this engine does.
        push: prefill writes to decode, instead of decode reading from prefill.
        backends: NIXL's plug-ins.
        num_threads: threads of UCX; each takes scarce doorbell pages of the network card.
        lease_s: seconds that prefill keeps pages that nobody asked for.
        bidirectional: prefill of a later turn reads the pages that decode generated.
        on_load_failure: compute a page again that did not come, or fail the request.
        capture: the engine returns routed experts.

    Raises:
        PlanError: a value that vLLM would refuse or misread.
        UnsupportedError: values that vLLM cannot have together.
    """
    _one_of("role", role, ("prefill", "decode"))
    _one_of("on_load_failure", on_load_failure, ("recompute", "fail"))
    if isinstance(backends, str) or not backends or not all(backends):
        raise PlanError(f'backends is a list of names, such as ["UCX"]; got {backends!r}')
    if not _is_int(lease_s) or lease_s < 6:
        raise PlanError(
            f"lease_s={lease_s!r}: vLLM renews a lease every lease_s // 6 seconds; pass 6 or more"
        )
    if num_threads is not None:
        _at_least("num_threads", num_threads, 1)
        if list(backends) != ["UCX"]:
            raise UnsupportedError(
                f"num_threads={num_threads} with backends={list(backends)}: vLLM passes it to UCX "
                "alone. Drop one of the two."
            )
    if push and bidirectional:
        raise UnsupportedError("push=True with bidirectional=True: vLLM's push goes one way only")
    if capture:
        raise UnsupportedError(
            'capture=True with NIXL: vLLM refuses it ("PD auxiliary output is not supported"), the '
            "routes of a prefill do not reach the decoding engine. Let one engine do both."
        )
    extra: dict[str, Any] = {
        "backends": list(backends),
        "kv_lease_duration": lease_s,
        "bidirectional_kv_xfer": bidirectional,
    }
    if num_threads is not None:
        extra["num_threads"] = num_threads
    connector = "NixlPushConnector" if push else "NixlConnector"
    return _arguments(connector, _ROLES[role], extra, on_load_failure)


def mooncake(
    run: str,
    *,
    role: str = "both",
    save_generated: bool = True,
    lookup_async: bool = False,
    preferred_segment: str | None = None,
    on_load_failure: str = "recompute",
    capture: bool = False,
) -> dict[str, Any]:
    """Configure a pool of pages that several engines share, in Mooncake's store. Pure.

    The engine finds the store by the file that `MOONCAKE_CONFIG_PATH` names (`mooncake_settings`).

    Args:
        run: put in front of every key. The store outlives engines and knows a model by the last
            part of its path; two runs with one name would use each other's pages.
        role: "decode" reads and saves what it generates, "prefill" and "both" save all.
        save_generated: save generated tokens; they are part of the next turn's prompt.
        lookup_async: query the store without holding up the engine's steps.
        preferred_segment: the store's node that takes new pages.
        on_load_failure: compute a page again that did not come, or fail the request.
        capture: the engine returns routed experts.

    Raises:
        PlanError: a value that vLLM would refuse or misread.
        UnsupportedError: capture.
    """
    _one_of("role", role, tuple(_ROLES))
    _one_of("on_load_failure", on_load_failure, ("recompute", "fail"))
    if not run or "@" in run:  # vLLM joins the parts of a key with it
        raise PlanError(f'run names this run in every key, without "@"; got {run!r}')
    if preferred_segment is not None and not preferred_segment.strip():
        raise PlanError(f"preferred_segment is a node's name or None; got {preferred_segment!r}")
    if capture:
        raise UnsupportedError(
            "capture=True with Mooncake: vLLM accepts it, but a page that another engine computed "
            "has no routed experts here. Use engine_args, whose pages carry them."
        )
    extra = {
        "cache_prefix": run,
        "save_decode_cache": save_generated,
        "lookup_async": lookup_async,
    }
    if preferred_segment is not None:
        extra["preferred_segment"] = preferred_segment
    arguments = _arguments("MooncakeStoreConnector", _ROLES[role], extra, on_load_failure)
    return arguments | {"enable_prefix_caching": True}


def mooncake_settings(
    *,
    master: str,
    segment_bytes: int,
    buffer_bytes: int = 4 << 30,
    metadata: str = "P2PHANDSHAKE",
    protocol: str = "rdma",
    device: str = "",
    disk: bool = False,
) -> str:
    """Return the JSON text of the file that an engine's `MOONCAKE_CONFIG_PATH` names. Pure.

    Args:
        master: `host:port` of the store's master.
        segment_bytes: memory that each worker adds to the pool; 0 where a Mooncake client owns it.
        buffer_bytes: a worker's buffer for transfers.
        metadata: the metadata server; the default needs none.
        protocol: that of the transfers.
        device: RDMA devices, separated by commas; empty lets Mooncake choose.
        disk: the pool's owner has a disk behind its memory.

    Raises:
        PlanError: a value that vLLM or Mooncake would refuse.
    """
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise PlanError(f'master is "host:port"; got {master!r}')
    _at_least("segment_bytes", segment_bytes, 0)
    _at_least("buffer_bytes", buffer_bytes, 1)
    _one_of("protocol", protocol, ("rdma", "tcp"))
    if device and protocol != "rdma":
        raise PlanError(f'device={device!r} with protocol={protocol!r}: devices are for "rdma"')
    settings = {
        "metadata_server": metadata,
        "master_server_address": master,
        "protocol": protocol,
        "device_name": device,
        "mode": "embedded" if segment_bytes else "standalone-store",
        "global_segment_size": segment_bytes,
        "local_buffer_size": buffer_bytes,
        "enable_offload": disk,
    }
    return json.dumps(settings, indent=2)


def _arguments(
    connector: str, role: str, extra: dict[str, Any], on_load_failure: str = "fail"
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": on_load_failure,
    }
    return {"kv_transfer_config": KVTransferConfig(**settings)}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(name: str, value: int, least: int) -> None:
    if not _is_int(value) or value < least:
        raise PlanError(f"{name} is a whole number from {least}; got {value!r}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} is one of {', '.join(known)}; got {value!r}")

"""Engine arguments for vLLM's own KV tiers and transfers.

We have never run an engine with arguments from this module, because vLLM's workers need a GPU.
Unknown settings are ignored by vLLM, and other settings are checked only when vLLM's workers start.
If a value is wrong, the builders of this module raise an error immediately. `OPTIONS` lists the
options of each builder. Call a builder once per engine, because each configuration contains the id
of one engine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from ...errors import PlanError, UnsupportedError, needs

with needs("vllm", extra="vllm"):
    from vllm.config import KVTransferConfig

from ...kvoffload.adapters.vllm.engine import transfer_settings

__all__ = ["OPTIONS", "Option", "mooncake", "mooncake_settings", "multi", "native", "nixl"]

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
_REQUIRED: Any = object()


class Option(NamedTuple):
    """An option of a builder.

    Args:
        name: vLLM's name of the option, or "" if the builder converts the option to other settings.
        allowed: the allowed values. An int is the smallest allowed integer, a tuple lists the
            allowed values, and a str is a regular expression. A type (`bool`, `str` or `list`) is
            the required type of the value, and `list` requires a list of names. None allows any
            value.
        meaning: a description of the option, or of the text that a regular expression matches.
        default: the default value. A builder accepts the value None only if None is the default.
        hint: a text at the end of the error message for a value that is not allowed.
    """

    name: str
    allowed: Any
    meaning: str
    default: Any = _REQUIRED
    hint: str = ""


_CAPTURE = Option("", bool, "the engine returns routed experts", False)
_ON_FAILURE = Option("", ("recompute", "fail"), "what follows a page that is lost", "recompute")
_4_GIB = " For 4 GiB pass 4 << 30."
_LEASE = " vLLM renews a lease every lease_s // 6 seconds."
OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "native": {
        # vLLM rounds each page of its host pool up to 4096.
        "cpu_bytes": Option("cpu_bytes_to_use", 4096, "pool of all workers", hint=_4_GIB),
        "disk_path": Option("", None, "directory of vLLM's file tier", None),
        "disk_threads": Option("", 1, "threads that read, and as many that write", 16),
        "eviction_policy": Option("eviction_policy", ("lru", "arc"), "that of the pool", "lru"),
        "store_threshold": Option("", 0, "computations of a page before it is offloaded", 0),
        "blocks_per_chunk": Option("blocks_per_chunk", 1, "engine pages that move as one", 1),
        "offload_prompt_only": Option(
            "offload_prompt_only", bool, "leave generated tokens out", False
        ),
        "capture": _CAPTURE,
    },
    "nixl": {
        "role": Option("", ("prefill", "decode"), "what this engine does"),
        "push": Option("", bool, "prefill writes to decode, instead of decode reading", False),
        "backends": Option("backends", list, "NIXL's plug-ins", ("UCX",)),
        "num_threads": Option("num_threads", 1, "threads of UCX; each takes doorbell pages", None),
        "lease_s": Option("kv_lease_duration", 6, "time that unread pages are kept", 30, _LEASE),
        "bidirectional": Option("bidirectional_kv_xfer", bool, "prefill reads from decode", False),
        "on_load_failure": _ON_FAILURE,
    },
    "mooncake": {
        # vLLM joins the parts of a key with "@".
        "run": Option("cache_prefix", "[^@]+", 'text in front of every key, without "@"'),
        "role": Option("", tuple(_ROLES), "decode saves what it generates, others all", "both"),
        "save_generated": Option("save_decode_cache", bool, "it begins the next prompt", True),
        "lookup_async": Option("lookup_async", bool, "ask without holding up steps", False),
        "preferred_segment": Option("preferred_segment", r".*\S.*", "a node for new pages", None),
        "on_load_failure": _ON_FAILURE,
        "capture": _CAPTURE,
    },
    "mooncake_settings": {
        "master": Option("master_server_address", r".+:\d+", '"host:port"'),
        "segment_bytes": Option("global_segment_size", 0, "memory that each worker adds"),
        "buffer_bytes": Option("local_buffer_size", 1, "a worker's buffer for transfers", 4 << 30),
        "metadata": Option("metadata_server", str, "the metadata server", "P2PHANDSHAKE"),
        "protocol": Option("protocol", ("rdma", "tcp"), "that of the transfers", "rdma"),
        "device": Option("device_name", str, "RDMA devices, separated by commas", ""),
        "disk": Option("enable_offload", bool, "the pool's owner has a disk", False),
    },
}

_Given = dict[str, Any]
# Values that vLLM, or router replay, cannot have together.
_CLASHES: Mapping[str, Mapping[str, Callable[[_Given], Any]]] = {
    "native": {
        "store_threshold={store_threshold} with a disk: vLLM counts uses without a disk only. "
        "Leave it 0, or drop disk_path.": lambda it: it["disk_path"] and it["store_threshold"] > 1,
        "capture=True with vLLM's file tier: its files hold no routed experts and outlive "
        "those that vLLM keeps in memory; a hit would come without its routes. Use engine_args, "
        "whose pages carry them, or drop disk_path.": lambda it: it["disk_path"] and it["capture"],
    },
    "nixl": {
        "num_threads={num_threads} with backends={backends}: vLLM passes it to UCX alone. Drop one "
        "of the two.": lambda it: it["num_threads"] and list(it["backends"]) != ["UCX"],
        "push=True with bidirectional=True: vLLM's push goes one way only": lambda it: (
            it["push"] and it["bidirectional"]
        ),
    },
    "mooncake": {
        "capture=True with Mooncake: vLLM accepts it, but a page that another engine computed "
        "has no routed experts here. Use engine_args, whose pages carry them.": (
            itemgetter("capture")
        ),
    },
}


def native(**options: Any) -> dict[str, Any]:
    """Configure vLLM's offloading to host memory, and to files if you pass `disk_path`. Pure.

    Unlike the pages that `kvoffload.adapters.vllm.engine_args` puts on disk, vLLM's files have no
    checksum, no quota and no policy version. The files of vLLM stay on disk after the engine ends,
    so use a new directory or new values of `cache_salt` for each training run. The engine needs a
    GPU, because vLLM refuses `native` offloading on the CPU platform.

    Raises:
        PlanError: vLLM would refuse or misread a value.
        UnsupportedError: vLLM or router replay does not support the combination of options.
    """
    if options.get("disk_path") is not None and options.get("cpu_bytes") == 0:
        raise UnsupportedError(
            "cpu_bytes=0: vLLM cannot use a disk without host memory. Set cpu_bytes to the size "
            "of the pages of the longest prompts in flight."
        )
    given, extra = _read("native", options)
    if given["disk_path"] is None:
        extra |= {"spec_name": "CPUOffloadingSpec", "store_threshold": given["store_threshold"]}
    else:
        names = ("n_read_threads", "n_write_threads")
        tier = dict.fromkeys(names, given["disk_threads"])
        tier |= {"type": "fs", "root_dir": os.fspath(given["disk_path"])}
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    # Host copies cannot fail in vLLM, and a failed file is a miss: there is no policy to choose.
    transfer = _transfer("OffloadingConnector", "kv_both", extra, "fail")
    return transfer | {"enable_prefix_caching": True}


def nixl(role: str, **options: Any) -> dict[str, Any]:
    """Configure NIXL transfers from engines that prefill to engines that decode. Pure.

    If engines run on several machines, each engine needs its own value of the environment variable
    `VLLM_NIXL_SIDE_CHANNEL_HOST`.

    Raises:
        PlanError: vLLM would refuse or misread a value.
        UnsupportedError: vLLM does not support the combination of options.
    """
    given, extra = _read("nixl", {"role": role, **options})
    extra["backends"] = list(given["backends"])
    connector = "NixlPushConnector" if given["push"] else "NixlConnector"
    return _transfer(connector, _ROLES[role], extra, given["on_load_failure"])


def mooncake(run: str, **options: Any) -> dict[str, Any]:
    """Configure a pool of pages in Mooncake's store that several engines share. Pure.

    Save the text from `mooncake_settings` in a file, and set the engine's environment variable
    `MOONCAKE_CONFIG_PATH` to the path of the file. The store keeps pages after an engine ends, and
    identifies a model by the last part of the model's path. Pass a different `run` per training
    run, because two training runs with one value of `run` would use each other's pages.

    Raises:
        PlanError: vLLM would refuse or misread a value.
        UnsupportedError: `capture` is True. Pages that other engines computed would have no routes.
    """
    given, extra = _read("mooncake", {"run": run, **options})
    role, policy = _ROLES[given["role"]], given["on_load_failure"]
    transfer = _transfer("MooncakeStoreConnector", role, extra, policy)
    return transfer | {"enable_prefix_caching": True}


def mooncake_settings(**options: Any) -> str:
    """Return the JSON text of the file that an engine's `MOONCAKE_CONFIG_PATH` names. Pure.

    Pass `segment_bytes=0` if a separate Mooncake client owns the memory of the store.

    Raises:
        PlanError: vLLM or Mooncake would refuse a value.
    """
    given, settings = _read("mooncake_settings", options)
    if given["device"] and given["protocol"] != "rdma":
        raise PlanError(f'device={given["device"]!r}: only protocol="rdma" has devices')
    settings["mode"] = "embedded" if given["segment_bytes"] else "standalone-store"
    return json.dumps(settings, indent=2)


def multi(*parts: Mapping[str, Any], on_load_failure: str = "recompute") -> dict[str, Any]:
    """Combine connectors in one engine: `multi(nixl("prefill"), native(cpu_bytes=...))`. Pure.

    The engine saves pages with all connectors. A request loads pages from the first connector that
    has *any* of its tokens, and the engine computes the other tokens. Put NIXL first, because a
    short prefix in an earlier cache would prevent NIXL from loading the whole prompt.

    Args:
        parts: results of `native`, `nixl`, `mooncake` and `engine_args`.
        on_load_failure: the load-failure policy of all parts, in place of each part's own policy.

    Raises:
        PlanError: there are fewer than two parts, a part is not the result of a builder, or two
            parts need different values of one engine argument.
        UnsupportedError: vLLM does not support this combination of parts, or this order.
    """
    if on_load_failure not in ("recompute", "fail"):
        raise PlanError(f"on_load_failure is recompute or fail; got {on_load_failure!r}.")
    if len(parts) < 2:
        raise PlanError(
            f"multi needs at least two parts; got {len(parts)}. Do not call multi for one part."
        )
    joined: dict[str, Any] = {}
    children = []
    for part in parts:
        rest = dict(part)
        config = rest.pop("kv_transfer_config", None)
        if not isinstance(config, KVTransferConfig):
            raise PlanError(f"no KVTransferConfig in {part!r}. Pass the result of a builder.")
        children.append({**transfer_settings(config), "kv_load_failure_policy": on_load_failure})
        for key in rest.keys() & joined.keys():
            if rest[key] != joined[key]:
                raise PlanError(f"two parts want {key}={joined[key]!r} and {rest[key]!r}")
        joined |= rest
    _check_order([child["kv_connector"] for child in children])
    return joined | _transfer(
        "MultiConnector", "kv_both", {"connectors": children}, on_load_failure
    )


def _read(builder: str, options: Mapping[str, Any]) -> tuple[_Given, _Given]:
    """Return all options of a builder, and the options that vLLM knows, by vLLM's names."""
    table = OPTIONS[builder]
    if unknown := options.keys() - table.keys():
        raise PlanError(f"{builder} takes {', '.join(table)}; got {', '.join(sorted(unknown))}")
    given = {name: options.get(name, option.default) for name, option in table.items()}
    for name, value in given.items():
        if value is _REQUIRED:
            raise PlanError(f"{builder} needs {name}: {table[name].meaning}")
        if value is not table[name].default and (wanted := _wanted(table[name], value)):
            raise PlanError(f"{name} is {wanted}; got {value!r}.{table[name].hint}")
    for message, clash in _CLASHES.get(builder, {}).items():
        if clash(given):
            raise UnsupportedError(message.format(**given))
    named = {option.name: given[name] for name, option in table.items() if option.name}
    return given, {name: value for name, value in named.items() if value is not None}


def _wanted(option: Option, value: Any) -> str | None:
    """Return what a value should be, or None if the value is allowed."""
    match option.allowed:
        case int() as least:
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            wanted = f"a whole number from {least}"
        case tuple() as known:
            fits, wanted = value in known, f"one of {', '.join(known)}"
        case str() as pattern:
            fits = isinstance(value, str) and bool(re.fullmatch(pattern, value))
            wanted = option.meaning
        case kind if kind is list:
            fits = not isinstance(value, str) and bool(value) and all(value)
            wanted = 'a list of names, such as ["UCX"]'
        case None:
            fits, wanted = True, ""
        case kind:
            fits, wanted = isinstance(value, kind), f"of type {kind.__name__}"
    return None if fits else wanted


def _check_order(names: list[str]) -> None:
    if "MultiConnector" in names or len(set(names)) < len(names):
        raise UnsupportedError(
            f"parts {names}: vLLM names its statistics after the kinds of connector, and two "
            "offloading pools would use the same file. Use each kind at most once, and do not "
            "nest multi."
        )
    if late := [name for name in names[1:] if name.startswith("Nixl")]:
        raise UnsupportedError(
            f"parts {names}: {late[0]} would load only prompts of which no earlier part has a "
            "token. Put this part first."
        )


def _transfer(connector: str, role: str, extra: _Given, on_load_failure: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": on_load_failure,
    }
    return {"kv_transfer_config": KVTransferConfig(**settings)}

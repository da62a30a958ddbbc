"""Several connectors in one engine, and engine arguments as words of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.config import KVTransferConfig

from ....errors import PlanError, UnsupportedError
from .engine import engine_args

__all__ = ["command_line", "multi", "server_args"]


def multi(*parts: Mapping[str, Any], on_load_failure: str = "recompute") -> dict[str, Any]:
    """Combine connectors in one engine: `multi(nixl("prefill"), native(cpu_bytes=...))`. Pure.

    Saves go to all. A request loads from the first part that has *any* of its tokens and computes
    the rest, so NIXL comes first: a short prefix in a cache would keep a whole prompt from it.

    Args:
        parts: what `native`, `nixl`, `mooncake` and `engine_args` return.
        on_load_failure: policy of all parts; replaces their own.

    Raises:
        PlanError: fewer than two parts, a part that no builder returned, or parts that
            want different values of one argument.
        UnsupportedError: parts that vLLM cannot have together, or not in this order.
    """
    if on_load_failure not in ("recompute", "fail"):
        raise PlanError(f"on_load_failure is recompute or fail; got {on_load_failure!r}")
    if len(parts) < 2:
        raise PlanError(f"multi joins two parts or more; got {len(parts)}. Pass one as it is.")
    joined: dict[str, Any] = {}
    children = []
    for part in parts:
        config, rest = _split(part)
        children.append({**_settings(config), "kv_load_failure_policy": on_load_failure})
        for key in rest.keys() & joined.keys():
            if rest[key] != joined[key]:
                raise PlanError(f"two parts want {key}={joined[key]!r} and {rest[key]!r}")
        joined |= rest
    _check_order([child["kv_connector"] for child in children])
    settings: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
        "kv_load_failure_policy": on_load_failure,
    }
    return joined | {"kv_transfer_config": KVTransferConfig(**settings)}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as words for `python -m vllm.entrypoints.openai.api_server`. Pure.

    Raises:
        PlanError: a value that has no form on a command line.
    """
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, KVTransferConfig):
            words += [f"--{flag}", json.dumps(_settings(value))]
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, (str, int, float)):
            words += [f"--{flag}", str(value)]
        else:
            raise PlanError(f"{name} is a {type(value).__name__}, which is no word; got {value!r}")
    return words


def server_args(**settings: Any) -> list[str]:
    """Return `engine_args` as words of a server's command line; same arguments and errors. Pure."""
    return command_line(engine_args(**settings))


def _check_order(names: list[str]) -> None:
    if "MultiConnector" in names or len(set(names)) < len(names):
        raise UnsupportedError(
            f"parts {names}: vLLM keeps statistics by these names, and two offloading pools of one "
            "engine would be one file. Use each kind once, and do not nest."
        )
    if late := [name for name in names[1:] if name.startswith("Nixl")]:
        raise UnsupportedError(
            f"parts {names}: {late[0]} would load only prompts of which no part in front has a "
            "token. Put it first."
        )


def _split(part: Mapping[str, Any]) -> tuple[KVTransferConfig, dict[str, Any]]:
    rest = dict(part)
    config = rest.pop("kv_transfer_config", None)
    if not isinstance(config, KVTransferConfig):
        raise PlanError(f"no KVTransferConfig in {part!r}: pass what a builder returned")
    return config, rest


def _settings(config: KVTransferConfig) -> dict[str, Any]:
    """Return the settings that differ from vLLM's defaults, without the engine's own identity."""
    default = KVTransferConfig()
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    return {
        name: value
        for name, value in settings.items()
        if name != "engine_id" and value != getattr(default, name)
    }

"""Run by test_vllm_configs.py in its own process: `vllm_configs_job.py FOLDER`.

Gives what our builders return to vLLM's own configuration, command line and factories, as far as
they go without a GPU, NIXL or Mooncake: to the connector of the scheduler.
Writes FOLDER/facts.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from primeblocks.kvoffload.adapters import vllm as adapter
from primeblocks.plugins.vllm import register

MIB = 1 << 20
LAYERS, HEADS, WIDTH, PAGE_TOKENS = 4, 2, 32, 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": PAGE_TOKENS,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}


class Engine:
    """What an engine's scheduler makes of some arguments."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        self.config = AsyncEngineArgs(model=model, **ENGINE, **arguments).create_engine_config()
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.SCHEDULER, pages(self.config)
        )

    def scheduler(self) -> Any:
        connector: Any = self.connector
        return connector.connector_scheduler


def pages(config: VllmConfig) -> Any:
    spec = FullAttentionSpec(
        block_size=PAGE_TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32
    )
    layers: dict[str, KVCacheSpec] = {f"layers.{index}": spec for index in range(LAYERS)}
    (found,) = get_kv_cache_configs(config, [layers], [8 * MIB])
    config.cache_config.num_gpu_blocks = found.num_blocks
    return found


def offloading(scheduler: Any) -> dict[str, Any]:
    """What arrived in vLLM's offloading: the pool, and the tiers behind it."""
    manager = scheduler.manager
    pool = getattr(manager, "primary_tier", manager)
    files = [tier for tier in getattr(manager, "secondary_tiers", []) if tier.tier_type == "fs"]
    return {
        "manager": type(manager).__name__,
        "chunks": pool._num_chunks,
        "policy": type(pool._policy).__name__,
        "store_threshold": pool.store_threshold,
        "blocks_per_chunk": scheduler.config.blocks_per_chunk,
        "offload_prompt_only": scheduler.config.offload_prompt_only,
        "threads": [len(tier._pool._threads) for tier in files],
    }


def transfer(scheduler: Any) -> dict[str, Any]:
    return {
        "lease_s": scheduler._kv_lease_duration,
        "bidirectional": scheduler.is_bidirectional_kv_xfer_enabled,
        "mode": getattr(scheduler, "_TRANSFER_MODE", "pull"),
    }


def pool(scheduler: Any) -> dict[str, Any]:
    names = "kv_role", "save_decode_cache", "lookup_async", "load_async", "enable_lookup"
    return {name: getattr(scheduler, name) for name in names}


def accepted(model: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def case(name: str, arguments: dict[str, Any], *views: Any) -> None:
        config = arguments["kv_transfer_config"]
        engine = Engine(model, arguments)
        parts = getattr(engine.connector, "sub_connectors", [engine.connector])
        found[name] = {
            "connectors": [type(part).__name__ for part in parts],
            "saw": [
                view(part.connector_scheduler) for view, part in zip(views, parts, strict=True)
            ],
            "policy": vars(engine.config.kv_transfer_config)["kv_load_failure_policy"],
            "hybrid": KVConnectorFactory.supports_hma_config(config),
            "prefix_caching": engine.config.cache_config.enable_prefix_caching,
            "same_on_command_line": parsed(model, arguments) == bare(config),
        }
        engine.connector.shutdown()

    disk: dict[str, Any] = {"disk_path": folder / "disk", "disk_threads": 3}
    some: dict[str, Any] = {"store_threshold": 2, "eviction_policy": "arc", "blocks_per_chunk": 2}
    ours = adapter.engine_args(primary_bytes=MIB, host_bytes=MIB)
    case("cpu", adapter.native(cpu_bytes=MIB, **some), offloading)
    case("disk", adapter.native(cpu_bytes=MIB, offload_prompt_only=True, **disk), offloading)
    case("prefill", adapter.nixl("prefill", lease_s=60, bidirectional=True), transfer)
    case("decode", adapter.nixl("decode", push=True, on_load_failure="fail"), transfer)
    case("pool", adapter.mooncake("run-1", role="decode", lookup_async=True), pool)
    both = adapter.multi(adapter.nixl("prefill"), adapter.native(cpu_bytes=MIB, **disk))
    case("multi", both, transfer, offloading)
    case("multi_ours", adapter.multi(adapter.nixl("decode"), ours), transfer, offloading)
    three = adapter.multi(adapter.nixl("decode"), adapter.mooncake("run-1", role="decode"), ours)
    case("three", three, transfer, pool, offloading)
    return found


def bare(config: KVTransferConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "engine_id"}


def parsed(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The transfer that vLLM's server reads from our words."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", model, *adapter.command_line(arguments)]
    read = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    assert read.enable_prefix_caching == arguments.get("enable_prefix_caching")
    return bare(read.kv_transfer_config)


def refused(model: str, folder: Path) -> dict[str, str]:
    """What vLLM says to the values that our builders refuse."""
    native = "OffloadingConnector", "kv_both"
    tier = {"type": "fs", "root_dir": str(folder / "refused")}
    tiered = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    size = {"cpu_bytes_to_use": MIB}
    capture = {"enable_return_routed_experts": True}
    prefill = adapter.nixl("prefill")
    cases: dict[str, Any] = {
        "no memory": (*native, tiered | {"cpu_bytes_to_use": 0}),
        "policy": (*native, size | {"eviction_policy": "fifo"}),
        "threshold": (*native, size | tiered | {"store_threshold": 2}),
        "chunk": (*native, size | {"blocks_per_chunk": 0}),
        "old name": (*native, size | tiered | {"secondary_tiers": [tier | {"type": "fs_python"}]}),
        "push": ("NixlPushConnector", "kv_producer", {"bidirectional_kv_xfer": True}),
        "misspelt": (*native, size | tiered | {"secondary_tiers": [tier | {"root": "x"}]}),
    }
    found = {}
    for name, (connector, role, extra) in cases.items():
        config = KVTransferConfig(
            kv_connector=connector, kv_role=role, kv_connector_extra_config=extra
        )
        found[name] = complaint(model, {"kv_transfer_config": config})
    found["capture"] = complaint(model, prefill | capture)
    found["capture in multi"] = complaint(
        model, adapter.multi(prefill, adapter.native(cpu_bytes=MIB)) | capture
    )
    return found


def complaint(model: str, arguments: dict[str, Any]) -> str:
    try:
        Engine(model, arguments)
    except Exception as error:  # vLLM raises bare Exception for some of them.
        return str(error)
    return ""


def unnoticed(model: str) -> dict[str, Any]:
    """What vLLM lets pass, and what becomes of it."""

    def extra(connector: str, role: Any, settings: dict[str, Any]) -> dict[str, Any]:
        config = KVTransferConfig(
            kv_connector=connector, kv_role=role, kv_connector_extra_config=settings
        )
        return {"kv_transfer_config": config}

    small = Engine(model, extra("OffloadingConnector", "kv_both", {"cpu_bytes_to_use": 4}))
    lease = Engine(model, extra("NixlConnector", "kv_producer", {"kv_lease_duration": 5}))
    other = Engine(
        model, extra("OffloadingConnector", "kv_both", {"cpu_bytes_to_use": MIB, "evict": "arc"})
    )
    return {
        "chunks": offloading(small.scheduler())["chunks"],
        "heartbeat_s": lease.scheduler()._heartbeat_interval,
        "policy": offloading(other.scheduler())["policy"],
    }


def main(folder: Path) -> None:
    register()
    model = str(folder / "model")
    facts = {
        "accepted": accepted(model, folder),
        "refused": refused(model, folder),
        "unnoticed": unnoticed(model),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

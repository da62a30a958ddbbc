"""What vLLM's own configuration, command line and factories make of what our builders return.

As far as they go without a GPU, NIXL or Mooncake: to the connector of the scheduler.
"""

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from tests.engine_job import call

MIB, GIB = 1 << 20, 1 << 30
LAYERS, HEADS, WIDTH, PAGE_TOKENS = 4, 2, 32, 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": PAGE_TOKENS,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def adapter():
    return _adapter()


def _adapter() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module("primeblocks.kvoffload.adapters.vllm")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    tiny_models.save("qwen3_moe", folder / "model", seed=0, dtype="float32")
    return call(_see, folder)


def _see(folder: Path) -> dict[str, Any]:
    register()
    model = str(folder / "model")
    return {
        "accepted": _accepted(model, folder),
        "refused": _refused(model, folder),
        "unnoticed": _unnoticed(model),
        "expected": _expected(model),
    }


class Engine:
    """What an engine's scheduler makes of some arguments."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.engine.arg_utils import AsyncEngineArgs

        self.config = AsyncEngineArgs(model=model, **ENGINE, **arguments).create_engine_config()
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.SCHEDULER, _pages(self.config)
        )

    def scheduler(self) -> Any:
        connector: Any = self.connector
        return connector.connector_scheduler


def _pages(config: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=PAGE_TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32
    )
    layers = {f"layers.{index}": spec for index in range(LAYERS)}
    (found,) = get_kv_cache_configs(config, [layers], [8 * MIB])
    config.cache_config.num_gpu_blocks = found.num_blocks
    return found


def _offloading(scheduler: Any) -> dict[str, Any]:
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


def _transfer(scheduler: Any) -> dict[str, Any]:
    return {
        "lease_s": scheduler._kv_lease_duration,
        "bidirectional": scheduler.is_bidirectional_kv_xfer_enabled,
        "mode": getattr(scheduler, "_TRANSFER_MODE", "pull"),
    }


def _pool(scheduler: Any) -> dict[str, Any]:
    names = "kv_role", "save_decode_cache", "lookup_async", "load_async", "enable_lookup"
    return {name: getattr(scheduler, name) for name in names}


def _accepted(model: str, folder: Path) -> dict[str, Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    adapter, found = _adapter(), {}

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
            "same_on_command_line": _parsed(model, arguments) == _bare(config),
        }
        engine.connector.shutdown()

    disk: dict[str, Any] = {"disk_path": folder / "disk", "disk_threads": 3}
    some: dict[str, Any] = {"store_threshold": 2, "eviction_policy": "arc", "blocks_per_chunk": 2}
    ours = adapter.engine_args(primary_bytes=MIB, host_bytes=MIB)
    case("cpu", adapter.native(cpu_bytes=MIB, **some), _offloading)
    case("disk", adapter.native(cpu_bytes=MIB, offload_prompt_only=True, **disk), _offloading)
    case("prefill", adapter.nixl("prefill", lease_s=60, bidirectional=True), _transfer)
    case("decode", adapter.nixl("decode", push=True, on_load_failure="fail"), _transfer)
    case("pool", adapter.mooncake("run-1", role="decode", lookup_async=True), _pool)
    both = adapter.multi(adapter.nixl("prefill"), adapter.native(cpu_bytes=MIB, **disk))
    case("multi", both, _transfer, _offloading)
    case("multi_ours", adapter.multi(adapter.nixl("decode"), ours), _transfer, _offloading)
    three = adapter.multi(adapter.nixl("decode"), adapter.mooncake("run-1", role="decode"), ours)
    case("three", three, _transfer, _pool, _offloading)
    return found


def _bare(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "engine_id"}


def _parsed(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The transfer that vLLM's server reads from our words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", model, *_adapter().command_line(arguments)]
    read = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    assert read.enable_prefix_caching == arguments.get("enable_prefix_caching")
    return _bare(read.kv_transfer_config)


def _refused(model: str, folder: Path) -> dict[str, str]:
    """What vLLM says to the values that our builders refuse."""
    adapter, native = _adapter(), ("OffloadingConnector", "kv_both")
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
    found = {name: _complaint(model, _stock(*case)) for name, case in cases.items()}
    found["capture"] = _complaint(model, prefill | capture)
    found["capture in multi"] = _complaint(
        model, adapter.multi(prefill, adapter.native(cpu_bytes=MIB)) | capture
    )
    return found


def _stock(connector: str, role: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments that none of our builders made."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector=connector, kv_role=role, kv_connector_extra_config=settings
    )
    return {"kv_transfer_config": config}


def _complaint(model: str, arguments: dict[str, Any]) -> str:
    try:
        Engine(model, arguments)
    except Exception as error:  # vLLM raises bare Exception for some of them.
        return str(error)
    return ""


def _unnoticed(model: str) -> dict[str, Any]:
    """What vLLM lets pass, and what becomes of it."""
    small = Engine(model, _stock("OffloadingConnector", "kv_both", {"cpu_bytes_to_use": 4}))
    lease = Engine(model, _stock("NixlConnector", "kv_producer", {"kv_lease_duration": 5}))
    other = Engine(
        model, _stock("OffloadingConnector", "kv_both", {"cpu_bytes_to_use": MIB, "evict": "arc"})
    )
    return {
        "chunks": _offloading(small.scheduler())["chunks"],
        "heartbeat_s": lease.scheduler()._heartbeat_interval,
        "policy": _offloading(other.scheduler())["policy"],
    }


def _expected(model: str) -> dict[str, Any]:
    """Pages that our manager expects a queued request to load, the engine having its first."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
    ours = _adapter().engine_args(primary_bytes=MIB, host_bytes=MIB)
    found = {}
    several = _adapter().multi(_adapter().nixl("decode"), ours)
    for name, arguments in {"alone": ours, "in multi": several}.items():
        engine = Engine(model, arguments)
        cache = SimpleNamespace(find_longest_cache_hit=lambda hashes, most: ((), PAGE_TOKENS, 0))
        connector = getattr(engine.connector, "sub_connectors", [engine.connector])[-1]
        connector._kv_cache_manager = SimpleNamespace(coordinator=cache)
        tokens = list(range(3 * PAGE_TOKENS + 1))
        request = Request("r", tokens, SamplingParams(), None, block_hasher=hasher)
        engine.connector.on_new_request(request)
        wanted = connector.connector_scheduler.manager._queue["r"].wanted()
        hashes = [get_offload_block_hash(key) for key in wanted]
        found[name] = [hashes == request.block_hashes[1:], len(hashes), _rests(connector)]
        engine.connector.shutdown()
    return found


def _rests(connector: Any) -> list[int]:
    """The numbers of tokens, 0 or 1, that steps in which our manager rests compute."""
    from vllm.v1.core.sched.output import SchedulerOutput

    rested: list[int] = []
    connector.connector_scheduler.manager.rest = lambda: rested.append(tokens)
    for tokens in (0, 1):
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = tokens
        connector.build_connector_meta(output)
    return rested


POOL = {"chunks": 16, "policy": "LRUCachePolicy", "store_threshold": 1, "blocks_per_chunk": 1}
OURS = {**POOL, "manager": "StoreManager", "offload_prompt_only": False, "threads": []}
STOCK = {**POOL, "manager": "TieringOffloadingManager", "threads": [6]}
SHARED = {"kv_role": "kv_consumer", "save_decode_cache": True, "load_async": True}
PULL = {"lease_s": 30, "bidirectional": False, "mode": "pull"}
ACCEPTED = {
    "cpu": [
        {
            "manager": "CPUOffloadingManager",
            "chunks": 8,
            "policy": "ARCCachePolicy",
            "store_threshold": 2,
            "blocks_per_chunk": 2,
            "offload_prompt_only": False,
            "threads": [],
        }
    ],
    "disk": [{**STOCK, "offload_prompt_only": True}],
    "prefill": [{"lease_s": 60, "bidirectional": True, "mode": "pull"}],
    "decode": [{"lease_s": 30, "bidirectional": False, "mode": "push"}],
    "pool": [{**SHARED, "lookup_async": True, "enable_lookup": True}],
    "multi": [PULL, {**STOCK, "offload_prompt_only": False}],
    "multi_ours": [PULL, OURS],
    "three": [PULL, {**SHARED, "lookup_async": False, "enable_lookup": True}, OURS],
}


# What vLLM says, and ours for the same.
REFUSED = {
    "no memory": ("cpu_bytes_to_use must be", "native", {"cpu_bytes": 0, "disk_path": "d"}),
    "policy": ("Unknown cache policy", "native", {"cpu_bytes": GIB, "eviction_policy": "fifo"}),
    "threshold": (
        "not supported for Tiering",
        "native",
        {"cpu_bytes": GIB, "disk_path": "d", "store_threshold": 2},
    ),
    "chunk": ("greater than 0", "native", {"cpu_bytes": GIB, "blocks_per_chunk": 0}),
    "push": (
        "not supported for NIXL push",
        "nixl",
        {"role": "decode", "push": True, "bidirectional": True},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_vllm_builds_it_with_our_values(facts, case):
    found = facts["accepted"][case]
    assert found["saw"] == ACCEPTED[case]
    assert found["hybrid"]
    assert found["prefix_caching"]
    fails = case in ("cpu", "disk", "decode")
    assert found["policy"] == ("fail" if fails else "recompute")
    assert found["same_on_command_line"]


@pytest.mark.parametrize("case", REFUSED)
def test_vllm_refuses_it_late_and_we_at_once(facts, adapter, case):
    theirs, builder, wrong = REFUSED[case]
    assert theirs in facts["refused"][case]
    with pytest.raises((PlanError, UnsupportedError)):
        getattr(adapter, builder)(**wrong)


def test_the_manager_expects_what_a_queued_request_will_load_and_rests_in_empty_steps(facts):
    assert facts["expected"] == {"alone": [True, 2, [0]], "in multi": [True, 2, [0]]}


def test_names_that_vllm_no_longer_knows_or_never_knew(facts):
    assert "Unknown secondary tier type: 'fs_python'" in facts["refused"]["old name"]
    assert "unexpected keyword argument 'root'" in facts["refused"]["misspelt"]
    assert "PD auxiliary output" in facts["refused"]["capture in multi"]
    assert facts["refused"]["capture"] == ""


def test_what_vllm_lets_pass_is_why_we_check(facts):
    assert facts["unnoticed"] == {"chunks": 0, "heartbeat_s": 0, "policy": "LRUCachePolicy"}

"""What vLLM's own configuration, command line and factories make of our arguments.

As far as they go without a GPU, NIXL or Mooncake: to the connector of the scheduler.
"""

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primeblocks.errors import UnsupportedError
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from tests.engine_job import call

MIB = 1 << 20
LAYERS, HEADS, WIDTH, PAGE_TOKENS = 4, 2, 32, 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": PAGE_TOKENS,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}

pytestmark = pytest.mark.vllm


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module(f"primeblocks.{name}.adapters.vllm")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    tiny_models.save("qwen3_moe", folder / "model", seed=0, dtype="float32")
    return call(_see, folder)


def _see(folder: Path) -> dict[str, Any]:
    register()
    model = str(folder / "model")
    return {"accepted": _accepted(model, folder), "expected": _expected(model)}


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

    ours, stock, found = _module("kvoffload"), _module("contrib"), {}

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
    args = ours.engine_args(primary_bytes=MIB, host_bytes=MIB)
    case("ours", args, _offloading)
    case("cpu", stock.native(cpu_bytes=MIB, **some), _offloading)
    case("disk", stock.native(cpu_bytes=MIB, offload_prompt_only=True, **disk), _offloading)
    case("prefill", stock.nixl("prefill", lease_s=60, bidirectional=True), _transfer)
    case("decode", stock.nixl("decode", push=True, on_load_failure="fail"), _transfer)
    pool = stock.mooncake("run-1", role="decode", lookup_async=True)
    three = stock.multi(stock.nixl("decode"), pool, args)
    case("three", three, _transfer, _pool, _offloading)
    return found


def _bare(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "engine_id"}


def _parsed(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The transfer that vLLM's server reads from our words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", model, *_module("kvoffload").command_line(arguments)]
    read = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    assert read.enable_prefix_caching == arguments.get("enable_prefix_caching")
    return _bare(read.kv_transfer_config)


def _expected(model: str) -> dict[str, Any]:
    """Pages that our manager expects a queued request to load, the engine having its first."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
    stock = _module("contrib")
    ours = _module("kvoffload").engine_args(primary_bytes=MIB, host_bytes=MIB)
    found = {}
    several = stock.multi(stock.nixl("decode"), ours)
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
        engine.connector.update_state_after_alloc(request, SimpleNamespace(), 0)
        found[name].append(list(connector.connector_scheduler.manager._queue))
        engine.connector.shutdown()
    return found


def _rests(connector: Any) -> list[int]:
    """The numbers of tokens, 0 or 1, that steps in which our manager rests compute.

    With several replicas or stages it does not rest.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    rested: list[int] = []
    connector.connector_scheduler.manager.rest = lambda: rested.append(tokens)
    parallel = connector._vllm_config.parallel_config
    for tokens, replicas, stages in ((0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)):
        parallel.data_parallel_size, parallel.pipeline_parallel_size = replicas, stages
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
    "ours": [OURS],
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
    "three": [PULL, {**SHARED, "lookup_async": True, "enable_lookup": True}, OURS],
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_vllm_builds_it_with_our_values(facts, case):
    found = facts["accepted"][case]
    assert found["saw"] == ACCEPTED[case]
    assert found["hybrid"]
    assert found["prefix_caching"]
    fails = case in ("ours", "cpu", "disk", "decode")
    assert found["policy"] == ("fail" if fails else "recompute")
    assert found["same_on_command_line"]


def test_the_manager_expects_what_a_queued_request_will_load_and_rests_in_empty_steps(facts):
    expected = [True, 2, [0], []]  # Without the request in the queue, once it is scheduled.
    assert facts["expected"] == {"alone": expected, "in multi": expected}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        # vLLM 0.33 stores pages of ended requests.
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "async_scheduling=False"),
        ({"parallel_config": SimpleNamespace(nnodes_within_dp=2)}, "one node per engine"),
        (
            {"parallel_config": SimpleNamespace(nnodes_within_dp=1, use_ray=True, world_size=2)},
            "one node per engine",
        ),
    ],
)
def test_engines_that_would_load_other_pages_are_refused(adapter, monkeypatch, of, said):
    monkeypatch.setattr(adapter.spec.vllm, "__version__", "0.33.0")
    of = {"scheduler_config": SimpleNamespace(async_scheduling=False)} | of
    with pytest.raises(UnsupportedError, match=said):
        adapter.spec.OffloadingConnector(SimpleNamespace(**of), None, None)

"""Builders of vLLM configurations: the names that vLLM reads, and what we refuse."""

import ast
import importlib
import importlib.util
import json
import warnings
from pathlib import Path

import pytest

from primeblocks.errors import PlanError, UnsupportedError

pytestmark = pytest.mark.vllm
GIB = 1 << 30
CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
# For each connector, where vLLM reads its settings, and those that no builder offers.
READ = {
    "OffloadingConnector": (
        [
            "v1/kv_offload",
            "v1/kv_offload/cpu",
            "v1/kv_offload/tiering",
            f"{CONNECTORS}/offloading",
        ],
        {
            "backpressure",
            "block_size",  # blocks_per_chunk in tokens
            "cache_policy_module_path",
            "canonical_layout",
            "max_tracker_size",
            "self_describing_kv_events",
            "spec_module_path",  # of engine_args
        },
    ),
    "NixlConnector": (
        [f"{CONNECTORS}/nixl"],
        {
            "decoder_kv_blocks_ttl",
            "enforce_handshake_compat",
            "engine_ttl",
            "kv_recompute_threshold",
            "push_registration_timeout",
        },
    ),
    "MooncakeStoreConnector": (
        [f"{CONNECTORS}/mooncake/store", f"{CONNECTORS}/mooncake/rdma_utils.py"],
        {
            "custom_mem_pool",
            "enable_cross_layers_blocks",
            "enable_group_semantics",
            "enable_lookup",
            "enable_store_tp_lcm",
            "load_async",  # False fails an assertion
            "lookup_rpc_port",
            "prefill_tp_sizes",
            "store_tp_size",
        },
    ),
    "MultiConnector": ([f"{CONNECTORS}/multi_connector.py"], set()),
}


@pytest.fixture(scope="module")
def adapter():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module("primeblocks.contrib.adapters.vllm")


@pytest.fixture(scope="module")
def engine(adapter):
    return importlib.import_module("primeblocks.kvoffload.adapters.vllm")


def extra_of(arguments):
    return arguments["kv_transfer_config"].kv_connector_extra_config


# --- names -----------------------------------------------------------------------------------


def sources(places):
    home = Path(importlib.util.find_spec("vllm").origin).parent
    for place in (home / name for name in places):
        yield from place.glob("*.py") if place.is_dir() else [place]


def keys_read(places, names=("extra_config",)):
    """Constant keys that these files take from a mapping of such a name."""
    found = set()
    for file in sources(places):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                receiver, key = ast.unparse(node.func.value), node.args[0]
                reads = node.func.attr == "get" and receiver.endswith(names)
                reads |= node.func.attr == "get_from_extra_config"
            elif isinstance(node, ast.Subscript):
                key, reads = node.slice, ast.unparse(node.value).endswith(names)
            else:
                continue
            if reads and isinstance(key, ast.Constant):
                found.add(key.value)
    return found


def everything(adapter):
    """Each builder with every setting that adds a key."""
    disk = adapter.native(cpu_bytes=GIB, disk_path="d")
    pool = adapter.mooncake("run", preferred_segment="node")
    transfers = [adapter.nixl("prefill", num_threads=1), adapter.nixl("decode", push=True)]
    several = adapter.multi(transfers[0], disk)
    return [adapter.native(cpu_bytes=GIB), disk, pool, *transfers, several]


def test_every_key_is_read_by_vllm_and_the_others_are_listed(adapter):
    written = {name: set() for name in READ}
    for arguments in everything(adapter):
        name = arguments["kv_transfer_config"].kv_connector.replace("Push", "")
        written[name] |= extra_of(arguments).keys()
    for name, (places, left_out) in READ.items():
        read = keys_read(places)
        assert written[name] | left_out == read, name
        assert not written[name] & left_out, name


def test_the_file_tier_takes_what_it_is_given(adapter):
    (tier,) = extra_of(adapter.native(cpu_bytes=GIB, disk_path="d"))["secondary_tiers"]
    (source,) = sources(["v1/kv_offload/tiering/fs/manager.py"])
    classes = [
        each for each in ast.parse(source.read_text()).body if isinstance(each, ast.ClassDef)
    ]
    (manager,) = [each for each in classes if each.name == "FileSystemTierManager"]
    (start,) = [each for each in manager.body if getattr(each, "name", "") == "__init__"]
    assert tier.keys() - {"type"} <= {argument.arg for argument in start.args.args}


def test_the_file_of_mooncake_is_what_vllm_reads(adapter, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("vllm.distributed.mooncake_store")
    text = adapter.mooncake_settings(master="head:50051", segment_bytes=GIB, device="mlx5_0")
    read = keys_read(["distributed/mooncake_store.py"], ("config",))
    assert json.loads(text).keys() == read - {"tenant_id"}
    (tmp_path / "mooncake.json").write_text(text)
    config = module.MooncakeStoreConfig.from_file(str(tmp_path / "mooncake.json"))
    assert (config.master_server_address, config.mode) == ("head:50051", "embedded")
    assert (config.global_segment_size, config.local_buffer_size) == (GIB, 4 * GIB)
    owned = adapter.mooncake_settings(master="head:1", segment_bytes=0, protocol="tcp", disk=True)
    (tmp_path / "mooncake.json").write_text(owned)
    config = module.MooncakeStoreConfig.from_file(str(tmp_path / "mooncake.json"))
    assert (config.mode, config.enable_offload, config.protocol) == (
        "standalone-store",
        True,
        "tcp",
    )


# --- what we refuse --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "wrong", "error", "message"),
    [
        (
            "native",
            {"cpu_bytes": 0, "disk_path": "d"},
            UnsupportedError,
            "disk without host memory",
        ),
        ("native", {"cpu_bytes": 4}, PlanError, r"4096; got 4. For 4 GiB pass 4 << 30"),
        ("native", {"cpu_bytes": True}, PlanError, "got True"),
        ("native", {"disk_path": "d", "capture": True}, UnsupportedError, "without its routes"),
        ("native", {"disk_threads": 0}, PlanError, "disk_threads .* from 1; got 0"),
        ("nixl", {"role": "both"}, PlanError, "prefill, decode; got 'both'"),
        ("nixl", {"on_load_failure": "retry"}, PlanError, "recompute, fail; got 'retry'"),
        ("nixl", {"lease_s": 5}, PlanError, "lease_s .* from 6; got 5. vLLM renews"),
        ("nixl", {"backends": []}, PlanError, r"got \[\]"),
        (
            "nixl",
            {"num_threads": 2, "backends": ["GDS"]},
            UnsupportedError,
            r"\['GDS'\].*UCX alone",
        ),
        ("mooncake", {"run": ""}, PlanError, "got ''"),
        ("mooncake", {"run": "a@b"}, PlanError, "a@b"),
        ("mooncake", {"preferred_segment": " "}, PlanError, "got ' '"),
        ("mooncake", {"capture": True}, UnsupportedError, "another engine computed"),
        ("mooncake_settings", {"master": "head"}, PlanError, "host:port"),
        ("mooncake_settings", {"protocol": "tcp", "device": "mlx5_0"}, PlanError, "mlx5_0"),
    ],
)
def test_values_that_do_not_fit(adapter, builder, wrong, error, message):
    right = {
        "native": {"cpu_bytes": GIB},
        "nixl": {"role": "prefill"},
        "mooncake": {"run": "run"},
        "mooncake_settings": {"master": "head:1", "segment_bytes": GIB},
    }[builder]
    assert getattr(adapter, builder)(**right)
    with pytest.raises(error, match=message):
        getattr(adapter, builder)(**right | wrong)


def test_parts_that_do_not_go_together(adapter, engine):
    prefill, cpu = adapter.nixl("prefill"), adapter.native(cpu_bytes=GIB)
    ours = engine.engine_args(primary_bytes=GIB, host_bytes=GIB)
    with pytest.raises(PlanError, match="at least two parts; got 1"):
        adapter.multi(prefill)
    with pytest.raises(PlanError, match="recompute or fail; got 'retry'"):
        adapter.multi(prefill, cpu, on_load_failure="retry")
    with pytest.raises(PlanError, match="no KVTransferConfig"):
        adapter.multi(prefill, {"enable_prefix_caching": True})
    with pytest.raises(PlanError, match="enable_prefix_caching=True and False"):
        adapter.multi(cpu, prefill | {"enable_prefix_caching": False})
    with pytest.raises(UnsupportedError, match="Use each kind at most once"):
        adapter.multi(cpu, ours)
    with pytest.raises(UnsupportedError, match="do not nest"):
        adapter.multi(adapter.multi(prefill, cpu), adapter.mooncake("run"))
    with pytest.raises(UnsupportedError, match="Put this part first"):
        adapter.multi(cpu, prefill)


def test_engines_on_a_command_line_have_an_identity_of_their_own(adapter, engine):
    arguments = adapter.multi(adapter.nixl("prefill"), adapter.native(cpu_bytes=GIB))
    words = engine.command_line(arguments | {"max_model_len": 64, "seed": 0, "quiet": False})
    assert arguments["kv_transfer_config"].engine_id not in " ".join(words)
    assert words[-5:] == ["--max-model-len", "64", "--seed", "0", "--no-quiet"]
    sizes = {"primary_bytes": GIB, "host_bytes": GIB}
    assert engine.server_args(**sizes) == engine.command_line(engine.engine_args(**sizes))
    with pytest.raises(PlanError, match="logits_processors is a list"):
        engine.command_line({"logits_processors": []})

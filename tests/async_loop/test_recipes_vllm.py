"""What vLLM's own parser and configuration, and vllm-router's parser, make of printed lines.

The configuration runs twice: here, as far as it goes without a GPU, and as on eight H100s, which
are a fake (`h100.py`). Models are published configurations without weights. Nothing is started.
"""

import itertools
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primeblocks.async_loop.recipes import (
    FEATURES,
    REFUSED,
    Deployment,
    Model,
    colocated,
    prefill_decode,
    replicas,
    wide_ep,
    with_router,
)
from primeblocks.async_loop.recipes.shapes import POLICIES
from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.replay.adapters import vllm as replay
from primeblocks.testing import tiny_models
from tests.async_loop.serving_models import CONFIGS, model_in
from tests.deadlines import JOB_S
from tests.engine_job import call

ROOT = Path(__file__).parents[2]
HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
CAPTURE = replay.server_args(max_bytes=1 << 30, device="cuda")
# What the table of docs/serving_shapes.md has columns for, as arguments of an engine.
NAMES = {
    "replay": "router replay",
    "tiers": "KV tiers",
    "lora": "LoRA",
    "mtp": "MTP",
    "prefill/decode": "P/D by NIXL",
    "sleep": "sleep",
    "wide ep": "wide EP",
    "fp8": "FP8",
    "chunked prefill": "chunked prefill",
}
# Pairs that ran in a real vLLM on CPU, against transformers' choices or a computation without them.
RUN = {
    frozenset(pair): "tests/replay/test_vllm_speculation.py"
    for pair in itertools.combinations(["replay", "tiers", "mtp", "chunked prefill"], 2)
} | {frozenset(("replay", "prefill/decode")): "tests/integration/test_prefill_decode_vllm.py"}


def shapes(model: Model) -> dict[str, Deployment]:
    """A recipe of every shape, at sizes that eight GPUs a host can hold."""
    split = prefill_decode(
        replicas(model, 1, tensor=4, hosts=HOSTS[:1]), replicas(model, 1, tensor=8, hosts=HOSTS[1:])
    )
    return {
        "single node": replicas(model, 1, tensor=8),
        "replicas": with_router(replicas(model, 4, tensor=2)),
        "wide ep": wide_ep(model, 16, hosts=HOSTS[:2]),
        "wide ep, a server each": with_router(
            wide_ep(model, 4, tensor=4, hosts=HOSTS[:2], servers="each")
        ),
        "wide ep on one host": wide_ep(model, 4, tensor=2),
        "prefill/decode": with_router(split),
        "wide prefill/decode": with_router(
            prefill_decode(wide_ep(model, 8, hosts=HOSTS[:1]), wide_ep(model, 16, hosts=HOSTS[1:]))
        ),
        "colocated": with_router(colocated(split)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes")
    tiny_models.save("glm4_moe", path / "tiny", seed=0, dtype="float32")
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    return call(_see, folder)


def _see(folder: Path) -> dict[str, Any]:
    """First what a CPU can answer: after `pretend` this process has H100s."""
    from tests.async_loop.h100 import pretend

    tiny = Model(str(folder / "tiny"), 8, 4, 1 << 20, 1 << 19)
    models = {name: model_in(folder, name) for name in CONFIGS}
    for model in models.values():  # vLLM looks at a model's class before it has a platform.
        _ask(replicas(model).merge(FEATURES["mtp"]))
    cpu = {"single node": _ask(replicas(tiny))}
    features = _features()
    cpu |= {name: _ask(_on_eight_gpus(replicas(tiny)).merge(*features[name])) for name in NAMES}
    pretend()
    return {
        "cpu": cpu,
        "shapes": {
            name: {shape: _ask(recipe) for shape, recipe in shapes(model).items()}
            for name, model in models.items()
        },
        "with replay": {
            name: _ask(wide_ep(model, 8).merge(CAPTURE)) for name, model in models.items()
        },
        "pairs": _pairs(models["GLM-4.5"]),
        "refused": {pair: _refusal(models["DeepSeek-V3"], pair) for pair in REFUSED},
        "transfers": {name: _beside_capture(models["GLM-4.5"], name) for name in TRANSFERS},
    }


def _features() -> dict[str, list[Any]]:
    """Every feature as settings to merge; P/D and tiers as `kvoffload` words them."""
    from primeblocks.kvoffload.adapters import vllm as kvoffload

    tiers = kvoffload.engine_args(primary_bytes=1 << 30, host_bytes=1 << 34)
    nixl = kvoffload.nixl("prefill")
    return {
        "replay": [CAPTURE],
        "tiers": [kvoffload.command_line(tiers)],
        "lora": [FEATURES["lora"]],
        "mtp": [FEATURES["mtp"]],
        "prefill/decode": [kvoffload.command_line(nixl)],
        "sleep": [FEATURES["sleep"]],
        "wide ep": [{"data_parallel_size": 4, "enable_expert_parallel": True}],
        "fp8": [FEATURES["fp8"]],
        "chunked prefill": [FEATURES["chunked prefill"]],
        # Not in the table: what else vLLM refuses beside capture.
        "pipeline": [{"pipeline_parallel_size": 2}],
        "decode context": [{"decode_context_parallel_size": 2, "tensor_parallel_size": 8}],
        "no prefix cache": [["--no-enable-prefix-caching"]],
        "transfer without routes": [kvoffload.command_line(kvoffload.multi(nixl, tiers))],
    }


# Beside capture, through no block of ours: what recipes refuse, and what they must not. MoRIIO is
# refused by the same loop of vLLM, but its module wants packages that are not here.
TRANSFERS = {"MooncakeConnector": True, "MooncakeStoreConnector": False}


def _beside_capture(model: Model, connector: str) -> Any:
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    return _ask_past_recipes(model, [CAPTURE, {"kv_transfer_config": transfer}])


def _on_eight_gpus(recipe: Deployment) -> Deployment:
    return Deployment(tuple(replace(each, gpus=tuple(range(8))) for each in recipe.processes))


def _pairs(model: Model) -> dict[frozenset[str], Any]:
    """vLLM's answer to each pair; what recipes refuse on their own is asked past them."""
    from primeblocks.kvoffload.adapters import vllm as kvoffload

    features, found = _features(), {}
    tiers = kvoffload.engine_args(primary_bytes=1 << 30, host_bytes=1 << 34)
    both = kvoffload.command_line(kvoffload.multi(kvoffload.nixl("prefill"), tiers))
    for pair in itertools.combinations(NAMES, 2):
        settings = [both] if set(pair) == {"tiers", "prefill/decode"} else [
            *features[pair[0]], *features[pair[1]]
        ]  # fmt: skip
        found[frozenset(pair)] = _ask_past_recipes(model, settings)
    return found


def _refusal(model: Model, pair: tuple[str, str]) -> Any:
    features = _features()
    return _ask_past_recipes(model, [*features[pair[0]], *features[pair[1]]])


def _ask_past_recipes(model: Model, settings: list[Any]) -> Any:
    from primeblocks.async_loop.recipes import deployment as module

    refused, module.REFUSED = module.REFUSED, {}  # type: ignore[misc]
    try:
        process = replicas(model).processes[0]
        plain = {k: v for k, v in process.arguments.items() if "parallel" not in k}
        alone = _on_eight_gpus(Deployment((replace(process, arguments=plain),)))
        return _ask(alone.merge(*settings))
    finally:
        module.REFUSED = refused  # type: ignore[misc]


def _ask(recipe: Deployment) -> Any:
    """What vLLM's configuration knows of each engine, or its reason to refuse one."""
    from primeblocks.async_loop.adapters.vllm import parse_commands

    found = []
    engines = [process for process in recipe.processes if process.role != "router"]
    for process, arguments in zip(engines, parse_commands(recipe), strict=True):
        arguments.skip_tokenizer_init = True  # Published tokenizers are not here.
        try:
            config = arguments.create_engine_config(headless="--headless" in process.arguments)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            return str(error)
        parallel, transfer = config.parallel_config, config.kv_transfer_config
        found.append(
            {
                "tensor": parallel.tensor_parallel_size,
                "data": parallel.data_parallel_size,
                "local": parallel.data_parallel_size_local,
                "rank": parallel.data_parallel_rank,
                "hybrid": parallel.data_parallel_hybrid_lb,
                "external": parallel.data_parallel_external_lb,
                "expert": parallel.enable_expert_parallel,
                "address": (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
                "connector": transfer and (transfer.kv_connector, transfer.kv_role),
                "on_failure": transfer and transfer.kv_load_failure_policy,
                "capture": config.aux_output_config.enabled,
                "v2": config.use_v2_model_runner,
            }
        )
    return found


@pytest.mark.vllm
class TestEngines:
    @pytest.mark.parametrize("name", CONFIGS)
    @pytest.mark.parametrize("shape", shapes(Model("m", 256, 64, 2, 1)))
    def test_vllm_reads_what_was_meant(self, seen, folder, name, shape):
        found = seen["shapes"][name][shape]
        assert not isinstance(found, str), found
        recipe = shapes(Model("m", 256, 64, 2, 1))[shape]
        engines = [process for process in recipe.processes if process.role != "router"]
        assert [each["tensor"] for each in found] == [process.tensor for process in engines]
        experts = [each["tensor"] * each["data"] if each["expert"] else 1 for each in found]
        assert experts == [process.experts for process in engines]
        gpus = [each["tensor"] * each["local"] for each in found]
        assert gpus == [len(process.gpus) for process in engines]
        kinds = {"prefill": "kv_producer", "decode": "kv_consumer"}
        for each, process in zip(found, engines, strict=True):
            kind = kinds.get(process.role)
            assert each["connector"] == (kind and ("NixlConnector", kind))
            if process.role == "decode":
                assert each["on_failure"] == "recompute"
            assert each["v2"]

    def test_one_server_takes_the_requests_of_all_ranks(self, seen):
        head, other = seen["shapes"]["DeepSeek-V3"]["wide ep"]
        assert (head["rank"], head["local"], other["rank"], other["local"]) == (0, 8, 8, 8)
        assert head["address"] == other["address"] == (HOSTS[0], 13345)
        assert not any(each["hybrid"] or each["external"] for each in (head, other))

    def test_a_server_on_each_host_takes_those_of_its_own(self, seen):
        found = seen["shapes"]["DeepSeek-V3"]["wide ep, a server each"]
        assert [(each["rank"], each["local"], each["hybrid"]) for each in found] == [
            (0, 2, True),
            (2, 2, True),
        ]

    @pytest.mark.parametrize("name", CONFIGS)
    def test_capture_with_wide_ep_is_accepted_for_every_model(self, seen, name):
        (found,) = seen["with replay"][name]
        assert found["capture"]
        assert found["data"] == 8

    def test_what_a_cpu_can_answer(self, seen):
        """For a tiny model, as this machine is: sleep alone is refused."""
        refused = {name: why for name, why in seen["cpu"].items() if isinstance(why, str)}
        assert refused.keys() == {"sleep"}
        assert "Sleep mode is not supported" in refused["sleep"]

    @pytest.mark.parametrize("pair", REFUSED)
    def test_what_recipes_refuse_vllm_refuses(self, seen, pair):
        """Where a patch of the plug-in, or a new vLLM, lifts a refusal, delete it in `REFUSED`."""
        message = seen["refused"][pair]
        assert isinstance(message, str), f"vLLM accepts {pair} now"
        assert re.search("enable-return-routed-experts is incompatible|AuxOutput", message)

    @pytest.mark.parametrize(("name", "is_refused"), TRANSFERS.items())
    def test_transfers_beside_capture_are_those_that_vllm_refuses(self, seen, name, is_refused):
        answer = seen["transfers"][name]
        incompatible = f"enable-return-routed-experts is incompatible with {name}"
        assert (isinstance(answer, str) and incompatible in answer) == is_refused, answer
        transfer = {"kv_connector": name, "kv_role": "kv_both"}
        recipe = replicas(Model("m", 8, 4, 2, 1)).merge({"kv_transfer_config": transfer})
        if not is_refused:
            assert recipe.merge(CAPTURE)
            return
        with pytest.raises(UnsupportedError, match="transfer without routes"):
            recipe.merge(CAPTURE)

    def test_the_parser_names_a_flag_that_vllm_does_not_have(self, folder):
        with pytest.raises(AssertionError, match=r"PlanError.*refuses this: unrecognized.*--speed"):
            call(_parse, replicas(Model("m", 8, 4, 2, 1)).merge({"speed": 11}))
        with pytest.raises(AssertionError, match=r"PlanError.*--dtype.*invalid"):
            call(_parse, replicas(Model("m", 8, 4, 2, 1)).merge(["--dtype", "float7"]))

    def test_the_parser_ends_no_process_and_raises_nothing_of_its_own(self, folder):
        call(_refused_by_the_parser)


def _parse(recipe: Deployment) -> None:
    from primeblocks.async_loop.adapters.vllm import parse_commands

    parse_commands(recipe)


def _refused_by_the_parser() -> None:
    one = replicas(Model("m", 8, 4, 2, 1))
    for words, said in [
        (["--help"], "exits with 0"),
        (["--config", "nowhere.yaml"], "No such file"),
        (["--config", "config.ini"], "yaml"),
        (["--chat-template", "nowhere/chat.jinja"], "chat template"),
    ]:
        with pytest.raises(PlanError, match=f"vLLM's command line .*{said}"):
            _parse(one.merge(words))


def _table() -> dict[frozenset[str], str]:
    """The cells of the table "What composes with what" in the docs."""
    text = (ROOT / "docs/serving_shapes.md").read_text()
    lines = text.split("## What composes with what")[1].split("\n\n")[2].splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    key = {title: name for name, title in NAMES.items()}
    return {
        frozenset((key[row[0]], key[column])): cell
        for row in rows
        for column, cell in zip(columns[1:], row[1:], strict=True)
        if cell
    }


class TestTable:
    @pytest.mark.vllm
    def test_each_cell_is_what_vllm_answered(self, seen):
        table = _table()
        assert table.keys() == seen["pairs"].keys()
        for pair, answer in seen["pairs"].items():
            expected = "run" if pair in RUN else "accepted"
            expected = "**refused**" if isinstance(answer, str) else expected
            assert table[pair] == expected, f"{set(pair)}: {answer}"

    @pytest.mark.parametrize("file", sorted(set(RUN.values())))
    def test_what_was_run_has_a_test(self, file):
        assert (ROOT / file).is_file()


ROUTER = ROOT / ".venv-router/bin/python"
_READ = """
import json, sys
from vllm_router.launch_router import parse_router_args
found = [vars(parse_router_args(words)) for words in json.loads(sys.argv[1])]
print(json.dumps(found, default=str))
"""


@pytest.mark.skipif(not ROUTER.exists(), reason="scripts/peers installs vllm-router")
def test_the_router_reads_what_was_meant():
    model = Model("m", 256, 64, 2, 1)
    deployments = [
        *(with_router(replicas(model, 2), policy=policy, port=31000) for policy in POLICIES),
        shapes(model)["prefill/decode"],
    ]
    lines = [shlex.split(each.commands()[-1]) for each in deployments]
    assert all(line[0] == "vllm-router" for line in lines)
    done = subprocess.run(
        [ROUTER, "-c", _READ, json.dumps([line[1:] for line in lines])],
        capture_output=True, text=True, check=False, timeout=JOB_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *plain, split = json.loads(done.stdout.splitlines()[-1])
    for policy, found in zip(POLICIES, plain, strict=True):
        assert found["worker_urls"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
        assert (found["policy"], found["port"]) == (policy, 31000)
    assert split["vllm_pd_disaggregation"]
    assert split["prefill_urls"] == [[f"http://{HOSTS[0]}:8000", None]]
    assert split["decode_urls"] == [f"http://{HOSTS[1]}:8000"]

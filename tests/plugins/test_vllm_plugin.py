"""The plug-in: what it refuses, its off switch, and that weight updates need it."""

import importlib
import json
import re
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primeblocks.errors import UnsupportedError
from primeblocks.plugins import vllm as plugin
from tests.engine_job import fork_job

CPU = {"release": "0.32.0", "is_cpu": True, "off": ""}
CPU_ONLY = {"amx_on_cpu", "routed_experts_on_cpu", "moe_reload_on_cpu"}
NAMES = CPU_ONLY | {"missing_routes_survive", "routes_with_pages", "routes_over_nixl"}
NAMES |= {"stores_before_reuse"}
CAPTURE = NAMES - {"amx_on_cpu", "routes_over_nixl", "stores_before_reuse"}
EXACT_K3 = 1e-11  # float32 rounding; a fault costs 0.1 and more


def test_vllm_finds_register_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["primeblocks"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_tested_versions_on_cpu_get_every_patch():
    assert {patch.name for patch in plugin.PATCHES} == NAMES
    for release in ("0.32.0", "0.32.1+cpu", "0.32.0rc1"):
        assert plugin.refusals(**CPU | {"release": release}) == {}


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0", "1.33.0", "0.320.0", "0.330.1", "dev"])
def test_other_versions_get_none(release):
    refused = plugin.refusals(**CPU | {"release": release})
    assert set(refused) == NAMES
    assert all(release in why and "vllm==0.32.*" in why for why in refused.values())


def test_a_version_that_was_compared_gets_what_was_compared():
    refused = plugin.refusals(release="0.33.0", is_cpu=False, off="")
    assert set(refused) == NAMES - {"routes_with_pages", "stores_before_reuse"}
    assert set(plugin.refusals(**CPU | {"release": "0.33.1"})) == set(refused)


def test_and_only_in_an_engine_whose_tier_carries_rows(monkeypatch):
    from primeblocks.plugins.vllm import routes_with_pages as rows
    from primeblocks.plugins.vllm.scheduled_blocks import ROUTES, carries_routes, lift_cap

    there = Path(__file__).parents[2] / "primeblocks/kvoffload/adapters/vllm/spec.py"
    assert f'ROUTES = "{ROUTES}"' in there.read_text()
    ours = SimpleNamespace(kv_connector_extra_config={ROUTES: 8})
    others = SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30, ROUTES: 0})
    applied = []
    monkeypatch.setattr(plugin, "_apply", lambda patch: applied.append(patch.name))
    for release, expected in (("0.32.0", [1, 1, 1, 0]), ("0.33.0", [1, 0, 0, 0])):
        here = {"release": release, "is_cpu": False, "off": ""}
        monkeypatch.setattr(plugin, "_here", lambda here=here: here)
        for transfer, capture, times in zip(
            (ours, others, None, ours), (True, True, True, False), expected, strict=True
        ):
            applied.clear()
            plugin._apply_asked([rows.PATCH], config(capture=capture, transfer=transfer))
            assert len(applied) == times
        applied.clear()
        plugin._apply_asked(plugin.PATCHES, config(transfer=OUR_TIER, v2=True))
        assert applied == ["stores_before_reuse"]  # a tier without rows

    def allowed(transfer, control):
        engine = config(capture=True, transfer=transfer)
        assert carries_routes(engine) == (transfer is ours)
        lift_cap(SimpleNamespace(aux_output_connector=control), engine)
        return control.cap_external_hit(SimpleNamespace(num_tokens=9), 0, 8)

    assert allowed(ours, SimpleNamespace(cap_external_hit=lambda *_: 0)) == 8
    assert allowed(others, SimpleNamespace(cap_external_hit=lambda *_: 0)) == 0
    before = SimpleNamespace()  # 0.32 has no cap
    lift_cap(SimpleNamespace(aux_output_connector=before), config(capture=True, transfer=ours))
    assert vars(before) == {}


def test_other_platforms_get_what_is_not_about_cpus():
    assert set(plugin.refusals(**CPU | {"is_cpu": False})) == CPU_ONLY


def test_the_off_switch_names_patches():
    assert set(plugin.refusals(**CPU | {"off": "moe_reload_on_cpu"})) == {"moe_reload_on_cpu"}
    off = " moe_reload_on_cpu , routed_experts_on_cpu"
    assert set(plugin.refusals(**CPU | {"off": off})) == CPU_ONLY - {"amx_on_cpu"}


@pytest.mark.parametrize("off", ["routes_with_pages", "missing_routes_survive"])
def test_capture_over_nixl_is_off_without_what_it_needs(off):
    refused = plugin.refusals(**CPU | {"off": off})
    assert set(refused) == {off, "routes_over_nixl"}
    assert f"it needs {off}: {plugin.OFF} contains its name" in refused["routes_over_nixl"]


def config(*, dtype="float32", backend=None, capture=False, transfer=None, v2=False):
    """What patches look at in a VllmConfig."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=getattr(torch, dtype)),
        weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
        aux_output_config=SimpleNamespace(enabled=capture),
        kv_transfer_config=transfer,
        use_v2_model_runner=v2,
    )


THEIR_TIER = SimpleNamespace(kv_connector_extra_config={"spec_name": "CPUOffloadingSpec"})
OUR_TIER = SimpleNamespace(
    kv_connector_extra_config={"spec_module_path": "primeblocks.kvoffload.adapters.vllm.spec"}
)

NIXL = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={})


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, set()),
        ({"dtype": "float16", "backend": "nccl", "transfer": THEIR_TIER}, set()),
        ({"backend": "primeblocks"}, {"moe_reload_on_cpu"}),
        ({"transfer": OUR_TIER}, {"moe_reload_on_cpu"}),
        ({"transfer": OUR_TIER, "v2": True}, {"moe_reload_on_cpu", "stores_before_reuse"}),
        ({"transfer": THEIR_TIER, "v2": True}, set()),
        ({"transfer": NIXL}, set()),
        ({"capture": True}, CAPTURE),
        ({"capture": True, "transfer": THEIR_TIER}, CAPTURE),
        ({"capture": True, "transfer": NIXL}, CAPTURE | {"routes_over_nixl"}),
        ({"dtype": "bfloat16"}, {"amx_on_cpu"}),
    ],
)
def test_a_configuration_asks_for_what_it_uses(settings, asked, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    found = {patch.name for patch in plugin.PATCHES if patch.asked(config(**settings))}
    assert found == asked


@pytest.mark.vllm
def test_capture_of_micro_batches_is_refused_on_every_platform(monkeypatch):
    warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
    import vllm

    monkeypatch.setattr(plugin, "_here", lambda: CPU | {"is_cpu": False})
    found = config(capture=True, v2=True)
    found.parallel_config = SimpleNamespace(use_ubatching=True)
    create = plugin._looking_front(lambda args: found)
    with pytest.raises(UnsupportedError, match="Leave out enable_dbo and ubatch_size"):
        create(None)
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    assert create(None) is found


def test_without_amx_bfloat16_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not any(patch.asked(config(dtype="bfloat16")) for patch in plugin.PATCHES)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process saw that started with one patch switched off, and then switched it on."""
    folder = tmp_path_factory.mktemp("plugin")
    printed = fork_job(Path(__file__).with_name("plugin_job.py"), str(folder))
    facts = json.loads((folder / "facts.json").read_text())
    for each in f"\n{printed}".split("\n== ")[1:]:
        phase, _, log = each.partition("\n")
        facts[f"log of {phase}"] = [
            line for line in log.splitlines() if re.search("(?i)primeblocks|the patch", line)
        ]
    return facts


@pytest.mark.vllm
class TestInAProcess:
    def test_an_untested_version_is_left_alone_with_one_warning(self, facts):
        untested = facts["untested"]
        assert untested["applied"] == []
        (warning,) = facts["log of untested"]
        assert all(name in warning for name in NAMES)
        assert "0.99.1" in untested["required"]
        assert "0.32" in untested["required"]

    def test_installing_applies_nothing(self, facts):
        assert facts["registered"]["applied"] == []
        assert facts["registered"]["same_symbols"]

    def test_an_engine_that_uses_nothing_of_ours_is_vllms(self, facts):
        """The configurations before it had capture on, and asked for two patches here."""
        assert facts["plain_engine"] == ["routed_experts_on_cpu", "routes_over_nixl"]
        assert facts["log of plain_engine"] == []

    def test_capture_in_the_configuration_applies_its_patch_and_says_so_once(self, facts):
        assert facts["capture"] == ["routed_experts_on_cpu", "routes_over_nixl"]
        assert facts["checked_again"] == ""
        assert facts["refused"]["nothing"] is None
        assert facts["refused"]["no_capture"] is None
        assert [
            re.findall("INFO .* patches vLLM in this process: ([a-z_]+)", line)
            for line in facts["log of capture"]
        ] == [["routed_experts_on_cpu"], ["routes_over_nixl"]]

    def test_the_off_switch_holds_and_typing_errors_are_named(self, facts):
        (warning,) = facts["log of registered"]
        assert "no_such_patch" in warning
        assert plugin.OFF in facts["registered"]["required"]
        assert "no_such_patch" in facts["registered"]["unknown"]

    def test_stock_vllm_has_each_fault_and_a_patched_one_has_not(self, facts):
        """Where a new vLLM has a fault no longer, its patch can go."""
        names = NAMES - {"moe_reload_on_cpu"}
        assert facts["registered"]["faults"] == {name: [True, False] for name in names}
        assert facts["all_required"]["faults"] == {name: [True, True] for name in names}

    def test_each_patch_is_one_line_of_the_log(self, facts):
        assert set(facts["all_required"]["applied"]) == NAMES
        log = facts["log of all_required"]
        assert [re.findall("INFO .* in this process: ([a-z_]+)", line) for line in log] == [
            [patch.name] for patch in plugin.PATCHES if patch.name not in facts["capture"]
        ]

    def test_stock_reload_of_the_same_weights_corrupts_and_ours_does_not(self, facts):
        """The point of `moe_reload_on_cpu`: one engine, the same checkpoint, twice."""
        assert facts["k3_again"] <= EXACT_K3
        assert facts["k3_stock_reload"] > 1e-2
        assert facts["k3_patched_reload"] <= EXACT_K3

    @pytest.mark.parametrize("case", ["default", "stock_torch_compile"])
    def test_capture_is_refused_by_name_where_rows_would_be_wrong(self, facts, case):
        kind, message = facts["refused"][case]
        assert kind == "UnsupportedError"
        assert "enforce_eager=True" in message

    def test_capture_with_speculative_decoding_is_accepted(self, facts):
        """tests/replay/test_vllm_speculation.py looks at the rows."""
        assert facts["refused"]["speculative"] is None

    def test_prefill_and_decode_over_nixl_are_accepted_and_over_others_refused(self, facts):
        assert facts["refused"]["nixl"] is None
        kind, message = facts["refused"]["mooncake"]
        assert kind != "UnsupportedError"
        assert "MooncakeConnector; PD auxiliary output is not supported" in message

    def test_in_tree_refusals_stay(self, facts):
        kind, message = facts["refused"]["no_prefix_caching"]
        assert kind != "UnsupportedError"
        assert "prefix caching" in message

"""The plug-in: what it refuses, its off switch, and that weight updates need it."""

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from primeblocks.plugins import vllm as plugin
from tests.engine_job import run_job

CPU = {"version": "0.32.0", "is_cpu": True, "off": ""}
CPU_ONLY = {"routed_experts_on_cpu", "moe_reload_on_cpu"}
NAMES = CPU_ONLY | {"missing_routes_survive", "routes_with_pages"}
EXACT_K3 = 1e-11  # float32 rounding; a fault costs 0.1 and more


def test_vllm_finds_register_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["primeblocks"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_tested_versions_on_cpu_get_every_patch():
    assert {patch.name for patch in plugin.PATCHES} == NAMES
    for version in ("0.32.0", "0.32.1+cpu", "0.32.0rc1"):
        assert plugin.refusals(**CPU | {"version": version}) == {}


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "0.320.0", "dev"])
def test_other_versions_get_none(version):
    refused = plugin.refusals(**CPU | {"version": version})
    assert set(refused) == NAMES
    assert all(version in why and "vllm==0.32.*" in why for why in refused.values())


def test_other_platforms_get_what_is_not_about_cpus():
    assert set(plugin.refusals(**CPU | {"is_cpu": False})) == CPU_ONLY


def test_the_off_switch_names_patches():
    assert set(plugin.refusals(**CPU | {"off": "moe_reload_on_cpu"})) == {"moe_reload_on_cpu"}
    assert set(plugin.refusals(**CPU | {"off": " moe_reload_on_cpu , routed_experts_on_cpu"})) == (
        CPU_ONLY
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process saw that started with one patch switched off, and then switched it on.

    Its own process: vLLM changes torch, the environment and the default process group for good.
    """
    folder = tmp_path_factory.mktemp("plugin")
    job = Path(__file__).with_name("plugin_job.py")
    off = {plugin.OFF: "moe_reload_on_cpu,no_such_patch"}
    run_job(job, str(folder), timeout_s=100, environment=off)
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.vllm
class TestInAProcess:
    def test_an_untested_version_is_left_alone_with_one_warning(self, facts):
        untested = facts["untested"]
        assert untested["applied"] == []
        assert len(untested["warnings"]) == 1
        assert all(name in untested["warnings"][0] for name in NAMES)
        assert "0.99.1" in untested["required"]
        assert "0.32" in untested["required"]

    def test_the_off_switch_holds_and_typing_errors_are_named(self, facts):
        off = facts["off"]
        assert off["applied"] == [
            "routed_experts_on_cpu",
            "missing_routes_survive",
            "routes_with_pages",
        ]
        assert len(off["warnings"]) == 1
        assert "no_such_patch" in off["warnings"][0]
        assert plugin.OFF in off["required"]

    def test_register_is_idempotent(self, facts):
        assert facts["same_symbols"]

    def test_self_tests_tell_stock_from_patched(self, facts):
        assert facts["off"]["self_tests"] == {
            "routed_experts_on_cpu": [True, True],
            "moe_reload_on_cpu": [True, False],
            "missing_routes_survive": [True, True],
            "routes_with_pages": [True, True],
        }
        assert facts["on"]["self_tests"] == {name: [True, True] for name in NAMES}

    def test_an_unknown_name_cannot_be_required(self, facts):
        assert "no_such_patch" in facts["unknown"]

    def test_stock_reload_of_the_same_weights_corrupts_and_ours_does_not(self, facts):
        """The point of `moe_reload_on_cpu`: one engine, the same checkpoint, twice."""
        assert facts["k3_again"] <= EXACT_K3
        assert facts["k3_stock_reload"] > 1e-2
        assert facts["k3_patched_reload"] <= EXACT_K3

    @pytest.mark.parametrize("case", ["default", "stock_torch_compile", "speculative"])
    def test_capture_is_refused_by_name_where_rows_would_be_wrong(self, facts, case):
        kind, message = facts["refused"][case]
        assert kind == "UnsupportedError"
        remedy = "speculative_config" if case == "speculative" else "enforce_eager=True"
        assert remedy in message

    def test_in_tree_refusals_stay(self, facts):
        kind, message = facts["refused"]["no_prefix_caching"]
        assert kind != "UnsupportedError"
        assert "prefix caching" in message

    def test_without_capture_nothing_is_refused(self, facts):
        assert facts["refused"]["no_capture"] is None

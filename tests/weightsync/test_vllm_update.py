"""Weights into an offline LLM: bit for bit what a fresh engine computes, and every fault."""

import importlib.util
import json
from pathlib import Path

import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_update_job.py")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def offline(request, tmp_path_factory):
    if request.param == "bfloat16" and not request.config.getoption("--full"):
        pytest.skip("an engine more: --full")
    folder, dtype = tmp_path_factory.mktemp("offline"), request.param
    for seed in (0, 1):
        path = folder / f"{dtype}-{seed}"
        tiny_models.save("qwen3_moe", path, seed=seed, dtype=dtype, num_layers=2, hidden=64)
    fork_job(JOB, dtype, str(folder))
    return json.loads((folder / f"{dtype}.json").read_text())


def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(offline):
    assert offline["start"] != offline["fresh"]
    assert offline["updated"] == [offline["fresh"], "1"]
    assert offline["back"] == [offline["start"], "2"]


def test_a_flipped_byte_leaves_the_old_weights_served(offline):
    kind, message = offline["corrupt"]
    assert kind == "CorruptionError"
    assert "of version 1 fails its digest" in message
    assert offline["after_corrupt"] == [offline["start"], "default"]


def test_a_load_that_breaks_goes_back(offline):
    kind, message = offline["broken"]
    assert kind == "TransferError"
    assert "out of memory. Version 1 was loaded again" in message
    assert offline["after_broken"] == [offline["fresh"], "1"]


def test_a_parameter_without_new_values_is_noticed(offline):
    kind, message = offline["partial"]
    assert kind == "TransferError"
    assert "would keep their old values" in message
    assert offline["after_partial"] == [offline["fresh"], "1"]


def test_refusals_have_types(offline):
    assert offline["unattached"][0] == "TransferError"
    assert "call attach() first" in offline["unattached"][1]
    assert offline["never_committed"][0] == "DeadlineError"

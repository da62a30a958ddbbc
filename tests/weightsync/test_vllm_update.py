"""Weights into real vLLM: bit for bit what a fresh engine computes, and every fault."""

import importlib.util
import json
from pathlib import Path

import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import run_job

JOB = Path(__file__).with_name("vllm_update_job.py")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def run_case(case, folder):
    run_job(JOB, case, str(folder), timeout_s=115)
    return json.loads((folder / f"{case}.json").read_text())


def save(folder, dtype, seed):
    path = folder / f"{dtype}-{seed}"
    tiny_models.save("qwen3_moe", path, seed=seed, dtype=dtype, num_layers=2, hidden=64)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def offline(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    for seed in (0, 1):
        save(folder, request.param, seed)
    return run_case(request.param, folder)


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


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("running")
    save(folder, "float32", 0)
    return run_case("running", folder)


def common_prefix(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("mode", "version", "before"), [("continue", 1, None), ("recompute", 2, 1), ("abort", 3, 2)]
)
def test_requests_in_flight_over_an_update_finish(running, mode, version, before):
    seen = running[mode]
    assert seen["finish"] == ["abort" if mode == "abort" else "length"] * 3
    assert not seen["paused"]
    assert seen["report"][0] == version
    for (tokens, _), spans in zip(seen["outputs"], seen["spans"], strict=True):
        old = "default" if before is None else str(before)
        labels = [old] if mode == "abort" else [old, str(version)]
        assert [label for label, _, _ in spans] == labels
        assert spans[0][2] >= 20
        assert spans[-1][2] == len(tokens)


def test_tokens_before_the_switch_are_the_old_policy_and_later_ones_are_not(running):
    for output, spans, (old, _) in zip(
        running["continue"]["outputs"],
        running["continue"]["spans"],
        running["reference"],
        strict=True,
    ):
        switch = spans[1][1]
        assert output[0][:switch] == old[:switch]
        assert common_prefix(output[0], old) < 200


def test_new_requests_are_under_the_new_weights(running):
    old = [[row[:24] for row in output] for output in running["reference"]]
    assert running["recompute"]["after"] == old
    assert running["continue"]["after"] == running["abort"]["after"] != old


def test_a_flipped_byte_keeps_its_type_across_processes(running):
    kind, message, _ = running["corrupt"]
    assert kind == "CorruptionError"
    assert message.startswith("bucket ")
    assert running["after_corrupt"] == running["abort"]["after"]
    assert running["version_after_corrupt"] == "3"
    assert running["retried"] == running["recompute"]["after"]


def test_a_hanging_engine_ends_at_the_deadline_and_a_retry_succeeds(running):
    kind, _, took_s = running["hung"]
    assert kind == "DeadlineError"
    assert took_s < 2
    assert running["version_after_hung"] == "5"


def test_a_dead_engine_is_noticed_before_the_deadline(running):
    kind, message, took_s = running["dead"]
    assert kind == "EngineError"
    assert "Restart it" in message
    assert took_s < 15

"""Running vLLM engines, with requests in flight: an AsyncLLM and vLLM's own server as a fleet."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_fleet_job.py")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module", params=["mixed", "pair"])
def fleet(request, tmp_path_factory):
    case = request.param
    if case == "pair" and not request.config.getoption("--full"):
        pytest.skip("two engines more: --full")
    folder = tmp_path_factory.mktemp(case)
    for seed in (0, 1):
        path = folder / f"float32-{seed}"
        tiny_models.save("qwen3_moe", path, seed=seed, dtype="float32", num_layers=2, hidden=64)
    fork_job(JOB, case, str(folder))
    return json.loads((folder / f"{case}.json").read_text())


def answers(fleet, *seeds):
    """What engines that were freshly loaded from the checkpoints of these seeds answer."""
    return [fleet["start"]["greedy"][seed] for seed in seeds]


def common_prefix(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("mode", "version", "before"), [("continue", 1, None), ("recompute", 2, 1), ("abort", 3, 2)]
)
def test_requests_in_flight_over_an_update_finish(fleet, mode, version, before):
    seen = fleet[mode]
    assert seen["finish"] == ["abort" if mode == "abort" else "length"] * 3
    assert not seen["paused"]
    assert seen["report"][0] == version
    for (tokens, _), spans in zip(seen["outputs"], seen["spans"], strict=True):
        old = "default" if before is None else str(before)
        labels = [old] if mode == "abort" else [old, str(version)]
        assert [label for label, _, _ in spans] == labels
        assert spans[0][2] >= 20
        assert spans[-1][2] == len(tokens)


def test_tokens_before_the_switch_are_the_old_policy_and_later_ones_are_not(fleet):
    for output, spans, (old, _) in zip(
        fleet["continue"]["outputs"],
        fleet["continue"]["spans"],
        fleet["reference"],
        strict=True,
    ):
        switch = spans[1][1]
        assert output[0][:switch] == old[:switch]
        assert common_prefix(output[0], old) < 200


def test_the_modes_differ_in_what_later_tokens_were_computed_from(fleet):
    gaps = {mode: fleet[mode]["gaps"] for mode in ("continue", "recompute")}
    assert min(gaps["continue"]) > 0.01  # old KV, new weights: neither policy
    assert max(gaps["recompute"]) < 1e-5  # as the trainer's own model would


def test_an_aborted_request_that_is_sent_again_goes_on_under_the_new_weights(fleet):
    for (tokens, _), spans, gap in fleet["resumed"]:
        assert len(tokens) == 60
        assert spans == [["3", 0, 60]]
        assert gap < 1e-5


def test_requests_in_flight_over_ten_updates_finish_with_a_version_for_each_token(fleet):
    ten = fleet["ten"]
    assert ten["lengths"] == [950] * 3
    assert ten["finish"] == ["length"] * 3
    for spans in ten["spans"]:
        assert [label for label, _, _ in spans] == [str(version) for version in range(3, 14)]
        assert spans[0][1] == 0
        assert spans[-1][2] == 950
        assert all(one[2] == after[1] for one, after in itertools.pairwise(spans))
        assert all(start < end for _, start, end in spans)


def test_a_late_call_of_an_update_that_was_given_up_loads_nothing(fleet):
    assert (fleet["late"], fleet["after_late"]) == (13, "14")


def test_new_requests_are_under_the_new_weights(fleet):
    old = [[row[:24] for row in output] for output in fleet["reference"]]
    assert fleet["recompute"]["after"] == old
    assert fleet["continue"]["after"] == fleet["abort"]["after"] != old


def test_updated_engines_equal_fresh_ones_bit_for_bit(fleet):
    fresh = answers(fleet, 0, 1)
    assert fleet["fresh"] == fresh[0]
    assert fresh[0] != fresh[1]
    assert fleet["one"]["greedy"] == [fresh[1], fresh[1]]
    assert fleet["two"]["greedy"] == [fresh[0], fresh[0]]
    assert (fleet["one"]["labels"], fleet["two"]["labels"]) == (["15"] * 2, ["16"] * 2)
    assert fleet["one"]["report"][0] == 15


def test_requests_in_flight_on_every_engine_finish_with_their_versions(fleet):
    for (tokens, spans), before in zip(fleet["flight"], ["14", "default"], strict=True):
        assert tokens == 600
        ((old, start, switch), (new, again, end)) = spans
        assert (old, start, new, end) == (before, 0, "15", 600)
        assert switch == again


def test_a_flipped_byte_is_refused_by_all_and_the_old_weights_are_served(fleet):
    assert fleet["corrupt"]["kind"] == "CorruptionError"
    assert "fails its digest" in fleet["corrupt"]["message"]
    assert fleet["corrupt"]["engines"] == [0, 1]
    assert fleet["after_corrupt"] == {"greedy": answers(fleet, 0, 0), "labels": ["16", "16"]}


def test_an_engine_that_hangs_at_its_load_takes_the_other_back(fleet):
    assert fleet["hung"]["kind"] == "DeadlineError"
    assert fleet["hung"]["engines"] == [0]
    assert fleet["hung"]["seconds"] < 2.5
    assert fleet["after_hung"] == {"greedy": answers(fleet, 0), "labels": ["16"]}
    # It may have loaded when it goes on, so it must not serve yet.
    assert fleet["stays_paused"] == [True, False]
    assert fleet["after_retry"] == {"greedy": answers(fleet, 1, 1), "labels": ["17", "17"]}


def test_a_dead_engine_is_named_and_dropped(fleet):
    assert fleet["dead"]["kind"] == "EngineError"
    assert fleet["dead"]["engines"] == [0]
    assert "Engine 0 of 2: the engine died" in fleet["dead"]["message"]
    assert fleet["dead"]["seconds"] < 15
    assert fleet["after_dead"] == {"greedy": answers(fleet, 1), "labels": ["17"]}
    assert fleet["dropped"] == {"greedy": answers(fleet, 0), "labels": ["18"]}


def test_a_server_that_hangs_or_is_gone(fleet):
    if "lost" not in fleet:
        pytest.skip("no server in this fleet")
    lost = fleet["lost"]
    assert lost["hung"]["kind"] == "DeadlineError"
    assert lost["hung"]["seconds"] < 1.5
    assert lost["after"] == {"greedy": answers(fleet, 1), "labels": ["19"]}
    assert lost["gone"]["kind"] == "EngineError"
    assert "Restart it" in lost["gone"]["message"]
    assert lost["gone"]["seconds"] < 15

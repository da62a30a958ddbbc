"""A real vLLM engine: good answers, and a typed error within its time for every kind of end."""

import json
from pathlib import Path

import pytest

from tests.engine_job import fork_job

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    job = Path(__file__).with_name("engine_faults_job.py")
    printed = fork_job(job, str(tmp_path_factory.mktemp("engine")))
    return json.loads(printed.strip().splitlines()[-1])


def test_it_samples_with_logprobs_and_versions(facts):
    healthy = facts["healthy"]
    assert healthy["completions"] == healthy["different"] == 3
    assert healthy["lengths"] == [12, 12, 12]
    assert healthy["negative_logprobs"]
    assert healthy["versions"] == [0]
    assert healthy["greedy_repeats"]
    assert healthy["rollout"] == [20, 12, "p"]
    assert healthy["rewarded"] == [0.5, {"routes": "r"}]


def test_a_bad_or_late_request_leaves_the_engine_well(facts):
    healthy = facts["healthy"]
    assert healthy["too_long"]["error"] == "UsageError"
    assert healthy["slow"]["error"] == "DeadlineError"
    assert healthy["slow"]["seconds"] < 5
    assert healthy["after"]["error"] is None


def test_a_wrong_checkpoint_is_an_error_at_once(facts):
    for kind in ("missing", "torn"):
        assert facts[kind]["error"] == "EngineError"
        assert facts[kind]["seconds"] < 5


def test_a_hung_engine_ends_at_the_deadline_and_can_be_closed(facts):
    hung = facts["hung"]
    assert hung["asked"]["error"] == "DeadlineError"
    assert hung["asked"]["seconds"] < 5
    assert hung["closed"]["error"] is None
    assert hung["closed"]["seconds"] < 10
    assert hung["left"] == []


def test_a_killed_engine_fails_every_request_at_once(facts):
    killed = facts["killed"]
    assert [request["error"] for request in killed["pending"]] == ["EngineError"] * 4
    assert all(request["seconds"] < 10 for request in killed["pending"])
    assert killed["later"]["error"] == "EngineError"
    assert killed["closed"]["error"] is None

"""The example runs as it is: TRL's trainer learns from a real vLLM, and hears of its death."""

import re
from pathlib import Path

import pytest

from tests.engine_job import run_job

pytest.importorskip("trl", reason="TRL is tested by scripts/peers")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")

pytestmark = [pytest.mark.vllm, pytest.mark.example]

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"


def test_trl_learns_through_our_worker_and_transfer():
    printed = run_job(EXAMPLE)
    rewards = [float(reward) for reward in re.findall(r"^step .* reward (\S+)", printed, re.M)]
    # 64 answers of at most 8 tokens: a standard deviation of 0.02 around chance, 0.5.
    assert rewards[0] < 0.65
    assert min(rewards[-3:]) > 0.9
    assert "; 81 versions, " in printed


def test_an_engine_killed_in_the_middle_is_an_error_of_the_trainer():
    printed = run_job(EXAMPLE, "--kill-at", "10", "--steps", "10000")
    assert re.search(r"after the kill: EngineError: the vLLM engine's process", printed)

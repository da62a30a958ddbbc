"""The example runs as it is: an agent calls tools, and what it was answered is recorded."""

import re
from pathlib import Path

import pytest

from tests.engine_job import fork_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "capture_agent.py"


@pytest.mark.vllm
@pytest.mark.example
def test_an_agent_of_the_openai_client_is_recorded():
    printed = fork_job(EXAMPLE)
    said = re.findall(r"^ *(user|assistant|tool): (.*)", printed, re.M)
    assert [who for who, _ in said] == ["user", "assistant", "tool", "assistant"] * 3
    assert [text for who, text in said if who == "tool"] == ["3", "2", "4"]
    assert "turns: 1 start, 5 clean" in printed
    assert re.search(r"by versions \[0, 1\]; routes \(\d+, 2, 2\); reward 1.00", printed)
    assert "tokens and log-probabilities are the engine's: True" in printed

"""The example runs as it is; deltas are small, and the engine ends as a fresh one starts."""

import re
from pathlib import Path

import pytest

from tests.engine_job import fork_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "sync_to_vllm.py"


@pytest.mark.vllm
@pytest.mark.example
def test_answers_run_through_eight_versions():
    printed = fork_job(EXAMPLE)
    rows = re.findall(r"^ +(\d+) +[\d,]+ +([\d.]+)%", printed, re.M)
    assert [int(version) for version, _ in rows] == list(range(1, 9))
    full = [float(share) for _, share in rows]
    assert full[0] == full[4] == 100
    assert all(0 < share < 2 for share in full[1:4] + full[5:])
    answers = re.findall(r"^tokens of each version in \w+: (.*)", printed, re.M)
    assert len(answers) == 4
    for answer in answers:
        spans = re.findall(r"(\w+): (\d+)", answer)
        assert sum(int(tokens) for _, tokens in spans) == 1500
        versions = [0 if version == "default" else int(version) for version, _ in spans]
        assert versions == sorted(set(versions))
        assert len(versions) >= 3
    assert "fresh engine, bit for bit: True" in printed

"""The example runs as it is, and replay does what it says."""

import re
from pathlib import Path

import pytest

from tests.engine_job import fork_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "router_replay.py"


@pytest.mark.vllm
@pytest.mark.example
def test_replay_lowers_the_printed_mismatch():
    printed = fork_job(EXAMPLE)
    without, with_replay = map(float, re.findall(r"^k3 with\w* replay +(\S+)", printed, re.M))
    # Routing dominates with weights this wide; the exact factor is in docs/replay_evidence.md.
    assert 1e-3 < without < 1e-1
    assert with_replay < without / 20

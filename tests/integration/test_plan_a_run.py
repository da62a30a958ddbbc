"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_a_run.py"


@pytest.mark.example
def test_the_simulated_loop_does_what_the_plan_says():
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == 0, f"{EXAMPLE.name} {how_it_ended(done.returncode)}\n{done.stderr}"
    reached = [float(x) for x in re.findall(r"^throughput +(\S+) of the plan", done.stdout, re.M)]
    with_tail, equal = reached
    assert equal >= 0.95
    assert 0.5 < with_tail <= 1.02  # The plan knows no tail.
    gains = [float(x) for x in re.findall(r"^gain +(\S+) x a synchronous", done.stdout, re.M)]
    assert len(gains) == 2
    assert min(gains) > 1

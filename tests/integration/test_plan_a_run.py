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
    assert len(reached) == 2
    assert min(reached) >= 0.95
    assert done.stdout.count("worth it") == 2

"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts_from_processes.py"


@pytest.mark.example
def test_a_killed_worker_costs_at_most_the_group_that_it_was_making():
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == 0, f"{EXAMPLE.name} {how_it_ended(done.returncode)}\n{done.stderr}"
    assert len(re.findall(r"^killed a worker", done.stdout, re.M)) == 1
    rewards = [float(x) for x in re.findall(r"mean reward (\S+),", done.stdout)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2
    taken, of, lost = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert taken + lost == of
    assert lost <= 1

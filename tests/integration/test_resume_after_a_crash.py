"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_after_a_crash.py"


@pytest.mark.example
def test_a_killed_run_ends_as_one_that_was_left_alone():
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == 0, f"{EXAMPLE.name} {how_it_ended(done.returncode)}\n{done.stderr}"
    tokens = [int(count) for count in re.findall(r"killed; .* (\d+) tokens", done.stdout)]
    assert len(tokens) == 4
    assert sum(tokens) > 0
    rewards = [float(x) for x in re.findall(r"reward of the last batch (\S+)$", done.stdout, re.M)]
    assert min(rewards) > 0.8
    (last,) = re.findall(r"^no prompt trained twice: .*$", done.stdout, re.M)
    assert last.count("True") == 3

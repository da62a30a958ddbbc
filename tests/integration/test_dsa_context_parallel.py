"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "dsa_context_parallel.py"


@pytest.mark.example
def test_three_ranks_equal_one_rank():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "3", EXAMPLE],
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, f"torchrun {how_it_ended(done.returncode)}\n{done.stderr}"
    output, gradient = map(
        float, re.findall(r"(?:output|gradient) (\S+e\S+?)(?:,|$)", done.stdout, re.M)
    )
    assert output < 1e-12
    assert gradient < 1e-12
    assert re.search(r"^received forward, rows +126\.0 MiB$", done.stdout, re.M)

"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel_moe.py"


@pytest.mark.example
def test_four_ranks_print_the_plans_and_equal_one_rank():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "4", EXAMPLE],
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, f"torchrun {how_it_ended(done.returncode)}\n{done.stderr}"
    assert re.search(r"^expert +4  0,1,2,3 .*all-to-all$", done.stdout, re.M)
    assert re.search(r"^1 +256 +\d+ +1\.0", done.stdout, re.M)
    loss, gradient = map(float, re.findall(r"(?:loss|gradient) (\S+e\S+?)(?:,|$)", done.stdout))
    assert loss < 1e-12
    assert gradient < 1e-12

"""The example runs as it is, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "fp8_layers.py"


@pytest.mark.example
def test_float8_layers_train_as_float32_and_round_once_a_step():
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == 0, f"{EXAMPLE.name} {how_it_ended(done.returncode)}\n{done.stderr}"
    errors = [float(x) for x in re.findall(r"^  model\.layers.* (0\.\d+)$", done.stdout, re.M)]
    assert len(errors) == 2 * (4 + 2)
    assert all(0.02 < error < 0.03 for error in errors)
    with_cache, without = map(int, re.findall(r"rounded (\d+) .* (\d+)$", done.stdout, re.M)[0])
    assert without == 4 * with_cache  # Micro-batches.
    losses = [
        (float(a), float(b)) for a, b in re.findall(r"^ +\d+ +(\S+) +(\S+)$", done.stdout, re.M)
    ]
    (first, _), _, (float32, float8) = losses
    assert abs(float8 - float32) < 0.1 * (first - float32)
    same, apart = map(int, re.findall(r"^audit.* findings (\d+)$", done.stdout, re.M))
    assert same == 0
    assert apart == len(errors)
    assert re.search(r"^fingerprint [0-9a-f]{16}$", done.stdout, re.M)

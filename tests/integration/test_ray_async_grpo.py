"""The example on Ray: an engine's actor is killed, and nothing is lost. Run by scripts/peers."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import HANG_S, JOB_S
from tests.engine_job import ENVIRONMENT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.example,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed; scripts/peers does"
    ),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_async_grpo.py"
STEPS, KILL_AT, PROMPTS, GROUP = 8, 2, 16, 8


def marked(mark: str) -> list[str]:
    """The command lines of living processes in whose environment there is a mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.fixture
def scratch():
    """For Ray's own files, whose sockets need a short path."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_an_engine_is_killed_and_nothing_is_lost(tmp_path, scratch):
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--warm-steps", "30"]
    command += ["--steps", str(STEPS), "--kill-at", str(KILL_AT)]
    with (tmp_path / "log").open("w") as log:
        patience = {"RAY_raylet_start_wait_time_s": str(int(HANG_S))}  # Ray's 30 s are too few.
        environment = os.environ | ENVIRONMENT | patience | {"TMPDIR": scratch, "MARK": mark}
        done = subprocess.run(
            command, env=environment, stdout=log, stderr=log, timeout=JOB_S, check=False
        )
    how = f"the example {how_it_ended(done.returncode)}"
    assert done.returncode == 0, f"{how}\n{(tmp_path / 'log').read_text()[-8000:]}"
    summary = json.loads((out / "summary.json").read_text())

    killed = summary["killed"]
    assert (killed["engine"], killed["version"]) == ("engine-1", 1 + KILL_AT)
    assert summary["failed_requests"] >= killed["in_flight"] > 0
    # The first engine was never replaced; the other one's successor began with what was newest.
    assert summary["joined_at"][0] == [1]
    first, second = summary["joined_at"][1]
    assert first == 1
    assert killed["version"] <= second <= 1 + STEPS
    assert summary["proved"] == [True, True]
    assert max(summary["mismatch_kl_by_engine"]) < 1e-3  # A version ago, it is 100 times that.
    assert summary["wrong_labels"] == 0
    assert summary["versions_seen"] >= 3
    assert 0 < summary["max_staleness_seen"] <= summary["max_off_policy_steps"]

    assert summary["steps"] == STEPS
    assert summary["prompts_trained_once"] == STEPS * PROMPTS
    assert (summary["prompts_trained_again"], summary["prompts_lost"]) == (0, 0)
    assert sum(map(sum, summary["rollouts"])) == STEPS * PROMPTS * GROUP

    until = time.monotonic() + HANG_S
    while marked(mark):
        assert time.monotonic() < until, marked(mark)
        time.sleep(0.2)

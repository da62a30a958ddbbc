"""Rules of the tests themselves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

from primeblocks.replay.gates import chosen_softmax_gates
from tests.deadlines import EXPIRES_S, JOB_S
from tests.engine_job import call, is_gone

ROOT = Path(__file__).parents[1]
# More than five seconds and less than HANG_S, as a number: neither an expiry nor a hang.
SCATTERED = re.compile(r"""(?x)
    (?: \b timeout(?:_s)? = | \.(?:join|wait|alarm|settimeout)\( | monotonic\(\)\ \+\  )
    (?: [6-9] | [1-9]\d | 1[01]\d )(?: \.\d+ )?
    (?= [,)\n] )
""")
SHARED = """
import pytest

@pytest.fixture(scope="module")
def engine():
    raise TimeoutError("one read of an engine")

def test_one(engine): ...
def test_two(engine): ...
def test_three(engine): ...
def test_four(): ...
"""


def test_deadlines_of_a_hang_have_one_place():
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts.items()
        for match in SCATTERED.finditer(text)
    ]
    assert found == [], "take HANG_S, START_S, JOB_S or EXPIRES_S of tests/deadlines.py"


def test_no_deadline_outlives_pytests_own():
    (own,) = re.findall(r"^timeout = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert int(own) > JOB_S


def test_shapes_are_checked_at_every_call():
    pytest.importorskip("beartype")
    with pytest.raises(jaxtyping.TypeCheckError):
        chosen_softmax_gates(torch.ones(3, 8), torch.zeros(2, 1, dtype=torch.int64))


def test_a_shared_setup_that_fails_is_one_failure(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (tmp_path / "test_shared.py").write_text(SHARED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert "1 passed, 2 skipped, 1 error" in done.stdout, done.stdout
    assert "not run: the setup that it shares failed in test_shared.py::test_one" in done.stdout


def _leaves_a_server(told):
    server = subprocess.Popen(["sleep", str(JOB_S)], process_group=0)
    Path(told).write_text(str(server.pid))
    server.wait()


@pytest.mark.vllm
def test_a_job_that_hangs_takes_its_servers_along(tmp_path):
    told = tmp_path / "pid"
    with pytest.raises(AssertionError, match="_leaves_a_server"):
        call(_leaves_a_server, str(told), timeout_s=EXPIRES_S)
    pid = int(told.read_text())
    assert is_gone(pid)

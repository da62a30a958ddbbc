"""The example itself: two trainer ranks and a real vLLM; killed engines, killed runs, two nodes."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S, START_S
from tests.engine_job import ENVIRONMENT
from tests.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.example]

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo_moe.py"
KEYS = {
    "engine",
    "reward_before",
    "reward_after",
    "steps",
    "versions_seen",
    "max_off_policy_steps",
    "max_staleness_seen",
    "mismatch_kl_without_replay",
    "mismatch_kl_with_replay",
    "route_agreement",
    "sync_seconds_median",
    "sync_bytes",
    "tokens_per_second",
    "kv_store_hits",
    "dropped",
    "seconds",
}


def start(
    out: Path, *, steps: int, warm_steps: int = 10, state: Path | None = None
) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--rdzv-id", run_id(out)]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--out", str(out)]
    command += ["--warm-steps", str(warm_steps), "--steps", str(steps)]
    command += [] if state is None else ["--state", str(state)]
    with (out / "log").open("w") as log:
        return subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, text=True
        )


def start_node(out: Path, rank: int, *, port: int, steps: int, own: str) -> subprocess.Popen:
    """One of two agents with a rank each, which share no files; nor memory, where it is walled.

    `own` is a folder with a short path, because the path of a socket has at most 107 bytes.
    """
    node = out / f"node-{rank}"
    node.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", run_id(out)]
    # Its address, with its process's number, is the name of a node; behind walls numbers are equal.
    command += ["--local-addr", f"127.0.0.{1 + rank}", "--nnodes", "2", "--nproc-per-node", "1"]
    command += [str(EXAMPLE), "--out", str(node), "--warm-steps", "10", "--steps", str(steps)]
    command += ["--trees"]
    environment = os.environ | ENVIRONMENT | {"TMPDIR": own}
    with (node / "log").open("w") as log:
        return subprocess.Popen(walled(command), env=environment, stdout=log, stderr=log, text=True)


def walled(command: list[str]) -> list[str]:
    """It sees no other processes and has a /dev/shm of its own, where this machine lets it."""
    walls = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc"]
    own = "mount -t tmpfs tmpfs /dev/shm"
    if shutil.which("unshare") is None:
        return command
    tried = subprocess.run([*walls, "sh", "-c", own], check=False, capture_output=True)
    if tried.returncode != 0:
        return command
    return [*walls, "sh", "-c", f"{own} && exec {shlex.join(command)}"]


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children]
    return found + [deeper for child in found for deeper in descendants(child)]


def engines(pid: int) -> list[int]:
    def is_engine(one: int) -> bool:
        try:
            return b"EngineCore" in Path(f"/proc/{one}/cmdline").read_bytes()
        except FileNotFoundError:
            return False

    return [one for one in descendants(pid) if is_engine(one)]


def run_id(out: Path) -> str:
    return f"{out.name}-{os.getpid()}"


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def shared_memory(out: Path) -> list[Path]:
    """What this run, and no other on the machine, holds in shared memory."""
    return list(Path("/dev/shm").glob(f"primeblocks-demo-{run_id(out)}-*"))


def test_two_nodes_share_no_memory_and_compute_trees(tmp_path, stack):
    """Simulated by two agents on one machine, over its loopback."""
    port = free_port()
    own = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
    nodes = [start_node(tmp_path, i, port=port, steps=6, own=own[i]) for i in range(2)]
    logs = [tmp_path / f"node-{rank}" / "log" for rank in range(2)]
    try:
        deadline = time.monotonic() + JOB_S
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            assert shared_memory(tmp_path) == []
            time.sleep(0.5)
        ended = [node.poll() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert ended == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    summary = json.loads((tmp_path / "node-0" / "summary.json").read_text())
    assert not (tmp_path / "node-1" / "summary.json").exists()
    assert (summary["steps"], summary["dropped"]) == (6, 0)
    assert summary["versions_seen"] >= 3
    # What the engine samples with are the weights of both ranks.
    assert 0 < summary["mismatch_kl_with_replay"] < summary["mismatch_kl_without_replay"]
    assert summary["sync_bytes"] > 1 << 20
    assert summary["trees"]
    assert summary["positions_computed"] < 0.3  # All prompts begin with one instruction.


def test_a_killed_engine_ends_the_run_with_its_name(tmp_path):
    process = start(tmp_path, steps=10_000, warm_steps=1)
    try:
        deadline = time.monotonic() + START_S
        while "GRPO" not in (tmp_path / "log").read_text():
            ended, log = process.poll(), (tmp_path / "log").read_text()[-6000:]
            assert ended is None, f"the example {how_it_ended(ended)}\n{log}"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert shared_memory(tmp_path)
        for pid in engines(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(START_S) != 0
    finally:
        process.kill()
    assert "primeblocks.errors.EngineError" in (tmp_path / "log").read_text()
    assert shared_memory(tmp_path) == []


def test_a_run_that_is_killed_goes_on_from_its_state_and_keeps_its_bounds(tmp_path):
    state = tmp_path / "state"
    process = start(tmp_path, steps=10_000, state=state)
    try:
        deadline = time.monotonic() + JOB_S
        while not list(state.glob("step-*[0-9]")):
            ended, log = process.poll(), (tmp_path / "log").read_text()[-6000:]
            assert ended is None, f"the example {how_it_ended(ended)}\n{log}"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        every = [process.pid, *descendants(process.pid)]
        for pid in every:
            os.kill(pid, signal.SIGKILL)
        process.wait(START_S)
        while any(Path(f"/proc/{pid}/fd/0").exists() for pid in every):
            time.sleep(0.1)  # Until they are gone they hold the journal.
        for left in shared_memory(tmp_path):
            shutil.rmtree(left)
        newest = max(int(path.name[5:]) for path in state.glob("step-*[0-9]"))
        process = start(tmp_path, steps=newest + 5, state=state)
        assert process.wait(JOB_S) == 0, (tmp_path / "log").read_text()[-6000:]
    finally:
        process.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["engine"] == "vllm-0.32.0"
    assert (summary["first_version"], summary["steps"]) == (newest, 6)
    assert summary["versions_seen"] >= 3
    assert 0 < summary["max_staleness_seen"] <= summary["max_off_policy_steps"]
    # The routes of trajectories from before the kill fit theirs from after it.
    assert 0 < summary["mismatch_kl_with_replay"] < summary["mismatch_kl_without_replay"]
    assert 0.5 < summary["route_agreement"] <= 1
    # Two bytes for each weight, every weight once.
    assert summary["sync_bytes"] > 1 << 20
    assert summary["kv_store_hits"] > 0
    pictures = {"reward.png", "mismatch_kl.png", "staleness.png", "time.png"}
    assert pictures <= {path.name for path in tmp_path.iterdir()}
    assert shared_memory(tmp_path) == []

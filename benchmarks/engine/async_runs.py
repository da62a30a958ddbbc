"""Runs with a real vLLM: synchronous, asynchronous, and killed three times on the way.

`python -m benchmarks.engine.async_runs` from the repository; ten minutes on two cores. It is the
example itself, run three times with the same number of steps and rollouts. With a bound of 0 the
trainer waits for the engine and the engine for the trainer. The third run is the asynchronous one
with its state in a folder: SIGKILL ends all of its processes at once, and it is started again.

All must learn: the mean reward of ten training batches in a row must reach `TARGET`, and the time
that each took for it is what is compared. On a CPU trainer and engine share cores, so that there is
little idle time to win: what a second machine would bring is not measured here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ..harness import main
from .environment import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo_moe.py"
STEPS, TARGET, WINDOW = 100, 0.5, 10
BOUNDS = {"synchronous": 0, "asynchronous": 2}
KILLED_AT = (23, 48, 71)  # steps; weights are saved every ten
TIMEOUT_S = 900.0


def start(bound: int, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--rdzv-id", run_id(out)]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--out", str(out)]
    command += ["--steps", str(STEPS), "--max-off-policy-steps", str(bound), *more]
    out.mkdir(exist_ok=True)
    with (out / "log").open("a") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, "TMPDIR": str(out)},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def run_id(out: Path) -> str:
    return f"{out.name}-{os.getpid()}"


def finish(process: subprocess.Popen[str], out: Path) -> tuple[dict[str, Any], list[Any]]:
    """The summary of a run, and the course of its reward."""
    code = process.wait(TIMEOUT_S)
    assert code == 0, (out / "log").read_text()[-4000:]
    return json.loads((out / "summary.json").read_text()), json.loads(
        (out / "history.json").read_text()
    )


def reached_s(history: list[dict[str, float]]) -> float | None:
    """Seconds until the mean reward of so many batches in a row was the target."""
    for end in range(WINDOW, len(history) + 1):
        window = history[end - WINDOW : end]
        if sum(record["reward"] for record in window) >= TARGET * WINDOW:
            return window[-1]["at_s"]
    return None


def policy(state: Path) -> int:
    """The policy that a running example has come to, read from its journal."""
    journal = state / "journal"
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        try:
            (version,) = db.execute("SELECT version FROM progress").fetchone()
        except (sqlite3.OperationalError, TypeError):  # It is being made.
            return 0
    return version or 0


def descendants(pid: int) -> Iterator[int]:
    """All processes that a process started, and those that they did."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from descendants(int(child))
        yield int(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_at(version: int, bound: int, out: Path, state: Path) -> int:
    """Run until a policy is there, then SIGKILL everything; return the policy."""
    process = start(bound, out, "--state", str(state))
    deadline = time.monotonic() + TIMEOUT_S
    while (now := policy(state)) < version:
        assert process.poll() is None, (out / "log").read_text()[-4000:]
        assert time.monotonic() < deadline, f"policy {version} did not come"
        time.sleep(0.05)
    every = [process.pid, *descendants(process.pid)]
    for pid in every:
        os.kill(pid, signal.SIGKILL)
    process.wait(60)
    while any(map(is_alive, every)):  # Until then they hold the journal.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for left in Path("/dev/shm").glob(f"primeblocks-demo-{run_id(out)}-*"):
        shutil.rmtree(left)  # What nobody lived to remove.
    return now


def survivors(state: Path) -> dict[str, int]:
    """What a killed run left: tokens of unfinished trajectories, and groups that it trains on."""
    from primeblocks.async_loop import Journal

    with Journal(state / "journal") as journal:
        saved = max(int(path.name[5:]) for path in state.glob("step-*[0-9]"))
        restored = journal.restore(saved)
    kept = [item for _, _, partials in restored.again for item in partials.values()]
    return {
        "groups": len(restored.finished),
        "trajectories": len(kept),
        "tokens": sum(len(item.completion) for item in kept),
    }


def measure() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, bound in BOUNDS.items():
            out = Path(folder, name)
            summary, history = finish(start(bound, out), out)
            assert summary["steps"] == STEPS, f"{name}: {summary['steps']} of {STEPS} steps"
            assert summary["max_staleness_seen"] <= bound, f"{name}: {summary}"
            until = reached_s(history)
            assert until is not None, f"{name} never reached {TARGET}: {history[-WINDOW:]}"
            seconds[name] = until
            prefix = f"async_loop.vllm.{name}"
            found[f"{prefix}.seconds_to_reward"] = (until, "s", "")
            found[f"{prefix}.seconds"] = (summary["loop_seconds"], "s", "")
            found[f"{prefix}.reward_after"] = (summary["reward_after"], "", "")
        out, state = Path(folder, "killed"), Path(folder, "state")
        left = {"groups": 0, "trajectories": 0, "tokens": 0}
        for step in KILLED_AT:
            kill_at(step + 1, BOUNDS["asynchronous"], out, state)
            left = {name: left[name] + count for name, count in survivors(state).items()}
        summary, history = finish(start(BOUNDS["asynchronous"], out, "--state", str(state)), out)
        assert summary["first_version"] > KILLED_AT[-1] - 10, summary
        assert summary["max_staleness_seen"] <= BOUNDS["asynchronous"], summary
        last = sum(record["reward"] for record in history[-WINDOW:]) / WINDOW
        assert last >= TARGET, f"the killed run ended at {last}"
        found["async_loop.vllm.killed.reward_after"] = (summary["reward_after"], "", "")
        for name, count in left.items():
            found[f"async_loop.vllm.killed.{name}_that_came_back"] = (float(count), "", "")
    ratio = seconds["synchronous"] / seconds["asynchronous"]
    found["async_loop.vllm.speedup_to_reward"] = (ratio, "ratio", "a bound of 0")
    return found


if __name__ == "__main__":
    main(measure)

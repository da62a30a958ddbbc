"""Asynchronous against synchronous training with a real vLLM: the example itself, run both ways.

`python -m benchmarks.engine.async_speedup` from the repository; ten minutes on two cores. Both runs
make as many optimizer steps with as many rollouts; with a bound of 0 the trainer waits for the
engine and the engine for the trainer. On a CPU the two share cores, so that there is little idle
time to win: what a second machine would bring is not measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..harness import main
from .environment import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo_moe.py"
STEPS, BOUNDS = 100, {"synchronous": 0, "asynchronous": 2}


def run(bound: int, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--out", str(out)]
    command += ["--steps", str(STEPS), "--max-off-policy-steps", str(bound)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
    summary: dict[str, float] = json.loads((out / "summary.json").read_text())
    return summary


def measure() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, bound in BOUNDS.items():
            summary = run(bound, Path(folder) / name)
            assert summary["steps"] == STEPS, f"{name}: {summary['steps']} of {STEPS} steps"
            assert summary["max_staleness_seen"] <= bound, f"{name}: {summary}"
            assert summary["reward_after"] > summary["reward_before"], f"{name}: {summary}"
            seconds[name] = summary["loop_seconds"]
            prefix = f"async_loop.vllm.{name}"
            found[f"{prefix}.seconds"] = (summary["loop_seconds"], "s", "")
            found[f"{prefix}.reward_before"] = (summary["reward_before"], "", "")
            found[f"{prefix}.reward_after"] = (summary["reward_after"], "", "")
    ratio = seconds["synchronous"] / seconds["asynchronous"]
    found["async_loop.vllm.speedup_vs_sync"] = (ratio, "ratio", "a bound of 0")
    return found


if __name__ == "__main__":
    main(measure)

"""Losses under staleness, in real runs: the example with a real vLLM, five losses by three bounds.

`python -m benchmarks.engine.loss_table --json ... ` from the repository; half an hour on two cores.
Every run makes as many steps from the same warm start, with one learning rate for all. Told are the
reward of greedy answers to held-out prompts after the run, the mean reward of its last ten batches,
and, over its second half, effective sample size and k3 between trainer and engine. One seed: runs
of one loss differ by some hundredths, so that small differences say nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ..harness import main
from .environment import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo_moe.py"
LOSSES = ("grpo", "aipo", "cispo", "gspo", "reinforce")
BOUNDS, STEPS = (0, 2, 8), 60


def run(loss: str, bound: int, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--out", str(out), "--loss", loss]
    command += ["--steps", str(STEPS), "--max-off-policy-steps", str(bound)]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(out.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    history = json.loads((out / "history.json").read_text())
    assert summary["steps"] == len(history) == STEPS
    assert summary["max_staleness_seen"] <= bound
    late = history[STEPS // 2 :]
    return {
        "reward": summary["reward_after"],
        "batch_reward": statistics.mean(record["reward"] for record in history[-10:]),
        "ess": statistics.mean(record["ess"] for record in late),
        "k3": statistics.mean(record["k3"] for record in late),
    }


def measure() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for bound in BOUNDS:
            for loss in LOSSES:
                figures = run(loss, bound, Path(folder, f"{loss}-{bound}"))
                print(f"{loss} {bound}", figures, file=sys.stderr, flush=True)
                for name, value in figures.items():
                    found[f"async_loop.losses.{loss}.staleness_{bound}.{name}"] = (value, "", "")
    return found


if __name__ == "__main__":
    main(measure)

"""What returning the routes costs a real vLLM: two engines, alike but for capture, asked in turn.

Each turn serves 16 fresh prompts of 256 tokens and generates 128 more. A ratio is the median over
turns of the time with capture over the time without, in the same turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from primeblocks.testing import tiny_models

from ..harness import main
from .environment import ENVIRONMENT

TURNS = 9
PROMPT = 256
MODELS: dict[str, dict[str, Any]] = {
    "small": {"num_layers": 4, "hidden": 128, "num_experts": 8, "top_k": 2, "vocab": 512},
    "large": {"num_layers": 8, "hidden": 256, "num_experts": 64, "top_k": 8, "vocab": 2048},
}


class Engine:
    """A job that serves a batch for each line."""

    def __init__(self, folder: Path, kind: str) -> None:
        job = Path(__file__).with_name("latency_job.py")
        self._job = subprocess.Popen(
            [sys.executable, str(job), str(folder), kind],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read_until("ready")

    def seconds(self, seed: int, *, prompt_start: int = 0) -> float:
        assert self._job.stdin is not None
        self._job.stdin.write(f"{seed} {prompt_start}\n")
        self._job.stdin.flush()
        return float(self._read_until(""))

    def close(self) -> None:
        assert self._job.stdin is not None
        self._job.stdin.close()
        self._job.wait(60)

    def _read_until(self, wanted: str) -> str:
        assert self._job.stdout is not None
        for line in self._job.stdout:
            text = line.strip()
            if text == wanted or (not wanted and text.replace(".", "", 1).isdigit()):
                return text
        raise SystemExit("an engine ended early")


def turns(folder: Path) -> list[tuple[float, float, float]]:
    """Seconds of each turn: without capture, with it, and with new tokens' rows only."""
    plain, capture = Engine(folder, "plain"), Engine(folder, "capture")
    found = []
    for turn in range(-2, TURNS):  # two to warm up
        seconds = (
            plain.seconds(3 * turn + 100),
            capture.seconds(3 * turn + 100),
            capture.seconds(3 * turn + 101, prompt_start=PROMPT - 1),
        )
        if turn >= 0:
            found.append(seconds)
    plain.close()
    capture.close()
    return found


def measure() -> dict[str, tuple[float, str, str]]:
    torch.set_num_threads(1)
    found: dict[str, tuple[float, str, str]] = {}
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            tiny_models.save("qwen3_moe", path / "model", **model)
            shape = {
                "num_layers": model["num_layers"],
                "moe_layers": tuple(range(model["num_layers"])),
                "num_experts": model["num_experts"],
                "top_k": model["top_k"],
            }
            (path / "shape.json").write_text(json.dumps(shape))
            seconds = turns(path)
        prefix = f"replay.return_overhead.{name}"
        for column, kind in ((1, "latency_ratio"), (2, "new_rows_only.latency_ratio")):
            ratios = [turn[column] / turn[0] for turn in seconds]
            found[f"{prefix}.{kind}"] = (statistics.median(ratios), "ratio", "no capture")
            quartiles = statistics.quantiles(ratios, n=4)
            found[f"{prefix}.{kind}.quartile_range"] = (quartiles[2] - quartiles[0], "ratio", "")
        found[f"{prefix}.seconds"] = (statistics.median(turn[0] for turn in seconds), "s", "")
    return found


if __name__ == "__main__":
    main(measure)

"""First token of a real vLLM, from pages or computed: `-m benchmarks.kvoffload_parts.vllm_ttft`.

vLLM on CPU in float32, room for one request, 8 layers of 256 with 32 experts, top 4, routed-expert
capture on. Computed, hit, and hit from the queue (its time is that from the end of
the request in front) take turns in one process; each hit is checked to have taken all of its
pages from the tier named and to equal the computed answer in token, log-probability and routes. The
engine's cache holds one prompt, vLLM's pool three of five; the disk is read directly where the file
system can. The model is small: with larger ones computing costs more for each byte of a page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from primeblocks.errors import how_it_ended
from primeblocks.testing import tiny_models

from ..engine.environment import ENVIRONMENT
from ..harness import Timing, main

__all__ = ["figures"]

MODEL = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}
TOKENS, ROUNDS = (2016, 4000), 9
TIMEOUT_S = 300

Figures = dict[str, tuple[float, str, str]]


def figures(*, tokens: Sequence[int] = TOKENS, rounds: int = ROUNDS) -> Figures:
    """By length of the prompt and tier."""
    found: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_models.save(
            "qwen3_moe", folder / "model", seed=0, dtype="float32", init_std=0.06, **MODEL
        )
        for length in tokens:
            for tier in ("host", "disk"):
                seconds = _run(folder, length, tier, rounds)
                print(f"{length} tokens, {tier}: " + _text(seconds))
                where = f"kvoffload.vllm.ttft.{length}_tokens.{tier}"
                for case, each in seconds.items():
                    found[f"{where}.{case}_s"] = (each.median, "s", "")
                ratio = seconds["computed"].median / seconds["hit"].median
                found[f"{where}.speedup"] = (ratio, "ratio", "computing the prompt again")
    return found


def _run(folder: Path, tokens: int, tier: str, rounds: int) -> dict[str, Timing]:
    job = Path(__file__).with_name("vllm_ttft_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(folder), str(tokens), tier, str(rounds)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{job.name} {how_it_ended(done.returncode)}\n{done.stderr[-4000:]}")
    return {
        name: Timing(tuple(each)) for name, each in json.loads(done.stdout.splitlines()[-1]).items()
    }


def _text(seconds: dict[str, Timing]) -> str:
    return ", ".join(
        f"{name} {each.median * 1e3:.1f} ms (spread {each.spread:.0%})"
        for name, each in seconds.items()
    )


if __name__ == "__main__":
    main(figures)

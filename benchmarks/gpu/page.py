"""Draws docs/gpu.md from the suite's JSON: `python -m benchmarks.gpu.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import CASES, PARTS

__all__ = ["PAGE", "draw"]

_ROOT = Path(__file__).parents[2]
PAGE, RESULTS = _ROOT / "docs" / "gpu.md", _ROOT / "benchmarks" / "results"
_HEAD = """# On a GPU

What ran on a GPU, and how fast; drawn from the JSON files of `benchmarks/gpu/run.sh` by
`python -m benchmarks.gpu.page`. A case that says *never* has not met one. `run.sh --dry-run` runs
all of them at small sizes on a CPU, kernels under Triton's interpreter or compiled for sm_90 and
sm_100. Each case is a process with a deadline; what crashes or hangs costs itself alone.

A part takes eight minutes at most, and leaves one file, `gpu_A.json` and so on:

```sh
benchmarks/gpu/bundle                    # where there is a network: 10 MB of wheels
benchmarks/gpu/run.sh --part A "$OUT"    # on the GPU's machine, with benchmarks/gpu/wheels
benchmarks/gpu/run.sh --part B "$OUT"
benchmarks/gpu/run.sh --part C "$OUT"
benchmarks/gpu/run.sh --part D "$OUT"
cp "$OUT"/gpu_?.json benchmarks/results/ && python -m benchmarks.gpu.page
```
"""
_NOTES = {
    "A": """\
Suites that have their device as a parameter are `tests/*/test_devices*.py`, and that of the
log-probabilities. On a CPU all but weightsync's also run on a device that is none (`--pretend`):
its tensors lie on the host, and an operator that mixes them with the host's raises. So code takes
the branches of a GPU; streams, pinned memory and CUDA's own kernels are not there. Left on the
CPU: suites over several ranks, for which NCCL wants as many GPUs; what no device changes (plans,
files, messages, refusals, routes and their code); fakes of libraries, which the engines' own suite
runs; hosts that such a machine lacks (vLLM, torchtitan).
""",
}
_SHOWN = (
    "fraction",
    "speedup",
    "ratio",
    "over_",
    "tflops",
    "mfu",
    "_ms",
    "gb_per_s",
    "waits",
    "launches",
)


def draw(results: Path = RESULTS) -> str:
    """Return the page."""
    lines = [_HEAD]
    for part, what in PARTS.items():
        path = results / f"gpu_{part}.json"
        report = json.loads(path.read_text()) if path.exists() else None
        lines += [f"## {part}, {what}", "", *([_NOTES[part]] if part in _NOTES else [])]
        lines += [_ran(report), "", "| case | |", "|---|---|"]
        done = {each["case"]: each for each in report["cases"]} if report else {}
        there = [case.name for case in CASES if case.part == part and case.arguments]
        lines += [_row(name, done.get(name)) for name in there]
        lines += ["", *_figures(done), ""]
    return "\n".join(lines).rstrip() + "\n"


def _ran(report: dict[str, Any] | None) -> str:
    if report is None:
        return "Never run."
    machine = report["machine"]
    versions = {name: machine["packages"].get(name) for name in ("torch", "triton", "transformers")}
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{machine['device']}, {said}, at {report['commit']}."


def _row(name: str, outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return f"| {name} | never |"
    said = f"{outcome['status']}, {outcome['seconds']:.0f} s"
    if outcome["status"] != "passed":
        said += ": " + " ".join(outcome["why"].split())[-200:].replace("|", "/")
    return f"| {name} | {said} |"


def _figures(done: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        f"| `{each['figure']}` | {each['value']:.4g} {each['unit']} | {each['peer']} |"
        for outcome in done.values()
        for each in outcome["figures"]
        if any(word in each["figure"] for word in _SHOWN)
    ]
    return ["| figure | | beside |", "|---|---|---|", *rows] if rows else []


if __name__ == "__main__":
    PAGE.write_text(draw())

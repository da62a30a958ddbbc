"""Draws docs/gpu.md from the suite's JSON: `python -m benchmarks.gpu.page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .cases import CASES

__all__ = ["PAGE", "draw"]

_ROOT = Path(__file__).parents[2]
PAGE, RESULTS = _ROOT / "docs" / "gpu.md", _ROOT / "benchmarks" / "results" / "gpu"
_HEAD = """# On a GPU

This page shows what ran on a GPU, what failed there, and every figure as it was measured last.
`python -m benchmarks.gpu.page` draws it from the files in `benchmarks/results/gpu`.

Run the suite on a machine with a GPU. It needs eight minutes at most:

```sh
benchmarks/gpu/bundle                       # where there is a network: 10 MB of wheels
benchmarks/gpu/run.sh "$OUT"                # on the GPU's machine, with benchmarks/gpu/wheels
benchmarks/gpu/run.sh --only fp8 "$OUT"     # a block's tests and figures, or a case, three minutes
cp "$OUT"/*.json benchmarks/results/gpu/ && python -m benchmarks.gpu.page
```

Tests run first and side by side, which also fills Triton's cache. Timed cases follow one at a time,
the most valuable first. When the eight minutes are over, the suite skips the rest: run such a case
with `--only`. Each case is a process with a deadline. A case that is killed keeps the rows that it
has written. `run.sh --dry-run` runs every case at small sizes on a CPU, with kernels under Triton's
interpreter or compiled for sm_90 and sm_100.

The tests are `tests/*/test_devices*.py`, those of Triton's kernels, and those of the
log-probabilities. With `--pretend` they also run on a simulated device, which finds operators that
mix its tensors with the host's. Streams, pinned memory and CUDA's own kernels are absent there.
The suite has no test over several GPUs, and none of vLLM or torchtitan.
"""
_HIDDEN = ("spread", "hops", ".rectangles")


def draw(results: Path = RESULTS) -> str:
    """Return the page."""
    reports = [json.loads(path.read_text()) for path in results.glob("*.json")]
    reports.sort(key=lambda report: report["date"], reverse=True)
    lines = [_HEAD, *(line for report in reports for line in _section(report))]
    newest: dict[str, str] = {}
    for report in reports:
        for each in (each for outcome in report["cases"] for each in outcome["figures"]):
            if not each["figure"].endswith(_HIDDEN):
                newest.setdefault(each["figure"], _figure(each, report["commit"]))
    rows = [newest[name] for name in sorted(newest)]
    lines += ["## Figures", "", "| figure | | next to | run |", "|---|---|---|---|", *rows, ""]
    seen = {each["case"] for report in reports for each in report["cases"]}
    never = [each.name for each in CASES if each.arguments and each.name not in seen]
    if never:
        lines += ["## Never run on a GPU", "", ", ".join(f"`{name}`" for name in never), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    versions = [f"{name} {version}" for name, version in machine["packages"].items() if version]
    lines = [f"## {machine['device']}, {report['commit']}", ""]
    lines += [report["note"], ""] if "note" in report else []
    ran = [each for each in report["cases"] if "on a CPU alone" not in each["why"]]
    head = ["| case | |", "|---|---|", f"| packages | {', '.join(versions)} |"]
    return [*lines, *head, *map(_row, ran), ""]


def _row(outcome: dict[str, Any]) -> str:
    said = outcome["status"]
    if outcome["seconds"] is not None:
        said += f", {outcome['seconds']:.0f} s"
    why = " ".join(outcome["why"].split())
    if outcome["status"] == "passed":  # What pytest counted, and what a benchmark left out.
        why = ", ".join(re.findall(r"\d+ passed(?:, \d+ skipped)?|left out: [^:]+", why)) or why
        why = "" if outcome["figures"] and "left out" not in why else why
    if why:
        said += ": " + why[-300:].replace("|", "/")
    return f"| {outcome['case']} | {said} |"


def _figure(each: dict[str, Any], commit: str) -> str:
    value = f"{each['value']:.4g} {each['unit']}"
    return f"| `{each['figure']}` | {value} | {each['peer']} | {commit[:7]} |"


if __name__ == "__main__":
    PAGE.write_text(draw())

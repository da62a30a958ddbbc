"""Runs cases, each in a process group of its own, so that a crash or a hang costs one case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primeblocks.errors import how_it_ended

from .cases import Case
from .machine import lacks

__all__ = ["Outcome", "run_case", "run_cases"]

_ROOT = Path(__file__).parents[2]
_HIDES = Path(__file__).parent / "hides"
_TAIL_CHARS, _SHOWN_CHARS = 4000, 400
# As many deadlines: kernels are interpreted, and others use the same processor.
_DRY_TIMES = 10
# Leaves time to kill, to read and to write.
_LEAST_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """A case's end.

    Attributes:
        figures: rows that were written, also by a case that was killed or failed later.
        status: "passed", "failed", "timed out" or "skipped".
        why: the end of its output, or why it was skipped.
    """

    case: str
    status: str
    seconds: float
    why: str
    figures: tuple[dict[str, Any], ...] = ()


def run_cases(
    cases: Sequence[Case],
    *,
    report: Path,
    head: dict[str, Any],
    dry: bool,
    budget_s: float,
    tell: Callable[[str], object] = print,
) -> list[Outcome]:
    """Run tests side by side, then figures in turn; `report` is whole JSON after each.

    Timed cases have the machine to themselves. No case runs past the budget.
    """
    end = time.monotonic() + budget_s

    def run(case: Case) -> Outcome:
        left_s = end - time.monotonic()
        missing = lacks(case.dry_needs if dry else case.needs)
        if not (dry or case.arguments):
            missing = "of use on a CPU alone"
        if missing or left_s < _LEAST_S:
            return Outcome(case.name, "skipped", 0.0, missing or f"{budget_s:g} s are over")
        deadline_s = case.deadline_s * (_DRY_TIMES if dry else 1)
        return run_case(case, dry=dry, deadline_s=min(deadline_s, left_s))

    def ended() -> Iterator[Outcome]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tests = [pool.submit(run, case) for case in cases if not case.has_figures]
            yield from (each.result() for each in as_completed(tests))
        yield from (run(case) for case in cases if case.has_figures)

    order = [case.name for case in cases]
    done: list[Outcome] = []
    for outcome in ended():
        done = sorted([*done, outcome], key=lambda each: order.index(each.case))
        tell(_line(outcome))
        _write(report, head | {"cases": [asdict(each) for each in done]})
    return done


def run_case(case: Case, *, dry: bool, deadline_s: float) -> Outcome:
    """Run a case; kill all that it started at its deadline, or when it has ended."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, figures = Path(folder) / "log", Path(folder) / "figures.json"
        arguments = case.dry if dry else case.arguments
        if case.has_figures:
            arguments = (*arguments, "--json", str(figures))
        code = _run(arguments, _environment(case, dry=dry), log, deadline_s)
        said = log.read_text(errors="replace").replace(f"{_ROOT}/", "")
        said = said.replace(str(Path.home()), "~")[-_TAIL_CHARS:]
        found = tuple(json.loads(figures.read_text()) if figures.exists() else ())
    seconds = time.monotonic() - begun
    if code is None:
        why = f"killed after {deadline_s:g} s: {said}"
        return Outcome(case.name, "timed out", seconds, why, found)
    if code:
        return Outcome(case.name, "failed", seconds, f"it {how_it_ended(code)}: {said}", found)
    # What was left out, and pytest's counts, are worth keeping.
    return Outcome(case.name, "passed", seconds, said[-_SHOWN_CHARS:], found)


def _run(
    arguments: Sequence[str], environment: dict[str, str], log: Path, deadline_s: float
) -> int | None:
    """Return the exit code; None where the deadline ended it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its children too, which may hold memory of the device.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(case: Case, *, dry: bool) -> dict[str, str]:
    more = dict(case.dry_environment) if dry else {}
    # A CPU's environment has packages that a machine with a GPU lacks: they are hidden.
    here = [
        str(_ROOT),
        *([str(_HIDES)] if dry else []),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(here), "PYTHONUNBUFFERED": "1"} | more


def _line(outcome: Outcome) -> str:
    line = f"{outcome.status:<10} {outcome.case:<18} {outcome.seconds:6.1f} s"
    return f"{line}  {outcome.why}" if outcome.status != "passed" else line


def _write(report: Path, value: dict[str, Any]) -> None:
    """Write whole or not at all: whoever reads may come at any time."""
    scratch = report.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n")
    scratch.replace(report)

"""Timing that can be trusted: agreement first, then A/B/A/B, with the roofline beside it."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Figure",
    "Timing",
    "collect",
    "commit",
    "compare",
    "copy_bandwidth",
    "machine",
    "main",
]


Figures = dict[str, tuple[float, str, str]]
Measure = Callable[[], Figures | Iterable[Figures]]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Args:
        figure: its name, `block.what.unit_or_ratio`.
        peer: what it is relative to; empty for an absolute number.
    """

    figure: str
    value: float
    unit: str
    peer: str
    machine: str
    commit: str


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The range over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def compare(
    *candidates: Callable[[], Any],
    agree: Callable[[], None],
    runs: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, ...]:
    """Time callables in turn, A B A B, after `agree` has passed.

    Args:
        agree: raises where the candidates do not compute the same; nothing is timed then.
        clock: seconds. Pass `time.process_time` for one thread of a busy machine.
    """
    agree()
    for candidate in candidates:  # caches, allocator, compilation
        candidate()
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(runs):
        for index, candidate in enumerate(candidates):
            _wait()
            start = clock()
            candidate()
            _wait()
            seconds[index].append(clock() - start)
    return tuple(Timing(tuple(one)) for one in seconds)


def copy_bandwidth(*, device: str = "cpu", size_bytes: int = 256 << 20) -> float:
    """Bytes read and written per second by a plain copy into memory that exists already."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).fill_(0)

    def agree() -> None:
        target.copy_(source)
        assert torch.equal(target, source)

    (timing,) = compare(lambda: target.copy_(source), agree=agree)
    return 2 * size_bytes / timing.median


def machine() -> str:
    """Processor, cores in use, torch; the GPU where there is one."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    parts = [model, f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
    return ", ".join(parts)


def main(measure: Measure, *, dry: Measure | None = None) -> None:
    """Run a benchmark's `measure`, print its figures, and write them where `--json` says.

    Figures are printed and written when `measure` yields them, so a benchmark that is killed keeps
    all that it has measured.

    Args:
        measure: returns or yields, by figure, (value, unit, peer).
        dry: the same at sizes that say nothing, which `--dry-run` runs instead.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    if dry is not None:
        parser.add_argument(
            "--dry-run", action="store_const", const=dry, default=measure, dest="do"
        )
    options = parser.parse_args()
    here, at, figures = machine(), commit(), []
    for rows in _parts(getattr(options, "do", measure)()):
        for name, (value, unit, peer) in rows.items():
            figures.append(Figure(name, value, unit, peer, here, at))
            against = f"  (vs {peer})" if peer else ""
            print(f"{name:<48} {value:>12.5g} {unit}{against}", flush=True)
        if options.json is not None:
            whole = options.json.with_suffix(".tmp")
            whole.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
            whole.replace(options.json)


def collect(measured: Figures | Iterable[Figures]) -> Figures:
    """Return all figures that a benchmark returns or yields."""
    return {name: value for rows in _parts(measured) for name, value in rows.items()}


def _parts(measured: Figures | Iterable[Figures]) -> Iterable[Figures]:
    return [measured] if isinstance(measured, dict) else measured


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""torchstore's put and get through shared memory beside `publish` and `receive`.

Both run in the same two processes, which are Monarch actors as torchstore wants them, and take
turns. Its volume holds one segment a tensor, which clients keep mapped; `put_batch` copies into the
segments, `get_batch` out of them into tensors that exist already. It computes no digest, has no
versions, and a get during a put reads parts of both. `receive` checks ahead of its load.

The shared-memory transport is in torchstore's repository (read and run at commit 5a4d5d3, of June
2026); the package on PyPI, 0.1.2, has none, and asks for torch 2.9. So it is nothing that
`scripts/peers` can install: `--torchstore` names the Python that has it, with torchmonarch 0.4.1
and what primeblocks needs. These figures are absent without it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from primeblocks.errors import how_it_ended

from ..harness import Timing
from .shared_memory import RUNS, Figures

__all__ = ["figures"]

TORCHSTORE = "torchstore 5a4d5d3, shared memory"
TIMEOUT_S = 300.0


def figures(
    python: Path | None, *, scale: float = 1.0, runs: int = RUNS, threads: tuple[int, ...] = (1, 2)
) -> Figures:
    """By thread count; the plain names are those of the first. Empty where it cannot run."""
    missing = _missing(python) if python else "name a Python that has it with --torchstore"
    if python is None or missing:
        print(f"no figures of {TORCHSTORE}: {missing}")
        return {}
    found: Figures = {}
    for count in threads:
        times = {key: Timing(tuple(v)) for key, v in _job(python, scale, runs, count).items()}
        median = {key: timing.median for key, timing in times.items()}
        measured = {
            "speedup_vs_torchstore": (median["get"] / median["receive"], "ratio", TORCHSTORE),
            "both.speedup_vs_torchstore": (
                (median["put"] + median["get"]) / (median["publish"] + median["receive"]),
                "ratio", TORCHSTORE,
            ),
            **{f"{key}.beside_torchstore.ms": (v * 1e3, "ms", "") for key, v in median.items()},
            **{f"{key}.beside_torchstore.spread": (t.spread, "ratio", "")
               for key, t in times.items()},
        }  # fmt: skip
        at = f"weightsync.shared_memory.{count}_threads"
        found |= {f"{at}.{key}": figure for key, figure in measured.items()}
    for key in ("speedup_vs_torchstore", "both.speedup_vs_torchstore"):
        plain = found[f"weightsync.shared_memory.{threads[0]}_threads.{key}"]
        found[f"weightsync.shared_memory.{key}"] = plain
    return found


def _missing(python: Path) -> str:
    """Why it cannot run; empty if it can."""
    probe = [str(python), "-c", "import monarch.actor, torchstore.transport.shared_memory, xxhash"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        return str(error)
    last = done.stderr.strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else last or f"it {how_it_ended(done.returncode)}"


def _job(python: Path, scale: float, runs: int, threads: int) -> dict[str, list[float]]:
    job = f"{__package__}.torchstore_job"
    command = [str(python), "-m", job, str(scale), str(runs), str(threads)]
    # For Monarch's processes too, which import the sides.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHSTORE_LOG_LEVEL": "WARNING",
    }
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))

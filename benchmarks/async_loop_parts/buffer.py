"""Rollouts from producer processes to a consumer's, beside TransferQueue 0.1.11.

Groups whose rollouts take 4 kB, 1 MB and 20 MB (`rollouts.SHAPES`), put by 1 and by 4 producers.
Both carriers run in the same processes, which are Ray actors as TransferQueue's own throughput
test has them, and take turns; after each turn, every rollout that came is compared by its digest
with what was sent.

- *whole*: all groups are put, then all are taken: the time of the slowest producer and of the
  consumer. TransferQueue gets one call of `kv_batch_put` a producer and one of `kv_batch_get`, the
  keys known beforehand, and clearing is not counted; ours puts group by group, checks checksums and
  gives the room back.
- *stream*: groups are put one by one, and four batches are taken meanwhile, each rollout once:
  `kv_batch_put`, `get_meta`, `get_data` and `clear_samples`.

TransferQueue runs on its default backend, SimpleStorage (ZeroMQ), with 1, 2 (its default) and 4
storage units, and both carriers with an allocator that keeps its pages. Its columns are jagged
tensors of the same bytes. Each figure is of the number of units with which it is fastest. Its
RayStore asks for NIXL, which failed between two processes without a GPU (NIXL_ERR_NOT_FOUND);
MooncakeStore and Yuanrong, services of their own, were not run.

It asks for ray and tensordict, so it lives in a virtual environment of its own:

    uv venv .venv-transferqueue
    uv pip install --python .venv-transferqueue/bin/python --torch-backend cpu \\
        TransferQueue==0.1.11 torch==2.13.0 xxhash jaxtyping safetensors
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from primeblocks.async_loop import Group, RolloutBuffer, StalenessPolicy
from primeblocks.errors import how_it_ended

from ..harness import Timing, compare, copy_bandwidth
from ..peers import ALLOCATOR
from .rollouts import SHAPES, make_groups

__all__ = ["figures"]

Figures = dict[str, tuple[float, str, str]]

PEER = "TransferQueue 0.1.11, SimpleStorage"
PYTHON = Path(__file__).parents[2] / ".venv-transferqueue" / "bin" / "python"
RUNS = 5
UNITS = (1, 2, 4)  # Of storage.
TIMEOUT_S = 900.0


def figures() -> Figures:
    """Those of the peer are absent where it cannot run.

    Without a configuration, `speedup_vs_transferqueue` is the least of all of *stream*, which is
    what a loop does: groups come singly, each is taken once and gives its room back. The least of
    *whole* stands beside it.
    """
    found = in_process()
    if missing := _missing():
        print(f"no figures beside {PEER}: {missing}")
        return found
    bandwidth = copy_bandwidth()
    jobs = {units: _job(units) for units in UNITS}
    for name in jobs[UNITS[0]]:
        by_units = {units: job[name] for units, job in jobs.items()}
        found |= _figures(f"async_loop.buffer.{name}", by_units, bandwidth)
    for way, name in (("stream", ""), ("whole", "whole.")):
        end = f".{way}.speedup_vs_transferqueue"
        least = min(value for key, (value, *_) in found.items() if key.endswith(end))
        found[f"async_loop.buffer.{name}speedup_vs_transferqueue"] = (least, "ratio", PEER)
    return found


def in_process(*, runs: int = 7) -> Figures:
    """The buffer of one process, which hands objects on."""
    made = make_groups(SHAPES["1MB"], range(SHAPES["1MB"].groups))
    policy = StalenessPolicy(2, "pace", "none: a benchmark")
    taken: list[Group] = []

    async def through() -> None:  # asyncio.run writes a result as text, which takes longer.
        buffer = RolloutBuffer(capacity=len(made), staleness=policy)
        for group in made:
            await buffer.put(group, timeout_s=60)
        taken[:] = await buffer.take(len(made), version=3, timeout_s=60)

    def agree() -> None:
        asyncio.run(through())
        assert {*map(id, taken)} == {*map(id, made)}

    (timing,) = compare(lambda: asyncio.run(through()), agree=agree, runs=runs)
    microseconds = timing.median / len(made) * 1e6
    return {"async_loop.buffer.in_process.us_per_group": (microseconds, "us", "")}


def _figures(at: str, by_units: dict[int, dict[str, Any]], bandwidth: float) -> Figures:
    """One configuration: our runs beside theirs, with as many units as make them fastest."""
    found: Figures = {}
    for way in ("whole", "stream"):
        theirs = {units: _timing(job, f"their_{way}") for units, job in by_units.items()}
        units = min(theirs, key=lambda units: theirs[units].median)
        ours, peer = _timing(by_units[units], way), theirs[units]
        found |= {
            f"{at}.{way}.speedup_vs_transferqueue": (peer.median / ours.median, "ratio", PEER),
            f"{at}.{way}.ms": (ours.median * 1e3, "ms", ""),
            f"{at}.{way}.spread": (ours.spread, "ratio", ""),
            f"{at}.{way}.their_ms": (peer.median * 1e3, "ms", PEER),
            f"{at}.{way}.their_spread": (peer.spread, "ratio", PEER),
            f"{at}.{way}.their_units": (float(units), "units", PEER),
        }
        if way == "whole":
            # Put and take each read and write every byte.
            nbytes = by_units[units]["bytes"]
            over = 4 * nbytes / ours.median / bandwidth
            found[f"{at}.over_copy_bandwidth"] = (over, "ratio", "copy")
            found[f"{at}.mb"] = (nbytes / 1e6, "MB", "")
    return found


def _timing(job: dict[str, Any], way: str) -> Timing:
    return Timing(tuple(job["seconds"][way]))


def _missing() -> str:
    """Why it cannot run; empty if it can."""
    if not PYTHON.exists():
        return f"there is no {PYTHON.parent.parent.name}; see {__name__}"
    probe = [str(PYTHON), "-c", "import transfer_queue, xxhash, jaxtyping, safetensors"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=300, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else last or f"it {how_it_ended(done.returncode)}"


def _job(units: int) -> dict[str, Any]:
    command = [str(PYTHON), "-m", f"{__package__}.transferqueue_job", str(units), str(RUNS)]
    # For Ray's processes too, which import the sides.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    settings = {"TQ_LOGGING_LEVEL": "ERROR", "RAY_AUTH_MODE": "disabled"}
    settings["RAY_worker_niceness"] = "0"  # Both carriers run in Ray's workers, nice by default.
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*command, *SHAPES],
        env=os.environ | ALLOCATOR | settings,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    lines = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return {name: job for line in lines for name, job in json.loads(line).items()}

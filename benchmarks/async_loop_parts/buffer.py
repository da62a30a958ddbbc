"""Rollouts from a producer process to a consumer's, beside TransferQueue 0.1.11.

The rollouts: groups of 8, of 2k to 16k tokens, with log-probabilities, versions, masks and 32 bytes
of routes a token. Both carriers run in the same two processes, which are Ray actors as
TransferQueue's own throughput test has them, and take turns; after each turn, what came is compared
bit for bit with what was sent.

- *whole*: all groups are put, then all are taken. One call of `kv_batch_put` and of `kv_batch_get`
  each, the keys known beforehand, and clearing not counted; ours puts group by group, checks
  checksums and gives the room back.
- *stream*: groups are put one by one, and batches of 32 are taken meanwhile, each once:
  `get_meta`, `get_data` and `clear_samples`.

TransferQueue runs on its SimpleStorage (ZeroMQ), with several numbers of storage units, and both
carriers with an allocator that keeps its pages and with malloc as it comes. The figures without
these words are of the configuration that TransferQueue is fastest in. Its columns are jagged
tensors of the same bytes. Its RayStore asks for NIXL, which failed between two processes without a
GPU (NIXL_ERR_NOT_FOUND); MooncakeStore and Yuanrong, services of their own, were not run.

It asks for ray and tensordict, so it lives in a virtual environment of its own, whose Python
`--transferqueue` names:

    uv venv tq && uv pip install --python tq/bin/python TransferQueue==0.1.11 torch==2.13.0 \\
        xxhash jaxtyping safetensors     # and --torch-backend cpu where there is no GPU
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
from .rollouts import make_groups

__all__ = ["figures"]

Figures = dict[str, tuple[float, str, str]]

PEER = "TransferQueue 0.1.11, SimpleStorage"
GROUPS, RUNS, UNITS = 256, 7, (1, 2, 4, 8)
TIMEOUT_S = 1800.0


def figures(
    python: Path | None,
    *,
    groups: int = GROUPS,
    runs: int = RUNS,
    units: tuple[int, ...] = UNITS,
) -> Figures:
    """Those of the peer are absent where it cannot run."""
    found = in_process(groups=groups, runs=runs)
    missing = _missing(python) if python else "name a Python that has it with --transferqueue"
    if python is None or missing:
        print(f"no figures of {PEER}: {missing}")
        return found
    bandwidth = copy_bandwidth()
    jobs = {
        (count, name): _job(python, groups, runs, count, allocator)
        for count in units
        for name, allocator in (("kept_pages", ALLOCATOR), ("default_malloc", {}))
    }
    for (count, name), job in jobs.items():
        found |= _figures(f"async_loop.buffer.{count}_units.{name}", job, bandwidth)
    fastest = min(jobs.values(), key=lambda job: _sums(job, "their_put", "their_get").median)
    return found | _figures("async_loop.buffer", fastest, bandwidth)


def in_process(*, groups: int, runs: int) -> Figures:
    """The buffer of one process, which hands objects on."""
    made = make_groups(groups // 8)
    policy = StalenessPolicy(2, correction="none: a benchmark")

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


def _figures(at: str, job: dict[str, Any], bandwidth: float) -> Figures:
    seconds, nbytes = job["seconds"], job["bytes"]
    whole, theirs = _sums(job, "put", "take"), _sums(job, "their_put", "their_get")
    stream, their_stream = _sums(job, "stream"), _sums(job, "their_stream")
    found: Figures = {
        f"{at}.speedup_vs_transferqueue": (theirs.median / whole.median, "ratio", PEER),
        f"{at}.worst_speedup_vs_transferqueue": (
            min(theirs.seconds) / max(whole.seconds), "ratio", PEER,
        ),
        f"{at}.stream.speedup_vs_transferqueue": (
            their_stream.median / stream.median, "ratio", PEER,
        ),
        # Put and take each read and write every byte.
        f"{at}.over_copy_bandwidth": (4 * nbytes / whole.median / bandwidth, "ratio", "copy"),
        f"{at}.spread": (whole.spread, "ratio", ""),
        f"{at}.their_spread": (theirs.spread, "ratio", ""),
        f"{at}.gb": (nbytes / 1e9, "GB", ""),
    }  # fmt: skip
    for key, values in seconds.items():
        found[f"{at}.{key}.ms"] = (Timing(tuple(values)).median * 1e3, "ms", "")
    return found


def _sums(job: dict[str, Any], *steps: str) -> Timing:
    """Of several steps in each round."""
    return Timing(tuple(map(sum, zip(*(job["seconds"][step] for step in steps), strict=True))))


def _missing(python: Path) -> str:
    """Why it cannot run; empty if it can."""
    probe = [str(python), "-c", "import transfer_queue, xxhash, jaxtyping, safetensors"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        return str(error)
    last = done.stderr.strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else last or f"it {how_it_ended(done.returncode)}"


def _job(
    python: Path, groups: int, runs: int, units: int, allocator: dict[str, str]
) -> dict[str, Any]:
    job = f"{__package__}.transferqueue_job"
    command = [str(python), "-m", job, str(groups), str(runs), str(units)]
    # For Ray's processes too, which import the sides.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {k: v for k, v in os.environ.items() if k not in ALLOCATOR} | allocator
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TQ_LOGGING_LEVEL": "ERROR",
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))

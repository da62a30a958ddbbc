"""The ladder of slime on a CPU: shared memory in place of CUDA IPC, gloo in place of NCCL.

slime's update of colocated engines went from 60 s to 7 s in five rungs on 8 H100: handles in place
of values, gathers in flight together, one call for a bucket of tensors, one handle for a bucket,
maps that are made once. Here two trainer ranks hold half of every tensor, rank 0 gathers and calls
the engine, which copies into its parameters and answers. The sixth rung is not slime's: segments
that stay mapped on both sides, one for each bucket. (CUDA memory that was handed out must not be
written while an engine may read it; here the engine answers after its copy.)

Every variant has to bring the same bytes; they take turns.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from ..harness import Timing
from .ladder_sides import LadderEngine, Rank, Rungs
from .shared_memory import Figures
from .worker import Worker

__all__ = ["figures", "ladder", "measure", "sync"]

RUNS = 5
NAMES = tuple(field.name for field in fields(Rungs))
PEER = "all rungs"


def ladder() -> dict[str, Rungs]:
    """Values first, then one rung more each time; then all rungs but one."""
    rungs = Rungs()
    variants = {"0_values": rungs}
    for index, name in enumerate(NAMES):
        rungs = replace(rungs, **{name: True})
        variants[f"{index + 1}_{name}"] = rungs
    return variants | {f"without_{name}": replace(rungs, **{name: False}) for name in NAMES}


def figures(*, scale: float = 1.0, runs: int = RUNS) -> Figures:
    """Milliseconds of a sync, rung by rung, and what each rung is worth at the top."""
    times = measure(ladder(), scale=scale, runs=runs)
    top = times[f"{len(NAMES)}_{NAMES[-1]}"].median
    found: Figures = {}
    for name, timing in times.items():
        at = f"weightsync.shared_memory_ladder.{name}"
        found[f"{at}.ms"] = (timing.median * 1e3, "ms", "")
        found[f"{at}.spread"] = (timing.spread, "ratio", "")
        if name.startswith("without"):
            found[f"{at}.slowdown"] = (timing.median / top, "ratio", PEER)
    bottom = times["0_values"].median
    found["weightsync.shared_memory_ladder.speedup"] = (bottom / top, "ratio", "values, no rung")
    return found


def measure(variants: Mapping[str, Rungs], *, scale: float, runs: int) -> dict[str, Timing]:
    """Seconds of each; they take turns.

    Raises:
        AssertionError: one brought other bytes than were sent.
    """
    ours, theirs = multiprocessing.Pipe()
    prefix = f"/dev/shm/weightsync-ladder-{os.getpid()}"
    seconds: dict[str, list[float]] = defaultdict(list)
    store = Path(f"{prefix}.store")
    try:
        with (
            Worker(Rank, 0, str(store), prefix, scale, ours) as first,
            Worker(Rank, 1, str(store), prefix, scale, None) as second,
            Worker(LadderEngine, scale, theirs) as engine,
        ):
            for turn in range(runs + 1):
                for name, rungs in variants.items():
                    taken = sync(first, second, engine, rungs)
                    if turn:  # The first makes what is cached.
                        seconds[name].append(taken)
    finally:
        store.unlink(missing_ok=True)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def sync(first: Worker, second: Worker, engine: Worker, rungs: Rungs) -> float:
    """One sync of a new version. Rank 0's seconds."""
    engine.call("forget")
    second.start("change")
    sent = first.call("change")
    second.finish()
    engine.start("serve")
    second.start("sync", rungs)
    taken: float = first.call("sync", rungs)
    second.finish()
    engine.finish()
    if engine.call("digest") != sent:
        raise AssertionError(f"{rungs} brought other bytes than were sent")
    return taken

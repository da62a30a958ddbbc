"""A trainer process publishes, an engine process receives: against copies of the same bytes.

The roofline counts one copy each way, tensor by tensor, by torch's `copy_` with as many threads,
into and out of shared memory that is mapped and touched already: what a transfer without names,
versions or checks costs. `publish` is one copy, digested in the cache; so is `receive`, into the
engine's parameters (`check="ahead"`; in "before", the default, all is checked before the first
copy). Both take every core, also where the roofline has one thread. push is copy over publish,
pull is copy over receive; `copy_bandwidth_fraction` is both copies over publish + receive. All take
turns in one run.
"""

from __future__ import annotations

import os
from collections import defaultdict

from ..harness import Timing
from .sides import Engine, Trainer
from .worker import Worker

__all__ = ["RUNS", "WARM", "Figures", "figures", "measure"]

Figures = dict[str, tuple[float, str, str]]
# So many versions until every slot of the transport exists.
WARM, RUNS = 3, 9


def figures(*, scale: float = 1.0, runs: int = RUNS, threads: tuple[int, ...] = (1, 2)) -> Figures:
    """By thread count; the plain names are those of the first."""
    found: Figures = {}
    for count in threads:
        at = f"weightsync.shared_memory.{count}_threads"
        found |= {f"{at}.{key}": figure for key, figure in _figures(scale, runs, count).items()}
    key = "copy_bandwidth_fraction"
    plain = found[f"weightsync.shared_memory.{threads[0]}_threads.{key}"]
    return {f"weightsync.shared_memory.{key}": plain, **found}


def _figures(scale: float, runs: int, threads: int) -> Figures:
    name = f"weightsync-benchmark-{os.getpid()}-{threads}"
    with (
        Worker(Trainer, name, scale, threads) as trainer,
        Worker(Engine, name, scale, threads) as engine,
    ):
        size = trainer.call("size_bytes")
        times = measure(trainer, engine, runs)
    median = {key: timing.median for key, timing in times.items()}
    copies = median["push_copy"] + median["pull_copy"]
    both = median["publish"] + median["receive"]
    return {
        "copy_bandwidth_fraction": (copies / both, "ratio", "torch copy_"),
        "push.copy_bandwidth_fraction": (
            median["push_copy"] / median["publish"], "ratio", "torch copy_",
        ),
        "pull.copy_bandwidth_fraction": (
            median["pull_copy"] / median["receive"], "ratio", "torch copy_",
        ),
        "publish.spread": (times["publish"].spread, "ratio", ""),
        "receive.spread": (times["receive"].spread, "ratio", ""),
        "payload_gb_per_s": (2 * size / both / 1e9, "GB/s", ""),
        **{f"{key}.ms": (value * 1e3, "ms", "") for key, value in median.items()},
    }  # fmt: skip


def measure(trainer: Worker, engine: Worker, runs: int) -> dict[str, Timing]:
    """Seconds by step; copies and transfers take turns.

    Raises:
        AssertionError: a version arrived with other bytes than were sent.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for version in range(WARM + runs):
        sent = trainer.call("change", version)
        round_s = {"push_copy": trainer.call("copy"), "publish": trainer.call("publish", version)}
        round_s["pull_copy"] = engine.call("copy")
        engine.call("forget")
        round_s["receive"], _ = engine.call("receive", version)
        if engine.call("digest") != sent:
            raise AssertionError(f"version {version} arrived with other bytes than were sent")
        if version >= WARM:
            for key, value in round_s.items():
                seconds[key].append(value)
    return {key: Timing(tuple(values)) for key, values in seconds.items()}

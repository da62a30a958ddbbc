"""From a publish to a load, of a delta of 1 % against all bytes, over shared memory and a link.

Publish and receive are timed one after the other, in two processes of two threads each, and added.
A delta is applied to a copy of the version that the reader holds, and `load` then gets this copy
whole, as a full version is loaded.
The link is computed, not run: what travels over 10 Gbit/s is added to those seconds, on both sides.
Nothing overlaps, neither here nor there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import ExitStack

from ..harness import Timing
from .shared_memory import WARM, Figures
from .sides import Engine, Trainer
from .worker import Worker

__all__ = ["figures"]

THREADS = 2
SHARE = 0.01
LINK_BYTES_PER_S = 10e9 / 8
FULL_EVERY = {"full": 1, "delta_copied": 1 << 20}


def figures(*, scale: float = 1.0, runs: int = 9) -> Figures:
    """Full versions and deltas take turns."""
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, float] = {}
    with ExitStack() as stack:
        pairs = {}
        for kind, full_every in FULL_EVERY.items():
            name = f"weightsync-{kind}-{os.getpid()}"
            args = name, scale, THREADS
            trainer = stack.enter_context(Worker(Trainer, *args, full_every))
            pairs[kind] = trainer, stack.enter_context(Worker(Engine, *args, "before"))
        for version in range(WARM + runs):
            for kind, (trainer, engine) in pairs.items():
                sent = trainer.call("step", SHARE, version)
                taken = {"publish": trainer.call("publish", version)}
                sizes[kind] = trainer.call("sent_bytes")
                taken["receive"], taken["load"] = engine.call("receive", version)
                if engine.call("digest") != sent:
                    raise AssertionError(f"version {version} arrived with other bytes")
                if version >= WARM:
                    for key, value in taken.items():
                        seconds[f"{kind}.{key}"].append(value)
    median = {key: Timing(tuple(values)).median for key, values in seconds.items()}
    whole = {kind: median[f"{kind}.publish"] + median[f"{kind}.receive"] for kind in pairs}
    linked = {kind: whole[kind] + sizes[kind] / LINK_BYTES_PER_S for kind in pairs}
    at = "weightsync.delta.end_to_end"
    ratio, linked_ratio = (row["full"] / row["delta_copied"] for row in (whole, linked))
    bytes_ratio = sizes["delta_copied"] / sizes["full"]
    by_link = "full versions; the link is computed"
    return {
        f"{at}_copied_speedup_vs_full": (ratio, "ratio", "full versions, shared memory"),
        f"{at}_copied.10_gbit_per_s.speedup_vs_full": (linked_ratio, "ratio", by_link),
        f"{at}.bytes_ratio": (bytes_ratio, "ratio", "full version"),
        **{f"{at}.{key}.ms": (value * 1e3, "ms", "") for key, value in median.items()},
    }

"""The index of a disk tier with 200,000 pages, in batches of 16: rates, stalls, reopening, bytes.

Keys as vLLM's are: 32 bytes of hash, a salt, a recipe of 32 characters. No page is written; the
file of pages that a reopened tier sees is a hole of the right length. After the keys are in, every
batch is dropped and put again. `worst_stall_s` is the longest of all these calls; beside it stands
the longest in processor time, and the longest pause of a loop that touches no file (`worst_pause`),
which is what other programs on the machine cost. Agreement: the reopened tier has every key, in its
order. Medians of several runs, of the longest calls too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from primeblocks.kvoffload import DiskTier, PageKey
from primeblocks.kvoffload.disk import System
from primeblocks.kvoffload.disk.index import Index, Place

__all__ = ["figures"]

KEYS, BATCH, RUNS = 200_000, 16, 3
FRAME = 4096

Figures = dict[str, tuple[float, str, str]]


def figures(*, folder: str | None = None, keys: int = KEYS, runs: int = RUNS) -> Figures:
    """Medians by name."""
    found: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    named = [
        PageKey("run-1/7", number.to_bytes(32, "big"), version=7, recipe="0123456789abcdef" * 2)
        for number in range(keys)
    ]
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir=folder) as room:
            for name, each in _measure(Path(room), named).items():
                found[name].append(each)
    return {
        f"kvoffload.index.{name}": (statistics.median(value for value, _ in each), each[0][1], "")
        for name, each in found.items()
    }


def _measure(room: Path, keys: list[PageKey]) -> dict[str, tuple[float, str]]:
    system = System()
    lock = system.own(room)
    sizes = {"page_bytes": FRAME, "attachment_bytes": 0}
    with closing(Index(room / "index", lock=lock, system=system, **sizes)) as index:
        index.ready()
        batches = [
            [(key, Place(start + at, FRAME, bytes(16))) for at, key in enumerate(each)]
            for start in range(0, len(keys), BATCH)
            for each in [keys[start : start + BATCH]]
        ]

        def replace(batch: list[tuple[PageKey, Place]]) -> None:
            index.forget([key for key, _ in batch])
            index.ready()
            index.put(batch)

        inserts = _calls(index.put, batches)
        replacements = _calls(replace, batches)
    system.close(lock)
    pauses = _calls(lambda batch: [key.encode() for key, _ in batch], batches)
    bytes_ = sum(each.stat().st_size for each in room.iterdir())
    (room / "pages").touch()
    os.truncate(room / "pages", len(keys) * FRAME)

    def reopen() -> DiskTier:
        return DiskTier(room, capacity_bytes=len(keys) * FRAME, page_bytes=FRAME)

    start, cpu = time.perf_counter(), time.thread_time()
    with closing(reopen()) as tier:
        reopened_s, reopened_cpu_s = time.perf_counter() - start, time.thread_time() - cpu
        start = time.perf_counter()
        assert tier.keys() == keys
        keys_s = time.perf_counter() - start
    tracemalloc.start()
    try:
        with closing(reopen()):
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {
        "reopen_s_200k": (reopened_s, "s"),
        "reopen_processor_s_200k": (reopened_cpu_s, "s"),
        "keys_s_200k": (keys_s, "s"),
        "worst_stall_s": (max(wall for wall, _ in inserts + replacements), "s"),
        "worst_stall_processor_s": (max(cpu for _, cpu in inserts + replacements), "s"),
        "worst_pause_without_s": (max(wall for wall, _ in pauses), "s"),
        "inserts_per_s": (len(keys) / sum(wall for wall, _ in inserts), "1/s"),
        "replacements_per_s": (len(keys) / sum(wall for wall, _ in replacements), "1/s"),
        "processor_us_per_insert": (sum(cpu for _, cpu in inserts) / len(keys) * 1e6, "us"),
        "bytes_per_page": (bytes_ / len(keys), "B"),
        "heap_bytes_per_page": (held / len(keys), "B"),
    }


def _calls(
    do: Callable[[list[tuple[PageKey, Place]]], object], batches: list[list[tuple[PageKey, Place]]]
) -> list[tuple[float, float]]:
    """Return the seconds of each call, on the clock and of the processor."""
    taken = []
    for batch in batches:
        start, cpu = time.perf_counter(), time.thread_time()
        do(batch)
        taken.append((time.perf_counter() - start, time.thread_time() - cpu))
    return taken

"""Pages into host memory and out again, against LMCache and against a plain copy.

Three sides take turns in one process: `TieredStore` over a `HostTier` (`save_batch`, `load_batch`,
wait), LMCache's LocalCPU backend, and `np.copyto` between buffers that exist. All copy the same
pages from the same buffers, into the same others; all memory is touched before. One thread copies
on each side, in ours beside the caller, which waits; then two: two copy threads, two torch threads
in LMCache's `copy_`, and two threads with half of the plain copies each. Each round compares every
page of every side, and removes all pages, which is not timed.

Pages have 2 MiB, then 256 and 64 KiB. `pages_per_s` is that of pages of 4 KiB in batches of 256,
which is all bookkeeping; beside it the processor time of all threads.

`put_speedup_vs_lmcache` and `get_speedup_vs_lmcache` are its seconds over ours; of both copies,
`copy_bandwidth_fraction` is the plain seconds over ours. The plain names are those of one thread
and of 2 MiB.

glibc copies around the caches only what is larger than `x86_non_temporal_threshold`, which follows
from the size of L3: 190 MB on a virtual Xeon that reports 480 MiB. There plain copies of 2 MiB ran
at up to 4.6 GB/s, and at up to 9.8 with
`GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x80000`, set before Python starts.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from primeblocks.kvoffload import HostTier, PageKey, TieredStore

from ..harness import Timing
from .lmcache_peer import LocalCpu

__all__ = ["figures"]

SIZES = ((2 << 20, 128), (256 << 10, 512), (64 << 10, 1024))  # bytes of a page, pages
SMALL_BYTES, SMALL_PAGES, BATCH = 4096, 8192, 256
WARM, RUNS = 3, 11
TIMEOUT_S = 60.0

Figures = dict[str, tuple[float, str, str]]


def figures(
    *, sizes: Sequence[tuple[int, int]] = SIZES, runs: int = RUNS, threads: Sequence[int] = (1, 2)
) -> Figures:
    """By page size and thread count; the plain names are those of the first of both."""
    found: Figures = {}
    plain: Figures = {}
    for page_bytes, pages in sizes:
        for count in threads:
            measured = _figures(page_bytes, pages, runs, count)
            name = f"kvoffload.host.{page_bytes >> 10}_kib.{count}_threads"
            found |= {f"{name}.{key}": each for key, each in measured.items()}
            plain = plain or measured
    names = ("put_speedup_vs_lmcache", "get_speedup_vs_lmcache", "copy_bandwidth_fraction")
    found |= {f"kvoffload.host.{name}": plain[name] for name in names}
    return found | _small_pages(runs)


def _small_pages(runs: int) -> Figures:
    """Pages a second through the store, and processor time a page; medians."""
    pages = list(torch.randint(0, 256, (SMALL_PAGES, SMALL_BYTES), dtype=torch.uint8))
    into = list(torch.zeros(SMALL_PAGES, SMALL_BYTES, dtype=torch.uint8))
    ours = _Ours(SMALL_BYTES, SMALL_PAGES, 1)
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in range(WARM + runs):
        for name, call, each in (("put", ours.put, pages), ("get", ours.get, into)):
            start, cpu = time.perf_counter(), time.process_time()
            for first in range(0, SMALL_PAGES, BATCH):
                call(each[first : first + BATCH], first)
            if run >= WARM:
                taken[name].append((time.perf_counter() - start, time.process_time() - cpu))
        assert all(map(torch.equal, pages, into)), "a page came back with other bytes"
        for page in into:
            page.zero_()
        ours.clear()
    ours.close()
    found: Figures = {}
    for name, each in taken.items():
        wall, cpu = (statistics.median(times) for times in zip(*each, strict=True))
        found[f"kvoffload.host.{name}.pages_per_s"] = (SMALL_PAGES / wall, "1/s", "")
        found[f"kvoffload.host.{name}.processor_us"] = (cpu / SMALL_PAGES * 1e6, "us", "")
    return found


def _figures(page_bytes: int, pages: int, runs: int, threads: int) -> Figures:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    peer = LocalCpu(pages=pages, page_bytes=page_bytes)
    ours, plain = _Ours(page_bytes, pages, threads), _Plain(page_bytes, pages, threads)
    sides = {"ours": ours, "lmcache": peer, "copy": plain}
    try:
        times = _measure(sides, page_bytes, pages, runs)
    finally:
        ours.close()
        torch.set_num_threads(before)
    median = {key: timing.median for key, timing in times.items()}
    copies, both = (median[f"put.{side}"] + median[f"get.{side}"] for side in ("copy", "ours"))
    size = pages * page_bytes
    answer: Figures = {"copy_bandwidth_fraction": (copies / both, "ratio", "np.copyto")}
    for do in ("put", "get"):
        ours, theirs, copy = (median[f"{do}.{side}"] for side in sides)
        answer[f"{do}_speedup_vs_lmcache"] = (theirs / ours, "ratio", peer.name)
        answer[f"{do}.copy_bandwidth_fraction"] = (copy / ours, "ratio", "np.copyto")
        for side in sides:
            answer[f"{do}.{side}.gb_per_s"] = (size / median[f"{do}.{side}"] / 1e9, "GB/s", "")
            answer[f"{do}.{side}.spread"] = (times[f"{do}.{side}"].spread, "ratio", "")
    return answer


class _Ours:
    def __init__(self, page_bytes: int, pages: int, threads: int) -> None:
        self._keys = [PageKey("benchmark", number.to_bytes(8, "big")) for number in range(pages)]
        host = HostTier(capacity_bytes=pages * page_bytes, page_bytes=page_bytes)
        self._store = TieredStore([host], copy_threads=threads)

    def put(self, pages: Sequence[Tensor], first: int = 0) -> None:
        keys = self._keys[first : first + len(pages)]
        saved = self._store.save_batch(keys, pages).wait(timeout_s=TIMEOUT_S)
        assert all(each.stored for each in saved)

    def get(self, pages: Sequence[Tensor], first: int = 0) -> None:
        keys = self._keys[first : first + len(pages)]
        loaded = self._store.load_batch(keys, into=pages).wait(timeout_s=TIMEOUT_S)
        assert all(loaded)

    def clear(self) -> None:
        self._store.clear().wait(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self._store.close(timeout_s=TIMEOUT_S)


class _Plain:
    """What cannot be faster: one copy of each page."""

    def __init__(self, page_bytes: int, pages: int, threads: int) -> None:
        self._room = np.zeros((pages, page_bytes), dtype=np.uint8)
        self._threads = ThreadPoolExecutor(threads)
        step = -(-pages // threads)
        self._parts = [slice(start, start + step) for start in range(0, pages, step)]

    def put(self, pages: Sequence[Tensor]) -> None:
        self._copy(self._room, [page.numpy() for page in pages])

    def get(self, pages: Sequence[Tensor]) -> None:
        self._copy([page.numpy() for page in pages], self._room)

    def clear(self) -> None:
        self._room.fill(0)

    def _copy(self, targets: Sequence[np.ndarray], sources: Sequence[np.ndarray]) -> None:
        def part(of: slice) -> None:
            for target, source in zip(targets[of], sources[of], strict=True):
                np.copyto(target, source)

        list(self._threads.map(part, self._parts))


def _measure(
    sides: dict[str, _Ours | LocalCpu | _Plain], page_bytes: int, pages: int, runs: int
) -> dict[str, Timing]:
    """Seconds by call and side; the sides take turns.

    Raises:
        AssertionError: a side returned other bytes than it was given.
    """
    numbers = np.random.default_rng(0)
    sources = [
        torch.from_numpy(numbers.integers(0, 256, page_bytes, dtype=np.uint8)) for _ in range(pages)
    ]
    targets = [torch.zeros(page_bytes, dtype=torch.uint8) for _ in range(pages)]
    seconds: dict[str, list[float]] = defaultdict(list)
    for run in range(WARM + runs):
        for name, side in sides.items():
            put, get = _seconds(side.put, sources), _seconds(side.get, targets)
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if not torch.equal(source, target):
                    raise AssertionError(f"{name}: page {number} came back with other bytes")
                target.zero_()
            side.clear()
            if run >= WARM:
                seconds[f"put.{name}"].append(put)
                seconds[f"get.{name}"].append(get)
    return {key: Timing(tuple(each)) for key, each in seconds.items()}


def _seconds(call: Callable[[Sequence[Tensor]], None], pages: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    call(pages)
    return time.perf_counter() - start

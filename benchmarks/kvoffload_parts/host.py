"""Pages of 2 MiB into host memory and out again, against LMCache and against a plain copy.

Three sides take turns in one process: `TieredStore` over a `HostTier` (`save_batch`, `load_batch`,
wait), LMCache's LocalCPU backend, and `np.copyto` between buffers that exist. All copy the same
pages from the same buffers, into the same others; all memory is touched before. One thread copies
on each side, in ours beside the caller, which waits; then two: two copy threads, two torch threads
in LMCache's `copy_`, and two threads with half of the plain copies each. Each round compares every
page of every side, and removes all pages, which is not timed.

`put_speedup_vs_lmcache` and `get_speedup_vs_lmcache` are its seconds over ours; of both copies,
`copy_bandwidth_fraction` is the plain seconds over ours. The plain names are those of one thread.
"""

from __future__ import annotations

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

PAGE_BYTES, PAGES = 2 << 20, 128
WARM, RUNS = 3, 11
TIMEOUT_S = 60.0

Figures = dict[str, tuple[float, str, str]]


def figures(*, pages: int = PAGES, runs: int = RUNS, threads: Sequence[int] = (1, 2)) -> Figures:
    """By thread count; the plain names are those of the first."""
    found: Figures = {}
    plain: Figures = {}
    for count in threads:
        measured = _figures(pages, runs, count)
        found |= {f"kvoffload.host.{count}_threads.{key}": each for key, each in measured.items()}
        plain = plain or measured
    names = ("put_speedup_vs_lmcache", "get_speedup_vs_lmcache", "copy_bandwidth_fraction")
    return {f"kvoffload.host.{name}": plain[name] for name in names} | found


def _figures(pages: int, runs: int, threads: int) -> Figures:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    peer = LocalCpu(pages=pages, page_bytes=PAGE_BYTES)
    sides = {"ours": _Ours(pages, threads), "lmcache": peer, "copy": _Plain(pages, threads)}
    try:
        times = _measure(sides, pages, runs)
    finally:
        sides["ours"].close()
        torch.set_num_threads(before)
    median = {key: timing.median for key, timing in times.items()}
    copies, both = (median[f"put.{side}"] + median[f"get.{side}"] for side in ("copy", "ours"))
    size = pages * PAGE_BYTES
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
    def __init__(self, pages: int, threads: int) -> None:
        self._keys = [PageKey("benchmark", number.to_bytes(8, "big")) for number in range(pages)]
        host = HostTier(capacity_bytes=pages * PAGE_BYTES, page_bytes=PAGE_BYTES)
        self._store = TieredStore([host], copy_threads=threads)

    def put(self, pages: Sequence[Tensor]) -> None:
        saved = self._store.save_batch(self._keys, pages).wait(timeout_s=TIMEOUT_S)
        assert all(each.stored for each in saved)

    def get(self, pages: Sequence[Tensor]) -> None:
        loaded = self._store.load_batch(self._keys, into=pages).wait(timeout_s=TIMEOUT_S)
        assert all(loaded)

    def clear(self) -> None:
        self._store.clear().wait(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self._store.close(timeout_s=TIMEOUT_S)


class _Plain:
    """What cannot be faster: one copy of each page."""

    def __init__(self, pages: int, threads: int) -> None:
        self._room = np.zeros((pages, PAGE_BYTES), dtype=np.uint8)
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
    sides: dict[str, _Ours | LocalCpu | _Plain], pages: int, runs: int
) -> dict[str, Timing]:
    """Seconds by call and side; the sides take turns.

    Raises:
        AssertionError: a side returned other bytes than it was given.
    """
    numbers = np.random.default_rng(0)
    sources = [
        torch.from_numpy(numbers.integers(0, 256, PAGE_BYTES, dtype=np.uint8)) for _ in range(pages)
    ]
    targets = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(pages)]
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

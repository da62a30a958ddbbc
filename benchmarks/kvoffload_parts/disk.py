"""Pages of 2 MiB to a disk and back, against plain sequential reads and writes of a file.

`DiskTier.put` and `get` in batches of 16 pages, journal included, and `pwrite` and `preadv` of 8
MiB (and of 32 MiB, a batch of ours) take turns on the same file system, with the same flags, from
and into the same memory. All files have been written before; dropping the pages between two puts is
not timed. Every page is compared once before. `raw_bandwidth_fraction` is the raw seconds of a
write and a read over ours, with direct I/O where the file system has it. Nothing is synced, so
buffered figures are those of the page cache.

`hung.save_fraction` is what is left of the rate of saves into a full host tier when the disk below
hangs: seconds of a store without a disk over those of one whose disk answers nothing, batches of
both in turn. The first of them wait `patience_s`, which is `hung.first_s`, and are not in it.

`small.put` and `small.get` are pages of 4 KiB in batches of 256 through a whole store that writes
back: host memory and disk are full, each save makes a page leave both, and each load finds its page
on the disk alone. Nothing is skipped. Beside the rate, the processor time of all threads.

`full` is a file system that is really full, a tmpfs of 64 MiB, where one can be mounted: a store
saves without a pause, other files take 24 MiB of it until the tier has refused pages for 20 s (its
longest rest is 8 s by then), and then leave. `full.recovery_s` are the seconds until 0.9 of the
room is taken, `full.kept_fraction` is what pages had of what the other files left.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from primeblocks.kvoffload import DiskTier, HostTier, PageKey, TieredStore
from primeblocks.kvoffload.disk import System
from primeblocks.kvoffload.page import checksum
from primeblocks.kvoffload.tier import Found, Record

from ..harness import Timing

__all__ = ["figures", "raw_rate"]

PAGE_BYTES, PAGES, BATCH = 2 << 20, 128, 16
CHUNKS = {"8_mib": 8 << 20, "32_mib": 32 << 20}
RUNS = 7
HUNG_BYTES, HUNG_PAGES = 64 << 10, 512  # of a page; in host memory
FULL_BYTES, FULL_OTHER_BYTES, FULL_S = 64 << 20, 24 << 20, 20.0
SMALL_BYTES, SMALL_HOST, SMALL_DISK, SMALL_BATCH = 4096, 2048, 8192, 256


Figures = dict[str, tuple[float, str, str]]


def figures(*, folder: str | None = None, pages: int = PAGES, runs: int = RUNS) -> Figures:
    """Fractions of the raw rates, direct where there is direct I/O, and buffered."""
    found: Figures = {}
    with tempfile.TemporaryDirectory(dir=folder) as room:
        for io in ("auto", "buffered"):
            measured = _figures(Path(room) / io, io, pages, runs)
            found |= {f"kvoffload.disk.{io}.{name}": each for name, each in measured.items()}
        found |= _hung(Path(room) / "hung", runs) | _small(Path(room) / "small", runs)
        found |= _full(Path(room) / "full")
    name = "raw_bandwidth_fraction"
    return {f"kvoffload.disk.{name}": found[f"kvoffload.disk.auto.{name}"]} | found


def raw_rate(
    descriptor: int, memory: np.ndarray, *, size_bytes: int, chunk_bytes: int, write: bool
) -> float:
    """Bytes a second of sequential calls of `chunk_bytes`, from or into `memory` in turn."""
    chunks = [
        memory[start : start + chunk_bytes].data for start in range(0, memory.nbytes, chunk_bytes)
    ]
    start = time.perf_counter()
    for number in range(size_bytes // chunk_bytes):
        chunk, offset = chunks[number % len(chunks)], number * chunk_bytes
        if write:
            moved = os.pwrite(descriptor, chunk, offset)
        else:
            moved = os.preadv(descriptor, [chunk], offset)
        assert moved == chunk_bytes
    return size_bytes / (time.perf_counter() - start)


def _figures(folder: Path, io: str, pages: int, runs: int) -> Figures:
    memory = np.frombuffer(mmap.mmap(-1, BATCH * PAGE_BYTES), dtype=np.uint8)
    size = pages * PAGE_BYTES
    tier = DiskTier(folder, capacity_bytes=size, page_bytes=PAGE_BYTES, io=io)
    flags = os.O_CREAT | os.O_RDWR | (os.O_DIRECT if tier.direct else 0)
    raw = os.open(folder / "raw", flags, 0o600)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    try:
        ours = _Ours(tier, memory, pages)
        ours.agree()
        for run in range(runs + 1):
            taken = {"put.ours": _seconds(ours.put), "get.ours": _seconds(ours.get)}
            ours.drop()
            for name, chunk in CHUNKS.items():
                for do in ("put", "get"):
                    put = do == "put"
                    rate = raw_rate(raw, memory, size_bytes=size, chunk_bytes=chunk, write=put)
                    taken[f"{do}.{name}"] = size / rate
            for key, each in taken.items():
                seconds[key] += [each] if run else []  # the first is for warming up
    finally:
        os.close(raw)
        tier.close()
    return _answer({key: Timing(tuple(each)) for key, each in seconds.items()}, size, tier.direct)


def _answer(times: dict[str, Timing], size: int, direct: bool) -> Figures:
    median = {key: timing.median for key, timing in times.items()}
    flags = "O_DIRECT" if direct else "page cache"
    answer: Figures = {}
    for name, chunk in CHUNKS.items():
        peer = f"calls of {chunk >> 20} MiB, {flags}"
        both = [median[f"put.{side}"] + median[f"get.{side}"] for side in (name, "ours")]
        suffix = "" if name == "8_mib" else f".{name}"
        answer[f"raw_bandwidth_fraction{suffix}"] = (both[0] / both[1], "ratio", peer)
        for do in ("put", "get"):
            fraction = median[f"{do}.{name}"] / median[f"{do}.ours"]
            answer[f"{do}.raw_bandwidth_fraction{suffix}"] = (fraction, "ratio", peer)
    for key, timing in times.items():
        answer[f"{key}.mb_per_s"] = (size / timing.median / 1e6, "MB/s", "")
        answer[f"{key}.spread"] = (timing.spread, "ratio", "")
    return answer


class _Hanging(System):
    """A file system that does not return from a write of pages until it is released."""

    def __init__(self) -> None:
        self.released = Event()

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if len(buffers[0]) >= HUNG_BYTES:
            self.released.wait()
        return super().write(descriptor, buffers, offset)


def _hung(folder: Path, runs: int) -> Figures:
    """The rate of saves above a disk that hangs, relative to that without a disk."""
    system, capacity = _Hanging(), HUNG_PAGES * HUNG_BYTES
    sizes = {"capacity_bytes": capacity, "page_bytes": HUNG_BYTES}
    alone = TieredStore([HostTier(**sizes)])
    hung = TieredStore([HostTier(**sizes), DiskTier(folder, system=system, **sizes)])
    pages = list(np.random.default_rng(0).integers(0, 256, (BATCH, HUNG_BYTES), dtype=np.uint8))
    seconds: dict[TieredStore, list[float]] = {alone: [], hung: []}
    number = 0
    try:
        for _ in range((runs + 2) * HUNG_PAGES // BATCH):
            keys = [PageKey("benchmark", (number + at).to_bytes(8, "big")) for at in range(BATCH)]
            number += BATCH
            for store, taken in seconds.items():
                start = time.perf_counter()
                saved = store.save_batch(keys, pages).wait(timeout_s=60.0)
                taken.append(time.perf_counter() - start)
                assert all(each.stored for each in saved)
        assert hung.statistics()["disk"].skipped, "the disk did not hang"
    finally:
        system.released.set()
        for store in seconds:
            store.close()
    warm = 2 * HUNG_PAGES // BATCH  # host memory is full, and the disk was given up
    rates = {store: Timing(tuple(taken[warm:])) for store, taken in seconds.items()}
    fraction = rates[alone].median / rates[hung].median
    return {
        "kvoffload.disk.hung.save_fraction": (fraction, "ratio", "no disk"),
        "kvoffload.disk.hung.first_s": (max(seconds[hung][:warm]), "s", ""),
    }


def _small(folder: Path, runs: int) -> Figures:
    """Pages a second through host memory onto a disk, and back, while pages leave both."""
    host = HostTier(capacity_bytes=SMALL_HOST * SMALL_BYTES, page_bytes=SMALL_BYTES)
    disk = DiskTier(folder, capacity_bytes=SMALL_DISK * SMALL_BYTES, page_bytes=SMALL_BYTES)
    random = np.random.default_rng(0)
    pages = list(random.integers(0, 256, (SMALL_BATCH, SMALL_BYTES), dtype=np.uint8))
    into = [np.empty_like(page) for page in pages]
    taken: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    with TieredStore([host, disk], patience_s=60.0) as store:
        for run in range(runs + 2):
            numbers = range(run * SMALL_DISK, (run + 1) * SMALL_DISK)
            keys = [PageKey("benchmark", number.to_bytes(8, "big")) for number in numbers]
            batches = [keys[at : at + SMALL_BATCH] for at in range(0, SMALL_DISK, SMALL_BATCH)]
            # The oldest of a run are on the disk alone, the newest in host memory alone.
            below = batches[len(batches) // 4 : len(batches) // 2]
            for name, each in (("put", batches), ("get", below)):
                start, cpu = time.perf_counter(), time.process_time()
                for batch in each:
                    if name == "put":
                        saved = store.save_batch(batch, pages).wait(timeout_s=60.0)
                        assert all(one.stored for one in saved)
                    else:
                        found = store.load_batch(batch, into=into).wait(timeout_s=60.0)
                        tiers = {one.tier for one in found}
                        assert tiers == {"disk"}, tiers
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
                count = len(each) * SMALL_BATCH
                taken[name] += [(wall / count, cpu / count)] if run > 1 else []
            assert all(map(np.array_equal, pages, into)), "a page came back with other bytes"
        assert not store.statistics()["disk"].skipped, "the disk did not keep up"
    found = {}
    for name, times in taken.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        found[f"kvoffload.disk.small.{name}.pages_per_s"] = (1 / wall, "1/s", "")
        found[f"kvoffload.disk.small.{name}.processor_us"] = (cpu * 1e6, "us", "")
    return found


def _full(folder: Path) -> Figures:
    """How much a full file system keeps, and how soon room on it is taken; none if unmountable."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return {}
    other = folder / "other"
    other.write_bytes(bytes(FULL_OTHER_BYTES))
    try:
        host = HostTier(capacity_bytes=32 * HUNG_BYTES, page_bytes=HUNG_BYTES)
        disk = DiskTier(folder / "pages", capacity_bytes=2 * FULL_BYTES, page_bytes=HUNG_BYTES)
        with TieredStore([host, disk]) as store:
            kept, _ = _saved_until(store, lambda pages: False, at_most_s=FULL_S)
            assert store.statistics()["disk"].failures, "the disk was never full"
            other.unlink()
            wanted = int(0.9 * FULL_BYTES / HUNG_BYTES)
            _, recovery_s = _saved_until(store, lambda pages: pages >= wanted, at_most_s=60.0)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    room = (FULL_BYTES - FULL_OTHER_BYTES) / HUNG_BYTES
    return {
        "kvoffload.disk.full.kept_fraction": (kept / room, "ratio", "room"),
        "kvoffload.disk.full.recovery_s": (recovery_s, "s", ""),
    }


def _saved_until(
    store: TieredStore, enough: Callable[[int], bool], *, at_most_s: float
) -> tuple[int, float]:
    """Save new pages until the disk has enough of them; return how many it has, and the seconds."""
    page, start = np.zeros(HUNG_BYTES, dtype=np.uint8), time.monotonic()
    while (taken := time.monotonic() - start) < at_most_s:
        key = PageKey("benchmark", os.urandom(16))
        assert store.save(key, page).wait(timeout_s=60.0).stored
        if enough(store.statistics()["disk"].pages):
            break
        time.sleep(0.002)  # 30 MB/s
    return store.statistics()["disk"].pages, taken


class _Ours:
    """Batches of pages that lie in `memory` one after the other."""

    def __init__(self, tier: DiskTier, memory: np.ndarray, pages: int) -> None:
        self._tier = tier
        random = np.random.default_rng(0)
        memory[:] = np.frombuffer(random.bytes(memory.nbytes), dtype=np.uint8)
        self._frames = [memory[at : at + PAGE_BYTES] for at in range(0, memory.nbytes, PAGE_BYTES)]
        keys = [PageKey("benchmark", number.to_bytes(8, "big")) for number in range(pages)]
        self._batches = [keys[start : start + BATCH] for start in range(0, pages, BATCH)]
        # The digest is the store's work, not the tier's: any will do.
        self._records = [
            [Record(key, frame, bytes(16), frame) for key, frame in zip(batch, self._frames)]  # noqa: B905
            for batch in self._batches
        ]

    def agree(self) -> None:
        """Different pages in every batch come back as they were."""
        digests = {}
        for number, batch in enumerate(self._records):
            for record in batch:
                record.content[:8] = np.frombuffer(number.to_bytes(8, "big"), np.uint8)
                digests[record.key] = checksum(record.key, record.content)
            assert self._tier.put(batch) == [None] * len(batch)
        for keys in reversed(self._batches):
            for frame in self._frames:
                frame[:] = 0
            found = self._tier.get(keys, into=self._frames[: len(keys)])
            for key, frame, each in zip(keys, self._frames, found):  # noqa: B905
                assert isinstance(each, Found)
                assert each.length == PAGE_BYTES
                assert checksum(key, frame) == digests[key]
        self.drop()

    def put(self) -> None:
        for batch in self._records:
            assert self._tier.put(batch) == [None] * len(batch)

    def get(self) -> None:
        for keys in self._batches:
            assert all(self._tier.get(keys, into=self._frames[: len(keys)]))

    def drop(self) -> None:
        self._tier.drop(self._tier.keys())


def _seconds(do: Callable[[], None]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start

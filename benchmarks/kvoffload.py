"""Tiers of pages: `OMP_NUM_THREADS=1 python -m benchmarks.kvoffload`; needs the peers' packages.

- `host`: pages into host memory and back, against LMCache and a plain copy.
- `disk`: against plain sequential reads and writes of the same file system.
- `index`: 200,000 keys of a disk tier: rates, stalls, reopening, bytes.
- `evict`: hit rates on simulated agents against LRU, ARC and Belady. Simulated, on all cores, so it
  comes last.

`kvoffload_parts.vllm_ttft` (a real engine) and `.device` (a GPU) are run on their own.
"""

from __future__ import annotations

from .harness import main
from .kvoffload_parts import disk, eviction, host, index
from .peers import restart_where

__all__: list[str] = []


def measure() -> dict[str, tuple[float, str, str]]:
    return host.figures() | disk.figures() | index.figures() | eviction.figures()


if __name__ == "__main__":
    restart_where("lmcache", module="benchmarks.kvoffload")
    main(measure)

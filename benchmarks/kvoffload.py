"""Tiers of pages: `python -m benchmarks.kvoffload`; six minutes, one core.

- `eviction`: hit rates on simulated agentic rollouts against LRU, ARC and Belady.
"""

from __future__ import annotations

from .harness import main
from .kvoffload_parts import eviction


def measure() -> dict[str, tuple[float, str, str]]:
    return eviction.figures()


if __name__ == "__main__":
    main(measure)

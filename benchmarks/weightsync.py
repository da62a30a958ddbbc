"""Weight transfer on one host: `python -m benchmarks.weightsync`; ten minutes, 4 cores, 12 GB.

It restarts itself in the Python of `scripts/peers`, where verl lies, with an allocator that keeps
its pages. Before anything is timed, and after every timed transfer, the bytes are compared.

- `delta`: lossless deltas against verl 0.9.1's, one core.
- `delta_sync`: deltas from publish to load, against full versions.
- `shared_memory`: publish and receive between two processes, against copies of the same bytes.
- `torchstore`: the same beside torchstore's put and get; needs `--torchstore PYTHON`.
- `plan`: bytes of a plan over the least possible; a sync of 1T parameters on paper.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from . import peers

PARTS = ("delta", "delta_sync", "shared_memory", "torchstore", "plan")


def measure(options: argparse.Namespace) -> dict[str, tuple[float, str, str]]:
    import torch

    from .weightsync_parts import delta, delta_sync, plan, shared_memory, torchstore_peer

    torch.set_num_threads(1)
    scale, runs = options.scale, options.runs
    parts = {
        "delta": lambda: delta.figures(numel=int(delta.NUMEL * scale)),
        "delta_sync": lambda: delta_sync.figures(scale=scale, runs=runs),
        "shared_memory": lambda: shared_memory.figures(scale=scale, runs=runs),
        "torchstore": lambda: torchstore_peer.figures(options.torchstore, scale=scale, runs=runs),
        "plan": lambda: plan.figures() | plan.paper(),
    }
    found: dict[str, tuple[float, str, str]] = {}
    for part in options.part or PARTS:
        found |= parts[part]()
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given again")
    parser.add_argument("--scale", type=float, default=1.0, help="of the bytes; 1 is 1 GB")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--torchstore", type=Path, help="a Python that has it")
    # The rest is the harness's.
    options, sys.argv[1:] = parser.parse_known_args()
    return options


if __name__ == "__main__":
    peers.restart_where("verl", module="benchmarks.weightsync")
    from .harness import main

    main(partial(measure, _options()))

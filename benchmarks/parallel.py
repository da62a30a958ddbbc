"""Dispatch of tokens to experts against torchtitan 0.3.0, bytes on the wire, balance of sequences.

`python -m benchmarks.parallel` from the repository; two minutes, one core, 6 GB. It restarts itself
in the Python of `scripts/peers`, where torchtitan is, and with an allocator that keeps its
pages: page faults of fresh allocations would take most of the time of both sides.

- Permute and combine, forward and backward, of 4096 tokens x 2048, top 8 of 64 experts, one thread.
  The bytes that each step reads and writes predict 4.8x in bfloat16 and 2.2x in float32: per
  chosen row ours moves 8 rows (gather 2, weighted sum 1; backward: weighted gather 2, dot products
  2, sum 1), torchtitan's 18 in float32 (products of their own, scatter with read and write) and
  38 in bfloat16 (the same in float32, and conversions).
- The gather of dispatch against a plain copy of the rows that it makes: 1 where rows are long.
- Bytes that leave a rank, forward and backward, counted in the collectives on gloo.
- The busiest rank's cost over the mean: one document, lengths as in RL, 60 short documents.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"


def restart_where_the_peer_is() -> None:
    """Return if this process is fit to measure; replace it, once, if not."""
    here = find_spec("torchtitan") is not None
    if here and ALLOCATOR.items() <= os.environ.items():
        return
    if not here and (not PEERS.exists() or Path(sys.executable) == PEERS):
        raise SystemExit("needs torchtitan 0.3.0: run scripts/peers once.")
    python = sys.executable if here else str(PEERS)
    command = [python, "-m", "benchmarks.parallel", *sys.argv[1:]]
    os.execve(python, command, os.environ | ALLOCATOR)


def measure() -> dict[str, tuple[float, str, str]]:
    import torch

    from .parallel_parts import balance, permute, wire

    torch.set_num_threads(1)
    return {**permute.figures(), **wire.figures(), **balance.figures()}


if __name__ == "__main__":
    restart_where_the_peer_is()
    from .harness import main

    main(measure)

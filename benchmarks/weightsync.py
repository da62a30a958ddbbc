"""Lossless deltas against verl 0.9.1's on one core: `python -m benchmarks.weightsync`; two minutes.

It restarts itself in the Python of `scripts/peers`, where verl lies, with an allocator that keeps
its pages.
"""

from . import peers


def measure() -> dict[str, tuple[float, str, str]]:
    import torch

    from .weightsync_parts import delta

    torch.set_num_threads(1)
    return delta.figures()


if __name__ == "__main__":
    peers.restart_where("verl", module="benchmarks.weightsync")
    from .harness import main

    main(measure)

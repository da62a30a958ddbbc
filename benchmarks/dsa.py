"""Sparse attention over ranks: balance, memory of scores, bytes on the wire, replay of indices.

`python -m benchmarks.dsa` from the repository; some minutes on two cores.

- The busiest rank's time over the mean, where ranks wait for each other in every layer: contiguous,
  zigzag over the packed sequence, head and tail of each document, balanced. Lengths as in RL, one
  document, 60 short ones; 131,072 tokens; the worst of eight draws.
- The most memory that scores take, over that of the matrix of all of them: planned at 131,072
  tokens on 8 ranks, measured at 16,384.
- Bytes that a layer receives, forward and backward, counted and by formula: they must be equal.
- Bytes of replayed indices over those of int32 ids.
"""

from .harness import main


def measure() -> dict[str, tuple[float, str, str]]:
    from .dsa_parts import balance, index_replay, memory, wire

    parts = (balance, memory, wire, index_replay)
    return {name: figure for part in parts for name, figure in part.figures().items()}


if __name__ == "__main__":
    main(measure)

"""Dispatch of tokens to experts against torchtitan 0.3.0, bytes on the wire, balance of sequences.

`python -m benchmarks.parallel` from the repository; three minutes, one core, 6 GB. It restarts
itself in the Python of `scripts/peers`, where torchtitan is, and with an allocator that keeps its
pages: page faults of fresh allocations would take most of the time of both sides.

- Permute and combine, forward and backward, of 4096 tokens x 2048, top 8 of 64 experts, one thread.
  The bytes that each step reads and writes predict 4.8x in bfloat16 and 2.2x in float32: per
  chosen row ours moves 8 rows (gather 2, weighted sum 1; backward: weighted gather 2, dot products
  2, sum 1), torchtitan's 18 in float32 (products of their own, scatter with read and write) and
  38 in bfloat16 (the same in float32, and conversions).
- The gather of dispatch against a plain copy of the rows that it makes: 1 where rows are long.
- Bytes that leave a rank, forward and backward, counted in the collectives on gloo.
- Operations of a dispatch for which the host waits, counted on four ranks.
- Kernels that `ring_attention` launches a layer, of 131,072 tokens on 8 ranks, balanced and zigzag,
  counted on meta tensors.
- Bytes of latent attention that a rank receives, over those of the latents that it lacks; the same
  attention with expanded heads beside it.
- Private memory of a rank that fills its shard from a checkpoint, and saves one, over shard plus
  largest tensor: RssAnon of fresh processes, sampled.
- The busiest rank's cost over the mean: one document, lengths as in RL, 60 short documents.
"""

from . import peers


def measure() -> dict[str, tuple[float, str, str]]:
    import torch

    from .parallel_parts import balance, host_reads, latent, launches, permute, start, wire

    torch.set_num_threads(1)
    counted = {**wire.figures(), **host_reads.figures(), **balance.figures(), **launches.figures()}
    counted |= latent.figures()
    return {**permute.figures(), **counted, **start.figures()}


if __name__ == "__main__":
    peers.restart_where("torchtitan", module="benchmarks.parallel")
    from .harness import main

    main(measure)

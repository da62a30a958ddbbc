"""attn_gym on a CUDA device: `python -m benchmarks.dsa_parts.gpu_peer`. Never run on a GPU.

At 512 columns, as it has no 576; 512 queries of 131,072 tokens, one of eight ranks. Other GPUs than
Blackwell's unroll its kernels over the selected rows: they select 16, and compile for a minute.
"""

from __future__ import annotations

from functools import partial

import torch

from primeblocks.errors import MissingPackageError, UnsupportedError
from primeblocks.parallel.attention.dsa import Rows

from ..harness import copy_bandwidth, main
from .gpu import matmul_rate, of_attention
from .gpu_sides import (
    SMALL,
    Engine,
    Figures,
    Operands,
    Sizes,
    draw_operands,
    engines_of,
    leave_out,
    unrolled_k,
)

__all__ = ["figures"]


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Figures:
    """Its kernels beside ours, at sizes that it takes; nothing where it is not installed.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.dsa_parts.gpu_peer needs a CUDA device")
    sizes = sizes or Sizes()
    try:
        from primeblocks.parallel.adapters.attn_gym import AttnGymKernel
    except MissingPackageError as error:
        leave_out("attn_gym", error)
        return {}
    model = sizes.models[0]
    k, width = unrolled_k(device, sizes.k), sizes.latent
    operands = draw_operands(device, sizes, model).first(sizes.few)
    rows, ids = Rows((0, width), (0, width)), operands.indices[..., :k].contiguous()
    operands = Operands(
        operands.q[..., :width].contiguous(),
        operands.kv[..., :width].contiguous(),
        ids,
        operands.grad,
        rows,
        int((ids >= 0).sum()),
    )
    engines = [Engine("attn_gym", AttnGymKernel()), *engines_of(device)]
    try:
        engines[0].kernel.forward(operands.q, operands.kv, ids, **operands.how)
    except UnsupportedError as error:
        leave_out("attn_gym", error)
        return {}
    name = f"{model.name}_{width}_columns_{k}_rows"
    roofline = matmul_rate(device, sizes), copy_bandwidth(device=device)
    return of_attention(name, operands, engines, device, sizes, roofline)


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

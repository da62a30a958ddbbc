"""Bytes of a layer of sparse attention, counted in its collectives, beside the formula."""

from __future__ import annotations

import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa
from primeblocks.planning.dsa import DsaSizes, plan_dsa
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter

__all__ = ["figures"]

# Widths of GLM-5 and DeepSeek-V3.2, with fewer heads and tokens.
LENGTHS = [300, 1, 75, 136]
SIZES = DsaSizes(heads=2, index_heads=2, layers=1, index_layers=1, top_k=64)


def _count() -> int:
    group = dist.group.WORLD
    assert group is not None
    plan = plan_sequence(LENGTHS, ranks=group.size(), chunk_tokens=16)
    own = plan.counts[group.rank()]
    generator = torch.Generator().manual_seed(group.rank())

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(own, *shape, generator=generator).bfloat16()

    q = drawn(SIZES.heads, SIZES.key_dim).requires_grad_()
    kv = drawn(SIZES.key_dim).requires_grad_()
    indexer = dsa.IndexerInputs(
        drawn(SIZES.index_heads, SIZES.index_dim), drawn(SIZES.index_dim), drawn(SIZES.index_heads)
    )
    with StepCounter() as step:
        out, _ = dsa.dsa_attention(
            q, kv, indexer, sequence=plan, group=group, rows=dsa.Rows.latent(512, 64),
            selector=dsa.TopK(SIZES.top_k), check=False,
        )  # fmt: skip
        out.sum().backward()
    return step.received_bytes.total()


def figures() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    for world_size in (2, 4):
        plan = plan_sequence(LENGTHS, ranks=world_size, chunk_tokens=16)
        planned = plan_dsa(plan, SIZES)
        formula = 2 * planned.gather_bytes + planned.index_gather_bytes + planned.scatter_bytes
        for counted in ranks.run(_count, world_size=world_size):
            assert counted == formula, f"{counted} bytes; the formula says {formula}"
        per_token = formula / plan.tokens
        found[f"dsa.wire.p{world_size}.bytes_per_token"] = (per_token, "B", "")
    return found

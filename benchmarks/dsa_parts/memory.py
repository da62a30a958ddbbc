"""Memory of an indexer's scores: planned at 131,072 tokens, measured at 16,384."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa
from primeblocks.planning.dsa import dsa_cost, plan_dsa

from .balance import MODELS

__all__ = ["figures"]

RANKS = 8


class Live(TorchDispatchMode):
    """The most bytes that results of operators took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            storage = x.untyped_storage()
            if storage.data_ptr() in self.live.keys() | given:
                continue  # A view, or written in place.
            self.live[storage.data_ptr()] = storage.nbytes()
            weakref.finalize(x, self.live.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.live.values()))
        return out


def measured(tokens: int, chunk_bytes: int) -> tuple[int, int]:
    """Bytes at the peak of the last rank's selection, and those that are planned."""
    sizes = MODELS["glm_5_2"]
    plan = plan_sequence([tokens], ranks=RANKS, order="contiguous")
    planned = plan_dsa(plan, sizes, chunk_bytes=chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    own = plan.counts[-1]
    q = torch.randn(own, 4, sizes.index_dim, generator=generator)
    keys = torch.randn(tokens, sizes.index_dim, generator=generator)
    weights = torch.randn(own, 4, generator=generator)
    selector = dsa.TopK(sizes.top_k, chunk_bytes=chunk_bytes)
    rules = {"sequence": plan, "rank": RANKS - 1, "scores": dsa.index_scores}
    with Live() as live, torch.no_grad():
        indices = selector.select(q, weights, keys, **rules)
    expected = keys @ q[-1].T
    expected = (expected.relu() * weights[-1]).sum(1).topk(sizes.top_k).indices.sort().values
    agree = len(set(indices[-1, 0].tolist()) & set(expected.tolist())) / sizes.top_k
    assert agree > 0.999, f"the last query shares {agree} of its selection with torch.topk"
    return live.most - indices.nbytes, planned.score_bytes


def figures() -> dict[str, tuple[float, str, str]]:
    sizes = MODELS["glm_5_2"]
    plan = plan_sequence([131_072], ranks=RANKS, cost=dsa_cost(sizes))
    planned = plan_dsa(plan, sizes)
    tokens, full = 16_384, 16_384 // RANKS * 16_384 * 4
    taken, said = measured(tokens, chunk_bytes=1 << 20)
    assert taken <= said, f"{taken} bytes at the peak; planned {said}"
    return {
        "dsa.score_memory.fraction_of_full": (planned.score_fraction, "ratio", "[n, N] float32"),
        "dsa.score_memory.planned_131072_tokens": (planned.score_bytes, "B", ""),
        "dsa.score_memory.measured_16384_tokens": (taken, "B", ""),
        "dsa.score_memory.measured_fraction_of_full": (taken / full, "ratio", "[n, N] float32"),
    }

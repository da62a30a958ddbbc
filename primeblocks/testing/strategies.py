"""Random inputs of blocks for hypothesis, with the edge cases that break blocks.

Tensors are drawn by seed and not by element. Shrinking then looks for a smaller shape, which
explains a failure better.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primeblocks.errors import MissingPackageError

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise MissingPackageError("hypothesis", "test") from error

__all__ = ["expert_ids", "generators", "ragged_lengths"]


def generators() -> st.SearchStrategy[torch.Generator]:
    """Draw random generators of torch, by seed."""
    return st.integers(0, 2**16 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


def ragged_lengths(
    *, min_items: int = 1, max_items: int = 6, max_length: int = 17
) -> st.SearchStrategy[list[int]]:
    """Draw lengths of documents, or rows per rank, including zeros, ones and odd numbers."""
    lengths = st.integers(0, max_length)
    return st.lists(lengths, min_size=min_items, max_size=max_items)


@st.composite
def expert_ids(
    draw: Callable[..., Any],
    *,
    num_experts: int,
    top_k: int,
    tokens: st.SearchStrategy[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Draw choices of experts, `[tokens, top_k]`, distinct within a token.

    Draws even routing, routing that leaves experts without tokens, and all tokens on the same
    experts.
    """
    count = draw(st.integers(0, 16) if tokens is None else tokens)
    generator = draw(generators())
    popular = draw(st.integers(top_k, num_experts))
    scores = torch.rand(count, num_experts, generator=generator)
    scores[:, popular:] -= 1.0  # Never among the top_k.
    return scores.topk(top_k, dim=-1).indices.to(dtype)

"""Strategies of hypothesis for random inputs, with edge cases that often cause errors.

hypothesis draws the seed of a tensor instead of its elements, so that shrinking looks for a smaller
shape. A smaller shape explains a failure better than smaller elements.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primeblocks.errors import needs

with needs("hypothesis", extra="test"):
    from hypothesis import strategies as st

__all__ = ["expert_ids", "generators", "ragged_lengths"]


def generators() -> st.SearchStrategy[torch.Generator]:
    """Draw a seeded random generator of torch."""
    return st.integers(0, 2**16 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


def ragged_lengths(*, max_items: int = 6, max_length: int = 17) -> st.SearchStrategy[list[int]]:
    """Draw a list of lengths, such as rows per rank, including zeros, ones and odd numbers."""
    return st.lists(st.integers(0, max_length), min_size=1, max_size=max_items)


@st.composite
def expert_ids(
    draw: Callable[..., Any],
    *,
    num_experts: int,
    top_k: int,
    tokens: st.SearchStrategy[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Draw expert ids `[tokens, top_k]`, which are distinct within a token.

    In some draws all experts are equally likely, in others some experts have no tokens, or all
    tokens have the same experts.
    """
    count = draw(st.integers(0, 16) if tokens is None else tokens)
    generator = draw(generators())
    popular = draw(st.integers(top_k, num_experts))
    scores = torch.rand(count, num_experts, generator=generator)
    scores[:, popular:] -= 1.0  # Never among the top_k.
    return scores.topk(top_k, dim=-1).indices.to(dtype)

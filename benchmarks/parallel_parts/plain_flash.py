"""Plain torch in place of torch's flash attention on packed sequences, for machines without a GPU.

Written from what torch documents and its source asks of callers; it is not flash attention and
says nothing about its speed or rounding. Sequence by sequence, in the dtype of sums; what the
operators would read out of bounds, leave unwritten or refuse is an AssertionError here.

Source: torch 2.13, `torch/nn/attention/varlen.py`, `flash_attn/flash_api.cpp`; flash-attention's
README: query i of n sees keys from `i + m - n - left` to `i + m - n + right` of m, both inclusive.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """Compute what `aten::_flash_attention_forward` does: output, lse, and three more."""
    assert not return_debug_mask
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
    out = torch.full_like(query, torch.nan)
    lse = query.new_full((query.shape[1], len(query)), torch.nan, dtype=_wide(query))
    mask = is_causal, window_size_left, window_size_right
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        scores = _scores(query[rows], key[keys], scale, max_k, *mask)
        seen = scores.logsumexp(-1)
        # Of a query that sees nothing the operator returns an output of 0 and an lse of +inf.
        lse[:, rows] = seen.masked_fill(seen == -torch.inf, torch.inf)
        weights = (scores - lse[:, rows].unsqueeze(-1)).exp()
        out[rows] = (weights @ _by_query_head(value[keys], query)).transpose(0, 1).to(out.dtype)
    return out, lse, *(query.new_empty(0) for _ in range(3))


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `aten::_flash_attention_backward` does, from any output and lse."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
    assert grad_out.dtype == out.dtype == query.dtype
    assert grad_out.shape == out.shape == query.shape
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.is_contiguous()
    assert logsumexp.dtype == _wide(query)
    assert (rng_state.dtype, rng_state.shape) == (torch.uint64, (2,))
    assert not unused.numel()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    mask = is_causal, window_size_left, window_size_right
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        scores = _scores(query[rows], key[keys], scale, max_k, *mask)
        weights = (scores - logsumexp[:, rows].unsqueeze(-1)).exp()
        of_out, one_out, q = (x[rows].transpose(0, 1).to(_wide(x)) for x in (grad_out, out, query))
        slope = of_out @ _by_query_head(value[keys], query).mT
        slope = weights * (slope - (of_out * one_out).sum(-1, keepdim=True)) * scale
        dq[rows] = (slope @ _by_query_head(key[keys], query)).transpose(0, 1).to(dq.dtype)
        dk[keys], dv[keys] = (
            x.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1).to(dk.dtype)
            for x in (slope.mT @ q, weights.mT @ of_out)
        )
    return dq, dk, dv


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
) -> None:
    assert dropout_p == 0.0
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2]
    assert query.shape[1] % key.shape[1] == 0
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert len(cum_seq_q) == len(cum_seq_k) > 1
    for starts, most, x in ((cum_seq_q, max_q, query), (cum_seq_k, max_k, key)):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        # Rows of no sequence would get gradients that nobody wrote.
        assert (int(starts[0]), int(starts[-1])) == (0, len(x))
        assert 1 <= int(starts.diff().min()) <= int(starts.diff().max()) <= most


def _sequences(cum_seq_q: Tensor, cum_seq_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = cum_seq_q.tolist(), cum_seq_k.tolist()
    for at in range(len(q) - 1):
        yield slice(q[at], q[at + 1]), slice(k[at], k[at + 1])


def _scores(
    query: Tensor, key: Tensor, scale: float, max_k: int, causal: bool, left: int, right: int
) -> Tensor:
    """`[heads, queries, keys]`, -inf where a query does not look."""
    wide = query.transpose(0, 1).to(_wide(query))
    scores = wide @ _by_query_head(key, query).mT * scale
    if causal:
        right = 0
    # What the operator makes of limits before its kernel sees them.
    left, right = (-1 if limit >= max_k else limit for limit in (left, right))
    if left < 0 and right < 0:
        return scores
    left, right = (max_k if limit < 0 else limit for limit in (left, right))
    aligned = torch.arange(len(query), device=query.device)[:, None] + len(key) - len(query)
    at = torch.arange(len(key), device=query.device)
    return scores.masked_fill((at < aligned - left) | (at > aligned + right), -torch.inf)


def _by_query_head(x: Tensor, query: Tensor) -> Tensor:
    """`[heads, keys, width]`, in the dtype of sums."""
    repeated = x.repeat_interleave(query.shape[1] // x.shape[1], 1)
    return repeated.transpose(0, 1).to(_wide(x))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32

"""Chunked recurrences on one device in plain torch: gated delta rule, Mamba-2.

Inside a chunk tokens see each other through matrix products. Between chunks a state is passed on.
Both recurrences compute in float32, or in float64 for float64 operands. Zero padding at the end of
a sequence does not change its state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["chunk_gated_delta_rule", "chunk_state_space"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """`S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q / sqrt(key_dim)`, token by token.

    Shapes, states and scale are those of `torch_chunk_gated_delta_rule` in transformers and
    `chunk_gated_delta_rule` in flash-linear-attention. `q` and `k` are not normalised. Local.
    Differentiable.

    Args:
        q, k: `[batch, tokens, heads, key_dim]`, at least one token.
        v: `[batch, tokens, heads, value_dim]`.
        g: `[batch, tokens, heads]`, the logarithm of the decay, at most 0.
        beta: `[batch, tokens, heads]`.
        initial_state: `[batch, heads, key_dim, value_dim]`. None means zero.

    Returns:
        The output, shaped like `v`, and the last state, shaped like `initial_state`, both in the
        dtype of the computation.

    Source: arXiv:2412.06464 (gated delta networks).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = initial_state.to(dtype)
    out, state = _chunked(q * k.shape[-1] ** -0.5, k, v, g, beta, state, chunk_size)
    return out.transpose(1, 2), state


def chunk_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """`S = exp(dt A) S + (dt x) B^T; y = S C`, token by token: Mamba-2 without the skip `D x`.

    Shapes and states are those of `mamba2_chunk_scan` in transformers and
    `mamba_chunk_scan_combined` in mamba-ssm. Local. Differentiable.

    Args:
        x: `[batch, tokens, heads, head_dim]`, at least one token.
        dt: `[batch, tokens, heads]`, the steps after bias, softplus and limits.
        A: `[heads]`, at most 0.
        B, C: `[batch, tokens, groups, state_dim]`. `groups` divides `heads`.

    Returns:
        The output, shaped like `x`, and the last state `[batch, heads, head_dim, state_dim]`, both
        in the dtype of the computation.

    Source: arXiv:2405.21060 (state space duality).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    groups, per_group = B.shape[2], x.shape[2] // B.shape[2]
    values = (x * dt.unsqueeze(-1)).transpose(1, 2).unflatten(1, (groups, per_group))
    decay = (dt * A).transpose(1, 2).unflatten(1, (groups, per_group))
    keys, queries = (t.transpose(1, 2).unsqueeze(2) for t in (B, C))
    state = x.new_zeros(*values.shape[:3], B.shape[-1], x.shape[-1])
    out, state = _chunked(queries, keys, values, decay, None, state, chunk_size)
    return out.flatten(1, 2).transpose(1, 2), state.flatten(1, 2).mT


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule with `beta`, and Mamba-2 without `beta`.

    All operands are `[..., tokens, dim]`, except `decay` and `beta` `[..., tokens]` and `state`
    `[..., key, value]`. Leading dims broadcast.
    """
    tokens = v.shape[-2]
    size = min(chunk_size, tokens)
    q, k, v = (_chunks(x, size) for x in (q, k, v))
    log = _chunks(decay.unsqueeze(-1), size).cumsum(-2)
    future = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    # Mask before the exponential, because a decay backward in time may overflow.
    pairs = (log - log.mT).masked_fill(future, float("-inf")).exp()
    reads, ends = q * log.exp(), (log[..., -1:, :] - log).exp() * k
    scores = (q @ k.mT) * pairs
    forgets = None
    if beta is not None:
        rate = _chunks(beta.unsqueeze(-1), size)
        # A token's write depends on the earlier writes of the chunk. One triangular system solves
        # the part without the state and the part that the state adds.
        system = ((rate * k) @ k.mT) * pairs
        sides = torch.cat([rate * v, rate * k * log.exp()], dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        v, forgets = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    outs = []
    for chunk in range(v.shape[-3]):
        written = v[..., chunk, :, :]
        if forgets is not None:
            written = written - forgets[..., chunk, :, :] @ state
        outs.append(reads[..., chunk, :, :] @ state + scores[..., chunk, :, :] @ written)
        kept = log[..., chunk, -1:, :].exp() * state
        state = kept + ends[..., chunk, :, :].mT @ written
    return torch.cat(outs, dim=-2)[..., :tokens, :], state


def _chunks(x: Tensor, size: int) -> Tensor:
    """`[..., tokens, dim]` as `[..., chunks, size, dim]`, with zeros after the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))

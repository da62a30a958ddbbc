"""The computations of this block on one rank, written as plainly as possible.

Convolutions and recurrences compute in the dtype of their operands, all other functions in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "attention",
    "causal_conv1d",
    "experts",
    "gated_delta_rule",
    "select",
    "sparse_attention",
    "state_space",
]


def experts(
    x: Float[Tensor, "tokens hidden"],
    expert_ids: Int[Tensor, "tokens top_k"],
    scores: Float[Tensor, "tokens top_k"],
    gate_up: Float[Tensor, "experts gate_and_up hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
) -> Float[Tensor, "tokens hidden"]:
    """Compute the result of `GroupedExperts`, one choice of one token at a time. Local.

    Differentiable. Returns float64.
    """
    x, scores, gate_up, down = (t.double() for t in (x, scores, gate_up, down))
    intermediate = down.shape[2]
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for choice in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, choice])
            both = gate_up[expert] @ x[token]
            gate, up = both[:intermediate], both[intermediate:]
            row = row + scores[token, choice] * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x.new_zeros(x.shape)


def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens key_heads head_dim"],
    v: Float[Tensor, "tokens key_heads value_dim"],
    document_lengths: Sequence[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    parents: Sequence[int] | None = None,
) -> Float[Tensor, "tokens heads value_dim"]:
    """Compute `ring_attention` and `ulysses_attention` from the matrix of all scores. Local.

    Differentiable. Returns float64.

    Args:
        parents: for each document, the document that it continues, or -1. Documents are in
            preorder.
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    document = torch.arange(len(document_lengths)).repeat_interleave(torch.tensor(document_lengths))
    place = torch.arange(len(document))
    behind = place[:, None] - place
    seen = document[:, None] == document
    if causal:
        seen = seen & (behind >= 0)
    if parents is not None:
        behind = torch.full_like(behind, -1)
        for query, path in enumerate(_paths(document_lengths, parents)):
            behind[query, path] = torch.arange(len(path)).flip(0)
        seen = behind >= 0
    if window is not None:
        seen = seen & (behind < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        more = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, more], dim=2)
    weights = scores.softmax(-1)[..., : v.shape[1]]
    return (weights @ v).transpose(0, 1)


def select(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "tokens heads"],
    document_lengths: Sequence[int],
    top_k: int,
) -> list[list[int]]:
    """Return for each query the ascending places in the sequence that `dsa.TopK` selects. Local."""
    chosen = []
    for start, stop in _documents(document_lengths):
        for t in range(start, stop):
            scores = []
            for s in range(start, t + 1):
                dots = (q[t].double() @ k[s].double()).relu()
                scores.append((-float(dots @ weights[t].double()), s))
            chosen.append(sorted(s for _, s in sorted(scores)[:top_k]))
    return chosen


def sparse_attention(
    q: Float[Tensor, "tokens heads key_dim"],
    kv: Float[Tensor, "entries groups width"],
    chosen: Sequence[Sequence[Sequence[int]]],
    *,
    key: slice,
    value: slice,
    scale: float,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "tokens heads value_dim"]:
    """Compute the result of `dsa.sparse_attention`, one head of one query at a time. Local.

    Differentiable. Returns float64.

    Args:
        chosen: for each query and group, the entries to read.
    """
    q, kv = q.double(), kv.double()
    per_group = q.shape[1] // kv.shape[1]
    rows = []
    for t, by_group in enumerate(chosen):
        heads = []
        for head in range(q.shape[1]):
            group = head // per_group
            read = kv[list(by_group[group]), group]
            scores = read[:, key] @ q[t, head] * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            heads.append(scores.softmax(0)[: len(read)] @ read[:, value])
        rows.append(torch.stack(heads))
    return torch.stack(rows) if rows else q.new_zeros(*q.shape[:2], value.stop - value.start)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_lengths: Sequence[int]
) -> Tensor:
    """Compute the result of `causal_conv1d` for the whole sequence. Local."""
    rows = []
    for document in x.split(list(document_lengths)):
        for t in range(document.shape[0]):
            row = torch.zeros_like(document[t]) if bias is None else bias
            for tap in range(weight.shape[1]):
                place = t - (weight.shape[1] - 1) + tap
                if place >= 0:
                    row = row + weight[:, tap] * document[place]
            rows.append(row)
    return _stack(rows, x)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_lengths: Sequence[int]
) -> Tensor:
    """Compute the result of `gated_delta_rule` for the whole sequence. Local."""
    rows = []
    for start, stop in _documents(document_lengths):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(start, stop):
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            rows.append(torch.einsum("hkv,hk->hv", state, q[t]) / k.shape[2] ** 0.5)
    return _stack(rows, v)


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    document_lengths: Sequence[int],
) -> Tensor:
    """Compute the result of `state_space` for the whole sequence. Local."""
    per_group = x.shape[1] // B.shape[1]
    rows = []
    for start, stop in _documents(document_lengths):
        state = x.new_zeros(*x.shape[1:], B.shape[2])
        for t in range(start, stop):
            b, c = (group[t].repeat_interleave(per_group, 0) for group in (B, C))
            state = state * (dt[t] * A).exp()[:, None, None]
            state = state + torch.einsum("h,hp,hn->hpn", dt[t], x[t], b)
            row = torch.einsum("hpn,hn->hp", state, c)
            rows.append(row if D is None else row + D[:, None] * x[t])
    return _stack(rows, x)


def _documents(lengths: Sequence[int]) -> list[tuple[int, int]]:
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _paths(lengths: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Return the places that each token sees. The last one is its own place."""
    of_documents: list[list[int]] = []
    found = []
    for (start, stop), parent in zip(_documents(lengths), parents, strict=True):
        trunk = of_documents[parent] if parent >= 0 else []
        found += [[*trunk, *range(start, place + 1)] for place in range(start, stop)]
        of_documents.append([*trunk, *range(start, stop)])
    return found


def _stack(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros_like(like)

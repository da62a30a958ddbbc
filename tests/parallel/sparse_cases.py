"""Selected rows of every kind, the attention over them in float64, and how far float32 may err."""

from dataclasses import dataclass

import torch
from torch import Tensor

from primeblocks.parallel import reference
from primeblocks.parallel.attention.dsa import Rows


@dataclass(frozen=True)
class Case:
    """Operands in float64; `counts` ids a query and group, drawn at random."""

    heads: int
    entries: int
    rows: Rows
    counts: tuple[int, ...]
    k: int
    groups: int = 1
    width: int | None = None

    @property
    def scale(self) -> float:
        return self.rows.key_dim**-0.5

    def draw(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.entries)
        width = self.width or self.rows.width

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        ids = torch.full((len(self.counts), self.groups, self.k), -1, dtype=torch.int32)
        for query, count in enumerate(self.counts):
            for group in range(self.groups):
                own = max(0, count - group)  # Groups differ in number too.
                chosen = torch.randperm(self.entries, generator=generator)[:own]
                ids[query, group, :own] = chosen.sort().values.int()
        # Of few bits, which every dtype holds: dtypes then differ in their own sums alone.
        return {
            "q": normal(len(self.counts), self.heads, self.rows.key_dim).bfloat16().double(),
            "kv": normal(self.entries, self.groups, width).bfloat16().double(),
            "grad": normal(len(self.counts), self.heads, self.rows.value_dim).bfloat16().double(),
            "sinks": normal(self.heads),
            "indices": ids,
        }


# Heads that fill no tile, lists longer than one, empty and full ones; groups; keys beside values;
# two blocks of heads; a value that ends among the key's columns, in rows wider than both; rows
# that many queries share; one row.
CASES = {
    "latents": Case(5, 200, Rows.latent(512, 64), (131, 0, 64, 7), 131),
    "grouped": Case(6, 50, Rows.latent(32, 16), (20, 0, 1, 17, 9), 20, groups=2),
    "heads": Case(6, 50, Rows.heads(32, 16), (20, 0, 1, 17, 9), 20, groups=2),
    "shared": Case(70, 20, Rows((0, 20), (0, 20)), (9, 3), 9),
    "wider": Case(3, 40, Rows((0, 100), (0, 80)), (33, 40, 5), 40, width=130),
    "repeated": Case(2, 6, Rows.latent(16), (6, 5, 4, 0) * 8, 6),
    "one": Case(1, 1, Rows.latent(3, 5), (1,), 1),
}


@dataclass(frozen=True)
class Expected:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dkv: Tensor


def exact(case: Case, drawn: dict[str, Tensor], *, sinks: bool = False) -> Expected:
    """In float64, by loops and autograd; `lse` and `out` over a sink as well, if asked."""
    ids = drawn["indices"]
    chosen = [[[i for i in row if i >= 0] for row in group] for group in ids.tolist()]
    q, kv = (drawn[name].clone().requires_grad_() for name in ("q", "kv"))
    out = reference.sparse_attention(
        *(q, kv, chosen),
        key=slice(*case.rows.key),
        value=slice(*case.rows.value),
        scale=case.scale,
        sinks=drawn["sinks"] if sinks else None,
    )
    out.backward(drawn["grad"])
    lse = scores_of(case, q.detach(), kv.detach(), ids).logsumexp(-1)
    if sinks:
        lse = torch.logaddexp(lse, drawn["sinks"])
    return Expected(out.detach(), lse, q.grad, kv.grad)


def of_heads(kv: Tensor, heads: int, columns: tuple[int, int]) -> Tensor:
    """`[heads, entries, dim]`, of each query head."""
    part = kv[..., slice(*columns)].transpose(0, 1)
    return part.repeat_interleave(heads // kv.shape[1], 0)


def scores_of(case: Case, q: Tensor, kv: Tensor, ids: Tensor) -> Tensor:
    """`[queries, heads, entries]`, -inf where a query does not look."""
    keys = of_heads(kv, case.heads, case.rows.key)
    scores = (q.transpose(0, 1) @ keys.mT).transpose(0, 1) * case.scale
    return scores.masked_fill(~seen_by(case, ids), -torch.inf)


def seen_by(case: Case, ids: Tensor) -> Tensor:
    seen = torch.zeros(*ids.shape[:2], case.entries + 1, dtype=torch.bool)
    seen.scatter_(2, ids.long() % (case.entries + 1), True)
    return seen[..., : case.entries].repeat_interleave(case.heads // case.groups, 1)


def naive(case: Case, drawn: dict[str, Tensor], dtype: torch.dtype) -> Expected:
    """Of whole matrices in one dtype, as one would write it, with autograd."""
    q, kv, grad = (drawn[name].to(dtype) for name in ("q", "kv", "grad"))
    q.requires_grad_(), kv.requires_grad_()
    scores = scores_of(case, q, kv, drawn["indices"])
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    values = of_heads(kv, case.heads, case.rows.value)
    out = (weights.transpose(0, 1) @ values).transpose(0, 1)
    out.backward(grad)
    return Expected(out.detach(), scores.logsumexp(-1).detach(), q.grad, kv.grad)


def float32_bounds(case: Case, drawn: dict[str, Tensor]) -> Expected:
    """How far sums in float32 may be off, number by number, whatever their order.

    Roundings of a sum of n numbers add up like a walk: to 6 sqrt(n) units of its magnitudes, once
    in a billion. A score has its columns, and 8 more for the exponential and its base; a weight
    twice that and its own sum; what follows, the weights and its own sum. Each is counted twice,
    once for the forward's error in `out`.
    """
    q, kv, grad = (drawn[name].abs() for name in ("q", "kv", "grad"))
    scores = scores_of(case, drawn["q"], drawn["kv"], drawn["indices"])
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).transpose(0, 1)
    keys, values = (of_heads(kv, case.heads, x) for x in (case.rows.key, case.rows.value))
    largest = float((q.transpose(0, 1) @ keys.mT).max()) * case.scale
    width = case.rows.width
    sums = (case.k + width + len(case.counts) * case.heads) ** 0.5
    off = 4 * (largest * (6 * width**0.5 + 8) + 6 * sums + 8) * 2.0**-24
    out = weights @ values
    of_out = grad.transpose(0, 1)
    slopes = weights * (of_out @ values.mT + (of_out * out).sum(-1, keepdim=True))
    dq = (slopes @ keys).transpose(0, 1) * case.scale
    of_groups = (case.groups, case.heads // case.groups)
    dkv = torch.zeros_like(kv)
    of_values = (weights.mT @ of_out).unflatten(0, of_groups).sum(1)
    of_keys = (slopes.mT @ q.transpose(0, 1)).unflatten(0, of_groups).sum(1) * case.scale
    dkv[..., slice(*case.rows.value)] += of_values.transpose(0, 1)
    dkv[..., slice(*case.rows.key)] += of_keys.transpose(0, 1)
    lse = off * (1 + scores.logsumexp(-1).abs().nan_to_num(posinf=0))
    return Expected(off * out.transpose(0, 1), lse, off * dq, off * dkv)

"""A small mixture-of-experts language model, and text for which its layers are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["QUANTIZED", "MixtureModel", "Sizes", "round_products"]

NOISE = 0.1  # Share of the tokens that are drawn at random instead.

QUANTIZED = "attention|experts"
"""The layers that multiply in float8; embedding, router and head do not, as in practice."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and of its batches.

    The next token follows from the last but one, by one of two tables; the last token says by
    which. Beside the layers, from embedding to head, passes the last token alone, which tells
    nothing: a run whose layers get no gradients stays at `log(vocabulary)` nats a token.
    """

    vocabulary: int = 64
    hidden: int = 128
    heads: int = 4
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    rows: int = 4
    length: int = 32

    @property
    def entropy(self) -> float:
        """Nats a token that nobody can predict."""
        other = NOISE / self.vocabulary
        right = 1 - NOISE + other
        return -right * math.log(right) - (self.vocabulary - 1) * other * math.log(other)

    def batch(self, generator: torch.Generator) -> Tensor:
        """Draw tokens `[rows, length + 2]`; the first two of a row are random."""
        shape = self.rows, self.length + 2
        fixed = torch.Generator().manual_seed(15)
        tables = [torch.randperm(self.vocabulary, generator=fixed) for _ in range(2)]
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        kept = torch.rand(shape, generator=generator) >= NOISE
        for t in range(2, self.length + 2):
            right = torch.stack(tables)[tokens[:, t - 1] % 2, tokens[:, t - 2]]
            tokens[:, t] = torch.where(kept[:, t], right, tokens[:, t])
        return tokens


class MixtureModel(nn.Module):
    """Logits `[rows, length, vocabulary]` of tokens, with weights from a seed.

    Its products are float32 until `fp8.convert` or `round_products` say otherwise.
    """

    def __init__(self, sizes: Sizes, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.Sequential(*(_Layer(sizes) for _ in range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))

    def loss(self, tokens: Tensor) -> Tensor:
        """Return nats a token, of those that the text determines."""
        logits = self(tokens[:, :-1])[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())


def round_products(model: MixtureModel) -> None:
    """Multiply in bfloat16, with float32 sums, what `fp8.convert` would let multiply in float8."""
    for module in model.modules():
        if isinstance(module, _Attention):
            module.qkv.__class__ = module.out.__class__ = _Bfloat16Linear
        elif isinstance(module, _Experts):
            module.grouped_mm = lambda _, x, weight, ends: _Bfloat16.apply(x, weight, ends)


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.experts = _Attention(sizes), _Experts(sizes)
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(sizes.hidden) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        flat = self.norms[1](x).flatten(0, 1)
        return x + self.experts(flat, self.router(flat).softmax(-1)).view_as(x)


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class _Experts(nn.Module):
    """SwiGLU over rows sorted by expert; `grouped_mm` is the seam that `fp8.convert` fills."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape, scale = (sizes.experts, sizes.hidden, sizes.hidden), sizes.hidden**-0.5
        self.gate_up = nn.Parameter(torch.randn(shape[0], 2 * shape[1], shape[2]) * scale)
        self.down = nn.Parameter(torch.randn(shape) * scale)
        self.top_k, self.grouped_mm = sizes.top_k, _plain

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=len(self.down)).cumsum(0).int()
        tokens = order // self.top_k
        gate, up = self.grouped_mm("gate_up", x[tokens], self.gate_up, ends).chunk(2, -1)
        y = self.grouped_mm("down", F.silu(gate) * up, self.down, ends)
        return torch.zeros_like(x).index_add(0, tokens, y * weights.flatten()[order, None])


def _plain(name: str, tokens: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    parts = zip(tokens.split(_counts(offsets)), weight, strict=True)
    return torch.cat([rows @ matrix.t() for rows, matrix in parts])


class _Bfloat16Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2)
        y = _Bfloat16.apply(rows, self.weight[None], torch.tensor([len(rows)]))
        return y.unflatten(0, input.shape[:-1])


class _Bfloat16(torch.autograd.Function):
    """Grouped products of operands that are rounded to bfloat16, in all three directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        x, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight, offsets)
        return _plain("", x.float(), weight.float(), offsets)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        dy, counts = dy.bfloat16().float(), _counts(offsets)
        parts = zip(dy.split(counts), x.float().split(counts), strict=True)
        dw = torch.stack([of_y.t() @ of_x for of_y, of_x in parts])
        return _plain("", dy, weight.float().mT, offsets), dw, None


def _counts(offsets: Tensor) -> list[int]:
    return offsets.diff(prepend=offsets.new_zeros(1)).tolist()


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

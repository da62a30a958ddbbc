"""One rank's share of attention: `python -m benchmarks.parallel_parts.gpu_attention`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

What the busiest of eight ranks computes of `ring_attention`: its queries against the keys of all,
which lie on the device already; forward and backward, bfloat16, 32 heads over 4 of keys, 128
columns, in each order of tokens, by each `AttentionKernel` that takes it. Beside it torch's flash
attention of one causal document with as many operations on one rank; and FlexAttention's backward
that recomputes, beside its backward by itself where torch can compile that. Counted: rectangles,
each a call of a fused kernel, and hops. Nothing is timed before the share agrees with dense
attention in float64 at a small size, gradients of the queries too. On a CPU `VarlenKernel` calls
plain torch (`plain_flash`) in place of flash attention, which is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from primeblocks.parallel import SequencePlan, plan_sequence
from primeblocks.parallel.attention import (
    AttentionKernel,
    AttentionSpec,
    FlexKernel,
    Hop,
    RectangleKernel,
    VarlenKernel,
)
from primeblocks.parallel.attention.hops import merge
from primeblocks.parallel.attention.rectangles import rectangles_of

from ..harness import Timing, compare, main
from . import plain_flash

__all__ = ["SMALL", "Sizes", "figures"]

Figures = dict[str, tuple[float, str, str]]
ORDERS = ("contiguous", "zigzag", "balanced")
# Of the norm: operands and results have 8 bits.
BF16_ERROR = 0.01
RANKS = 8


@dataclass(frozen=True)
class Sizes:
    """Lengths of the one document, and a layer's heads."""

    tokens: tuple[int, ...] = (8192, 32768, 131072)
    gate_tokens: int = 1024
    heads: int = 32
    key_heads: int = 4
    dim: int = 128
    runs: int = 3


SMALL = Sizes(tokens=(2048,), gate_tokens=200, heads=2, key_heads=1, dim=16, runs=1)


class Share:
    """One rank's queries, the keys of all ranks, and the plan that they lie by."""

    def __init__(
        self, order: str, tokens: int, sizes: Sizes, device: str, kernel: AttentionKernel
    ) -> None:
        self.kernel = kernel
        self.plan = plan_sequence([tokens], ranks=RANKS, order=order)
        pairs = [_pairs(self.plan, rank) for rank in range(RANKS)]
        self.pairs = max(pairs)
        self.rank = pairs.index(self.pairs)
        generator = torch.Generator(device).manual_seed(0)

        def draw(rows: int, heads: int) -> Tensor:
            shape = rows, heads, sizes.dim
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.q = draw(self.plan.counts[self.rank], sizes.heads)
        self.grad = draw(self.plan.counts[self.rank], sizes.heads)
        self.keys = [(draw(n, sizes.key_heads), draw(n, sizes.key_heads)) for n in self.plan.counts]
        self.spec = AttentionSpec(self.plan, causal=True, scale=sizes.dim**-0.5, window=None)

    def hops(self) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        """Hops with something to see, own keys first."""
        for step in range(RANKS):
            hop = self.spec.hop(self.rank, (self.rank - step) % RANKS)
            if hop.pairs:
                yield hop, *self.keys[hop.key_rank]

    def forward(self) -> tuple[Tensor, Tensor]:
        merged = None
        for hop, k, v in self.hops():
            merged = merge(merged, *self.kernel.forward(self.q, k, v, hop=hop))
        assert merged is not None
        return merged[0].to(self.q.dtype), merged[1]

    def both(self) -> Tensor:
        """Forward and backward; the gradient of the queries."""
        out, lse = self.forward()
        total = torch.zeros_like(self.q, dtype=torch.float32)
        for hop, k, v in self.hops():
            total += self.kernel.backward(self.grad, self.q, k, v, out, lse, hop=hop)[0]
        return total

    def dense(self, q: Tensor) -> Tensor:
        """The same attention in float64, without a plan."""
        where = [torch.as_tensor(self.plan.indices(rank)) for rank in range(RANKS)]
        order = torch.cat(where).to(self.q.device)
        k, v = (torch.cat([pair[i] for pair in self.keys]).double() for i in (0, 1))
        groups = self.q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        q = q.transpose(0, 1)
        seen = where[self.rank].to(self.q.device)[:, None] >= order[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """Rates of each order and length, and of torch's flash attention.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.parallel_parts.gpu_attention needs a CUDA device")
    sizes = sizes or Sizes()
    kernels = {"rectangles": RectangleKernel(), **_flex_kernels(), "varlen": _varlen_kernel(device)}
    for order, (engine, kernel) in product(ORDERS, kernels.items()):
        if (order, engine) == ("balanced", "varlen"):
            continue  # It refuses that order.
        gate(order, sizes, device, kernel)
        for tokens in sizes.tokens:
            share = Share(order, tokens, sizes, device, kernel)
            whole = _flash_of(share, sizes, device)
            forward, both, flash, flash_both = compare(
                share.forward, share.both, *whole, agree=lambda: None, runs=sizes.runs
            )
            name = f"parallel.ring_share.gpu.{engine}.{order}.{tokens}"
            flops = 4.0 * share.pairs * sizes.dim * sizes.heads  # Two products of each pair.
            found: Figures = {f"{name}.hops": (sum(1 for _ in share.hops()), "count", "")}
            if engine == "rectangles":
                found[f"{name}.rectangles"] = _rectangles(share), "count", ""
            found |= _rates(f"{name}.forward", flops, forward, flash)
            found |= _rates(f"{name}.forward_backward", 3.5 * flops, both, flash_both)
            yield found


def _flex_kernels() -> dict[str, AttentionKernel]:
    """Both ways of backward, where this torch has both."""
    found: dict[str, AttentionKernel] = {"flex_recompute": FlexKernel(recompute=True)}
    kernel = FlexKernel()
    return found if kernel.recompute else {"flex": kernel, **found}


def _varlen_kernel(device: str) -> VarlenKernel:
    plain = plain_flash.forward, plain_flash.backward
    return VarlenKernel() if device == "cuda" else VarlenKernel(operators=plain)


def _rectangles(share: Share) -> int:
    return sum(1 for hop, *_ in share.hops() for _ in rectangles_of(hop, share.q.device))


def _pairs(plan: SequencePlan, rank: int) -> int:
    """Queries of a rank, each with every key that it sees."""
    return int((torch.as_tensor(plan.indices(rank)) + 1).sum())


def gate(order: str, sizes: Sizes, device: str, kernel: AttentionKernel) -> None:
    share = Share(order, sizes.gate_tokens, sizes, device, kernel)
    q = share.q.double().requires_grad_()
    right = share.dense(q)
    right.backward(share.grad.double())
    assert q.grad is not None
    for found, exact in ((share.forward()[0], right), (share.both(), q.grad)):
        off = float((found.double() - exact).norm() / exact.norm())
        assert off <= BF16_ERROR, f"{order}: the relative error is {off}, over {BF16_ERROR}"


def _flash_of(share: Share, sizes: Sizes, device: str) -> tuple[Callable[[], object], ...]:
    """One causal document with as many pairs of a query and a key, and its backward."""
    tokens = max(1, round((2 * share.pairs) ** 0.5))
    q, k, v = (
        torch.randn(1, heads, tokens, sizes.dim, device=device, dtype=torch.bfloat16)
        for heads in (sizes.heads, sizes.key_heads, sizes.key_heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def both() -> object:
        out = forward()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return torch.no_grad()(forward), both


def _rates(name: str, flops: float, ours: Timing, flash: Timing) -> Figures:
    return {
        f"{name}.tflops": (flops / ours.median / 1e12, "TFLOP/s", ""),
        f"{name}.over_flash": (flash.median / ours.median, "ratio", "SDPA, as many pairs"),
        f"{name}.spread": (ours.spread, "ratio", ""),
    }


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

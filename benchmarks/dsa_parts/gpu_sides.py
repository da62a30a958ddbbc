"""Engines, sizes and operands of `benchmarks.dsa_parts.gpu`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention.dsa import ReferenceKernel, Rows, SparseKernel
from primeblocks.parallel.attention.dsa.indexer import IndexScores
from primeblocks.parallel.sequence import SequencePlan
from primeblocks.planning.dsa import DsaSizes, dsa_cost

__all__ = [
    "BF16_ERROR", "FLOAT8_ERROR", "SMALL", "Engine", "Figures", "Model", "Operands", "Sizes",
    "assert_close", "draw", "draw_indices", "draw_operands", "engines_of", "gate", "leave_out",
    "plan_of", "scorers_of",
]  # fmt: skip

Figures = dict[str, tuple[float, str, str]]

# Of the norm: weights, slopes and results are rounded to 8 bits.
BF16_ERROR = 0.01
# Twice what two E4M3 operands give, 2.65 % each, of sums whose terms cancel.
FLOAT8_ERROR = 2 * 2**0.5 * 0.0265


@dataclass(frozen=True)
class Model:
    """A layer: its name in figures, heads of attention and of the indexer."""

    name: str
    heads: int
    index_heads: int


@dataclass(frozen=True)
class Sizes:
    """One document over some ranks, of which one is measured.

    Attributes:
        few: queries where an engine is too slow for those of a rank.
        scored: queries whose scores are measured, against all tokens.
    """

    tokens: int = 131072
    ranks: int = 8
    k: int = 2048
    latent: int = 512
    rope: int = 64
    index_dim: int = 128
    few: int = 512
    scored: int = 512
    chunk_bytes: int = 1 << 30
    square: int = 8192
    runs: int = 5
    models: tuple[Model, ...] = (Model("glm52", 64, 32), Model("v32", 128, 64))

    @property
    def rows(self) -> Rows:
        return Rows.latent(self.latent, self.rope)


SMALL = Sizes(
    tokens=256, ranks=4, k=12, latent=16, rope=8, index_dim=16, few=8, scored=8,
    chunk_bytes=1 << 20, square=64, runs=2, models=(Model("tiny", 3, 2), Model("small", 2, 4)),
)  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """A call of a kernel; `pairs` of a query and a row that it selected."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    grad: Tensor
    rows: Rows
    pairs: int

    @property
    def how(self) -> dict[str, Any]:
        return {"rows": self.rows, "scale": self.rows.key_dim**-0.5}

    def first(self, queries: int) -> Operands:
        some = self.indices[:queries]
        pairs = int((some >= 0).sum())
        return Operands(self.q[:queries], self.kv, some, self.grad[:queries], self.rows, pairs)


@dataclass(frozen=True)
class Engine:
    """A kernel by name; `few` where it is measured on a part of the queries."""

    name: str
    kernel: SparseKernel
    few: bool = False


def engines_of(device: str) -> Iterator[Engine]:
    yield Engine("reference", ReferenceKernel(), few=True)
    triton = _import("primeblocks.parallel.adapters.triton") if device == "cuda" else None
    if triton is not None:
        yield Engine("triton", triton.TritonSparseKernel())


def scorers_of(device: str, heads: int) -> Iterator[tuple[str, IndexScores, float]]:
    """Engines of scores, and how far each may be off."""
    yield "torch", _by_head, BF16_ERROR
    if device != "cuda":
        return
    triton = _import("primeblocks.parallel.adapters.triton")
    if triton is not None:
        yield "triton", triton.TritonIndexScores(), BF16_ERROR
    module = _import("primeblocks.parallel.adapters.deep_gemm")
    try:
        module.check_device(torch.device(device))
        scores = module.DeepGemmIndexScores()
        _prove(scores, heads, device)
    except Exception as error:  # A library for another torch may load, and misread its tensors.
        leave_out("deep_gemm", error)
    else:
        yield "deep_gemm", scores, FLOAT8_ERROR


def _prove(scores: IndexScores, heads: int, device: str) -> None:
    some = draw(64, heads, 128, device=device, seed=0), draw(256, 128, device=device, seed=1)
    weights = draw(64, heads, device=device, seed=2).float()
    assert_close(scores(*some, weights), _by_head(*some, weights), FLOAT8_ERROR)


def _by_head(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """A matrix product in bfloat16 a head, added in float32: what torch alone can do."""
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        total.addcmul_((q[:, head] @ k.T).relu_().float(), weights[:, head, None])
    return total


@functools.cache  # What is left out is told once.
def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        leave_out(name, error)
        return None


def leave_out(name: str, error: Exception) -> None:
    print(f"left out: {name}: {error}", file=sys.stderr)


def draw(*shape: int, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def plan_of(sizes: Sizes, model: Model) -> SequencePlan:
    cost = dsa_cost(
        DsaSizes(model.heads, model.index_heads, layers=1, index_layers=1, top_k=sizes.k)
    )
    return plan_sequence([sizes.tokens], ranks=sizes.ranks, order="balanced", cost=cost)


def draw_indices(positions: Tensor, tokens: int, k: int) -> Tensor:
    """Draw up to k tokens for each position, of those before: worse for caches than a real choice.

    Returns:
        `[positions, 1, k]`, int32, ascending, -1 behind the last.
    """
    generator = torch.Generator(positions.device).manual_seed(0)
    column = torch.arange(tokens, device=positions.device)
    found = []
    for some in positions.split(max(1, (1 << 26) // tokens)):
        lots = torch.rand(len(some), tokens, generator=generator, device=positions.device)
        lots.masked_fill_(column > some[:, None], -1.0)
        best = lots.topk(min(k, tokens), dim=1)
        ids = best.indices.masked_fill(best.values < 0, tokens).sort(1).values
        found.append(ids.masked_fill(ids == tokens, -1).to(torch.int32))
    chosen = torch.cat(found)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1).unsqueeze(1)


def draw_operands(device: str, sizes: Sizes, model: Model) -> Operands:
    positions = torch.as_tensor(plan_of(sizes, model).indices(0), device=device)
    indices = draw_indices(positions, sizes.tokens, sizes.k)
    rows, queries = sizes.rows, len(positions)
    return Operands(
        draw(queries, model.heads, rows.key_dim, device=device, seed=0),
        draw(sizes.tokens, 1, rows.width, device=device, seed=1),
        indices,
        draw(queries, model.heads, rows.value_dim, device=device, seed=2),
        rows,
        int((indices >= 0).sum()),
    )


def gate(kernel: SparseKernel, device: str, heads: int, rows: Rows, k: int) -> None:
    """Demand the reference's results in float64, at a small size. With a sink in `lse`."""
    positions = torch.arange(0, 1024, 16, device=device)
    indices = draw_indices(positions, 1024, min(k, 300))
    q = draw(len(positions), heads, rows.key_dim, device=device, seed=3)
    kv = draw(1024, 1, rows.width, device=device, seed=4)
    grad = draw(len(positions), heads, rows.value_dim, device=device, seed=5)
    how = {"rows": rows, "scale": rows.key_dim**-0.5}
    exact = ReferenceKernel()
    wide = (q.double(), kv.double(), indices)
    wanted_out, wanted_lse = exact.forward(*wide, **how)
    out, lse = kernel.forward(q, kv, indices, **how)
    assert_close(out, wanted_out, BF16_ERROR)
    assert_close(lse, wanted_lse, BF16_ERROR)
    share = torch.rsqrt(torch.tensor(2.0, device=device))
    wanted = exact.backward(
        grad.double(), *wide, wanted_out * share, wanted_lse - share.log(), **how
    )
    found = kernel.backward(grad, q, kv, indices, (out * share).to(out), lse - share.log(), **how)
    for ours, right in zip(found, wanted, strict=True):
        assert_close(ours, right, BF16_ERROR)


def assert_close(result: Tensor, expected: Tensor, error: float) -> None:
    off = float((result.double() - expected.double()).norm() / expected.double().norm())
    assert off <= error, f"the relative error is {off}, over {error}"

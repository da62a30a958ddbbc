"""Sparse attention on a CUDA device: `python -m benchmarks.dsa_parts.gpu`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

One rank of eight, balanced, of a document of 131,072 tokens: 16,384 queries of GLM-5.2 (64 heads,
an indexer of 32 heads of 128 columns) and of DeepSeek-V3.2 (128, and 64 of 128). Rows are drawn at
random from all before, which no cache likes. Each engine is a row of its own; one that is not there
is named, with the reason, and left out. Nothing is timed before results agree.

- Attention, forward and backward: FLOPs of the rows that were selected, in a second, over the rate
  of a matrix product in bfloat16, or the bandwidth of a copy where reading each operand once would
  take longer; and the memory that a call takes beside its operands.
- The scores of 512 queries against all tokens, against a product a head in torch.
- The whole selection of a rank, scores and the choice among them, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from primeblocks.parallel.attention import dsa
from primeblocks.parallel.attention.dsa import IndexerInputs

from ..harness import Timing, compare, copy_bandwidth, main
from .gpu_sides import (
    SMALL,
    Engine,
    Figures,
    Model,
    Operands,
    Sizes,
    assert_close,
    draw,
    draw_operands,
    engines_of,
    gate,
    plan_of,
    scorers_of,
)

__all__ = ["attention_bytes", "attention_flops", "figures", "matmul_rate", "of_attention"]

MATMUL = "torch.mm in bfloat16"


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """All that the device and its packages allow.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.dsa_parts.gpu needs a CUDA device")
    sizes = sizes or Sizes()
    rate, bandwidth = matmul_rate(device, sizes), copy_bandwidth(device=device)
    yield {"dsa.gpu.bf16_tflops": (rate / 1e12, "TFLOP/s", MATMUL)}
    for model in sizes.models:
        operands = draw_operands(device, sizes, model)
        engines = [*engines_of(device)]
        yield of_attention(model.name, operands, engines, device, sizes, (rate, bandwidth))
        yield of_scores(model, device, sizes, rate)
        yield of_selection(model, device, sizes)


def attention_flops(operands: Operands, *, backward: bool) -> int:
    """Of the selected rows: two products forward, five backward, where scores are found again."""
    key, value = operands.rows.key_dim, operands.rows.value_dim
    columns = 3 * key + 2 * value if backward else key + value
    return 2 * operands.pairs * operands.q.shape[1] * columns


def attention_bytes(operands: Operands, *, backward: bool) -> int:
    """Of operands that are read once, and results that are written once."""
    q, kv, grad, ids = operands.q, operands.kv, operands.grad, operands.indices
    lse = 4 * q.shape[0] * q.shape[1]
    read = q.nbytes + kv.nbytes + ids.nbytes
    if not backward:
        return read + grad.nbytes + lse  # The output is as large as its gradient.
    return read + 2 * grad.nbytes + lse + q.nbytes + 4 * kv.numel()


def of_attention(
    name: str,
    operands: Operands,
    engines: list[Engine],
    device: str,
    sizes: Sizes,
    roofline: tuple[float, float],
) -> Figures:
    heads, k = operands.q.shape[1], operands.indices.shape[2]
    parts = [operands.first(sizes.few) if engine.few else operands for engine in engines]
    steps: list[Callable[[], Any]] = []
    for engine, some in zip(engines, parts, strict=True):
        steps += _steps(engine, some)

    def agree() -> None:
        for engine in engines:
            gate(engine.kernel, device, heads, operands.rows, k)

    timings = compare(*steps, agree=agree, runs=sizes.runs)
    found: Figures = {}
    for index, (engine, some) in enumerate(zip(engines, parts, strict=True)):
        for backward in (False, True):
            at = 2 * index + backward
            row = f"dsa.{name}.{'backward' if backward else 'forward'}.gpu.{engine.name}"
            found |= _rates(row, timings[at], some, roofline, backward=backward)
            if device == "cuda":
                found[f"{row}.peak_bytes"] = _peak_bytes(steps[at]), "bytes", ""
    return found


def _steps(engine: Engine, some: Operands) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward; the operands are made before the first of them is timed."""
    out, lse = engine.kernel.forward(some.q, some.kv, some.indices, **some.how)
    return (
        lambda: engine.kernel.forward(some.q, some.kv, some.indices, **some.how),
        lambda: engine.kernel.backward(
            some.grad, some.q, some.kv, some.indices, out, lse, **some.how
        ),
    )


def _rates(
    row: str, timing: Timing, some: Operands, roofline: tuple[float, float], *, backward: bool
) -> Figures:
    rate, bandwidth = roofline
    flops = attention_flops(some, backward=backward)
    least = max(flops / rate, attention_bytes(some, backward=backward) / bandwidth)
    return {
        f"{row}.tflops": (flops / timing.median / 1e12, "TFLOP/s", ""),
        f"{row}.fraction_of_roofline": (least / timing.median, "ratio", MATMUL),
        f"{row}.spread": (timing.spread, "ratio", ""),
    }


def _peak_bytes(step: Callable[[], Any]) -> float:
    """The most memory beside what is there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def of_scores(model: Model, device: str, sizes: Sizes, rate: float) -> Figures:
    heads, dim = model.index_heads, sizes.index_dim
    q = draw(sizes.scored, heads, dim, device=device, seed=0)
    k = draw(sizes.tokens, dim, device=device, seed=1)
    weights = draw(sizes.scored, heads, device=device, seed=2).float()
    sides = [*scorers_of(device, heads)]

    def agree() -> None:
        some = q[:64], k[:4096], weights[:64]
        wanted = dsa.index_scores(*(x.double() for x in some))
        for _, scores, error in sides:
            assert_close(scores(*some), wanted, error)

    steps = [lambda scores=scores: scores(q, k, weights) for _, scores, _ in sides]
    timings = compare(*steps, agree=agree, runs=sizes.runs)
    flops = 2 * sizes.scored * sizes.tokens * heads * dim
    found: Figures = {}
    for (name, _, _), timing in zip(sides, timings, strict=True):
        row = f"dsa.{model.name}.scores.gpu.{name}"
        found[f"{row}.tflops"] = flops / timing.median / 1e12, "TFLOP/s", ""
        found[f"{row}.fraction_of_roofline"] = flops / timing.median / rate, "ratio", MATMUL
        found[f"{row}.speedup_vs_torch"] = timings[0].median / timing.median, "ratio", "torch"
    return found


def of_selection(model: Model, device: str, sizes: Sizes) -> Figures:
    """Of a rank's queries, with the last of the engines that score in bfloat16."""
    plan = plan_of(sizes, model)
    queries, heads, dim = plan.counts[0], model.index_heads, sizes.index_dim
    inputs = IndexerInputs(
        draw(queries, heads, dim, device=device, seed=0),
        draw(queries, dim, device=device, seed=1),
        draw(queries, heads, device=device, seed=2).float(),
    )
    keys = draw(sizes.tokens, dim, device=device, seed=3)
    sides = [(name, scores) for name, scores, _ in scorers_of(device, heads) if name != "deep_gemm"]
    name, scores = sides[-1]
    selector = dsa.TopK(sizes.k, chunk_bytes=sizes.chunk_bytes)

    def select() -> Tensor:
        return dsa.select(inputs, keys, selector=selector, sequence=plan, rank=0, scores=scores)

    def agree() -> None:
        chosen = (select() >= 0).sum(-1).squeeze(1)
        positions = torch.as_tensor(plan.indices(0), device=device)
        assert torch.equal(chosen, (positions + 1).clamp_max(sizes.k))

    (timing,) = compare(select, agree=agree, runs=1)
    return {f"dsa.{model.name}.select.gpu.{name}.seconds": (timing.median, "s", "")}


def matmul_rate(device: str, sizes: Sizes) -> float:
    a, b = (draw(sizes.square, sizes.square, device=device, seed=seed) for seed in (0, 1))
    wanted = a[:16].double() @ b.double()

    def agree() -> None:
        assert_close((a @ b)[:16], wanted, 0.01)

    (timing,) = compare(lambda: a @ b, agree=agree)
    return 2 * sizes.square**3 / timing.median


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

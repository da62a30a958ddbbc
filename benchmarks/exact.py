"""The price of batch-invariant operations: the time inside `exact.batch_invariant()` over torch's.

`python -m benchmarks.exact` from the repository; half a minute, one core. Times are those of the
processor. An operation is timed after both results agree with the operation in float64, and a model
after its two results agree.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from primeblocks.exact import batch_invariant
from primeblocks.testing import tiny_models

from .harness import Figures, compare, main

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ((1, 1024, 1024), (64, 1024, 1024), (1024, 1024, 1024))  # rows, in, out
TOKENS, HEADS, GROUPS, WIDTH = 1024, 8, 2, 64
Run = Callable[..., Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from the last tokens of a sequence, which are all of them without a cache."""
    whole = len(query) == len(key)
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=whole, enable_gqa=True)


def grouped(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply an eighth of the rows by each of eight weights."""
    if rows.dtype == torch.float64:  # torch groups no products of this dtype.
        return torch.bmm(rows.unflatten(0, (8, -1)), weights).flatten(0, 1)
    ends = torch.arange(1, 9, dtype=torch.int32) * (len(rows) // 8)
    return F.grouped_mm(rows, weights, offs=ends)


def operations() -> Iterator[tuple[str, Run, tuple[Tensor, ...]]]:
    """Yield the name, the function and the operands of each operation."""
    for count, inner, outer in PRODUCTS:
        yield (
            f"product.{count}x{inner}x{outer}",
            torch.mm,
            (drawn(count, inner), drawn(inner, outer)),
        )
    yield "grouped_product.512x512x512", grouped, (drawn(512, 512), drawn(8, 512, 512))
    rows = drawn(1024, 1024)
    yield "rms_norm.1024x1024", lambda x: F.rms_norm(x, (1024,), None, 1e-6), (rows,)
    yield "sum.1024x1024", lambda x: x.sum(-1), (rows,)
    yield "silu.1024x1024", F.silu, (rows,)
    yield "top_k.1024x128", lambda x: x.topk(8, -1).values, (rows[:, :128],)
    yield "softmax.1024x128", partial(torch.softmax, dim=-1), (rows[:, :128],)
    yield "log_softmax.64x32768", partial(torch.log_softmax, dim=-1), (drawn(64, 32768),)
    keys = drawn(2, TOKENS, GROUPS, WIDTH).unbind()
    yield f"attention.{TOKENS}_tokens", attention, (drawn(TOKENS, HEADS, WIDTH), *keys)
    yield f"attention.1_token_after_{TOKENS - 1}", attention, (drawn(1, HEADS, WIDTH), *keys)


def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def inside(run: Run, *operands: Tensor) -> Tensor:
    with batch_invariant():
        return run(*operands)


def price(
    name: str, plain: Callable[[], Tensor], ours: Callable[[], Tensor], right: Tensor, most: float
) -> Figures:
    """Compare the fastest of 25 runs, if both results are near `right`.

    The fastest run counts, because other processes can only make a run slower.
    """

    def agree() -> None:
        for each in (plain(), ours()):
            error = float((each.double() - right).norm() / right.norm())
            assert error <= most, f"{name} is off by {error:.2g}; {most:.2g} is allowed"

    both = compare(plain, ours, agree=agree, runs=25, clock=time.process_time)
    theirs, mine = (min(each.seconds) for each in both)
    return {
        f"exact.{name}.time_ratio_vs_torch": (mine / theirs, "ratio", "torch"),
        f"exact.{name}.ms": (1e3 * mine, "ms", ""),
    }


@torch.no_grad()
def measure() -> Iterator[Figures]:
    for name, run, operands in operations():
        for short, dtype in DTYPES.items():
            given = [each.to(dtype) for each in operands]
            right = run(*(each.double() for each in given))
            plain, ours = partial(run, *given), partial(inside, run, *given)
            yield price(f"{name}.{short}", plain, ours, right, 16 * torch.finfo(dtype).eps)
    for short, dtype in DTYPES.items():
        model = tiny_models.build("qwen3_moe", num_layers=2, dtype=str(dtype)[6:]).eval()
        for shape in ((1, 512), (16, 1)):
            ids = torch.randint(4, 512, shape, generator=torch.Generator().manual_seed(0))
            run = partial(logits, model, ids)
            # In float64 routers may choose other experts.
            name = f"qwen3_moe.{shape[0]}x{shape[1]}_tokens.{short}"
            yield price(name, run, partial(inside, run), run().double(), 0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(measure)

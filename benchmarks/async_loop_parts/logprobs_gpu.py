"""Log-probabilities on a CUDA device: `python -m benchmarks.async_loop_parts.logprobs_gpu`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

Forward and backward of 8,192 tokens, 151,936 words and a width of 4,096, in bfloat16 and float32:
time and peak memory, gradients included, operands not, over those of all logits in torch; of
`token_logprobs`, `token_scores` and `chunked_loss`, and of cut cross-entropy in bfloat16 where it
is installed. Of each the error against float32 operands of the same values, and nothing is timed
before it is below a limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from primeblocks.errors import MissingPackageError
from primeblocks.losses.logprobs import token_logprobs

from ..harness import compare, main
from .logprobs import (
    NAME,
    Candidate,
    Grads,
    operands,
    our_logprobs,
    our_loss,
    our_scores,
    peak,
    plain_logprobs,
    plain_scores,
)

__all__ = ["LIMITS", "SMALL", "Sizes", "figures", "peak_bytes"]

Figures = dict[str, tuple[float, str, str]]
# Of the norm. In bfloat16 logits, their slopes and results are rounded to 8 bits. Cut cross-entropy
# adds 1,200 blocks of words in it: 2**-9 / 3**0.5 of half as many sums' root is 0.03.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
CUT_LIMIT = 0.1


@dataclass(frozen=True)
class Sizes:
    """Operands, and how many of the tokens are compared before."""

    tokens: int = 8192
    words: int = 151_936
    width: int = 4096
    compared: int = 512
    runs: int = 3


SMALL = Sizes(tokens=24, words=300, width=16, compared=8, runs=1)


@dataclass(frozen=True)
class Side:
    """A candidate, the plain computation of the same, and the error that it may have."""

    name: str
    step: Candidate
    plain: Candidate
    limit: float


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """All that the device and its packages allow.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.async_loop_parts.logprobs_gpu needs a CUDA device")
    sizes = sizes or Sizes()
    for dtype in LIMITS:
        given = operands(sizes.tokens, sizes.words, sizes.width, device=device, dtype=dtype)
        for side in _sides(dtype, device):
            name = f"{NAME}.gpu.{str(dtype).removeprefix('torch.')}.{side.name}"
            yield _of_side(name, side, given, sizes)


def peak_bytes(candidate: Candidate, given: Sequence[Tensor]) -> int:
    """Most bytes at once beside what there was: of the allocator, on a CPU of results."""
    if given[0].device.type != "cuda":
        return peak(candidate, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate(given)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _sides(dtype: torch.dtype, device: str) -> Iterator[Side]:
    limit = LIMITS[dtype]
    yield Side("token_logprobs", our_logprobs, plain_logprobs, limit)
    yield Side("token_scores", our_scores, plain_scores, limit)
    yield Side("chunked_loss", partial(our_loss, entropy=0.0), plain_logprobs, limit)
    if dtype != torch.bfloat16 or device != "cuda":
        return  # Its kernels are Triton's; what it computes without them is not what is compared.
    try:
        from primeblocks.contrib.adapters import cut_cross_entropy
    except MissingPackageError as error:
        print(f"left out: cut_cross_entropy: {error}", file=sys.stderr)
        return
    step = partial(_weighted, cut_cross_entropy.token_logprobs)
    yield Side("cut_cross_entropy", step, plain_logprobs, CUT_LIMIT)


def _weighted(function: Callable[..., Tensor], given: Sequence[Tensor]) -> Grads:
    hidden, weight, ids, weights = given
    loss = (function(hidden, weight, ids) * weights).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def _of_side(name: str, side: Side, given: list[Tensor], sizes: Sizes) -> Figures:
    error = _error(side, given, sizes)
    taken, full = (peak_bytes(each, given) for each in (side.step, side.plain))

    def agree() -> None:
        assert error <= side.limit, f"{name} errs by {error}, over {side.limit}"

    mine, plain = compare(
        partial(side.step, given), partial(side.plain, given), agree=agree, runs=sizes.runs
    )
    peers = f"all logits, {full / 2**30:.1f} GiB", f"all logits, {plain.median:.3g} s"
    return {
        f"{name}.error": (error, "of the norm", "all logits of float32 operands"),
        f"{name}.peak_memory": (taken / 2**30, "GiB", ""),
        f"{name}.peak_memory_fraction": (taken / full, "ratio", peers[0]),
        f"{name}.time": (mine.median, "s", ""),
        f"{name}.time_ratio": (mine.median / plain.median, "ratio", peers[1]),
        f"{name}.time_spread": (max(mine.spread, plain.spread), "of median", ""),
    }


def _error(side: Side, given: list[Tensor], sizes: Sizes) -> float:
    """The largest of gradients' and log-probabilities', of a few tokens."""
    some = [
        given[0].detach()[: sizes.compared].requires_grad_(),
        given[1],
        *(x[: sizes.compared] for x in given[2:]),
    ]
    exact = [x.detach().float().requires_grad_() for x in some[:2]] + some[2:]
    pairs: list[tuple[Any, Any]] = [*zip(side.step(some), side.plain(exact), strict=True)]
    if side.name in {"token_logprobs", "cut_cross_entropy"}:
        function = side.step.args[0] if isinstance(side.step, partial) else token_logprobs
        with torch.no_grad():
            every = torch.log_softmax(exact[0] @ exact[1].mT, -1)
            pairs.append((function(*some[:3]), every.gather(1, some[2][:, None])[:, 0]))
    return max(float((x.float() - y).norm() / y.norm()) for x, y in pairs)


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))

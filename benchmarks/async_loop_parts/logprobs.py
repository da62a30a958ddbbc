"""Log-probabilities and entropy without logits: memory and time over the plain computation's.

The plain one keeps all logits: `log_softmax`, `gather`, `-(exp(y) * y).sum()`, and backward through
them. Both work in float32, with the gradients of hidden states and head. Memory is that of
results of operators at the peak, forward and backward, the head's gradient included, parameters
not: of the plain one counted on tensors without storage, which is held to a real run's count first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import compare
from primeblocks.losses.logprobs import chunked_loss, token_logprobs, token_scores
from primeblocks.testing.oracles import StepCounter

__all__ = [
    "Candidate", "figures", "operands", "our_logprobs", "our_loss", "our_scores", "peak",
    "plain_logprobs", "plain_scores",
]  # fmt: skip

WORDS, WIDTH = 151_936, 1024
COUNTED_TOKENS, TIMED_TOKENS = 8192, 256
NAME = "async_loop.logprobs"
Grads = tuple[Tensor, ...]
Candidate = Callable[[Sequence[Tensor]], Grads]


def operands(
    tokens: int,
    words: int = WORDS,
    width: int = WIDTH,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Hidden states, head, ids, weights of log-probabilities; logits deviate by 1.6."""
    generator = torch.Generator(device).manual_seed(0)
    how: Any = {"generator": generator, "device": device}
    hidden = torch.randn(tokens, width, dtype=dtype, **how)
    weight = torch.randn(words, width, dtype=dtype, **how).mul_(1.6 / width**0.5)
    ids = torch.randint(words, (tokens,), **how)
    weights = torch.randn(tokens, **how)
    return [hidden.requires_grad_(), weight.requires_grad_(), ids, weights]


def _every(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def plain_logprobs(given: Sequence[Tensor]) -> Grads:
    hidden, weight, ids, weights = given
    every = _every(hidden, weight)
    loss = (every.gather(1, ids[:, None])[:, 0] * weights).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def plain_scores(given: Sequence[Tensor]) -> Grads:
    hidden, weight, ids, weights = given
    every = _every(hidden, weight)
    entropy = -(every.exp() * every).sum(-1)
    loss = (every.gather(1, ids[:, None])[:, 0] * weights).sum() - 0.1 * entropy.sum()
    return torch.autograd.grad(loss, (hidden, weight))


def our_logprobs(given: Sequence[Tensor]) -> Grads:
    hidden, weight, ids, weights = given
    loss = (token_logprobs(hidden, weight, ids) * weights).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def our_scores(given: Sequence[Tensor]) -> Grads:
    hidden, weight, ids, weights = given
    seen = token_scores(hidden, weight, ids)
    loss = (seen.logprobs * weights).sum() - 0.1 * seen.entropy.sum()
    return torch.autograd.grad(loss, (hidden, weight))


def our_loss(given: Sequence[Tensor], *, entropy: float = 0.1) -> Grads:
    hidden, weight, ids, weights = given

    def loss(seen: Any, own: slice) -> Tensor:
        found = (seen.logprobs * weights[own]).sum()
        return found - entropy * seen.entropy.sum() if entropy else found

    return torch.autograd.grad(chunked_loss(hidden, weight, ids, loss=loss), (hidden, weight))


def peak(candidate: Candidate, given: Sequence[Tensor]) -> int:
    """The most bytes that results of operators took at once."""
    with StepCounter() as counted:
        candidate(given)
    return counted.peak_bytes


def planned_peak(candidate: Candidate, tokens: int, words: int = WORDS, width: int = WIDTH) -> int:
    """The same, of tensors without storage."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, requires_grad=True)
        weight = torch.empty(words, width, requires_grad=True)
        ids = torch.empty(tokens, dtype=torch.int64)
        return peak(candidate, [hidden, weight, ids, torch.empty(tokens)])


PAIRS = {
    "logprobs": (our_logprobs, plain_logprobs),
    "scores": (our_scores, plain_scores),
    "chunked_loss.logprobs": (partial(our_loss, entropy=0.0), plain_logprobs),
    "chunked_loss.scores": (our_loss, plain_scores),
}


def agree(given: Sequence[Tensor]) -> None:
    """Gradients to within rounding of those in float64."""
    exact = [x.detach().double() if x.is_floating_point() else x for x in given]
    for leaf in exact[:2]:
        leaf.requires_grad_()
    for ours, plain in PAIRS.values():
        for x, y, z in zip(ours(given), plain(given), plain(exact), strict=True):
            error, theirs = (((each - z).abs().max() / z.abs().max()).item() for each in (x, y))
            assert error <= max(2 * theirs, 1e-6), f"errs by {error}; the plain one by {theirs}"


def memory() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    for key, (ours, plain) in PAIRS.items():
        taken, full = (planned_peak(each, COUNTED_TOKENS) for each in (ours, plain))
        peer = f"all logits, {full / 2**30:.1f} GiB"
        found[f"{NAME}.peak_memory.{key}"] = (taken / 2**30, "GiB", "")
        found[f"{NAME}.peak_memory_fraction.{key}"] = (taken / full, "ratio", peer)
    return found


def times() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    timed = operands(TIMED_TOKENS)
    for key, (ours, plain) in PAIRS.items():
        calls = partial(ours, timed), partial(plain, timed)
        mine, theirs = compare(*calls, agree=lambda: None, runs=3)
        peer = f"all logits, {theirs.median:.2f} s"
        found[f"{NAME}.time_ratio.{key}"] = (mine.median / theirs.median, "ratio", peer)
        found[f"{NAME}.time_spread.{key}"] = (max(mine.spread, theirs.spread), "of median", "")
    return found


def figures() -> dict[str, tuple[float, str, str]]:
    small = operands(96, 20_000, 64)
    agree(small)
    for candidate in {each for pair in PAIRS.values() for each in pair}:
        sizes = len(small[0]), *small[1].shape
        assert planned_peak(candidate, *sizes) == peak(candidate, small), candidate
    found = memory() | times()
    for what in ("peak_memory_fraction", "time_ratio"):
        found[f"{NAME}.{what}"] = found[f"{NAME}.{what}.logprobs"]
    return found

"""Sums over logits and their gradients, one chunk at a time in the memory of one chunk.

Logits are computed by chunks of words, and each of these by chunks of tokens. `normalise` reads all
chunks and returns log-probabilities and entropies. `gradients` reads them again and adds to the
gradients. `LogitChunks` computes a chunk twice, or keeps it from the first pass to the second
(`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShapeError, UsageError, check_counts
from ..groups import check_tensors

__all__ = [
    "Head",
    "HeadGradients",
    "LogitChunks",
    "Normalised",
    "check_operands",
    "gradients",
    "normalise",
]


R = TypeVar("R")


@dataclass(frozen=True)
class Head:
    """All properties of a head except its tensors."""

    first_word: int
    dtype: torch.dtype | None
    chunk: tuple[int, int]  # Tokens and words.
    group: dist.ProcessGroup | None
    entropy: bool

    def reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)
        return x


def check_operands(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float | Tensor,
    head: Head,
) -> None:
    check_tensors(hidden=hidden, weight=weight, ids=ids)
    if hasattr(weight, "device_mesh"):
        raise ShapeError(
            "weight is a DTensor. Call this in the forward of the head, where FSDP gathers it, or "
            "pass weight.to_local() with the group that shares the vocabulary and first_word."
        )
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, ids {list(ids.shape)}"
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or ids.ndim not in {1, 2} or len(ids) != len(hidden):
        raise ShapeError(
            "hidden must be [tokens, hidden], weight [words, hidden] and ids [tokens] or "
            f"[tokens, choices]; got {shapes}. Flatten a batch with hidden.flatten(0, 1)."
        )
    if ids.dtype not in {torch.int32, torch.int64}:
        raise ShapeError(f"ids must be int64 or int32; got {ids.dtype}.")
    if len(devices := {x.device for x in (hidden, weight, ids)}) > 1:
        raise ShapeError(
            f"hidden, weight and ids are on {len(devices)} devices: {devices}. Move them to one."
        )
    dtypes = {hidden.dtype, weight.dtype}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise ShapeError(f"hidden and weight must be floating; got {dtypes}.")
    if len(dtypes) > 1 and head.dtype is None:
        raise ShapeError(f"hidden and weight differ in dtype: {dtypes}. Pass a head_dtype.")
    if isinstance(temperature, Tensor):
        if temperature.shape != hidden.shape[:1] or temperature.requires_grad:
            raise ShapeError(
                f"temperature must be a number, or [{len(hidden)}] without gradient; got "
                f"{list(temperature.shape)}, requires_grad={temperature.requires_grad}."
            )
    elif not (isinstance(temperature, Real) and temperature > 0):
        raise UsageError(f"temperature must be above 0; got {temperature!r}.")
    check_counts(chunk_tokens=head.chunk[0], chunk_words=head.chunk[1])


class LogitChunks:
    """Logits by chunks of words, and within them by chunks of tokens.

    Args:
        keep: keep every chunk, and return it again in the second pass.
        like: chunks of at least as many tokens, whose memory is used again.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        scale: Any,
        head: Head,
        *,
        keep: bool = False,
        like: LogitChunks | None = None,
    ) -> None:
        self.hidden, self.weight, self.head = hidden, weight, head
        self.dtype = head.dtype or hidden.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.scale = scale.to(self.wide)[:, None] if isinstance(scale, Tensor) else scale
        self.keep, self.kept = keep, set[tuple[int, int]]()
        rows, words = min(head.chunk[0], len(hidden)), min(head.chunk[1], len(weight))
        # Fresh memory pages for a chunk would cost a CPU as much time as the chunk's exponentials.
        size = len(hidden) * len(weight) if keep else rows * words
        self.memory: tuple[Tensor, Tensor] = (
            (
                hidden.new_empty(size, dtype=self.wide),
                hidden.new_empty(2, rows * words, dtype=self.wide),
            )
            if like is None
            else like.memory
        )

    def words(self) -> Iterator[tuple[slice, Tensor]]:
        for own in _runs(len(self.weight), self.head.chunk[1]):
            yield own, self.weight[own].to(self.dtype)

    def tokens(self) -> Iterator[tuple[slice, Tensor]]:
        for own in _runs(len(self.hidden), self.head.chunk[0]):
            yield own, self.hidden[own].to(self.dtype)

    def other(self, like: Tensor, place: int = 0) -> Tensor:
        return self.memory[1][place, : like.numel()].view(like.shape)

    def scaled(self, x: Tensor, tokens: slice) -> Tensor:
        if isinstance(self.scale, Tensor):
            return x.mul_(self.scale[tokens])
        return x if self.scale == 1 else x.mul_(self.scale)

    def logits(self, tokens: slice, x: Tensor, words: slice, w: Tensor) -> Tensor:
        place = (tokens.start, words.start)
        start = len(self.hidden) * words.start + tokens.start * len(w) if self.keep else 0
        out = self.memory[0][start : start + len(x) * len(w)].view(len(x), len(w))
        if place in self.kept:
            return out
        if self.keep:
            self.kept.add(place)
        if self.wide == self.dtype:
            torch.mm(x, w.T, out=out)
        else:
            out.copy_(x @ w.T)
        return self.scaled(out, tokens)

    def place(self, ids: Tensor, words: slice) -> tuple[Tensor, Tensor]:
        """Return columns of a chunk, and whether the ids are in the chunk."""
        place = ids - (self.head.first_word + words.start)
        size = words.stop - words.start
        return place.clamp(0, size - 1), (place >= 0) & (place < size)


class Normalised(NamedTuple):
    """By token: log-probabilities of chosen words, entropy, and the log of summed exponentials."""

    logprobs: Tensor
    entropy: Tensor
    log_mass: Tensor


def _without_autocast(function: Callable[..., R]) -> Callable[..., R]:
    """Let forward and backward round logits alike, whatever autocast each runs in."""

    @wraps(function)
    def call(chunks: LogitChunks, *args: Any) -> R:
        kind = chunks.hidden.device.type
        if not torch.amp.is_autocast_available(kind):
            return function(chunks, *args)
        with torch.autocast(kind, enabled=False):
            return function(chunks, *args)

    return call


@_without_autocast
def normalise(chunks: LogitChunks, ids: Tensor) -> Normalised:
    """Return scores of all tokens. Collective with a group: two reductions of values per token."""
    head = chunks.head
    top = chunks.hidden.new_full((len(ids),), -torch.inf, dtype=chunks.wide)
    # Sums over words of exp(z - top) and of exp(z - top) * (z - top).
    mass, moment = torch.zeros_like(top), torch.zeros_like(top)
    chosen = torch.zeros_like(ids, dtype=chunks.wide)
    found = torch.zeros_like(chosen)
    for words, w in chunks.words():
        for tokens, x in chunks.tokens():
            logits = chunks.logits(tokens, x, words, w)
            place, here = chunks.place(ids[tokens], words)
            chosen[tokens] += torch.where(here, logits.gather(1, place), 0)
            found[tokens] += here
            highest = torch.maximum(top[tokens], logits.amax(1))
            _rescale(top[tokens], mass[tokens], moment[tokens], highest)
            below = torch.sub(logits, highest[:, None], out=chunks.other(logits))
            if head.entropy:
                exps = torch.exp(below, out=chunks.other(logits, 1))
                mass[tokens] += exps.sum(1)
                moment[tokens] += below.mul_(exps).sum(1)
            else:
                mass[tokens] += below.exp_().sum(1)
    if head.group is not None:
        _rescale(top, mass, moment, head.reduce(top.clone(), dist.ReduceOp.MAX))
        sums = head.reduce(torch.cat([mass[:, None], moment[:, None], chosen, found], 1))
        mass, moment = sums[:, 0], sums[:, 1]
        chosen, found = sums[:, 2:].chunk(2, 1)
    log_mass = top + mass.log()
    # NaN for a word that no rank has, or that two ranks have.
    logprobs = torch.where(found == 1, chosen - log_mass[:, None], torch.nan)
    return Normalised(logprobs, mass.log() - moment / mass, log_mass)


class HeadGradients(NamedTuple):
    """Gradients to add to, or None if not wanted. That of `hidden` is in full precision."""

    hidden: Tensor | None
    weight: Tensor | None


@_without_autocast
def gradients(
    chunks: LogitChunks,
    ids: Tensor,
    seen: Normalised,
    of_scores: tuple[Tensor | None, Tensor | None],
    to: HeadGradients,
) -> None:
    """Add the gradients of tokens, given those of their scores. Local: this rank's share.

    Args:
        of_scores: the gradients of log-probabilities and of entropies.
    """
    if of_scores == (None, None):  # A chunk of masked tokens does not have gradients.
        return
    for words, w in chunks.words():
        # Summed in full precision over tokens, and rounded once.
        rows = _wide(to.weight, words, chunks.wide)
        for tokens, x in chunks.tokens():
            logits = chunks.logits(tokens, x, words, w)
            grad = _of_logits(chunks, logits, tokens, words, ids, seen, of_scores)
            grad = grad.to(chunks.dtype)
            if to.hidden is not None:
                # Each chunk's words are summed on their own. Adding words to the total one by one,
                # as addmm does, is slightly less precise than the plain product with 150,000 words.
                to.hidden[tokens] += grad @ w
            if rows is None:
                continue
            if rows.dtype == grad.dtype:
                rows.addmm_(grad.T, x)
            else:
                rows += grad.T @ x
        if to.weight is not None and rows is not None and rows.dtype != to.weight.dtype:
            to.weight[words] = rows


def _of_logits(
    chunks: LogitChunks,
    logits: Tensor,
    tokens: slice,
    words: slice,
    ids: Tensor,
    seen: Normalised,
    of_scores: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return the gradient of a chunk's logits before the temperature, in the chunk's memory."""
    of_logprobs, of_entropy = of_scores
    logits -= seen.log_mass[tokens, None]
    grad = logits
    if of_entropy is not None:
        probabilities = torch.exp(logits, out=chunks.other(logits))
        grad = logits.add_(seen.entropy[tokens, None]).mul_(of_entropy[tokens, None])
        if of_logprobs is not None:
            grad += of_logprobs[tokens].sum(1, keepdim=True)
        grad.mul_(probabilities).neg_()
    elif of_logprobs is not None:
        grad = logits.exp_().mul_(-of_logprobs[tokens].sum(1, keepdim=True))
    if of_logprobs is not None:
        place, here = chunks.place(ids[tokens], words)
        added = torch.where(here, of_logprobs[tokens], 0)
        for choice in range(ids.shape[1]):  # One per row at a time: sums in a fixed order.
            at = place[:, choice, None]
            grad.scatter_(1, at, grad.gather(1, at) + added[:, choice, None])
    return chunks.scaled(grad, tokens)


def _runs(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _wide(whole: Tensor | None, words: slice, wide: torch.dtype) -> Tensor | None:
    if whole is None:
        return None
    part = whole[words]
    return part if part.dtype == wide else torch.zeros_like(part, dtype=wide)


def _rescale(top: Tensor, mass: Tensor, moment: Tensor, highest: Tensor) -> None:
    """Make sums relative to a higher maximum, in place."""
    # If the maximum is -inf, the sums are 0, and the change would be NaN.
    change = torch.where(mass > 0, top - highest, 0)
    factor = change.exp()
    moment.add_(mass * change).mul_(factor)
    mass.mul_(factor)
    top.copy_(highest)

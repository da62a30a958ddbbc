"""Log-probabilities and entropy from hidden states and the head, without storing all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ShapeError
from ..groups import agreed, facts_of, outside_graphs
from .logit_chunks import (
    Head,
    HeadGradients,
    LogitChunks,
    Normalised,
    check_operands,
    gradients,
    normalise,
)

__all__ = ["TokenScores", "chunked_loss", "token_logprobs", "token_scores"]


class TokenScores(NamedTuple):
    """Log-probabilities of chosen tokens, and the entropy of each distribution, in nats."""

    logprobs: Tensor
    entropy: Tensor


@outside_graphs
def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "words hidden"],
    ids: Int[Tensor, "tokens *choices"],
    **options: Any,
) -> Float[Tensor, "tokens *choices"]:
    """Return only log-probabilities. Everything else works as in `token_scores`."""
    return _scores("token_logprobs", hidden, weight, ids, **options).logprobs


@outside_graphs
def token_scores(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "words hidden"],
    ids: Int[Tensor, "tokens *choices"],
    **options: Any,
) -> TokenScores:
    """Return entropies, and log-probabilities of chosen tokens, from hidden states and the head.

    Logits are computed one chunk at a time, and again in the backward. The computation needs four
    matrix products, one more than with all logits stored, but only the memory of a few chunks.
    Results are float32, or float64 if the head computes in float64. With a `group`, the call and
    its backward are collective, and otherwise local. The results are deterministic, and
    differentiable once, in `hidden` and `weight`.

    Args:
        hidden: the hidden states. `hidden[t]` predicts the token `ids[t]`. Leave out rows that the
            loss does not need, such as prompts, because every row costs the same.
        weight: the weight of the head. With a `group`, pass only this rank's rows.
        ids: one vocabulary id per row, or several ids, such as a teacher's candidates. An id
            outside the vocabulary, such as -100, has the log-probability NaN.
        options: the keywords below.
        temperature: the divisor of the logits: a number, or a tensor `[tokens]` without gradient.
            The values of a tensor are not checked.
        head_dtype: the dtype to which operands are cast, one chunk at a time. Use float32 for a
            bfloat16 model only if the engine also uses float32, because the dtype changes the
            mismatch with the engine.
        group: the ranks that share the vocabulary. All ranks pass the same `hidden` and `ids`, and
            get the same result and the whole gradient of `hidden`. With c ids per token, the
            forward sends 3 + 2 c numbers per token. The backward sends a tensor `[tokens, hidden]`.
        first_word: the vocabulary id of the first row of `weight`.
        chunk_tokens: the number of rows in a chunk of logits.
        chunk_words: the number of columns in a chunk of logits.
        check: compare the arguments of all ranks first, in a small collective for which the host
            waits.

    Raises:
        ShapeError: a tensor has a wrong shape, dtype or device.
        UsageError: a temperature or the size of a chunk is not above 0.
        PlanError: `group` is not a process group, or ranks differ in sizes, in dtypes, or in the
            tensors that need gradients.
        RankError: another rank refused its arguments.

    Source: arXiv:1805.02867 (online softmax); arXiv:2411.09009 (cut cross-entropy).
    """
    return _scores("token_scores", hidden, weight, ids, **options)


@outside_graphs
def chunked_loss(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "words hidden"],
    ids: Int[Tensor, "tokens *choices"],
    *,
    loss: Callable[[TokenScores, slice], Float[Tensor, ""]],
    chunk_tokens: int = 512,
    **options: Any,
) -> Float[Tensor, ""]:
    """Sum a loss over chunks of tokens, and compute its gradients in the forward.

    The loss must be a sum over tokens. In float16, divide the result and not the loss, because a
    GradScaler scales only the result. Logits are computed once, and only the logits of one chunk
    are stored. The function needs three matrix products, one fewer than `token_scores`. Gradients
    flow only to `hidden` and `weight`. Between forward and backward, the gradient of `weight` is
    stored in full precision. With a `group`, the forward is collective in each chunk, so all ranks
    need equal `chunk_tokens`. The backward is local. Everything else works as in `token_scores`.

    Args:
        loss: a function that gets the scores of a chunk and the slice of the chunk's tokens, and
            returns a scalar tensor.
        chunk_tokens: the number of tokens in a chunk. The logits of a chunk use 4 bytes x
            `chunk_tokens` x the number of this rank's rows of `weight`.
        options: keywords of `token_scores`.

    Raises:
        ShapeError: `loss` does not return a scalar tensor. The function also raises the errors of
            `token_scores`.
    """
    options["chunk_tokens"] = chunk_tokens
    columns, scale, head = _settled("chunked_loss", hidden, weight, ids, **options)

    def of_chunk(seen: Normalised, tokens: slice) -> Tensor:
        part = loss(TokenScores(seen.logprobs.reshape(ids[tokens].shape), seen.entropy), tokens)
        if not isinstance(part, Tensor) or part.ndim:
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ShapeError(f"a loss must be a scalar tensor; got {shape}.")
        return part

    learns = torch.is_grad_enabled()
    return _ChunkedLoss.apply(hidden, weight, columns, scale, head, of_chunk, learns)


def _scores(name: str, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> TokenScores:
    columns, scale, head = _settled(name, hidden, weight, ids, **options)
    logprobs, entropy = _TokenScores.apply(hidden, weight, columns, scale, head)
    return TokenScores(logprobs.reshape(ids.shape), entropy)


def _settled(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    head_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    first_word: int = 0,
    chunk_tokens: int = 2048,
    chunk_words: int = 4096,
    check: bool = True,
) -> tuple[Tensor, Any, Head]:
    chunk, entropy = (chunk_tokens, chunk_words), name != "token_logprobs"
    head = Head(first_word, head_dtype, chunk, group, entropy)
    if group is None:
        check_operands(hidden, weight, ids, temperature, head)
    else:
        with agreed(name, hidden, group=group, check=check) as call:
            check_operands(hidden, weight, ids, temperature, head)
            call.facts |= {**facts_of("hidden", hidden), "tokens": len(hidden)}
            call.facts |= {"ids": list(ids.shape), "head_dtype": head_dtype}
            if name == "chunked_loss":  # Ranks exchange sums once per chunk.
                call.facts["chunk_tokens"] = chunk_tokens
    scale: Any = temperature
    if isinstance(temperature, Tensor):  # Its reciprocal is not rounded to its own dtype.
        scale = temperature.to(torch.promote_types(head_dtype or hidden.dtype, torch.float32))
    return ids if ids.ndim == 2 else ids[:, None], 1 / scale, head


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, scale: Any, head: Head
    ) -> tuple[Tensor, Tensor]:
        seen = normalise(LogitChunks(hidden, weight, scale, head), ids)
        ctx.save_for_backward(hidden, weight, ids, seen.log_mass, seen.entropy)
        ctx.scale, ctx.head = scale, head
        ctx.set_materialize_grads(False)
        if not head.entropy:
            ctx.mark_non_differentiable(seen.entropy)
        return seen.logprobs, seen.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        hidden, weight, ids, log_mass, entropy = ctx.saved_tensors
        chunks = LogitChunks(hidden, weight, ctx.scale, ctx.head)
        to = _zeros(hidden, weight, ctx.needs_input_grad)
        gradients(chunks, ids, Normalised(entropy, entropy, log_mass), (grads[0], grads[1]), to)
        if to.hidden is not None:
            ctx.head.reduce(to.hidden)
            to = to._replace(hidden=to.hidden.to(hidden.dtype))
        return *to, None, None, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        scale: Any,
        head: Head,
        loss: Callable[[Normalised, slice], Tensor],
        learns: bool,
    ) -> Tensor:
        needs = [learns and need for need in ctx.needs_input_grad[:2]]
        wide = torch.promote_types(head.dtype or hidden.dtype, torch.float32)
        to = _zeros(hidden, weight, needs, wide=wide)
        total = hidden.new_zeros((), dtype=wide)
        chunks = None
        for start in range(0, len(hidden), head.chunk[0]):
            own = slice(start, min(start + head.chunk[0], len(hidden)))
            part = scale[own] if isinstance(scale, Tensor) else scale
            chunks = LogitChunks(hidden[own], weight, part, head, keep=any(needs), like=chunks)
            seen = normalise(chunks, ids[own])
            with torch.set_grad_enabled(any(needs)):
                leaves = [
                    x.detach().requires_grad_(any(needs)) for x in (seen.logprobs, seen.entropy)
                ]
                value = loss(Normalised(leaves[0], leaves[1], seen.log_mass), own)
            total += value.detach()
            if value.requires_grad:
                grads: Any = torch.autograd.grad(value, leaves, allow_unused=True)
                share = to if to.hidden is None else to._replace(hidden=to.hidden[own])
                gradients(chunks, ids[own], seen, grads, share)
        if to.hidden is not None:
            head.reduce(to.hidden)
        ctx.save_for_backward(*to)
        ctx.dtypes = [hidden.dtype, weight.dtype]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        of_loss = grads[0]
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = [None if x is None else (x * of_loss).to(dtype) for x, dtype in pairs]
        return *found, None, None, None, None, None


def _zeros(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool], *, wide: torch.dtype | None = None
) -> HeadGradients:
    """Return gradients of zeros. That of `weight` is in its own dtype, or in `wide`."""
    full = torch.promote_types(hidden.dtype, torch.float32) if wide is None else wide
    return HeadGradients(
        torch.zeros_like(hidden, dtype=full) if needs[0] else None,
        torch.zeros_like(weight, dtype=wide) if needs[1] else None,
    )

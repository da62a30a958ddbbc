"""Log-probabilities under the distribution that was sampled from.

Temperature, top-k and top-p change what a policy is. A trainer that compares its plain log-softmax
with an engine's processed log-probabilities measures that change as mismatch, and clips good tokens
for it; so the trainer renormalises over the very ids that the engine kept.
"""

from __future__ import annotations

import numpy as np
import torch

from ..errors import ShapeError, UsageError
from .kept import KeptTokens

__all__ = ["kept_logprobs", "kept_tokens"]


def kept_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, kept: KeptTokens, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each target among the ids that its token kept.

    Computed in float32 (float64 for float64 logits); no `[tokens, vocab]` mask is made, and
    gradients reach kept ids only. A token without a mask uses the whole vocabulary. Local;
    differentiable; waits for the device once.

    Args:
        logits: `[tokens, vocab]`, before the temperature.
        targets: `[tokens]`, the sampled ids.
        kept: one row for each token.
        temperature: what the engine divided its logits by.

    Returns:
        `[tokens]`.

    Raises:
        ShapeError: tokens or vocabulary differ.
        UsageError: the temperature is not positive; a target is not among the kept ids.

    Source: DeepSeek-V3.2, "Keep Sampling Mask".
    """
    tokens, vocab = _check(logits, temperature)
    if targets.shape != (tokens,) or kept.tokens != tokens or kept.vocab_size != vocab:
        raise ShapeError(
            f"logits {list(logits.shape)} need as many targets and kept rows of that vocabulary;"
            f" got targets {list(targets.shape)} and {kept}"
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.gather(1, targets[:, None])[:, 0].to(dtype) / temperature
    masked = np.flatnonzero(kept.counts)
    free = np.flatnonzero(kept.counts == 0)
    normaliser = torch.zeros_like(chosen)
    if len(free):
        at = torch.from_numpy(free).to(logits.device)
        whole = (logits[at].to(dtype) / temperature).logsumexp(-1)
        normaliser = normaliser.index_copy(0, at, whole)
    if len(masked):
        at = torch.from_numpy(masked).to(logits.device)
        lengths = torch.from_numpy(kept.counts[masked]).to(logits.device)
        rows = torch.repeat_interleave(at, lengths)
        ids = torch.from_numpy(kept.ids.astype(np.int64)).to(logits.device)
        _check_targets(ids == targets[rows], lengths, at)
        scores = logits[rows, ids].to(dtype) / temperature
        normaliser = normaliser.index_copy(0, at, _logsumexp(scores, lengths))
    return chosen - normaliser


def kept_tokens(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> KeptTokens:
    """The ids that temperature, then top-k, then top-p leave, for an engine that does not say.

    An id as likely as the last one of top-k is kept too, and the most likely one always (as in
    vLLM 0.32). A trainer's own logits round differently: near the edge they keep other ids than
    the engine did, which is why an engine's own rows are better. Local; sorts the vocabulary.

    Args:
        logits: `[tokens, vocab]`.
        top_k: 0 keeps all.
        top_p: 1 keeps all.

    Raises:
        UsageError: a setting is out of range.
    """
    tokens, vocab = _check(logits, temperature)
    if top_k < 0 or not 0 < top_p <= 1:
        raise UsageError(f"needs top_k >= 0 and 0 < top_p <= 1; got {top_k} and {top_p}")
    scores, order = (logits.detach().float() / temperature).sort(dim=-1)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < vocab:
        keep = scores >= scores[:, -top_k, None]
        scores = scores.masked_fill(~keep, -torch.inf)
    if top_p < 1:
        # In float32, as engines do: 1 - 0.8 in float64 drops an id that is just at the edge.
        dropped = 1 - torch.tensor(top_p, dtype=torch.float32)
        keep = keep & (scores.softmax(-1).cumsum(-1) > dropped)
        keep[:, -1] = True
    if keep.all():
        return KeptTokens(np.zeros(0, np.int32), np.zeros(tokens + 1, np.int64), vocab)
    counts = keep.sum(-1).cpu().numpy()
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return KeptTokens.from_arrays(order[keep].cpu().numpy(), offsets, vocab_size=vocab)


def _check(logits: torch.Tensor, temperature: float) -> tuple[int, int]:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ShapeError(
            f"logits must be floating [tokens, vocab]; got {logits.dtype} {list(logits.shape)}"
        )
    if not temperature > 0:
        raise UsageError(f"temperature must be positive; got {temperature}")
    return logits.shape[0], logits.shape[1]


def _check_targets(hits: torch.Tensor, lengths: torch.Tensor, at: torch.Tensor) -> None:
    found = torch.segment_reduce(hits.float(), "max", lengths=lengths, unsafe=True) > 0
    if not found.all():
        lost = at[~found]
        raise UsageError(
            f"{len(lost)} targets are not among the ids kept for them, the first at token"
            f" {int(lost[0])}. Do targets and kept rows belong to the same tokens?"
        )


def _logsumexp(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """By segments; none is empty."""
    largest = torch.segment_reduce(scores.detach(), "max", lengths=lengths, unsafe=True)
    powers = (scores - torch.repeat_interleave(largest, lengths)).exp()
    return largest + torch.segment_reduce(powers, "sum", lengths=lengths, unsafe=True).log()

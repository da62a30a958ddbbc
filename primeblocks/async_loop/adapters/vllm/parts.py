"""Completions in parts. All but the last part are saved, so that a killed run can resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....errors import UsageError, check_counts
from ...ledger import Draft, Partial
from .completion import Completion
from .engine import VllmEngine

__all__ = ["generate_in_parts"]

ROUTES = "routed_experts"


async def generate_in_parts(
    engine: VllmEngine,
    prompt: Sequence[int],
    *,
    draft: Draft,
    sample: int,
    part_tokens: int,
    max_tokens: int,
    timeout_s: float,
    seed: int | None = None,
    **options: Any,
) -> Completion:
    """Sample one completion, and save the trajectory after every `part_tokens` tokens.

    If `draft` contains a trajectory of this sample, the call continues the trajectory. The call
    sends one request per part, with the trajectory so far as the prompt. After a crash, every saved
    token still has its log-probability, version and routes. The result has no `draft_tokens`.

    Args:
        sample: the position of the completion in its group. With one `seed`, samples differ.
        part_tokens: the number of tokens per part. A crash loses at most the tokens of one part.
            Each save writes the whole trajectory.
        timeout_s: the deadline of each part, in seconds.
        options: more arguments of `VllmEngine.generate`, except `n`.

    Raises:
        UsageError: as for `VllmEngine.generate`. UsageError is also raised if `part_tokens` or
            `max_tokens` is not positive, or the trajectory in `draft` begins with another prompt.
        DeadlineError, EngineError, ClosedError, PrimeblocksError: as for `VllmEngine.generate`, the
            last for an aborted request. Saved parts are not lost.
    """
    check_counts(part_tokens=part_tokens, max_tokens=max_tokens)
    # vLLM ends a completion at this length, and refuses a prompt that has it.
    room = engine.llm.model_config.max_model_len - len(prompt)
    max_tokens = max(1, min(max_tokens, room))
    so_far = draft.partials.get(sample)
    if so_far is not None and so_far.tokens[: so_far.prompt_length].tolist() != list(prompt):
        raise UsageError(
            f"the trajectory of prompt {draft.ordinal}, sample {sample}, begins with another "
            f"prompt of {so_far.prompt_length} tokens; got a prompt of {len(prompt)}. Pass the "
            "prompt of the draft."
        )
    while True:
        done = 0 if so_far is None else len(so_far.completion)
        asked = min(part_tokens, max_tokens - done)
        if so_far is not None and asked <= 0:
            return _completion_of(so_far, finish_reason="length", num_cached_tokens=0)
        tokens = list(prompt) if so_far is None else so_far.tokens.tolist()
        routes = None if so_far is None else so_far.attachments.get(ROUTES)
        (part,) = await engine.generate(
            tokens,
            max_tokens=asked,
            timeout_s=timeout_s,
            # Samples draw other random numbers, as in `generate`, and so do parts.
            seed=None if seed is None else seed + sample + (done << 20),
            routed_experts_prompt_start=0 if routes is None else len(routes),
            **options,
        )
        so_far = _longer(so_far, part)
        is_cut = part.finish_reason == "length" and len(part.token_ids) == asked
        if not is_cut or done + asked == max_tokens:
            return _completion_of(so_far, part.finish_reason, part.num_cached_tokens)
        draft.save(sample, so_far)


def _longer(so_far: Partial | None, part: Completion) -> Partial:
    """Return a trajectory extended by one part, whose prompt was the trajectory."""
    routes = part.routed_experts
    if so_far is None:
        logprobs, versions = np.array(part.logprobs), part.versions
    else:
        logprobs = np.concatenate([so_far.logprobs, part.logprobs])
        versions = np.concatenate([so_far.versions, part.versions])
        if routes is not None and ROUTES in so_far.attachments:
            routes = np.concatenate([so_far.attachments[ROUTES], routes])
    return Partial(
        tokens=np.array(part.prompt + part.token_ids),
        prompt_length=len(part.prompt) if so_far is None else so_far.prompt_length,
        logprobs=logprobs,
        versions=versions,
        attachments={} if routes is None else {ROUTES: routes},
    )


def _completion_of(whole: Partial, finish_reason: str, num_cached_tokens: int) -> Completion:
    tokens = tuple(whole.tokens.tolist())
    return Completion(
        prompt=tokens[: whole.prompt_length],
        token_ids=tokens[whole.prompt_length :],
        logprobs=tuple(whole.logprobs.tolist()),
        versions=whole.versions,
        finish_reason=finish_reason,
        routed_experts=whole.attachments.get(ROUTES),
        num_cached_tokens=num_cached_tokens,
    )

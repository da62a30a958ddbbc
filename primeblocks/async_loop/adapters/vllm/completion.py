"""Completions of the engine."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import EngineError, PrimeblocksError
from ....rollout import Rollout, version_of, versions_from_spans

__all__ = ["Completion", "completion_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One completion of the engine.

    `token_ids`, `logprobs` and `versions` have one entry per completion token. `routed_experts` is
    vLLM's array `[tokens - 1, layers, top_k]` over prompt and completion, or None if the engine
    does not return routes. The array lacks the rows of tokens before `routed_experts_prompt_start`.
    `num_cached_tokens` is the number of prompt tokens that came from the KV cache. If the engine
    has `per_request_spec_decode_metrics="summary"`, `draft_tokens` contains the number of accepted
    draft tokens and the number of all draft tokens.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: NDArray[np.int64]
    finish_reason: str
    routed_experts: NDArray | None
    num_cached_tokens: int
    draft_tokens: NDArray[np.int64] | None = None

    def to_rollout(
        self,
        *,
        prompt_id: Hashable = None,
        reward: float | None = None,
        attachments: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Return the completion as a `Rollout`. Local.

        Args:
            attachments: as in `Rollout`. The default contains "routed_experts", "draft_tokens" or
                both, if the engine returned them.

        Raises:
            ShapeError, UsageError: as for `Rollout`.
        """
        if attachments is None:
            found = {"routed_experts": self.routed_experts, "draft_tokens": self.draft_tokens}
            attachments = {name: array for name, array in found.items() if array is not None}
        return Rollout(
            tokens=np.array(self.prompt + self.token_ids),
            prompt_length=len(self.prompt),
            logprobs=np.array(self.logprobs),
            versions=self.versions,
            finish_reason=self.finish_reason,
            prompt_id=prompt_id,
            reward=reward,
            attachments=attachments,
        )


def completion_of(
    prompt: tuple[int, ...], output: Any, *, num_cached_tokens: int, version: int | None = None
) -> Completion:
    """Read one of vLLM's outputs. Local.

    Args:
        version: the version of the adapter that sampled the output. With None, the engine's labels
            of the base weights are used.

    Raises:
        EngineError: the label of the engine's weights is not a version.
        PrimeblocksError: the engine cut the output, with "abort" or "error". Send the request
            again.
    """
    if output.finish_reason in ("abort", "error"):
        raise PrimeblocksError(
            f"the engine ended the request with {output.finish_reason!r} before the answer was "
            "complete. Send the request again."
        )
    tokens = tuple(output.token_ids)
    if version is None:
        versions = _base_versions(output, length=len(tokens))
    else:
        versions = np.full(len(tokens), version)
    return Completion(
        prompt=prompt,
        token_ids=tokens,
        logprobs=tuple(
            at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)
        ),
        versions=versions,
        finish_reason=str(output.finish_reason),
        routed_experts=output.routed_experts,
        num_cached_tokens=num_cached_tokens,
        draft_tokens=_draft_tokens(output.spec_decode_metrics),
    )


def _draft_tokens(counted: Any) -> NDArray[np.int64] | None:
    if counted is None:
        return None
    accepted = sum(length * times for length, times in enumerate(counted.histogram))
    return np.array([accepted, counted.num_draft_tokens])


def _base_versions(output: Any, *, length: int) -> NDArray[np.int64]:
    spans = []
    for span in output.weight_versions or ():
        if (named := version_of(span.version)) is None:
            raise EngineError(
                f"the engine's weights are labelled {span.version!r:.80}, but a policy version "
                "must be an integer. Label them with update_weight_version(str(version))."
            )
        spans.append((named, span.start, span.end))
    return versions_from_spans(spans, length=length)

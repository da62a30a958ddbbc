"""Seams of a recording: an engine that takes ids, and a renderer that makes them of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Generate", "Renderer", "Sampled"]


class Sampled(Protocol):
    """A completion, as `adapters.vllm.Completion` is one. Entries are one a token.

    `routed_experts` has a row for each token of prompt and completion but the last; where the
    engine leaves out those of the first tokens, of the others. None without routes.
    """

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> ArrayLike: ...
    @property
    def versions(self) -> NDArray[np.int64]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def routed_experts(self) -> NDArray | None: ...


class Generate(Protocol):
    """An engine: one completion of ids. It ends behind a stop id, which it returns with them."""

    async def __call__(
        self,
        prompt: Sequence[int],
        /,
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Sampled:
        """Sample.

        Raises:
            UsageError: the request does not fit the engine.
            CapacityError: it has no room now.
            DeadlineError: no answer within `timeout_s`.
            EngineError: it died or refused.
        """


class Renderer(Protocol):
    """Ids of messages and messages of ids, as one model reads and writes them. Pure.

    Messages are OpenAI's, with text as content, and objects as the arguments of calls.
    """

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end an answer."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return a prompt, up to where the assistant begins to answer.

        Raises:
            UsageError: the model has no words for such messages.
        """

    def go_on(
        self,
        before: Sequence[Mapping[str, Any]],
        added: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        last_id: int,
    ) -> list[int] | None:
        """Return what stands behind an answer, up to where the assistant answers again.

        None where the model reads anything of `before` otherwise now that more follows.

        Args:
            before: messages; the last is the answer.
            added: what was said since.
            last_id: the last that was sampled for the answer, which may lack its end.

        Raises:
            UsageError: as `render`.
        """

    def parse(self, ids: Sequence[int], *, calls: bool) -> tuple[str, list[tuple[str, str]]]:
        """Return an answer's text, and its calls: names, and arguments as JSON.

        Args:
            ids: of the answer, without one that ended it.
            calls: without tools, or where it may not call them, all is text.
        """

    def encode(self, text: str) -> list[int]:
        """Return ids of a text that stands alone, or behind other ids."""

    def stop_id(self, text: str) -> int | None:
        """Return the one id that a text always is, or None: it may be written otherwise too."""

"""The two protocols of a recorder: an engine of token ids, and a renderer of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Generate", "Renderer", "Sampled"]


class Sampled(Protocol):
    """A completion, such as `adapters.vllm.Completion`. Each sequence has one entry per token.

    `routed_experts` has a row for each token of prompt and completion except the last. The engine
    may leave out rows of the first tokens. None without routes.
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
    """An engine that samples one completion of ids. The completion includes its stop id."""

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
        """Sample one completion.

        Raises:
            UsageError: the request does not fit the engine.
            CapacityError: the engine has no room now.
            DeadlineError: the engine did not answer within `timeout_s`.
            EngineError: the engine died or refused.
        """


class Renderer(Protocol):
    """Conversion between messages and ids in one model's format. Pure.

    Messages are OpenAI's, with text as content and objects as the arguments of tool calls.
    """

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The ids that end an answer."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the ids of a prompt, up to where the assistant begins to answer.

        Raises:
            UsageError: the model's format does not allow these messages.
        """

    def go_on(
        self,
        before: Sequence[Mapping[str, Any]],
        added: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        last_id: int,
    ) -> list[int] | None:
        """Return the ids after an answer, up to where the assistant answers again.

        None if the format writes any of `before` differently now that more messages follow.

        Args:
            before: messages, with the answer last.
            added: the messages after the answer.
            last_id: the last sampled id of the answer, which may lack its end.

        Raises:
            UsageError: as for `render`.
        """

    def parse(self, ids: Sequence[int], *, calls: bool) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of an answer, and its calls as pairs of name and JSON arguments.

        Args:
            ids: of the answer, without the stop id.
            calls: False if the model has no tools or may not call them. Then all ids are text.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that stands alone or after other ids."""

    def stop_id(self, text: str) -> int | None:
        """Return the id that always stands for a text, or None if other ids can spell it too."""

"""The ids of an agent's earlier answers, which its next prompt repeats unchanged.

A history maps the digest of messages that end with an answer to the ids of prompt and answer.
`prompt` looks for the longest known beginning of a request, and tokenises only the rest. `keep`
adds an answer. A history keeps all answers until the session ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UsageError
from .request import TurnAnswer, TurnRequest, read_messages

__all__ = ["History", "Prompt", "Renderer"]


class Renderer(Protocol):
    """Conversion between messages and token ids in the format of one model. Pure.

    Messages have OpenAI's form, with text as content. The arguments of tool calls are objects.
    """

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The ids that end an answer."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the ids of a prompt, up to the point where the assistant begins to answer.

        Raises:
            UsageError: the model's format does not allow the messages.
        """

    def go_on(
        self,
        before: Sequence[Mapping[str, Any]],
        added: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        last_id: int,
    ) -> list[int] | None:
        """Return the ids between an answer and the next answer of the assistant.

        Return None if the format writes a message of `before` differently because more messages
        follow.

        Args:
            before: the messages up to the answer, with the answer last.
            added: the messages after the answer.
            last_id: the last sampled id of the answer, which is not a stop id if the answer was
                cut short.

        Raises:
            UsageError: as for `render`.
        """

    def parse(self, ids: Sequence[int], *, calls: bool) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of an answer, and its tool calls as pairs of a name and JSON arguments.

        Args:
            ids: the ids of the answer, without the stop id.
            calls: False if the model has no tools or may not call tools. If `calls` is False, all
                ids are decoded to text, and the list of tool calls is empty.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which is a whole prompt or the continuation of other ids."""


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, and the known answer that the prompt continues."""

    ids: list[int]
    held: _Held | None = None
    mark: bytes = b""  # The digest of a chat's messages.


class History:
    """The prompts and answers of a session. All messages up to an answer identify the answer."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._chats: dict[bytes, _Held] = {}
        self._texts: dict[str, _Held] = {}  # By prompt and answer.

    def prompt(self, request: TurnRequest) -> Prompt:
        """Return the ids of a request. Known answers keep the ids that were sampled."""
        if request.prompt is not None:
            return self._text_prompt(request.prompt)
        messages, renderer = request.messages, self._renderer
        try:
            marks = _digests(request.tools, messages)
            for count in range(len(messages), 0, -1):
                held = self._chats.get(marks[count])
                if held is None:
                    continue
                ids = renderer.go_on(
                    messages[:count], messages[count:], request.tools, last_id=int(held.ids[-1])
                )
                if ids is not None:
                    return Prompt(held.whole() + ids, held, marks[-1])
                break
            return Prompt(renderer.render(messages, request.tools), mark=marks[-1])
        except RecursionError as error:
            raise UsageError("the request is nested too deeply") from error

    def keep(
        self, request: TurnRequest, prompt: Prompt, ids: list[int], answer: TurnAnswer, *, end: int
    ) -> None:
        """Remember an answer, whose last `end` ids are not part of its text."""
        held = prompt.held
        new = prompt.ids[0 if held is None else held.length :] + ids
        if request.prompt is None:
            (message,) = read_messages([answer.message()])
            self._chats[_digest(prompt.mark, message)] = _Held(held, new)
        elif isinstance(request.prompt, str):
            # The ids that ended the answer are left out, because the next text continues the
            # answer.
            self._texts[request.prompt + answer.content] = _Held(held, new[: len(new) - end])

    def _text_prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(list(prompt))
        fitting = [x for x in self._texts if prompt.startswith(x)]
        if not fitting:
            return Prompt(self._renderer.encode(prompt))
        longest = max(fitting, key=len)
        held, rest = self._texts[longest], prompt[len(longest) :]
        ids = self._renderer.encode(rest)
        if self._renderer.parse(ids, calls=False)[0] == f" {rest}":
            # This tokenizer puts a space before each text, which the agent did not write.
            return Prompt(self._renderer.encode(prompt))
        return Prompt(held.whole() + ids, held)


class _Held:
    """The ids of a prompt and its answer. The ids of an earlier answer are shared, not copied."""

    def __init__(self, before: _Held | None, ids: ArrayLike) -> None:
        self._before, self.ids = before, np.asarray(ids, np.int64)
        self.length: int = len(self.ids) + (0 if before is None else before.length)

    def whole(self) -> list[int]:
        parts, each = [self.ids], self._before
        while each is not None:
            parts.append(each.ids)
            each = each._before
        return np.concatenate(parts[::-1]).tolist()


def _digests(tools: Sequence[Mapping], messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return digests of the tools with the first 0, 1, 2, ... messages."""
    found = [_digest(b"", tools)]
    for message in messages:
        found.append(_digest(found[-1], message))
    return found


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return blake2b(before + text.encode(), digest_size=16).digest()

"""transformers 5: a tokenizer and its chat template as a renderer, which keeps what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MissingPackageError, UnsupportedError, UsageError

try:
    from transformers import PreTrainedTokenizerBase
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingPackageError("transformers", "transformers") from error

__all__ = ["ChatTemplate"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PROBE = "wxyz"  # Any word, to see what a template writes behind an answer.

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A model's own chat template, rendered so that sampled ids stay as they were sampled.

    What follows an answer is what the template adds to its text once more messages follow, and
    that alone is tokenised. It is found as text: where the template writes the earlier messages
    otherwise because of those that follow, as some do that leave out reasoning, there is no such
    addition. An answer that was cut gets the token that ends it from the template.

    Calls are read in the format of Qwen and Hermes, `<tool_call>{"name":..., "arguments":
    {...}}</tool_call>`. An answer with anything else in such a place is text as a whole.

    Args:
        tokenizer: its tokens that end a turn must be tokens of their own, added to the vocabulary.
        stop_token_ids: ids that end an answer, beside the template's own.
        options: variables of the template, `enable_thinking` for instance.

    Raises:
        UnsupportedError: the template ends an answer with no such token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._added = tokenizer.get_added_vocab()
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        self._end = self._text(said, (), answers=False).rpartition(_PROBE)[2]
        ids = self.encode(self._end)
        if not ids or ids[0] not in self._added.values():
            raise UnsupportedError(
                f"the template ends an answer with {self._end!r}, which begins with no token of "
                "its own. Give such a model a renderer that knows its format."
            )
        self._end_id = ids[0]
        self.stop_token_ids = tuple(dict.fromkeys([self._end_id, *stop_token_ids]))

    def render(self, messages: Messages, tools: Messages) -> list[int]:
        """Return a prompt, as `Renderer` says."""
        return self.encode(self._text(messages, tools, answers=True))

    def go_on(
        self, before: Messages, added: Messages, tools: Messages, *, last_id: int
    ) -> list[int] | None:
        """Return what stands behind an answer, as `Renderer` says."""
        asked = self._text(before[:-1], tools, answers=False)
        answered = self._text(before, tools, answers=False)
        whole = self._text([*before, *added], tools, answers=True)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            return None
        if not answered.endswith(self._end):
            return None
        # With the end of the turn in front, so that text begins where it begins in the whole.
        ids = self.encode(self._end + whole[len(answered) :])
        return ids[1:] if last_id == self._end_id else ids

    def parse(self, ids: Sequence[int], *, calls: bool) -> tuple[str, list[tuple[str, str]]]:
        """Return an answer's text and its calls, as `Renderer` says."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [_call(each) for each in _CALL.findall(text)] if calls else []
        if not found or None in found:
            return text, []
        return _CALL.sub("", text).strip(), [each for each in found if each is not None]

    def encode(self, text: str) -> list[int]:
        """Return ids of a text, without any that the tokenizer would add around it."""
        if self._fast is None:
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        return self._fast.encode(text, add_special_tokens=False).ids

    def stop_id(self, text: str) -> int | None:
        """Return the id of a token that was added to the vocabulary."""
        return self._added.get(text)

    def _text(self, messages: Messages, tools: Messages, *, answers: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=answers,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # Whatever a template raises, it is of these messages.
            raise UsageError(f"the chat template refuses the messages: {error}") from error


def _call(text: str) -> tuple[str, str] | None:
    """Return a call's name, and its arguments as JSON; None for what is no call."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")

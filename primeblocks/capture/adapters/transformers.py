"""transformers 5: a renderer that uses a model's chat template and keeps sampled ids."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UnsupportedError, UsageError, needs

with needs("transformers", extra="transformers"):
    from transformers import PreTrainedTokenizerBase

from ..request import strict_json

__all__ = ["ChatTemplate"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PROBE = "wxyz"  # Any word, to find the text that a template writes after an answer.

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A `Renderer` that uses a model's own chat template, so that sampled ids stay unchanged.

    After an answer, the renderer tokenises only the text that the template adds. The renderer finds
    the added text by comparing the texts of the prompt with and without new messages. If the
    template writes earlier messages differently when more messages follow, for instance without
    their reasoning, the whole prompt is tokenised. Tokenisation of the whole prompt may change
    sampled ids. If an answer was cut, the renderer adds the token that ends an answer.

    Tool calls are read in the format of Qwen and Hermes, `<tool_call>{"name":..., "arguments":
    {...}}</tool_call>`. If a `<tool_call>` element is malformed, the whole answer is returned as
    text. Calls inside `<think>` are text, because they are reasoning.

    Args:
        tokenizer: the model's tokenizer. The token that ends an answer must be an added token of
            the vocabulary.
        stop_token_ids: ids that end an answer, in addition to the id that the template writes.
        options: variables of the chat template, such as `enable_thinking`.

    Raises:
        UnsupportedError: the template ends an answer without an added token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        # A copy, because calls of `tokenizer` leave truncation and padding in the original.
        self._fast = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        self._end = self._text(said, (), answers=False).rpartition(_PROBE)[2]
        ids = self.encode(self._end)
        if not ids or ids[0] not in tokenizer.get_added_vocab().values():
            raise UnsupportedError(
                f"the template ends an answer with {self._end!r}, which does not begin with an "
                "added token. For this model, pass a renderer that knows its format."
            )
        self._end_id = ids[0]
        opened = self._text(said[:1], (), answers=True).rpartition("<think>")
        self._thinks = bool(opened[1]) and "</think>" not in opened[2]  # Answers begin inside.
        self.stop_token_ids = tuple(dict.fromkeys([self._end_id, *stop_token_ids]))

    def render(self, messages: Messages, tools: Messages) -> list[int]:
        """Return the ids of a prompt. See `Renderer.render`."""
        return self.encode(self._text(messages, tools, answers=True))

    def go_on(
        self, before: Messages, added: Messages, tools: Messages, *, last_id: int
    ) -> list[int] | None:
        """Return the ids that follow an answer, or None. See `Renderer.go_on`."""
        asked = self._text(before[:-1], tools, answers=False)
        answered = self._text(before, tools, answers=False)
        whole = self._text([*before, *added], tools, answers=True)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            return None
        if not answered.endswith(self._end):
            return None
        written = "".join(answered[len(asked) :].split())
        if "".join(before[-1]["content"].split()) not in written:
            return None  # The template always leaves out a part of an answer: its reasoning.
        # Keep the end of the turn in front, so that the text is tokenised as in the whole prompt.
        ids = self.encode(self._end + whole[len(answered) :])
        return ids[1:] if last_id == self._end_id else ids

    def parse(self, ids: Sequence[int], *, calls: bool) -> tuple[str, list[tuple[str, str]]]:
        """Return the text and the tool calls of an answer. See `Renderer.parse`."""
        # Some tokenizers would leave out the space at the beginning of a text.
        text = self._decode([self._end_id, *ids])[len(self._decode([self._end_id])) :]
        thought, closes, said = text.partition("</think>")
        if not self._thinks and not text.lstrip().startswith("<think>"):
            thought, closes, said = "", "", text
        found = [_call(each) for each in _CALL.findall(said)] if calls else []
        rest = _CALL.sub("", said)
        if not found or None in found or "tool_call>" in rest:  # The rest may be a call cut short.
            return text, []
        return (thought + closes + rest).strip(), [each for each in found if each is not None]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens that a tokenizer adds around a text."""
        if self._fast is None:
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        return self._fast.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _text(self, messages: Messages, tools: Messages, *, answers: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=answers,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # Any exception of a template is about these messages.
            raise UsageError(f"the chat template refuses the messages: {error}") from error


def _call(text: str) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON, or None if the text is not a call."""
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)

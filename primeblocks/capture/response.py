"""Responses of OpenAI's chat completions and completions, as one body or as events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .request import TurnRequest

__all__ = ["ToolCall", "TurnAnswer", "error_body", "response_body", "response_events"]


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to a request. `finish_reason` is the word of the engine."""

    id: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> dict[str, Any]:
        """Return the answer as OpenAI's message of the assistant."""
        content = None if self.tool_calls and not self.content else self.content
        found: dict[str, Any] = {"role": "assistant", "content": content}
        if self.tool_calls:
            found["tool_calls"] = [_call_json(call) for call in self.tool_calls]
        return found


def response_body(request: TurnRequest, answer: TurnAnswer, *, created: int) -> bytes:
    """Return the JSON of a response. `created` is in seconds of Unix time."""
    if request.prompt is None:
        choice: dict[str, Any] = {"message": answer.message()}
    else:
        choice = {"text": answer.content}
    choice |= {"index": 0, "finish_reason": _finish(answer), "logprobs": None}
    head = _head(request, answer, created, "")
    return _dump(head | {"choices": [choice], "usage": _usage(answer)})


def response_events(request: TurnRequest, answer: TurnAnswer, *, created: int) -> Iterator[bytes]:
    """Return the server-sent events of a response whose answer is complete already."""
    head = _head(request, answer, created, ".chunk")
    if request.include_usage:
        head["usage"] = None

    def event(delta: dict[str, Any] | str, finish: str | None = None) -> bytes:
        key = "text" if isinstance(delta, str) else "delta"
        choice = {"index": 0, key: delta, "finish_reason": finish, "logprobs": None}
        return b"data: " + _dump(head | {"choices": [choice]}) + b"\n\n"

    if request.prompt is None:
        yield event({"role": "assistant", "content": answer.content})
        for i, call in enumerate(answer.tool_calls):
            yield event({"tool_calls": [_call_json(call) | {"index": i}]})
        yield event({}, _finish(answer))
    else:
        yield event(answer.content)
        yield event("", _finish(answer))
    if request.include_usage:
        yield b"data: " + _dump(head | {"choices": [], "usage": _usage(answer)}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def error_body(error: BaseException, kind: str) -> bytes:
    """Return the JSON of an error in the form that OpenAI's clients read."""
    said = {"message": str(error), "type": kind, "param": None, "code": type(error).__name__}
    return _dump({"error": said})


def _head(request: TurnRequest, answer: TurnAnswer, created: int, chunk: str) -> dict[str, Any]:
    kind = "chat.completion" + chunk if request.prompt is None else "text_completion"
    return {"id": answer.id, "object": kind, "created": created, "model": request.model}


def _usage(answer: TurnAnswer) -> dict[str, int]:
    asked, sampled = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": asked,
        "completion_tokens": sampled,
        "total_tokens": asked + sampled,
    }


def _finish(answer: TurnAnswer) -> str:
    if answer.tool_calls:
        return "tool_calls"
    # Any other word of an engine means that the answer was cut.
    return "stop" if answer.finish_reason == "stop" else "length"


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

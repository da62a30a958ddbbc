"""Requests and responses of OpenAI's chat completions and completions. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError, UsageError

__all__ = [
    "ToolCall",
    "TurnAnswer",
    "TurnRequest",
    "error_body",
    "read_messages",
    "read_request",
    "response_body",
    "response_events",
    "strict_json",
]

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word. Templates know the older one.
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Fields that are accepted only at these values, which change nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([],),  # An engine of ids stops at ids.
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1,),
}
# Names, tags and hints. They do not affect sampling.
IGNORED = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
COMMON = {"model", "seed", "stop_token_ids", "stream", "stream_options", "temperature"}
CHAT = COMMON | {"max_completion_tokens", "max_tokens", "messages", "tools"}
TEXT = COMMON | {"max_tokens", "prompt"}
MESSAGE = {"content", "name", "reasoning_content", "role", "tool_call_id", "tool_calls"}
# Fields of OpenAI's own answers, which agents send back unchanged.
EMPTY = {"annotations", "audio", "function_call", "refusal"}


@dataclass(frozen=True)
class TurnRequest:
    """One request of an agent.

    Attributes:
        messages: the messages of a chat, with text as content and objects as arguments of tool
            calls.
        prompt: the prompt of a completion, as text or ids. None for a chat.
        tools: the agent's descriptions of the tools.
        calls: whether the model may call tools. `calls` does not change the prompt, as in vLLM.
    """

    model: str
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False


def read_request(body: bytes, *, is_chat: bool) -> TurnRequest:
    """Parse the body of a request.

    Raises:
        UsageError: the body is not JSON, or a field is missing or has a wrong type.
        UnsupportedError: the request has a field or a value that is not supported. Only nulls and
            fields that do not affect sampling are ignored.
    """
    fields = _read_json(body)
    known = CHAT if is_chat else TEXT
    for name, value in fields.items():
        if value is None or name in known or name in IGNORED:
            continue
        if name not in ONLY:
            raise UnsupportedError(f"unknown field {name!r}. Leave it out.")
        if not any(value == each for each in ONLY[name]):
            accepted = " or ".join(json.dumps(each) for each in ONLY[name])
            raise UnsupportedError(
                f"{name}={json.dumps(value)[:80]} is not supported. Use {accepted}, or leave it "
                "out."
            )
    tools = _tools(fields) if is_chat else ()
    options = _get(fields, "stream_options", dict) or {}
    if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
        raise UnsupportedError(
            f"unknown fields of stream_options: {sorted(unknown)}. Leave them out."
        )
    return TurnRequest(
        model=_need(fields, "model", str),
        messages=read_messages(_need(fields, "messages", list)) if is_chat else (),
        prompt=None if is_chat else _prompt(fields.get("prompt")),
        tools=tools,
        calls=bool(tools) and fields.get("tool_choice") != "none",
        max_tokens=_max_tokens(fields),
        temperature=_temperature(fields),
        seed=_integer(fields, "seed", least=-(1 << 63), most=(1 << 63) - 1),
        stop_token_ids=_ids(_get(fields, "stop_token_ids", list) or [], "stop_token_ids"),
        stream=bool(_get(fields, "stream", bool)),
        include_usage=bool(_get(options, "include_usage", bool)),
    )


def read_messages(values: list[Any]) -> tuple[dict[str, Any], ...]:
    """Return messages in the form that templates read. The errors are those of `read_request`."""
    if not values:
        raise UsageError("messages is empty. Give at least one message.")
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(values))


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # Half of a surrogate pair is not text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"the body is a JSON {type(value).__name__}. Send a JSON object.")
    return value


def strict_json(text: str) -> Any:
    """Parse JSON without NaN, numbers too large for a float, and halves of surrogate pairs.

    Raises:
        ValueError, RecursionError: `text` is not such JSON.
    """
    value = json.loads(text, parse_constant=_refuse_constant)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _get(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field or None, and refuse a field of another type."""
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise UsageError(f"{name} must be {kind.__name__}; got {type(value).__name__}")
    return value


def _need(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _get(fields, name, kind)
    if value is None:
        raise UsageError(f"{name} is missing")
    return value


def _integer(fields: Mapping[str, Any], name: str, *, least: int, most: int) -> int | None:
    value = _get(fields, name, int)
    if value is not None and not least <= value <= most:
        raise UsageError(f"{name} must be between {least} and {most}")
    return value


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    names = ("max_tokens", "max_completion_tokens")
    given = [_integer(fields, name, least=1, most=(1 << 31) - 1) for name in names]
    found = {value for value in given if value is not None}
    if len(found) > 1:
        raise UsageError(f"max_tokens and max_completion_tokens differ: {sorted(found)}")
    return found.pop() if found else None


def _temperature(fields: Mapping[str, Any]) -> float | None:
    value = fields.get("temperature")
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 <= value <= 2:
        raise UsageError("temperature must be a number in [0, 2]")
    return float(value)


def _ids(values: list[Any], name: str) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise UsageError(f"{name} must contain token ids")
    return tuple(values)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return _ids(value, "prompt")
    raise UsageError("prompt must be one text or one list of token ids, and must not be empty")


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = _get(fields, "tools", list) or []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise UnsupportedError(f"tools[{i}] is not a function. Only functions are supported.")
        _need(function, "name", str)
        _get(function, "parameters", dict)
        if function.get("strict"):
            raise UnsupportedError(
                f"tools[{i}] has strict=true, which is not enforced. Leave strict out."
            )
    return tuple(tools)


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object; got {type(value).__name__}")
    for name, held in value.items():
        is_empty = held is None or (name in EMPTY and held == [])
        if name not in MESSAGE and not is_empty:
            raise UnsupportedError(f"{where} has the field {name!r}, which is not supported")
    role = ROLES.get(_need(value, "role", str))
    if role is None:
        raise UsageError(f"{where} has the role {value['role']!r}; expected one of {sorted(ROLES)}")
    found: dict[str, Any] = {"role": role, "content": _content(value.get("content"), where)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if text := _get(value, name, str):
            found[name] = text
    if calls := _get(value, "tool_calls", list):
        if role != "assistant":
            raise UsageError(f"{where}: only an assistant can call tools, not the role {role}")
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    elif value.get("content") is None and role != "assistant":
        raise UsageError(f"{where} has no content")
    return found


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise UsageError(f"{where}.content must be a text or a list of parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise UnsupportedError(f"{where}.content has a part that is not text")
        texts.append(_need(part, "text", str))
    return "".join(texts)


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise UsageError(f"{where} is not a function")
    name, text = _need(function, "name", str), _need(function, "arguments", str)
    try:
        arguments = strict_json(text)
    except (ValueError, RecursionError):
        arguments = None
    # Templates write an object themselves. Anything else stays text.
    function = {"name": name, "arguments": arguments if isinstance(arguments, dict) else text}
    return {"id": _get(value, "id", str) or "", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to a request. `finish_reason` is the value that the engine returned."""

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
    """Return the server-sent events of a response. The answer must be complete."""
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

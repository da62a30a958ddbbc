"""Routes from vLLM's HTTP server as bytes, instead of base64 inside JSON.

Start the server with `--middleware primeblocks.replay.adapters.vllm.RoutesMiddleware`, vLLM's
documented way to extend a server. A client that accepts `MEDIA_TYPE` then gets a body from
`codec.seal`:

    sizes    length of the JSON, number of arrays, length of each (uint64)
    JSON     the answer without `choices[i].routed_experts`. In its place are the numbers of known
             and missing rows: `choices[i].routed_experts_coverage`
    arrays   a .npy file for each choice, empty for a choice without routes

All other clients get vLLM's own answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import CorruptionError, UsageError
from ...codec import Bytes, seal, unseal
from ...routes import Routes
from .rows import missing_rows, read_npy, routes_from_rows
from .shape import RouterShape

__all__ = ["MEDIA_TYPE", "Answer", "RoutesMiddleware", "read_answer"]

MEDIA_TYPE = "application/x-primeblocks-routes"

_KIND, _FORMAT = b"PBHT", 1
_FIELD = "routed_experts"
_COVERAGE = "routed_experts_coverage"
_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(frozen=True)
class Answer:
    """The server's answer without routes, and the captured rows of each choice."""

    json: dict[str, Any]
    rows: tuple[np.ndarray | None, ...]
    """By choice, the rows as vLLM returned them, or None for a choice without rows."""

    def routes(
        self, choice: int, shape: RouterShape, *, tokens: int, prompt_start: int = 0
    ) -> Routes:
        """Return the routes of one choice, with the arguments and errors of `routes_from_base64`.

        Raises:
            UsageError: `choice` is out of range.
            CorruptionError: the answer has no rows of this choice.
        """
        if not 0 <= choice < len(self.rows):
            raise UsageError(f"choice must be in 0..{len(self.rows) - 1}; got {choice}")
        rows = self.rows[choice]
        if rows is None:
            raise CorruptionError(f"choice {choice} came without routed experts")
        return routes_from_rows(rows, shape, tokens=tokens, prompt_start=prompt_start)


def read_answer(body: Bytes) -> Answer:
    """Read a body of `MEDIA_TYPE`. Rows are views of the body. Local.

    Raises:
        CorruptionError: a byte was changed, added or lost, or the body is not of `MEDIA_TYPE`.
        UnsupportedError: the body has an unknown format version.
    """
    inner = unseal(body, kind=_KIND, format_version=_FORMAT)
    count = int.from_bytes(inner[8:16], "little")
    head = 8 * (2 + count)
    if len(inner) < head:
        raise CorruptionError(f"an answer of {len(inner)} bytes cannot list {count} arrays")
    lengths = np.frombuffer(inner[:head], dtype="<u8").tolist()
    lengths = [lengths[0], *lengths[2:]]
    if head + sum(lengths) != len(inner):
        raise CorruptionError(
            f"an answer of {len(inner)} bytes does not contain {sum(lengths)} bytes of arrays"
        )
    parts, begin = [], head
    for length in lengths:
        parts.append(inner[begin : begin + length])
        begin += length
    try:
        answer = json.loads(bytes(parts[0]))
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"the JSON of an answer cannot be read: {error}") from error
    if not isinstance(answer, dict):
        raise CorruptionError(f"the JSON of an answer is a {type(answer).__name__}, not an object")
    return Answer(answer, tuple(read_npy(part) if len(part) else None for part in parts[1:]))


class RoutesMiddleware:
    """ASGI middleware that makes vLLM's server return routes as bytes.

    The middleware changes only answers to clients that accept `MEDIA_TYPE`. Streams and errors are
    not changed.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: Any, send: _Send) -> None:
        if scope["type"] != "http" or not _accepts(scope):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send))


class _Rewriter:
    """Holds a JSON answer back until it is complete, and sends a body of `MEDIA_TYPE` instead."""

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._start: _Message | None = None
        self._body = bytearray()

    async def __call__(self, message: _Message) -> None:
        if message["type"] == "http.response.start" and _is_answer(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: _Message) -> None:
        body = bytes(_rewritten(json.loads(self._body)))
        kept = [
            (name, value)
            for name, value in start["headers"]
            if name.lower() not in (b"content-type", b"content-length")
        ]
        own = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({**start, "headers": [*kept, *own]})
        await self._send({"type": "http.response.body", "body": body})


def _rewritten(answer: Any) -> memoryview:
    choices = answer.get("choices") or [] if isinstance(answer, dict) else []
    encoded = [choice.pop(_FIELD, None) for choice in choices]
    files = [base64.b64decode(text) if text else b"" for text in encoded]
    for choice, file in zip(choices, files, strict=True):
        if file:
            missing = missing_rows(read_npy(file))
            counts = {"known": int((~missing).sum()), "missing": int(missing.sum())}
            choice[_COVERAGE] = counts
    text = json.dumps(answer).encode()
    sizes = [len(text), len(files), *map(len, files)]
    return seal(_KIND, _FORMAT, [np.array(sizes, dtype="<u8"), text, *files])


def _accepts(scope: _Message) -> bool:
    wanted = MEDIA_TYPE.encode()
    return any(name.lower() == b"accept" and wanted in value for name, value in scope["headers"])


def _is_answer(start: _Message) -> bool:
    is_json = any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in start["headers"]
    )
    return start["status"] == 200 and is_json

"""Starlette 1.10: an application that answers OpenAI's chat completions, completions and models.

`capture_app(recorder)` returns an ASGI application for any ASGI server. `adapters.uvicorn` runs the
application inside of your program.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from ...errors import (
    CancelledError,
    CapacityError,
    ClosedError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UsageError,
    needs,
)

with needs("starlette", extra="capture"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Message, Receive, Scope, Send

from ...clock import within
from ..recorder import CaptureSession, Recorder
from ..request import error_body, read_request, response_body, response_events

__all__ = ["capture_app"]

T = TypeVar("T")

# The first match counts. All other errors are 500.
_STATUS = (
    (UsageError, 400, "invalid_request_error"),
    (CapacityError, 429, "rate_limit_error"),
    (DeadlineError, 504, "timeout_error"),
    (ClosedError, 410, "invalid_request_error"),
    (EngineError, 503, "engine_error"),
)


def capture_app(recorder: Recorder) -> Starlette:
    """Return the application. The base URL of each session ends in `/s/{session}/v1`.

    A request must contain the key of its session, in the header `Authorization: Bearer <key>`. An
    answer is sampled in full before the response begins. A failed request therefore gets an HTTP
    error status, even if the agent asked for a stream. A stream sends all its events together. A
    turn is recorded when the engine has answered, even if the agent does not read the answer. If
    the agent closes the connection before the engine has answered, the request to the engine is
    cancelled.

    An error has the JSON form of OpenAI's API. The status is 400 for an unsupported request, 401
    for a wrong key, 410 for an ended session, and 413 for an oversized body. The status is 429 with
    `Retry-After` for a reached bound, and 504 for a missed deadline. It is 503 for an aborted
    request, which OpenAI's clients send again, and 503 with `x-should-retry: false` for a failure
    of the engine.
    """

    async def models(request: Request) -> Response:
        if _session(recorder, request) is None:
            return _unknown()
        said = {"id": recorder.model, "object": "model", "created": 0, "owned_by": "primeblocks"}
        return JSONResponse({"object": "list", "data": [said]})

    async def refuse(_: Request, error: Exception) -> Response:
        status, headers = getattr(error, "status_code", 500), getattr(error, "headers", None)
        return _refusal(error, status, "invalid_request_error", headers)

    base = "/s/{session}/v1"
    app = Starlette(
        routes=[
            Route(f"{base}/chat/completions", _Turns(recorder, is_chat=True), methods=["POST"]),
            Route(f"{base}/completions", _Turns(recorder, is_chat=False), methods=["POST"]),
            Route(f"{base}/models", models, methods=["GET"]),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    return app


class _Turns:
    """The endpoint of one type of request."""

    def __init__(self, recorder: Recorder, *, is_chat: bool) -> None:
        self._recorder, self._is_chat = recorder, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = _session(self._recorder, Request(scope))
        if session is None:
            return await _unknown()(scope, receive, send)
        try:
            response = await self._respond(session, receive)
        except CancelledError:
            return  # The agent has left.
        # A response that is not read fills a buffer, and then waits.
        await self._in_time(response(scope, receive, send), f"a response of {session.name}")

    async def _respond(self, session: CaptureSession, receive: Receive) -> Response:
        most = self._recorder.bounds.body_bytes
        gone: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        watching = None
        try:
            body = await self._in_time(_read(receive, most), f"a request of {session.name}")
            if body is None:
                return _too_long(most)
            asked = read_request(body, is_chat=self._is_chat)
            watching = asyncio.create_task(_watch(receive, gone))
            answer = await session.ask(asked, gone=gone)
        except CancelledError:
            raise
        except Exception as error:
            return _error(error)
        finally:
            if watching is not None:
                watching.cancel()
        created = int(time.time())
        if not asked.stream:
            text = response_body(asked, answer, created=created)
            return Response(text, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            for event in response_events(asked, answer, created=created):
                yield event

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def _in_time(self, transfer: Coroutine[Any, Any, T], what: str) -> T:
        """Wait until bytes were transferred, or the deadline passed."""
        task = asyncio.ensure_future(transfer)
        try:
            await asyncio.sleep(0)  # Most transfers are done then, and need no timer.
        except BaseException:
            task.cancel()
            raise
        if task.done():
            return task.result()
        timeout_s = self._recorder.bounds.transfer_timeout_s
        return await within(task, timeout_s=timeout_s, clock=self._recorder.clock, what=what)


def _session(recorder: Recorder, request: Request) -> CaptureSession | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return recorder.find(request.path_params["session"], key if kind.lower() == "bearer" else "")


async def _read(receive: Receive, most: int) -> bytes | None:
    """Return a body, or None if it is longer than `most` bytes. Stores at most `most` bytes."""
    parts: list[bytes] = []
    length = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError(
                "the agent closed the connection before it had sent the whole request"
            )
        part = message.get("body", b"")
        length += len(part)
        # Read to the end: an agent that is still sending would not see the answer.
        if length <= most:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False):
            return b"".join(parts) if length <= most else None


async def _watch(receive: Receive, gone: asyncio.Future[BaseException]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not gone.done():
        gone.set_result(CancelledError("the agent closed the connection before it got its answer"))


def _refusal(
    error: Exception, status: int, kind: str, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(error_body(error, kind), status, headers, media_type="application/json")


def _unknown() -> Response:
    error = UsageError(
        "the session does not exist, or the key is not its key. Use the base_url and key of an "
        "open session."
    )
    return _refusal(error, 401, "authentication_error", {"www-authenticate": "Bearer"})


def _too_long(most: int) -> Response:
    error = CapacityError(
        f"the body is longer than {most} bytes. Send a shorter body, or raise "
        "CaptureBounds(body_bytes=)."
    )
    return _refusal(error, 413, "invalid_request_error")


def _error(error: Exception) -> Response:
    if type(error) is PrimeblocksError:  # The engine aborted the request, and can answer it again.
        return _refusal(error, 503, "engine_error")
    status, kind = next(
        ((status, kind) for cls, status, kind in _STATUS if isinstance(error, cls)),
        (500, "server_error"),
    )
    headers = {}
    if status == 429:
        headers["retry-after"] = "1"
    elif status >= 500:
        # OpenAI's clients retry by themselves, which would cost another answer.
        headers["x-should-retry"] = "false"
    if status == 504:
        headers["connection"] = "close"  # The rest of a request may never come.
    return _refusal(error, status, kind, headers)

"""uvicorn 0.54: a `Recorder` served over HTTP, in the event loop of the program that trains.

`capture_app` answers OpenAI's chat completions, completions and models. It is an ASGI application,
for any ASGI server. `CaptureServer` serves it inside of a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from ipaddress import ip_address
from typing import Any, TypeVar

from ...errors import (
    CancelledError,
    CapacityError,
    ClosedError,
    DeadlineError,
    EngineError,
    MissingPackageError,
    UnsupportedError,
    UsageError,
)

try:
    import uvicorn
except ModuleNotFoundError as error:
    if error.name != "uvicorn":
        raise
    raise MissingPackageError("uvicorn", "capture") from error

from ...clock import within
from ..history import Renderer
from ..recorder import CaptureSession, Generate, Recorder
from ..request import error_body, read_request, response_body, response_events

__all__ = ["CaptureServer", "capture_app"]

T = TypeVar("T")
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# A response: the status, the body or its events, and headers.
Response = tuple[int, bytes | Iterator[bytes], dict[str, str]]

_PATH = re.compile(r"/s/([^/]+)/v1/(chat/completions|completions|models)")
# The first match counts. All other errors are 500.
_STATUS = (
    (UsageError, 400, "invalid_request_error"),
    (CapacityError, 429, "rate_limit_error"),
    (DeadlineError, 504, "timeout_error"),
    (ClosedError, 410, "invalid_request_error"),
    (EngineError, 503, "engine_error"),
)
# Seconds that an agent may take between two requests on one connection.
_KEEP_ALIVE_S = 75
# The most bytes of a request before its body.
_HEAD_BYTES = 64 << 10
# Starting to listen and closing connections take moments.
_START_S, _CLOSE_S = 10.0, 5


class CaptureServer:
    """An OpenAI-compatible endpoint in front of an engine, with a URL and a key per session:

        async with CaptureServer(generate, ChatTemplate(tokenizer)) as server:
            async with server.session(prompt_id="p") as session:
                client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key)
                ...  # Any agent that uses this client.
            rollouts = session.rollouts(reward=1.0)

    Requests are answered in the event loop that entered the context, so that loop must not be
    blocked. The server does not handle signals. HTTP is not encrypted: anyone who reads the network
    can read keys. Use a tunnel or a proxy with TLS for other hosts.

    Args:
        host: loopback by default. An address of another network needs `url`.
        port: 0 takes a free port.
        url: the URL by which agents reach the server, such as "http://trainer-3:8000".
        options: of `Recorder`.

    Raises:
        UsageError: `host` is not loopback and `url` is missing, or the address cannot be used.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        url: str | None = None,
        **options: Any,
    ) -> None:
        if url is None and not _is_loopback(host):
            raise UsageError(
                f"host={host!r} is open to other machines. Say by which url= agents reach it, or "
                "leave it at 127.0.0.1."
            )
        self.recorder = Recorder(generate, renderer, **options)
        self._address, self._url = (host, port), url
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CaptureServer:
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}, port {port}: {error}") from error
        # Connections inherit it. Without it the body of an answer waits 40 ms for the acknowledged
        # head. asyncio sets it only on connections of its own listeners.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"[{host}]" if ":" in host else host
        self.recorder.url = self._url or f"http://{name}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            capture_app(self.recorder),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",  # Bounds the bytes before a key is checked. httptools takes any header.
            h11_max_incomplete_event_size=_HEAD_BYTES,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S - 1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await within(
            self._server.listens.wait(),
            timeout_s=_START_S,
            clock=self.recorder.clock,
            what="the start of the capture server",
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def session(self, **options: Any) -> contextlib.AbstractAsyncContextManager[CaptureSession]:
        """Open a session, as `Recorder.session` does. The agent gets its `base_url` and `key`.

        Raises:
            ClosedError: the server does not run.
            UsageError: as for `Recorder.session`.
        """
        if self._server is None:
            raise ClosedError("the capture server does not run. Use it as a context.")
        return self.recorder.session(**options)

    async def close(self) -> None:
        """End every session and connection, and stop listening. May be called twice."""
        self.recorder.close()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(DeadlineError):
            await within(
                self._serving,
                timeout_s=_CLOSE_S,
                clock=self.recorder.clock,
                what="the end of the capture server",
            )
        self._server = None


def capture_app(recorder: Recorder) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """Return the application. Each session has its own base URL, `/s/{session}/v1`.

    A request needs the key of its session, as `Authorization: Bearer`. An answer is sampled in full
    before it is sent, so errors have a status in streams too. A turn is recorded once the engine
    has answered. If the agent leaves before that, the engine's request is cancelled.

    Errors are OpenAI's JSON. An unsupported request gets status 400, a wrong key 401, an ended
    session 410, and a body that is too long 413. A bound gives 429 with `Retry-After`, a failure of
    the engine 503, and a deadline 504.
    """

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise UnsupportedError(f"a capture server answers HTTP; got {scope['type']!r}")
        # A server may mount the application below a path of its own.
        found = _PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        name, asked = found.groups() if found else ("", "")
        session, method = recorder.find(name, _key(scope)), "GET" if asked == "models" else "POST"
        response: Response
        if not asked:
            response = _refusal(404, UsageError("there is nothing at this path"))
        elif scope["method"] != method:
            response = _refusal(405, UsageError(f"only {method} is answered here"), allow=method)
        elif session is None:
            unknown = UsageError(
                "no such session, or not its key. Use the base_url and key of an open session."
            )
            bearer = {"www-authenticate": "Bearer"}
            response = _refusal(401, unknown, "authentication_error", **bearer)
        elif asked == "models":
            said = {
                "id": recorder.model,
                "object": "model",
                "created": 0,
                "owned_by": "primeblocks",
            }
            response = 200, json.dumps({"object": "list", "data": [said]}).encode(), {}
        else:
            try:
                response = await _answer(recorder, session, receive, asked == "chat/completions")
            except CancelledError:
                return  # The agent has left.
        # A response that is not read fills a buffer, and then waits.
        await _in_time(recorder, _send(send, *response), f"a response of {scope['path']}")

    return app


async def _answer(
    recorder: Recorder, session: CaptureSession, receive: Receive, is_chat: bool
) -> Response:
    most = recorder.bounds.body_bytes
    gone: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    watching = None
    try:
        body = await _in_time(recorder, _read(receive, most), f"a request of {session.name}")
        if body is None:
            text = f"the body is longer than {most} bytes. Send less, or raise body_bytes."
            return _refusal(413, CapacityError(text))
        asked = read_request(body, is_chat=is_chat)
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
        return 200, response_body(asked, answer, created=created), {}
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return 200, response_events(asked, answer, created=created), headers


async def _in_time(recorder: Recorder, transfer: Coroutine[Any, Any, T], what: str) -> T:
    """Wait until bytes were transferred, or the deadline passed."""
    task = asyncio.ensure_future(transfer)
    try:
        await asyncio.sleep(0)  # Most transfers are done then, and need no timer.
    except BaseException:
        task.cancel()
        raise
    if task.done():
        return task.result()
    timeout_s = recorder.bounds.transfer_timeout_s
    return await within(task, timeout_s=timeout_s, clock=recorder.clock, what=what)


async def _read(receive: Receive, most: int) -> bytes | None:
    """Return a body, or None if it is longer than `most`. Holds at most that many bytes."""
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the agent left before its request was whole")
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
        gone.set_result(CancelledError("the agent left before its answer"))


async def _send(
    send: Send, status: int, body: bytes | Iterator[bytes], headers: dict[str, str]
) -> None:
    headers = {"content-type": "application/json"} | headers
    if isinstance(body, bytes):
        headers["content-length"] = str(len(body))
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": named})
    for part in [body] if isinstance(body, bytes) else body:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _key(scope: Message) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            return key if kind.lower() == "bearer" else ""
    return ""


def _refusal(
    status: int, error: Exception, kind: str = "invalid_request_error", **headers: str
) -> Response:
    return status, error_body(error, kind), headers


def _error(error: Exception) -> Response:
    status, kind = next(
        ((status, kind) for cls, status, kind in _STATUS if isinstance(error, cls)),
        (500, "server_error"),
    )
    headers = {}
    if status == 429:
        headers["retry-after"] = "1"
    elif status >= 500:
        # OpenAI's clients retry by themselves, and would pay for another answer.
        headers["x-should-retry"] = "false"
    if status == 504:
        headers["connection"] = "close"  # The rest of a request may never come.
    return _refusal(status, error, kind, **headers)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listens.set()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

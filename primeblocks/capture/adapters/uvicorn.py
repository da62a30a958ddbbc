"""uvicorn 0.54: an HTTP server for a `Recorder`, in the event loop of the training program."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

from ...errors import ClosedError, DeadlineError, UsageError, needs

with needs("uvicorn", extra="capture"):
    import uvicorn

from ...clock import within
from ..history import Renderer
from ..recorder import CaptureSession, Generate, Recorder
from .starlette import capture_app

__all__ = ["CaptureServer"]

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

    Do not block the event loop of the `async with` statement, because this loop answers requests.
    The server does not handle signals. HTTP is not encrypted, so anyone who reads the network can
    read keys. If agents run on other machines, use a tunnel or a proxy with TLS.

    Args:
        host: the address to listen on. An address other than loopback needs `url`.
        port: the port to listen on. For port 0, the system chooses a free port.
        url: the URL by which agents reach the server, such as "http://trainer-3:8000".
        options: more arguments of `Recorder`.

    Raises:
        UsageError: `host` is not loopback and `url` is missing, or the server cannot listen on
            `host` and `port`.
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
                f"host={host!r} is open to other machines. Pass the url= by which agents reach "
                "this server, or leave host at 127.0.0.1."
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
        # Connections inherit TCP_NODELAY. Without it, the body of an answer waits 40 ms until the
        # head is acknowledged. asyncio sets it only on connections of its own listeners.
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
            http="h11",  # Bounds the bytes before a key is checked. httptools does not.
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
        """Open a session with `Recorder.session`.

        The agent needs the session's `base_url` and `key`.

        Raises:
            ClosedError: the server is not running.
            UsageError: as for `Recorder.session`.
        """
        if self._server is None:
            raise ClosedError(
                "the capture server is not running. Use it in an async with statement."
            )
        return self.recorder.session(**options)

    async def close(self) -> None:
        """End every session and connection, and stop listening. You may call `close` twice."""
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

"""One JSON request to an engine's server, with one deadline for all of it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from ...errors import DeadlineError, EngineError, UnsupportedError

__all__ = ["JsonServer"]


class JsonServer:
    """The address of a server. Each request has a connection of its own; no proxies.

    Args:
        url: http://host:port.
        headers: sent with every request.

    Raises:
        UnsupportedError: `url` is something else.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise UnsupportedError(f"{url!r} is no address of a server; try http://host:30000.")
        self.url, self._host, self._port = url, parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def exchange(
        self, method: str, path: str, body: Any = None, *, deadline: float
    ) -> tuple[int, dict[str, Any]]:
        """Make a request; return the status and the answer, whatever the status is.

        Args:
            body: JSON-able; None sends none.
            deadline: as time.monotonic() counts.

        Returns:
            An answer that is no JSON object comes as {"answer": it}.

        Raises:
            DeadlineError: the answer was not whole in time. The server may still act on it.
            EngineError: there is no such server, or it hung up.
        """
        left_s = max(0.001, deadline - time.monotonic())
        connection = HTTPConnection(self._host, self._port, timeout=left_s)
        # A socket's own timeout starts anew with each byte.
        timer = threading.Timer(left_s, _cut, (connection,))
        timer.daemon = True
        timer.start()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers=self._headers)
            response = connection.getresponse()
            if response.length is None and not response.chunked:
                # To http.client, a connection cut inside the head looks like its end.
                raise HTTPException("an answer without its length")
            return response.status, _parse(response.read())
        except (OSError, HTTPException) as error:
            what = f"{method} {path} at {self.url}"
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{what}: no answer within {left_s:.3g} s") from error
            raise EngineError(f"{what}: {type(error).__name__}: {error}. Restart it.") from error
        finally:
            timer.cancel()
            connection.close()


def _cut(connection: HTTPConnection) -> None:
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = text.decode(errors="replace")
    return answer if isinstance(answer, dict) else {"answer": answer}

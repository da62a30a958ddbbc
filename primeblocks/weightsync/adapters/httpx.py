"""One JSON request to an engine's server, with one deadline for the whole request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from ...errors import DeadlineError, EngineError, UnsupportedError, needs

with needs("httpx", extra="httpx"):
    import httpx

__all__ = ["JsonServer"]


class JsonServer:
    """Sends requests to one server. Each request opens its own connection, without a proxy.

    Args:
        url: the address, as http://host:port.
        headers: HTTP headers that are sent with every request.

    Raises:
        UnsupportedError: `url` is not of the form http://host:port.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            is_right = parts.scheme == "http" and parts.hostname and not parts.path.strip("/")
            _ = parts.port  # Raises for a port that is not a number.
        except ValueError:
            is_right = False
        if not is_right:
            raise UnsupportedError(
                f"{url!r} is not the address of a server. Pass http://host:port, such as "
                "http://localhost:30000."
            )
        self.url, self._headers = url, dict(headers or {})

    async def exchange(
        self, method: str, path: str, body: Any = None, *, deadline: float
    ) -> tuple[int, dict[str, Any]]:
        """Make a request, and return the HTTP status and the answer.

        An HTTP status of 400 or above does not raise an error.

        Args:
            body: a JSON-able value. With None, the body is empty.
            deadline: the latest time of the answer, as a value of `time.monotonic()`.

        Returns:
            The status and a JSON object. If the answer is not an object, the returned object has
            the answer under the key "answer".

        Raises:
            DeadlineError: the answer was incomplete at the deadline. The server may still act on
                the request.
            EngineError: the server cannot be reached, closed the connection early, or did not send
                the length of the answer.
        """
        left_s = max(0.001, deadline - time.monotonic())
        what = f"{method} {path} at {self.url}"
        try:
            # httpx's own timeouts start anew with each byte.
            async with (
                asyncio.timeout(left_s),
                httpx.AsyncClient(
                    base_url=self.url, timeout=None, trust_env=False, verify=False
                ) as client,
            ):
                response = await client.request(method, path, json=body, headers=self._headers)
        except TimeoutError as error:
            raise DeadlineError(
                f"{what} got no answer within {left_s:.3g} s. Pass a longer timeout_s, or check "
                "the server."
            ) from error
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}".rstrip(":. ")
            raise EngineError(f"{what}: {said}. Restart the server.") from error
        if not {"content-length", "transfer-encoding"} & set(response.headers):
            # Without a length, a cut connection looks like the end of the answer.
            raise EngineError(
                f"{what}: the server sent an answer without its length. Restart the server."
            )
        return response.status_code, _parse(response.content)

    def exchange_blocking(
        self, method: str, path: str, body: Any = None, *, deadline: float
    ) -> tuple[int, dict[str, Any]]:
        """Run `exchange` in a thread, so that the caller's thread may have a running event loop."""
        request = self.exchange(method, path, body, deadline=deadline)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, request).result()


def _parse(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = text.decode(errors="replace")
    return answer if isinstance(answer, dict) else {"answer": answer}

"""One JSON request to an engine's server, with one deadline for all of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from ...errors import DeadlineError, EngineError, MissingPackageError, UnsupportedError

try:
    import httpx
except ImportError as error:
    raise MissingPackageError("httpx", "httpx") from error

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
        self.url, self._headers = url, dict(headers or {})

    async def exchange(
        self, method: str, path: str, body: Any = None, *, deadline: float
    ) -> tuple[int, dict[str, Any]]:
        """Make a request; return the status and the answer, whatever the status is.

        Args:
            body: JSON-able; None sends none.
            deadline: as time.monotonic() counts.

        Returns:
            What is no JSON object comes as the value of "answer" in one.

        Raises:
            DeadlineError: the answer was not whole in time. The server may still act on it.
            EngineError: there is no such server, or it hung up.
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
            raise DeadlineError(f"{what}: no answer within {left_s:.3g} s") from error
        except httpx.TransportError as error:
            first = _first_cause(error)
            said = f"{type(first).__name__}: {first}"
            raise EngineError(f"{what}: {said}. Restart it.") from error
        if not {"content-length", "transfer-encoding"} & set(response.headers):
            # A connection that is cut looks like its end.
            raise EngineError(f"{what}: an answer without its length. Restart it.")
        return response.status_code, _parse(response.content)

    def exchange_blocking(
        self, method: str, path: str, body: Any = None, *, deadline: float
    ) -> tuple[int, dict[str, Any]]:
        """Do as `exchange` in a thread, so that a caller may have an event loop of its own."""
        request = self.exchange(method, path, body, deadline=deadline)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, request).result()


def _first_cause(error: BaseException) -> BaseException:
    """Return the operating system's error, which says more than httpx's."""
    if isinstance(error, BaseExceptionGroup):
        return _first_cause(error.exceptions[0])
    held = (each for each in error.args if isinstance(each, BaseException))
    below = error.__cause__ or next(held, None)
    return error if below is None else _first_cause(below)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = text.decode(errors="replace")
    return answer if isinstance(answer, dict) else {"answer": answer}

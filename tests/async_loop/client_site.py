"""A server of known behaviour, for clients of the `openai` package."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import strategies as st

openai = pytest.importorskip("openai")

PROMPT = [7, 8, 9]
Reply = Callable[[str, Any], Any]


class Died(Exception):
    """The connection ends without an answer."""


async def on_server(reply: Reply, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Use a client of a server that answers `reply(path, body)`: JSON, text, or status and JSON."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = (
                int(head.split("content-length: ")[1].split()[0]) if "content-length" in head else 0
            )
            body = await reader.readexactly(size)
            answer = reply(head.split()[1], json.loads(body or b"null"))
            if asyncio.iscoroutine(answer):
                answer = await answer
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s" % (status, len(data), data)
            )
            await writer.drain()
        except Died:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            # Reading the machine's certificates takes longer than a request.
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as client,
    ):
        return await use(client)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)

"""Client of `capture`: a line of sessions in, a line of added latencies in milliseconds out."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from urllib.parse import urlsplit

from .capture import SESSIONS, SLEEP_S, TURNS, sleep_of


async def _talk(index: int, url: str, key: str) -> list[float]:
    """Ask turn by turn on one connection; milliseconds of each beyond the engine's sleep."""
    parts = urlsplit(url)
    await asyncio.sleep(SLEEP_S * index / SESSIONS)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    messages, latencies = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"question {turn} " + "of words " * 20})
        seed = index * TURNS + turn
        asked = {"model": "m", "messages": messages, "seed": seed}
        body = json.dumps(asked).encode()
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sleep_s = sleep_of(seed)
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        answer = await reader.readexactly(int(said.partition("content-length: ")[2].split()[0]))
        latencies.append((time.perf_counter() - begun - sleep_s) * 1e3)
        assert " 200 " in said, answer
        content = json.loads(answer)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    writer.close()
    return latencies


async def _wave(sessions: list[list[str]]) -> list[float]:
    talks = [_talk(i, *session) for i, session in enumerate(sessions)]
    return [each for found in await asyncio.gather(*talks) for each in found]


def main() -> None:
    gc.disable()  # A pause of the client is no latency of the server.
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_wave(json.loads(line)))), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()

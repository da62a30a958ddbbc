"""A capture server, an agent of OpenAI's client, and what the model writes to it."""

import contextlib
import json

import openai

from primeblocks.capture.adapters.uvicorn import CaptureServer
from tests.capture.chat_site import ADD, template
from tests.deadlines import HANG_S


def serve(engine, **options):
    return CaptureServer(engine, template(), **options)


@contextlib.asynccontextmanager
async def recording(engine, *, name=None, prompt_id=None, **options):
    """A server, a session of it, and the client of an agent."""
    async with (
        serve(engine, **options) as server,
        server.session(name=name, prompt_id=prompt_id) as session,
        agent_of(session) as client,
    ):
        yield server, session, client


@contextlib.asynccontextmanager
async def agent_of(session, **options):
    options = {"base_url": session.base_url, "api_key": session.key, "max_retries": 0} | options
    async with openai.AsyncOpenAI(timeout=HANG_S, **options) as client:
        yield client


def adds(prompt):
    """Call a tool, read what it says, and answer in words."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if "tool_response" in last:
        return f"<think>hm</think>It is {last.split()[1]}, dear naïve user."
    a = prompt.count("user")
    return f'Wait.\n<tool_call>\n{{"name":"add","arguments":{{"a":{a},"b":2}}}}\n</tool_call>'


async def converse(client, messages, rounds, *, stream):
    """Ask and run tools as agents do; return what was said."""
    for i in range(rounds):
        messages.append({"role": "user", "content": f"And {i} + 2?"})
        while True:
            ask = {"model": "m", "messages": messages, "tools": [ADD], "temperature": 0.5}
            if stream:
                async with client.chat.completions.stream(
                    **ask, stream_options={"include_usage": True}
                ) as events:
                    async for _ in events:
                        pass
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**ask)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            assert answer.usage.total_tokens > answer.usage.completion_tokens > 0
            if not message.tool_calls:
                assert answer.choices[0].finish_reason == "stop"
                break
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                asked = json.loads(call.function.arguments)
                said = str(asked["a"] + asked["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return messages

"""An agent of OpenAI's own client, recorded: every token that the engine sampled, and no other."""

import asyncio
import contextlib
import json
import socket

import openai
import pytest

from primeblocks.capture import CaptureBounds
from primeblocks.capture.adapters.uvicorn import CaptureServer
from primeblocks.errors import (
    CapacityError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UsageError,
)
from primeblocks.losses.packing import plan_trees
from primeblocks.testing.faults import ManualClock
from tests.capture.capture_site import adds, agent_of, converse, recording, serve
from tests.capture.chat_site import ADD, Engine, template
from tests.deadlines import HANG_S


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_is_recorded_token_by_token(stream):
    async def run():
        engine = Engine(adds)
        async with recording(engine, prompt_id="p") as (_, session, client):
            messages = await converse(client, [], 3, stream=stream)
            assert [model.id async for model in client.models.list()] == ["policy"]
        return engine, session, messages

    engine, session, messages = asyncio.run(run())
    assert session.conversation.counts == {"start": 1, "clean": 5}
    (rollout,) = session.rollouts(reward=1.0, rewards={"style": 0.5})
    engine.check([rollout])
    assert (rollout.prompt_id, rollout.reward, rollout.rewards["style"]) == ("p", 1.0, 0.5)
    assert (rollout.oldest_version, rollout.newest_version) == (0, 6)
    assert [each["role"] for each in messages[:4]] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "Wait."
    assert messages[3]["content"] == "<think>hm</think>It is 3, dear naïve user."
    # Ids that the tokenizer would not have made: it would have lost some that were sampled.
    ids = rollout.tokens.tolist()
    assert template().encode(template().parse(ids, calls=False)[0]) != ids
    assert engine.options[0]["temperature"] == 0.5
    assert engine.options[0]["stop_token_ids"] == template().stop_token_ids


def test_agents_that_change_what_was_said_fork():
    async def run():
        engine = Engine(lambda prompt: "one two three")
        async with recording(engine) as (_, session, client):

            async def ask(messages, **more):
                made = await client.chat.completions.create(model="m", messages=messages, **more)
                return made.choices[0]

            first = [{"role": "user", "content": "a"}]
            cut = await ask(first, max_tokens=2)
            assert cut.finish_reason == "length"
            second = [*first, cut.message.model_dump(), {"role": "user", "content": "b"}]
            await ask(second)
            second[1] = {"role": "assistant", "content": "otherwise"}
            await ask(second)
            await ask(second, tools=[ADD])
        return engine, session

    engine, session = asyncio.run(run())
    continued = [turn.continuity for turn in session.conversation.turns]
    assert continued == ["start", "clean", "fork", "fork"]
    rollouts = session.rollouts()
    engine.check(rollouts)
    # A trainer computes what they share once.
    paths = [tuple(each.tokens.tolist()) for each in rollouts]
    distinct = {path[: i + 1] for path in paths for i in range(len(path))}
    assert len(plan_trees(rollouts).places) == len(distinct) < sum(map(len, paths))


def test_an_agent_that_forbids_calls_goes_on_with_the_same_tools():
    async def run():
        engine = Engine(adds)
        async with recording(engine) as (_, session, client):
            messages = [{"role": "user", "content": "a"}]
            for choice in ("auto", "none", "auto"):
                ask = {"model": "m", "messages": messages, "tools": [ADD], "tool_choice": choice}
                made = (await client.chat.completions.create(**ask)).choices[0].message
                assert bool(made.tool_calls) == (choice == "auto")
                assert ("<tool_call>" in made.content) == (choice == "none")
                messages += [made.model_dump(), {"role": "user", "content": "b"}]
        return engine, session

    engine, session = asyncio.run(run())
    assert session.conversation.counts == {"start": 1, "clean": 2}
    engine.check(session.rollouts())


def test_completions_go_on_with_text():
    async def run():
        engine = Engine(lambda prompt: " tell you")
        async with recording(engine) as (_, session, client):
            text = "Let me"
            for _ in range(3):
                made = await client.completions.create(
                    model="m",
                    prompt=text,
                    max_tokens=40,
                    seed=3,
                    extra_body={"stop_token_ids": [5]},
                )
                text += made.choices[0].text + ", then"
            ids = template().encode("given")
            stream = await client.completions.create(model="m", prompt=ids, stream=True)
            told = "".join([chunk.choices[0].text async for chunk in stream])
        return engine, session, text, told

    engine, session, text, told = asyncio.run(run())
    assert (text, told) == ("Let me" + " tell you, then" * 3, " tell you")
    # The token that ended an answer is not in the text that goes on.
    assert session.conversation.counts == {"start": 1, "fork": 3}
    engine.check(session.rollouts())
    first, second, *_ = session.rollouts()
    assert second.tokens.tolist()[: len(first.tokens) - 1] == first.tokens.tolist()[:-1]


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (EngineError("it died"), 503, "EngineError"),
        (DeadlineError("late"), 504, "DeadlineError"),
        (CapacityError("full"), 429, "CapacityError"),
        (UsageError("too long"), 400, "UsageError"),
        (RuntimeError("what"), 503, "EngineError"),
        (PrimeblocksError("aborted"), 503, "PrimeblocksError"),
    ],
)
def test_an_engine_that_fails_is_said_and_loses_nothing(raised, status, kind):
    async def run():
        engine, fails = Engine(lambda prompt: "well"), []

        async def generate(prompt, **options):
            if fails:
                raise fails[0]
            return await engine(prompt, **options)

        async with recording(generate) as (_, session, client):
            ask = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            await client.chat.completions.create(**ask)
            fails.append(raised)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**ask, stream=True)
            fails.clear()
            await client.chat.completions.create(**ask)
        return engine, session, caught.value

    engine, session, error = asyncio.run(run())
    assert (error.status_code, error.code) == (status, kind)
    assert str(raised) in error.message
    assert error.response.headers.get("retry-after") == ("1" if status == 429 else None)
    assert len(session.conversation.turns) == 2
    engine.check(session.rollouts())


def test_bounds_are_kept():
    async def run():
        engine = Engine(lambda prompt: "x" * 100)
        bounds = CaptureBounds(turns=1, body_bytes=1000, max_tokens=20)
        async with recording(engine, bounds=bounds) as (_, session, client):

            async def fails(status, **more):
                ask = {"messages": [{"role": "user", "content": "a"}]} | more
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(model="m", **ask)
                assert caught.value.status_code == status

            await fails(413, messages=[{"role": "user", "content": "a" * 3_000_000}])
            await fails(400, max_tokens=21)
            await fails(400, max_tokens=4, max_completion_tokens=5)
            await fails(400, n=2)
            await fails(400, temperature=10**400)
            await fails(400, stop=["word"])
            await fails(400, extra_body={"surprise": 1})
            await fails(400, messages=[])
            ask = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            made = await client.chat.completions.create(**ask)
            assert made.usage.completion_tokens == 20
            await fails(429)
            for wrong in ("x", session.key[:-1], session.key + "x"):
                async with agent_of(session, api_key=wrong) as other:
                    with pytest.raises(openai.AuthenticationError, match="not its key"):
                        await other.chat.completions.create(**ask)
            elsewhere = session.base_url.replace(session.name, "0" * 16)
            async with agent_of(session, base_url=elsewhere) as other:
                with pytest.raises(openai.AuthenticationError, match="not its key"):
                    await other.models.list()
        return engine, session

    engine, session = asyncio.run(run())
    assert engine.calls == len(session.conversation.turns) == 1


def test_requests_under_way_are_counted_over_all_sessions():
    async def run():
        asked, go_on = asyncio.Event(), asyncio.Event()
        engine = Engine(lambda prompt: "late")

        async def slow(prompt, **options):
            asked.set()
            await go_on.wait()
            return await engine(prompt, **options)

        ask = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        bounds = CaptureBounds(in_flight=1)
        async with recording(slow, bounds=bounds) as (server, _, client):
            first = asyncio.create_task(client.chat.completions.create(**ask))
            await asked.wait()
            async with server.recorder.session() as other, agent_of(other) as second:
                with pytest.raises(openai.RateLimitError, match="1 requests are under way"):
                    await second.chat.completions.create(**ask)
                go_on.set()
                await first
                await second.chat.completions.create(**ask)

    asyncio.run(run())


def test_a_head_without_end_is_refused_before_any_key():
    async def run():
        async with recording(Engine(lambda prompt: "x")) as (server, *_):
            port = int(server.recorder.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /s/a/v1/models HTTP/1.1\r\nX: " + b"a" * (1 << 20))
            try:
                # To the end of the connection: a server that waits for more misses the deadline.
                return await asyncio.wait_for(reader.read(), HANG_S)
            except ConnectionError:  # Closed while more was on its way.
                return b""
            finally:
                writer.close()

    assert asyncio.run(run())[:12] in {b"", b"HTTP/1.1 400"}


def test_hosts_of_a_network_are_chosen_on_purpose():
    with pytest.raises(UsageError, match="open to other machines"):
        serve(Engine(adds), host="0.0.0.0")
    with pytest.raises(UsageError, match="bounds must be positive"):
        CaptureBounds(turns=0)


def test_an_agent_that_leaves_takes_its_request_along():
    async def run():
        engine = Engine(lambda prompt: "late")
        asked, go_on, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def generate(prompt, **options):
            asked.set()
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return await engine(prompt, **options)

        async with recording(generate) as (_, session, client):

            async def begin():
                asked.clear()
                cancelled.clear()
                messages = [{"role": "user", "content": "a"}]
                made = client.chat.completions.create(model="m", messages=messages)
                task = asyncio.create_task(made)
                await asked.wait()
                return task

            leaving = await begin()
            leaving.cancel()
            await asyncio.wait_for(cancelled.wait(), HANG_S)
            assert session.conversation.turns == []
            go_on.set()
            await (await begin())
            go_on.clear()
            waiting = await begin()
            session.close()
            with pytest.raises(openai.APIStatusError) as caught:
                await waiting
            assert (caught.value.status_code, cancelled.is_set()) == (410, True)
        return engine, session

    engine, session = asyncio.run(run())
    assert len(session.conversation.turns) == 1
    engine.check(session.rollouts())


class Large:
    """A renderer of bytes, in which every answer is longer than sockets hold."""

    stop_token_ids = (0,)

    def render(self, messages, tools):
        return [1, *json.dumps([messages, tools]).encode()]

    def go_on(self, before, added, tools, *, last_id):
        return None

    def parse(self, ids, *, calls):
        return "word" * (2 << 20), []

    def encode(self, text):
        return [*text.encode()]


async def post(session, body, *, length=None):
    """Send a request by hand, and be slow to read; return the connection."""
    host, port = session.base_url.split("/")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    path = session.base_url.partition("/s/")[2]
    head = f"POST /s/{path}/chat/completions HTTP/1.1\r\nhost: x\r\n"
    head += f"authorization: Bearer {session.key}\r\ncontent-length: {length or len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


@pytest.mark.parametrize("how", ["leaves", "stalls", "sends half"])
def test_an_agent_that_dies_on_the_way_loses_no_turn_and_leaves_no_task(how):
    async def run():
        clock, engine = ManualClock(), Engine(lambda prompt: "word")
        bounds = CaptureBounds(transfer_timeout_s=30)
        ask = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
        body = json.dumps(ask).encode()
        async with (
            CaptureServer(engine, Large(), bounds=bounds, clock=clock) as server,
            server.session() as session,
        ):
            tasks = asyncio.all_tasks()
            if how == "sends half":
                reader, writer = await post(session, body[:20], length=len(body))
            else:
                reader, writer = await post(session, body)
                assert (await reader.readline()).endswith(b"200 OK\r\n")
            if how == "leaves":
                writer.transport.abort()
            while not asyncio.all_tasks() - tasks:
                await asyncio.sleep(0)
            while asyncio.all_tasks() - tasks:
                clock.advance(0 if how == "leaves" else 31)
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
            writer.close()
        return engine, session, answer if how == "sends half" else b""

    engine, session, answer = asyncio.run(run())
    assert (b" 504 " in answer) == (how == "sends half")
    assert len(session.conversation.turns) == (how != "sends half")
    engine.check(session.rollouts())

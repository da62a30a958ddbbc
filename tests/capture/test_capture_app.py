"""What the application answers to each request, without a server."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from primeblocks.capture.adapters.starlette import capture_app
from primeblocks.capture.recorder import CaptureBounds, Recorder
from primeblocks.testing.faults import ManualClock
from tests.capture.chat_site import Engine, template

ASK = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


async def answer(app, method, path, *, key="", body=b"", root="", kind="Bearer", more=False):
    """Send a request to the application; return its status, headers and body."""
    messages = [{"type": "http.request", "body": body, "more_body": more}]
    said = []

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "path": root + path,
        "root_path": root,
        "query_string": b"",
        "headers": [(b"authorization", f"{kind} {key}".encode())],
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
    }
    await app(scope, receive, send)
    head = {name.decode(): value.decode() for name, value in said[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in said[1:])
    assert int(head.get("content-length", len(body))) == len(body)
    return SimpleNamespace(status=said[0]["status"], head=head, body=body)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "head"),
    [
        ("POST", "/chat/completions", {}, 200, {"content-type": "application/json"}),
        ("POST", "/chat/completions", {"kind": "bEARER"}, 200, {}),
        ("POST", "/chat/completions", {"root": "/below"}, 200, {}),
        ("POST", "/chat/completions", {"kind": "Basic"}, 401, {"www-authenticate": "Bearer"}),
        ("POST", "/chat/completions", {"key": ""}, 401, {"www-authenticate": "Bearer"}),
        ("POST", "/chat/completions", {"size": 400}, 200, {}),
        ("POST", "/chat/completions", {"size": 401}, 413, {}),
        ("GET", "/chat/completions", {}, 405, {"allow": "POST"}),
        ("POST", "/completions", {}, 400, {}),
        ("GET", "/completions", {}, 405, {"allow": "POST"}),
        ("GET", "/models", {}, 200, {"content-type": "application/json"}),
        ("HEAD", "/models", {}, 200, {}),
        ("GET", "/models", {"key": "x"}, 401, {"www-authenticate": "Bearer"}),
        ("POST", "/models", {}, 405, {}),
        ("POST", "/chat/completions/", {}, 404, {}),
        ("POST", "/chat/completions2", {}, 404, {}),
        ("GET", "/", {}, 404, {}),
    ],
)
def test_each_request_has_its_answer(method, path, options, status, head):
    async def run():
        recorder = Recorder(
            Engine(lambda prompt: "x"), template(), bounds=CaptureBounds(body_bytes=400)
        )
        recorder.url = "http://host"
        async with recorder.session() as session:
            given = {"key": session.key} | options
            body = json.dumps(ASK).encode().ljust(given.pop("size", 0))
            where = f"/s/{session.name}/v1{path}"
            return await answer(capture_app(recorder), method, where, body=body, **given)

    found = asyncio.run(run())
    assert found.status == status
    assert head.items() <= found.head.items()
    if status != 200:
        assert json.loads(found.body)["error"]["message"]
    elif path == "/chat/completions":
        assert json.loads(found.body)["choices"][0]["message"]["content"] == "x"


def test_a_body_that_does_not_come_ends_its_connection():
    async def run():
        clock = ManualClock()
        recorder = Recorder(Engine(lambda prompt: "x"), template(), clock=clock)
        recorder.url = "http://host"
        async with recorder.session() as session:
            where = f"/s/{session.name}/v1/chat/completions"
            asking = asyncio.ensure_future(
                answer(capture_app(recorder), "POST", where, key=session.key, more=True)
            )
            while not asking.done():
                clock.advance(recorder.bounds.transfer_timeout_s)
                await asyncio.sleep(0)
            return await asking

    found = asyncio.run(run())
    assert (found.status, found.head["connection"]) == (504, "close")
    assert found.head["x-should-retry"] == "false"


def test_it_starts_under_servers_that_speak_of_their_life():
    async def run():
        said = []
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            said.append(message["type"])

        app = capture_app(Recorder(Engine(lambda prompt: "x"), template()))
        await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
        return said

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

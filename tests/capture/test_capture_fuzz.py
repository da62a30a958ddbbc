"""Damaged requests: a typed answer to each, and no session learns anything of another.

1,000 mutations; 100,000 with `--full`.
"""

import asyncio
import copy
import json
from collections import Counter

import numpy as np

from primeblocks.capture import CaptureBounds, Recorder
from primeblocks.capture.adapters.starlette import capture_app
from tests.capture.chat_site import ADD, Engine, template

SESSIONS, REQUESTS = 3, 8  # of a round
WEIRD = [
    *(None, True, -1, 0, 1e308, 1 << 70, "", "x", "\ud800", "\0", "<|im_end|>", [], {}, [[]]),
    *([None], {"": None}, "日" * 99, {"type": "text"}, [{"type": "image_url"}], 0.5),
]
PATHS = ["chat/completions", "completions", "models", "", "../models", "chat/completions/"]


def valid(secret, rng):
    """Return a request that is answered, in which a session's secret is said."""
    if rng.random() < 0.2:
        return PATHS[1], {"model": "m", "prompt": f"{secret} said", "max_tokens": 9}
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "system", "content": secret},
        {"role": "user", "content": [{"type": "text", "text": f"tell {secret}"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    return PATHS[0], {
        "model": "m",
        "messages": messages[: int(rng.integers(2, 5))],
        "tools": [ADD],
        "stream": bool(rng.integers(2)),
        "max_tokens": int(rng.integers(1, 12)),
        "temperature": 1,
        "stop_token_ids": [5],
    }


def places(value, found):
    """Collect every container of a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        found.append((value, key))
        if isinstance(each, dict | list):
            places(each, found)
    return found


def mutated(value, rng):
    """Change some places of a JSON value, or bytes of its text."""
    value = copy.deepcopy(value)
    for _ in range(rng.integers(1, 4)):
        at, key = (found := places(value, []))[rng.integers(len(found))]
        kind = rng.integers(4)
        if kind == 0:
            at[key] = copy.deepcopy(WEIRD[rng.integers(len(WEIRD))])
        elif kind == 1 and isinstance(at, dict) and len(value) > 1:
            at[str(rng.choice(["n", "seed", "logprobs", "tools", "é", "role"]))] = at.pop(key)
        elif kind == 2:
            at[key] = [copy.deepcopy(at[key]) for _ in range(rng.integers(3))]
        elif kind == 3:
            at[key] = at[key] if isinstance(at[key], dict | list) else str(at[key]) + "\x00é"
        if not value:
            break
    body = bytearray(json.dumps(value).encode())
    for _ in range(rng.integers(-3, 4)):
        place = int(rng.integers(len(body) + 1))
        kind = rng.integers(5)
        if kind == 0:
            del body[place : place + int(rng.integers(1, 30))]
        elif kind == 1:
            body[place:place] = bytes(rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8))
        elif kind == 2:
            body[place : place + 1] = b"[" * int(rng.integers(1, 3000))
        elif kind == 3:
            body[place:place] = body[: int(rng.integers(1, 200))]
        else:
            del body[place:]
    return bytes(body)


async def request(app, path, key, body, rng):
    """Send a request to the application, in pieces; return the status and what was said."""
    cuts = sorted(int(rng.integers(len(body) + 1)) for _ in range(rng.integers(3)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    if rng.random() < 0.02:
        parts = parts[:-1]  # It leaves before the end.
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(cuts)}
        for i, part in enumerate(parts)
    ]
    said = []

    async def receive():
        if messages:
            return messages.pop(0)
        if len(parts) == len(cuts) + 1:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode("latin-1", "replace"))],
        "http_version": "1.1",
        "scheme": "http",
        "method": "GET" if path.endswith("models") and rng.random() < 0.9 else "POST",
    }
    await app(scope, receive, send)
    if not said:
        return None, b""
    return said[0]["status"], b"".join(each.get("body", b"") for each in said[1:])


async def one_round(app, recorder, engine, rng, seen):
    """Open sessions, send each some requests, and look at what all of them hold."""
    async with recorder.session() as a, recorder.session() as b, recorder.session() as c:
        sessions = [a, b, c]
        secrets = {each.name: f"secret{each.name}" for each in sessions}
        for _ in range(SESSIONS * REQUESTS):
            own, other = (sessions[i] for i in rng.permutation(SESSIONS)[:2])
            kind, value = valid(secrets[own.name], rng)
            body = mutated(value, rng) if rng.random() < 0.9 else json.dumps(value).encode()
            key, name = own.key, own.name
            if rng.random() < 0.05:
                key = str(rng.choice([other.key, "", key[:-1], key + "x", "é", "\x00"]))
            if rng.random() < 0.1:
                kind = str(rng.choice(PATHS))
            before = {each.name: len(each.conversation.turns) for each in sessions}
            status, said = await request(app, f"/s/{name}/v1/{kind}", key, body, rng)
            seen[status] += 1
            if key != own.key:
                assert status in {401, 404, 405}
            if status == 200 and kind != "models":
                before[name] += 1
            assert before == {each.name: len(each.conversation.turns) for each in sessions}
            for each in sessions:
                assert each is own or secrets[each.name].encode() not in said
                assert each is own or each.key.encode() not in said
            if status not in {200, None}:
                assert json.loads(said)["error"]["message"]
    for each in sessions:
        for rollout in each.rollouts():
            text = template().parse(rollout.tokens.tolist(), calls=False)[0]
            assert not any(secret in text for name, secret in secrets.items() if name != each.name)
    engine.check([rollout for each in sessions for rollout in each.rollouts()])
    engine.seen.clear()


def test_damaged_requests_get_typed_answers_and_sessions_stay_apart(full):
    async def run():
        rng, seen = np.random.default_rng(0), Counter()
        engine = Engine(lambda prompt: "it is " + prompt[-40:-25], seed=1)
        recorder = Recorder(engine, template(), bounds=CaptureBounds(body_bytes=20_000))
        app = capture_app(recorder)
        tasks = asyncio.all_tasks()
        while seen.total() < (100_000 if full else 1000):
            await one_round(app, recorder, engine, rng, seen)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == tasks
        return seen

    seen = asyncio.run(run())
    print(dict(seen))
    assert set(seen) <= {None, 200, 400, 401, 404, 405, 413}
    assert min(seen[200], seen[400], seen[401] * 10) > seen.total() / 10

"""Prefill and decode over NIXL while either dies, hangs, and starts again.

Requests are held at three places: in prefill's hands, between the two, and while decode goes on.
The first decode server computes pages that it cannot read. The second one fails.
"""

import asyncio
import importlib.util
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.serving.adapters.vllm import FleetMember, VllmFleet
from primeblocks.weightsync.adapters import vllm as into_vllm
from tests.deadlines import EXPIRES_S
from tests.engine_job import call
from tests.integration.fleet_site import (
    LONG,
    START_S,
    Policies,
    check,
    member_of,
    save,
    servers,
)
from tests.ports import free_port
from tests.weightsync.vllm_site import TIMEOUT_S

MISSING = [name for name in ("vllm", "nixl") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PROMPT, SHORT = 150, 24  # tokens; pages have 32


# As docs/serving_shapes.md sets them.
TRANSFER = {
    "prefill": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
    "decode": {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
    },
}


class Door:
    """Holds requests of a client, while it is shut, before they are sent."""

    def __init__(self) -> None:
        self._opened, self._came, self.waiting = asyncio.Event(), asyncio.Condition(), 0
        self._opened.set()

    def client(self, url: str) -> Any:
        import httpx
        import openai

        hooks = {"request": [self._enter]}
        through = httpx.AsyncClient(event_hooks=hooks, timeout=None)  # type: ignore[arg-type]
        return openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=through
        )

    def shut(self) -> None:
        self._opened.clear()
        self.waiting = 0

    def open(self) -> None:
        self._opened.set()

    async def reach(self, count: int) -> None:
        async with self._came:
            await asyncio.wait_for(
                self._came.wait_for(lambda: self.waiting >= count), timeout=START_S
            )

    async def _enter(self, _: Any) -> None:
        async with self._came:
            self.waiting += 1
            self._came.notify_all()
        await self._opened.wait()


class Site:
    """A prefill and a decode server, which come and go, behind one fleet."""

    def __init__(self, folder: Path, start: Any) -> None:
        self.policies, self._start = Policies(folder), start
        self.doors = {role: Door() for role in ("prefill", "decode")}
        self._side = {role: str(free_port()) for role in self.doors}
        self.served: dict[str, Any] = {}
        self.clients: dict[str, Any] = {}
        self._names, self._drawn = iter("abcdefgh"), np.random.default_rng(1)

    def launch(self, role: str, **config: Any) -> None:
        environment = {
            "UCX_TLS": "tcp,shm,self,sysv,posix",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": self._side[role],
        }
        words = ["--kv-transfer-config", json.dumps(TRANSFER[role] | config)]
        name = f"{role}-{next(self._names)}"
        self.served[role] = self._start(name, *words, environment=environment)

    async def ready(self, role: str) -> FleetMember:
        served = self.served[role]
        await asyncio.to_thread(served.wait, START_S)
        self.clients[role] = self.doors[role].client(served.url)
        await self.policies.attach(served.engine)
        member = member_of(served)
        return FleetMember(member.generate, member.engine, is_prefill=role == "prefill")

    async def begin(self) -> None:
        for role in self.doors:
            self.launch(role)
        members = {role: await self.ready(role) for role in self.doors}
        update = partial(into_vllm.update_all, in_flight="abort")
        self.fleet = VllmFleet(members, update=update, through=self._both)

    async def again(self, role: str) -> None:
        await self.fleet.join(role, await self.ready(role), timeout_s=TIMEOUT_S)
        await self.meet()

    async def meet(self) -> None:
        """Ask until decode reads from prefill: vLLM gives their first contact five seconds."""
        said: list[Any] = []
        for _ in range(9):
            said += await self.ask(self.draw(1))
            if said[-1].get("sent"):
                return
        raise AssertionError(said)

    async def _both(self, *args: Any, **options: Any) -> Any:
        from primeblocks.async_loop.adapters.openai import generate_split

        prefill, decode = (self.clients[role] for role in ("prefill", "decode"))
        return await generate_split(prefill, decode, *args, **options)

    def signal(self, role: str, number: int) -> None:
        os.killpg(self.served[role].process.pid, number)

    def draw(self, count: int) -> list[list[int]]:
        return self._drawn.integers(4, 512, (count, PROMPT)).tolist()

    def ask(self, prompts: list[list[int]], tokens: int = SHORT, timeout_s: float = START_S) -> Any:
        """Start requests; awaiting them gives for each what it is, or its error."""
        asked = {"max_tokens": tokens, "temperature": 0.0, "timeout_s": timeout_s}
        answers = [self.fleet.generate(prompt, **asked) for prompt in prompts]
        return asyncio.gather(*(self._outcome(each) for each in answers))

    async def _outcome(self, answer: Any) -> dict[str, Any]:
        try:
            first, second = await answer
        except PrimeblocksError as error:
            notes = " ".join(getattr(error, "__notes__", []))
            return {"error": type(error).__name__, "said": f"{error} {notes}"}
        said = self.policies.judge(second, routes=self.policies.join(first, second))
        told = (second.tokens.tolist(), second.logprobs.tolist())
        sent = int(self.policies.routes(second).missing[: second.prompt_length].sum())
        return {"judged": said, "told": told, "sent": sent}

    async def alone(self, role: str) -> dict[str, Any]:
        """What a server says without the other."""
        from primeblocks.async_loop.adapters.openai import generate_tokens

        asked = {"max_tokens": SHORT, "timeout_s": START_S, "cache_salt": "alone"}
        (one,) = await generate_tokens(self.clients[role], *self.draw(1), **asked)
        return self.policies.judge(one)

    async def hold(self) -> dict[str, Any]:
        """Stop decode while it goes on with two requests, and three are between the two."""
        served = self.served["decode"]
        served.before_long = await asyncio.to_thread(served.generated)
        decoding = self.ask(self.draw(2), LONG)
        await asyncio.wait_for(served.amid(""), START_S)
        self.signal("decode", signal.SIGSTOP)
        return {"decoding": decoding, "between": await self.between(3)}

    async def between(self, count: int, **options: Any) -> Any:
        door = self.doors["decode"]
        door.shut()
        asked = self.ask(self.draw(count), **options)
        await door.reach(count)
        return asked


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deaths")
    save(folder)
    return call(_see, folder)


# With status 500, a server that dies answers as if one request had failed.
FAILURES = ("EngineError", "PrimeblocksError")


def _see(folder: Path) -> dict[str, Any]:
    register()
    with servers(folder) as start:
        return asyncio.run(_run(Site(folder, start)))


async def _run(site: Site) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    await site.begin()
    await site.fleet.update(site.policies.publish(1), timeout_s=TIMEOUT_S)
    await site.meet()
    same = site.draw(3)
    seen["before"] = await site.ask(same)
    await _prefill_dies(site, seen)
    await site.fleet.update(site.policies.publish(3), timeout_s=TIMEOUT_S)
    seen["after"] = await site.ask(same)
    await _decode_dies(site, seen)
    await _update_between(site, seen)
    await _prefill_hangs(site, seen)
    site.policies.trainer.transport.close()
    return seen


async def _prefill_dies(site: Site, seen: dict[str, Any]) -> None:
    held = await site.hold()
    site.signal("prefill", signal.SIGSTOP)
    site.doors["prefill"].waiting = 0
    held["waiting"] = site.ask(site.draw(2))
    await site.doors["prefill"].reach(2)
    seen["urls"] = {role: served.url for role, served in site.served.items()}
    site.served["prefill"].close()
    site.doors["decode"].open()
    site.signal("decode", signal.SIGCONT)
    seen["prefill dies"] = {name: await asked for name, asked in held.items()}
    seen["prefill dies"]["dead"] = await site.ask(site.draw(1))
    done = await site.fleet.update(site.policies.publish(2), timeout_s=TIMEOUT_S)
    seen["without prefill"] = [done.held_by, sorted(done.drained)]
    site.launch("prefill")
    await site.again("prefill")
    seen["prefill again"] = await site.ask(site.draw(4))
    seen["versions"] = await site.fleet.versions(timeout_s=TIMEOUT_S)
    seen["decode lived on"] = site.served["decode"].process.poll() is None


async def _decode_dies(site: Site, seen: dict[str, Any]) -> None:
    held = await site.hold()
    site.served["decode"].close()
    site.doors["decode"].open()
    seen["decode dies"] = {name: await asked for name, asked in held.items()}
    site.launch("decode", kv_load_failure_policy="fail")
    await asyncio.to_thread(site.served["decode"].wait, START_S)
    # Only now, for prefill's pause waits while it keeps pages for a server that is gone.
    done = await site.fleet.update(site.policies.publish(4), timeout_s=START_S)
    seen["without decode"] = [done.held_by, sorted(done.drained)]
    await site.again("decode")
    seen["decode again"] = await site.ask(site.draw(4))


async def _update_between(site: Site, seen: dict[str, Any]) -> None:
    asked = await site.between(3)
    receipt = site.policies.publish(5)
    update = asyncio.ensure_future(site.fleet.update(receipt, timeout_s=START_S))
    paused = {"prefill": False}
    while not paused["prefill"] and not update.done():
        paused = {role: await _is_paused(served) for role, served in site.served.items()}
    seen["paused"] = paused
    site.doors["decode"].open()
    seen["updated"] = (await update).held_by
    seen["between an update"] = await asked
    seen["updated decode"] = await site.ask(site.draw(1))


async def _is_paused(served: Any) -> bool:
    return await served.engine.until(time.monotonic() + TIMEOUT_S).is_paused()


async def _prefill_hangs(site: Site, seen: dict[str, Any]) -> None:
    short = await site.between(1, timeout_s=EXPIRES_S)
    asked = await site.between(2)
    site.signal("prefill", signal.SIGSTOP)
    site.doors["decode"].open()
    seen["meanwhile"] = await site.alone("decode")
    seen["its deadline"] = await short
    seen["urls again"] = {role: served.url for role, served in site.served.items()}
    site.served["prefill"].close()
    seen["prefill hung"] = await asked
    seen["decode alone"] = await site.alone("decode")


def judged(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert not [each for each in outcomes if "error" in each]
    return [each["judged"] for each in outcomes]


def test_what_decode_goes_on_with_does_not_mind_that_prefill_dies(seen):
    check(judged(seen["prefill dies"]["decoding"]), 1)


def test_decode_computes_pages_that_died_with_prefill(seen):
    between = seen["prefill dies"]["between"]
    check(judged(between), 1)
    assert [each["sent"] for each in between] == [0] * 3


def test_a_request_in_the_hands_of_a_prefill_server_that_dies_names_it(seen):
    died = seen["prefill dies"]
    for each in [*died["waiting"], *died["dead"]]:
        assert each["error"] in FAILURES
        assert seen["urls"]["prefill"] in each["said"]


def test_a_decode_server_lives_on_with_the_prefill_server_that_comes_back(seen):
    assert seen["without prefill"] == [("decode",), ["prefill"]]
    assert seen["decode lived on"]
    assert seen["versions"] == {"prefill": "2", "decode": "2"}
    check(judged(seen["prefill again"]), 2)
    assert [each["sent"] for each in seen["prefill again"]] == [PROMPT - 1] * 4  # of its pages
    check(judged(seen["after"]), 3)
    assert [each["told"] for each in seen["after"]] == [each["told"] for each in seen["before"]]


def test_requests_of_a_decode_server_that_dies_name_it_and_a_new_one_serves(seen):
    died = seen["decode dies"]
    for each in [*died["decoding"], *died["between"]]:
        assert each["error"] in FAILURES
        assert seen["urls"]["decode"] in each["said"]
    assert seen["without decode"] == [("prefill",), ["decode"]]
    check(judged(seen["decode again"]), 4)
    assert [each["sent"] for each in seen["decode again"]] == [PROMPT - 1] * 4


def test_an_update_waits_until_decode_has_what_prefill_computed(seen):
    assert seen["paused"] == {"prefill": True, "decode": False}
    assert seen["updated"] == ("prefill", "decode")
    for each in seen["between an update"]:
        if "error" in each:  # of a request that the update has cut
            assert each["error"] == "PrimeblocksError"
            assert "aborted before its end. Send the request again" in each["said"]
            continue
        check([each["judged"]], 4)
        assert each["sent"] == PROMPT - 1
    check(judged(seen["updated decode"]), 5)


def test_a_transfer_that_hangs_ends_at_its_deadline_or_with_prefill(seen):
    check([seen["meanwhile"], seen["decode alone"]], 5)
    assert [each["error"] for each in seen["its deadline"]] == ["DeadlineError"]
    for each in seen["prefill hung"]:
        assert each["error"] in FAILURES
        assert all(url in each["said"] for url in seen["urls again"].values())

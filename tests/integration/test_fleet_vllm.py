"""Real fleets: every token and every route is that of the version it names, whoever dies.

An AsyncLLM in a process of its own beside one to three of vLLM's servers; and vllm-router, which
scripts/peers installs, before two servers.
"""

import asyncio
import importlib.util
import time
import urllib.request
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.serving.adapters.vllm import FleetMember, VllmFleet
from tests.deadlines import HANG_S
from tests.engine_job import call
from tests.integration.fleet_site import (
    LONG,
    MODEL_TOKENS,
    PROMPTS,
    ROUTER,
    START_S,
    Policies,
    check,
    client_of,
    member_of,
    needs_router,
    retried,
    router,
    save,
    servers,
    updating,
)
from tests.weightsync.vllm_site import TIMEOUT_S

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


async def _local(folder: Path) -> tuple[Any, FleetMember]:
    from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
    from primeblocks.replay.adapters.vllm import engine_args as capture_args
    from primeblocks.weightsync.adapters import vllm as into_vllm

    arguments = base_engine_args(
        folder / "start", seed=0, dtype="float32", max_model_len=MODEL_TOKENS, max_num_seqs=8,
        kv_bytes=32 << 20,
    )  # fmt: skip
    arguments |= into_vllm.engine_args() | capture_args(max_bytes=1 << 22, device="cpu")
    engine = await VllmEngine.start(arguments, timeout_s=START_S)

    async def generate(prompt: list[int], **options: Any) -> Any:
        return [each.to_rollout() for each in await engine.generate(prompt, **options)]

    return engine, FleetMember(generate, engine.llm)


async def _rollouts(fleet: VllmFleet, tokens: int, prompts: Any = PROMPTS) -> list[Any]:
    asked = {"max_tokens": tokens, "timeout_s": START_S}
    return [
        rollout
        for rollouts in await asyncio.gather(*(fleet.generate(each, **asked) for each in prompts))
        for rollout in rollouts
    ]


async def _in_flight(fleet: VllmFleet, servers: Iterable[Any], receipt: Any) -> list[Any]:
    """Update while requests are under way, those of these servers at least."""
    for served in servers:
        served.before_long = await asyncio.to_thread(served.generated)
    asked = asyncio.ensure_future(_rollouts(fleet, LONG))
    await asyncio.wait_for(asyncio.gather(*(served.amid("") for served in servers)), START_S)
    # So that none ends before; the update lets them go on.
    await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    await fleet.update(receipt, timeout_s=TIMEOUT_S)
    return await asked


async def _error(awaitable: Any) -> str:
    try:
        await awaitable
    except PrimeblocksError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- an AsyncLLM and servers ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1 server", "2 servers", "3 servers"])
def mixed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    if request.param > 1 and not request.config.getoption("--full"):
        pytest.skip("more than one server beside an AsyncLLM: only with --full")
    folder = tmp_path_factory.mktemp("mixed")
    save(folder)
    return call(_see_mixed, folder, request.param)


def _see_mixed(folder: Path, count: int) -> dict[str, Any]:
    register()
    with servers(folder) as start:
        return asyncio.run(_run_mixed(folder, start, count))


async def _run_mixed(folder: Path, start: Any, count: int) -> dict[str, Any]:
    policies = Policies(folder)
    served = {f"server {place}": start(f"server-{place}") for place in range(count)}
    local, member = await _local(folder)
    async with local:
        for each in served.values():
            await asyncio.to_thread(each.wait, START_S)
        members = {"local": member} | {name: member_of(each) for name, each in served.items()}
        *others, lost = members
        fleet, seen = VllmFleet(members, update=updating()), {"others": others, "lost": lost}
        for each in members.values():
            await policies.attach(each.engine)
        await fleet.update(policies.publish(1), timeout_s=TIMEOUT_S)
        seen["still"] = [policies.judge(each) for each in await _rollouts(fleet, 24)]
        in_flight = await _in_flight(fleet, served.values(), policies.publish(2))
        seen["in_flight"] = [policies.judge(each) for each in in_flight]

        # A server dies with requests in hand.
        dying = served[lost]
        dying.before_long = await asyncio.to_thread(dying.generated)
        asked = {"max_tokens": LONG, "timeout_s": START_S}
        tasks = [asyncio.ensure_future(retried(fleet.generate, p, **asked)) for p in PROMPTS]
        await asyncio.wait_for(dying.amid(""), START_S)
        dying.close()
        outcomes = await asyncio.gather(*tasks)
        seen["failures"] = [failures for _, failures in outcomes]
        seen["survived"] = [policies.judge(rollouts[0]) for rollouts, _ in outcomes]
        seen["open"] = fleet.open
        done = await fleet.update(policies.publish(3), timeout_s=TIMEOUT_S)
        seen["without"] = [done.held_by, await fleet.versions(timeout_s=TIMEOUT_S)]

        again = start("again")
        await asyncio.to_thread(again.wait, START_S)
        members[lost] = member = member_of(again)
        seen["unversioned"] = await _error(
            member.generate(PROMPTS[0], max_tokens=4, timeout_s=HANG_S)
        )
        await policies.attach(again.engine)
        await fleet.join(lost, member, timeout_s=TIMEOUT_S)
        seen["joined"] = [fleet.open, await fleet.versions(timeout_s=TIMEOUT_S)]
        same = {"max_tokens": 24, "temperature": 0.0, "timeout_s": START_S, "cache_salt": "same"}
        answers = [
            [(await each.generate(prompt, **same))[0] for prompt in PROMPTS]
            for each in members.values()
        ]
        seen["back"] = [policies.judge(each) for each in answers[-1]]
        seen["same"] = [
            bool((one.tokens == other.tokens).all() and (one.logprobs == other.logprobs).all())
            for engine in answers[1:]
            for one, other in zip(answers[0], engine, strict=True)
        ]
        policies.trainer.transport.close()
        return seen


def test_tokens_and_routes_are_of_the_version_that_they_name(mixed):
    check(mixed["still"], 1)


def test_an_update_in_flight_splits_rollouts_exactly(mixed):
    check(mixed["in_flight"], 1, 2)
    assert [1, 2] in [each["versions"] for each in mixed["in_flight"]]


def test_a_server_that_is_killed_costs_its_requests_one_attempt(mixed):
    assert mixed["open"] == tuple(mixed["others"])
    assert sorted(set(mixed["failures"])) == [0, 1]
    check(mixed["survived"], 2)
    assert mixed["without"] == [tuple(mixed["others"]), dict.fromkeys(mixed["others"], "3")]


def test_it_comes_back_with_the_current_version_and_says_the_same(mixed):
    assert mixed["unversioned"].startswith("EngineError")
    assert "the label 'default'" in mixed["unversioned"]
    every = (*mixed["others"], mixed["lost"])
    assert mixed["joined"] == [every, dict.fromkeys(every, "3")]
    check(mixed["back"], 3)
    assert len(mixed["same"]) == len(PROMPTS) * len(mixed["others"])
    assert all(mixed["same"])


# --- vllm-router before two servers ---------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("routed")
    save(folder)
    return call(_see_routed, folder, ROUTER)


def _see_routed(folder: Path, program: str) -> dict[str, Any]:
    register()
    with servers(folder) as start:
        pair = {name: start(name) for name in ("a", "b")}
        for served in pair.values():
            served.wait(START_S)
        words = ["--policy", "round_robin", "--worker-urls", *(each.url for each in pair.values())]
        with router(program, folder / "router.log", *words) as address:
            return asyncio.run(_run_routed(folder, start, pair, address))


async def _run_routed(folder: Path, start: Any, pair: Any, address: str) -> dict[str, Any]:
    from primeblocks.async_loop.adapters.openai import generate_tokens

    policies, seen = Policies(folder), {}
    members = {name: member_of(served) for name, served in pair.items()}
    through = partial(generate_tokens, client_of(address))
    fleet = VllmFleet(members, update=updating(), through=through)
    for each in members.values():
        await policies.attach(each.engine)
    await fleet.update(policies.publish(1), timeout_s=TIMEOUT_S)
    seen["still"] = [policies.judge(each) for each in await _rollouts(fleet, 24)]
    seen["generated"] = [served.generated() for served in pair.values()]
    in_flight = await _in_flight(fleet, [pair["b"]], policies.publish(2))
    seen["in_flight"] = [policies.judge(each) for each in in_flight]
    # A control call that goes through the router reaches one server.
    _post(f"{address}/pause?mode=keep&clear_cache=false")
    seen["paused"] = [await _calls(each.engine).is_paused() for each in members.values()]
    await fleet.resume(timeout_s=TIMEOUT_S)

    pair["b"].before_long = pair["b"].generated()
    asked = {"max_tokens": LONG, "timeout_s": START_S, "attempts": 9}
    tasks = [asyncio.ensure_future(retried(fleet.generate, p, **asked)) for p in PROMPTS]
    await asyncio.wait_for(pair["b"].amid(""), START_S)
    pair["b"].close()
    outcomes = await asyncio.gather(*tasks)
    seen["failures"] = [failures for _, failures in outcomes]
    seen["survived"] = [policies.judge(rollouts[0]) for rollouts, _ in outcomes]
    done = await fleet.update(policies.publish(3), timeout_s=TIMEOUT_S)
    seen["without"] = [done.held_by, sorted(done.drained)]
    _post(f"{address}/remove_worker?url={pair['b'].url}")

    again = start("again")
    await asyncio.to_thread(again.wait, START_S)
    member = member_of(again)
    await policies.attach(again.engine)
    await fleet.join("b", member, timeout_s=TIMEOUT_S)
    _post(f"{address}/add_worker?url={again.url}")
    seen["joined"] = await fleet.versions(timeout_s=TIMEOUT_S)
    before = again.generated()
    seen["back"] = [policies.judge(each) for each in await _rollouts(fleet, 24)]
    seen["of_the_new"] = again.generated() - before
    policies.trainer.transport.close()
    return seen


def _post(url: str) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(url, method="POST"), timeout=HANG_S
    ) as answer:
        return answer.read().decode()


def _calls(engine: Any) -> Any:
    return engine.until(time.monotonic() + TIMEOUT_S)


def completed(judged: list[dict[str, Any]]) -> int:
    return sum(each["tokens"] - len(PROMPTS[0]) for each in judged)


@needs_router
def test_rollouts_through_a_router_are_of_the_versions_that_they_name(routed):
    check(routed["still"], 1)
    assert all(routed["generated"])
    assert sum(routed["generated"]) == completed(routed["still"])
    check(routed["in_flight"], 1, 2)
    assert [1, 2] in [each["versions"] for each in routed["in_flight"]]


@needs_router
def test_a_control_call_through_a_router_reaches_one_server(routed):
    assert sorted(routed["paused"]) == [False, True]


@needs_router
def test_a_router_and_a_fleet_survive_the_death_of_a_server(routed):
    assert max(routed["failures"]) < 9
    check(routed["survived"], 2)
    assert routed["without"] == [("a",), ["b"]]


@needs_router
def test_a_router_gets_a_server_back_once_it_has_the_version(routed):
    assert routed["joined"] == {"a": "3", "b": "3"}
    check(routed["back"], 3)
    assert 0 < routed["of_the_new"] < completed(routed["back"])

"""Prefill and decode as two engines, joined by NIXL, which scripts/peers installs."""

import asyncio
import contextlib
import importlib.util
import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.serving.adapters.vllm import VllmFleet
from tests.deadlines import HANG_S
from tests.engine_job import call
from tests.integration.fleet_site import (
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
from tests.ports import free_port
from tests.weightsync.vllm_site import TIMEOUT_S

MISSING = [name for name in ("vllm", "nixl") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PAGES = 5  # of a prompt, the last of them not whole


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("split")
    save(folder)
    return call(_see_split, folder, ROUTER)


def _see_split(folder: Path, program: str | None) -> dict[str, Any]:
    register()
    over = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    # On a busy machine decode may come late for pages that prefill keeps.
    patient = {"kv_connector_extra_config": {"kv_lease_duration": 300}}
    words = ["--kv-transfer-config", json.dumps(over | patient)]
    with servers(folder) as start, contextlib.ExitStack() as stack:
        pair = {}
        for name in ("prefill", "decode"):
            settings = {
                "UCX_TLS": "tcp,shm,self,sysv,posix",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            pair[name] = start(name, *words, environment=settings)
        for served in pair.values():
            served.wait(START_S)
        address = None
        if program is not None:
            words = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            words += ["--prefill", pair["prefill"].url, "--decode", pair["decode"].url]
            address = stack.enter_context(router(program, folder / "router.log", *words))
        return asyncio.run(_run_split(folder, pair, address))


async def _run_split(folder: Path, pair: Any, address: str | None) -> dict[str, Any]:
    from primeblocks.async_loop.adapters.openai import generate_split, generate_tokens

    policies, seen = Policies(folder), {}
    prefill, decode = (client_of(pair[name].url) for name in ("prefill", "decode"))
    members = {name: member_of(served) for name, served in pair.items()}
    both = partial(generate_split, prefill, decode)
    fleet = VllmFleet(members, update=updating(), through=both)
    for each in members.values():
        await policies.attach(each.engine)
    prompts = np.random.default_rng(1).integers(4, 512, (3, 32 * PAGES - 10)).tolist()
    greedy = {"max_tokens": 24, "temperature": 0.0, "timeout_s": START_S}
    seen["rounds"] = []
    for version in (1, 2):
        await fleet.update(policies.publish(version), timeout_s=TIMEOUT_S)
        if version == 1:
            # The first transfer finds the other engine, for which vLLM waits five seconds.
            await retried(fleet.generate, [5, 6, 7], attempts=9, **greedy)
        before, compared = _hits(pair["decode"].url), []
        for prompt in prompts:
            first, second = await fleet.generate(prompt, **greedy)
            (single,) = await generate_tokens(decode, prompt, cache_salt=f"one-{version}", **greedy)
            compared.append(_compared(policies, first, second, single))
        hits = _hits(pair["decode"].url) - before
        seen["rounds"].append({"version": version, "hits": hits, "compared": compared})
    # The next turn of a conversation: what the decode server generated begins its prompt.
    turn, kept = [*map(int, second.tokens), *prompts[0][:40]], (len(second.tokens) - 1) // 32 * 32
    first, second = await fleet.generate(turn, **greedy)
    (single,) = await generate_tokens(decode, turn, cache_salt="one-2", **greedy)
    seen["turn"] = _compared(policies, first, second, single)
    # Of the pages that decode still has, it computed the rows from the prompt's last token on.
    seen["known"] = max(0, kept - len(prompts[0]) + 1)
    seen["turn"]["prompt"] = len(turn)
    seen["prompt"] = sum(map(len, prompts))
    # The prompt was computed before an update, the answer after it.
    first, _ = await fleet.generate(prompts[0], **greedy)
    await fleet.update(policies.publish(3), timeout_s=TIMEOUT_S)
    _, second = await fleet.generate(prompts[0], **greedy)
    try:
        policies.join(first, second)
    except PrimeblocksError as error:
        seen["mixed"] = str(error)
    if address is not None:
        before = _hits(pair["decode"].url)
        salted = {"cache_salt": "through a router"}
        (routed,) = await generate_tokens(client_of(address), prompts[0], **greedy, **salted)
        (single,) = await generate_tokens(decode, prompts[0], **greedy, cache_salt="alone")
        seen["routed"] = {
            "hits": _hits(pair["decode"].url) - before,
            "same": _same(routed, single),
            "missing": int(policies.routes(routed).missing.sum()),
        }
    policies.trainer.transport.close()
    return seen


def _compared(policies: Policies, first: Any, second: Any, single: Any) -> dict[str, Any]:
    """Two engines against one of them alone, and against the policy."""
    joined = policies.join(first, second)
    return {
        "same": _same(second, single),
        "same_routes": joined == policies.routes(single),
        "sent": int(policies.routes(second).missing[: second.prompt_length].sum()),
        "judged": policies.judge(second, routes=joined),
    }


def _same(one: Any, other: Any) -> bool:
    return bool((one.tokens == other.tokens).all() and (one.logprobs == other.logprobs).all())


def _hits(url: str) -> float:
    """Prompt tokens that a server got from another."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=HANG_S) as answer:
        lines = answer.read().decode().splitlines()
    counter = "vllm:external_prefix_cache_hits_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counter))


def test_prefill_and_decode_over_nixl_equal_one_engine(split):
    for each in split["rounds"]:
        assert each["hits"] == split["prompt"]  # all prompt tokens came from the other engine
        assert [one["same"] for one in each["compared"]] == [True] * 3
        check([one["judged"] for one in each["compared"]], each["version"])


def test_routes_of_both_engines_join_to_those_of_one(split):
    for each in split["rounds"]:
        assert [one["same_routes"] for one in each["compared"]] == [True] * 3
        # The last token of the prompt is computed again.
        assert sum(one["sent"] for one in each["compared"]) == split["prompt"] - 3


def test_a_prompt_of_other_weights_is_refused(split):
    assert "version 2 computed the prompt, and version 3 continued it" in split["mixed"]


def test_a_second_turn_has_rows_of_both_engines(split):
    turn = split["turn"]
    assert turn["same_routes"]
    check([turn["judged"]], 2)
    assert turn["sent"] == turn["prompt"] - 1 - split["known"]


@needs_router
def test_a_router_of_prefill_and_decode_loses_the_routes_of_the_prompt(split):
    prompt = split["prompt"] // 3
    assert split["routed"] == {"hits": prompt, "same": True, "missing": prompt}

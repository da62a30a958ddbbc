"""Running vLLM engines, with requests in flight: an AsyncLLM and vLLM's own server as a fleet."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as adapter
from tests.deadlines import EXPIRES_S, START_S
from tests.engine_forks import Nursery
from tests.engine_job import call
from tests.weightsync.vllm_site import (
    PROMPTS,
    SAID,
    SIZES,
    TIMEOUT_S,
    InProcess,
    Requests,
    Served,
    Trainer,
    names,
    needs,
    seen,
    spans_of,
)

LONG = 500  # tokens

pytestmark = needs("vllm")


@pytest.fixture(scope="module", params=["mixed", "pair"])
def fleet(request, tmp_path_factory):
    case = request.param
    if case == "pair" and not request.config.getoption("--full"):
        pytest.skip("two engines more: --full")
    folder = tmp_path_factory.mktemp(case)
    for seed in (0, 1):
        tiny_models.save(
            "qwen3_moe", folder / f"float32-{seed}", seed=seed, dtype="float32", **SIZES
        )
    return call(_see, case, folder)


def _see(case: str, folder: Path) -> dict[str, Any]:
    """An AsyncLLM with vLLM's server ("mixed"), or with another ("pair").

    The second of either starts with seed 1, so it is the freshly loaded reference for that.
    """
    register()
    with Nursery() as nursery:
        return asyncio.run(_run(case, folder, nursery))


async def _run(case: str, folder: Path, nursery: Nursery) -> dict[str, Any]:
    trainer = Trainer("float32", folder)
    attach = adapter.attach
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.transport.close)
        if case == "mixed":
            second: Any = Served(folder / "float32-1", folder / "server.log", nursery=nursery)
            stack.callback(second.close)
        first = InProcess(folder / "float32-0")
        stack.callback(first.close)
        if case == "pair":
            second = InProcess(folder / "float32-1")
            stack.callback(second.close)
        result: dict[str, Any] = {"fresh": await first.greedy("fresh")}
        await attach(first.engine, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S)
        result |= await _flight(first.requests, trainer)
        if case == "mixed":
            second.wait(START_S)
        await attach(second.engine, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S)
        result |= await _updates([first, second], trainer)
        if case == "mixed":
            result["lost"] = await _lost(second, trainer)
    return result


async def _flight(requests: Requests, trainer: Trainer) -> dict[str, Any]:
    """Every mode once, what was aborted sent again, ten updates; leaves version 14 of seed 0."""
    outputs = await asyncio.gather(*requests.start("reference", LONG))
    result: dict[str, Any] = {"reference": [seen(output) for output in outputs]}
    for version, mode in enumerate(("continue", "recompute", "abort"), start=1):
        result[mode] = await _one_update(requests, trainer, mode, version)
    result["resumed"] = await _resume(requests, trainer, result["abort"]["outputs"])
    result["ten"] = await _ten_updates(requests, trainer, 4)
    return result | await _late_call(requests, trainer, 14)


class PausedAmid:
    """Pauses amid long requests, which end before an update pauses on a busy machine."""

    def __init__(self, requests: Requests, name: str) -> None:
        self._requests, self._name = requests, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests.engine, name)

    async def pause_generation(self, **how: Any) -> None:
        self.tasks = self._requests.start(self._name, LONG)
        await self._requests.reach(*names(self._name), tokens=20)
        await self._requests.engine.pause_generation(**how)


async def _one_update(requests: Requests, trainer: Trainer, mode: Any, version: int) -> Any:
    """An update under requests in flight. Odd versions are the weights of seed 1."""
    engine = PausedAmid(requests, mode)
    receipt = trainer.publish(version, seed=version % 2)
    report = await adapter.update(engine, receipt, in_flight=mode, timeout_s=TIMEOUT_S)
    outputs = await asyncio.gather(*engine.tasks)
    told = [seen(output) for output in outputs]
    return {
        "outputs": told,
        "gaps": [
            trainer.gap(ids + tokens[:switch], [tokens[switch:], logprobs[switch:]])
            for ids, (tokens, logprobs), output in zip(PROMPTS, told, outputs, strict=True)
            for _, switch, _ in spans_of(output)[-1:]
        ],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "spans": [spans_of(output) for output in outputs],
        "report": report,
        "paused": await engine.is_paused(),
        "after": await requests.all(f"after {mode}", SAID),
    }


async def _resume(requests: Requests, trainer: Trainer, partial: list[Any]) -> list[Any]:
    """Go on with what was aborted: tokens, and the gap to the trainer's own model."""
    result = []
    for index, (ids, (tokens, _)) in enumerate(zip(PROMPTS, partial, strict=True)):
        prompt = ids + tokens
        output = await requests.one(f"resumed{index}", prompt, 60)
        result.append([seen(output), spans_of(output), trainer.gap(prompt, seen(output))])
    return result


async def _ten_updates(requests: Requests, trainer: Trainer, first: int) -> dict[str, Any]:
    """Requests that live through ten updates.

    The engine is paused from before each publish until the update resumes it. Otherwise a fast
    engine would run out of tokens, or an update would follow the one before without a token.
    """
    tasks = requests.start("ten", 950)
    for index in range(10):
        await requests.advance(*names("ten"), tokens=20)
        await requests.engine.pause_generation(mode="keep", clear_cache=False)
        receipt = trainer.publish(first + index, seed=index % 2)
        await adapter.update(requests.engine, receipt, timeout_s=TIMEOUT_S)
    outputs = await asyncio.gather(*tasks)
    return {
        "lengths": [len(output.outputs[0].token_ids) for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "spans": [spans_of(output) for output in outputs],
    }


async def _late_call(requests: Requests, trainer: Trainer, version: int) -> dict[str, Any]:
    """What an update leaves behind that was given up: an open session, a call that comes late."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    engine = requests.engine
    receipt = trainer.publish(version, seed=0)
    await engine.start_weight_update()
    late = {"version": version, "transaction": "given up", "timeout_s": TIMEOUT_S}
    await engine.update_weights(WeightTransferUpdateRequest(late))
    (state,) = await engine.collective_rpc("primeblocks_state")
    await adapter.update(engine, receipt, timeout_s=TIMEOUT_S)
    return {"late": state["version"], "after_late": await engine.get_weight_version()}


class StoppedAtLoad:
    """An engine whose process is stopped at the moment when it is to load."""

    def __init__(self, member: InProcess) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member.engine, name)

    async def update_weights(self, request: Any) -> None:
        os.kill(self._member.pid, signal.SIGSTOP)
        await self._member.engine.update_weights(request)


async def _failing(call: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        await call
    except PrimeblocksError as error:
        said = {"kind": type(error).__name__, "message": str(error), "engines": error.engines}
        return said | {"seconds": time.monotonic() - start}
    return {}


def _calls(engine: Any) -> Any:
    """An engine, or the calls of a server."""
    if isinstance(engine, adapter.VllmServer):
        return engine.until(time.monotonic() + TIMEOUT_S)
    return engine


async def _look(members: list[Any], name: str) -> dict[str, Any]:
    """What each member answers now, and under which label."""
    return {
        "greedy": [await member.greedy(name) for member in members],
        "labels": [await _calls(member.engine).get_weight_version() for member in members],
    }


async def _updates(members: list[Any], trainer: Trainer) -> dict[str, Any]:
    """Updates of all, then faults of the first."""
    first, second = members
    engines = [member.engine for member in members]
    update, result = adapter.update_all, {"start": await _look(members, "start")}

    # The requests end in their own time: nothing slow after the first of them, and first the one
    # whose tokens are seen late.
    receipt, tasks = trainer.publish(15, seed=1), []
    for member in (second, first):
        tasks.insert(0, asyncio.create_task(member.long("long")))
        await asyncio.wait_for(member.amid("long"), TIMEOUT_S)
    report = await update(engines, receipt, timeout_s=TIMEOUT_S)
    result["flight"] = list(await asyncio.gather(*tasks))
    result["one"] = await _look(members, "one") | {"report": report}
    await update(engines, trainer.publish(16, seed=0), timeout_s=TIMEOUT_S)
    result["two"] = await _look(members, "two")

    receipt = trainer.publish(17, seed=1)
    trainer.flip(17)
    result["corrupt"] = await _failing(update(engines, receipt, timeout_s=TIMEOUT_S))
    result["after_corrupt"] = await _look(members, "corrupt")
    trainer.flip(17)

    stopped = [StoppedAtLoad(first), second.engine]
    result["hung"] = await _failing(update(stopped, receipt, timeout_s=EXPIRES_S))
    result["after_hung"] = await _look([second], "hung")
    os.kill(first.pid, signal.SIGCONT)
    result["stays_paused"] = [await _calls(engine).is_paused() for engine in engines]
    await update(engines, receipt, timeout_s=TIMEOUT_S)
    result["after_retry"] = await _look(members, "retry")

    receipt = trainer.publish(18, seed=0)
    os.kill(first.pid, signal.SIGKILL)
    result["dead"] = await _failing(update(engines, receipt, timeout_s=TIMEOUT_S))
    result["after_dead"] = await _look([second], "dead")
    await update([second.engine], receipt, timeout_s=TIMEOUT_S)
    result["dropped"] = await _look([second], "dropped")
    return result


async def _lost(member: Served, trainer: Trainer) -> dict[str, Any]:
    """A server that hangs, then is gone."""
    receipt = trainer.publish(19, seed=1)
    os.killpg(member.process.pid, signal.SIGSTOP)
    hung = await _failing(adapter.update(member.engine, receipt, timeout_s=1.0))
    os.killpg(member.process.pid, signal.SIGCONT)
    await adapter.update(member.engine, receipt, timeout_s=TIMEOUT_S)
    after = await _look([member], "lost")
    receipt = trainer.publish(20, seed=0)
    member.close()
    gone = await _failing(adapter.update(member.engine, receipt, timeout_s=TIMEOUT_S))
    return {"hung": hung, "after": after, "gone": gone}


def answers(fleet, *seeds):
    """What engines that were freshly loaded from the checkpoints of these seeds answer."""
    return [fleet["start"]["greedy"][seed] for seed in seeds]


def common_prefix(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("mode", "version", "before"), [("continue", 1, None), ("recompute", 2, 1), ("abort", 3, 2)]
)
def test_requests_in_flight_over_an_update_finish(fleet, mode, version, before):
    seen = fleet[mode]
    assert seen["finish"] == ["abort" if mode == "abort" else "length"] * 3
    assert not seen["paused"]
    assert seen["report"].version == version
    for (tokens, _), spans in zip(seen["outputs"], seen["spans"], strict=True):
        old = "default" if before is None else str(before)
        labels = [old] if mode == "abort" else [old, str(version)]
        assert [label for label, _, _ in spans] == labels
        assert spans[0][2] >= 20
        assert spans[-1][2] == len(tokens)


def test_tokens_before_the_switch_are_the_old_policy_and_later_ones_are_not(fleet):
    for output, spans, (old, _) in zip(
        fleet["continue"]["outputs"],
        fleet["continue"]["spans"],
        fleet["reference"],
        strict=True,
    ):
        switch = spans[1][1]
        assert output[0][:switch] == old[:switch]
        assert common_prefix(output[0], old) < LONG


def test_the_modes_differ_in_what_later_tokens_were_computed_from(fleet):
    gaps = {mode: fleet[mode]["gaps"] for mode in ("continue", "recompute")}
    assert min(gaps["continue"]) > 0.01  # old KV, new weights: neither policy
    assert max(gaps["recompute"]) < 1e-5  # as the trainer's own model would


def test_an_aborted_request_that_is_sent_again_goes_on_under_the_new_weights(fleet):
    for (tokens, _), spans, gap in fleet["resumed"]:
        assert len(tokens) == 60
        assert spans == [["3", 0, 60]]
        assert gap < 1e-5


def test_requests_in_flight_over_ten_updates_finish_with_a_version_for_each_token(fleet):
    ten = fleet["ten"]
    assert ten["lengths"] == [950] * 3
    assert ten["finish"] == ["length"] * 3
    for spans in ten["spans"]:
        assert [label for label, _, _ in spans] == [str(version) for version in range(3, 14)]
        assert spans[0][1] == 0
        assert spans[-1][2] == 950
        assert all(one[2] == after[1] for one, after in itertools.pairwise(spans))
        assert all(start < end for _, start, end in spans)


def test_a_late_call_of_an_update_that_was_given_up_loads_nothing(fleet):
    assert (fleet["late"], fleet["after_late"]) == (13, "14")


def test_new_requests_are_under_the_new_weights(fleet):
    assert fleet["recompute"]["after"] == fleet["fresh"]
    assert fleet["continue"]["after"] == fleet["abort"]["after"] != fleet["fresh"]


def test_updated_engines_equal_fresh_ones_bit_for_bit(fleet):
    fresh = answers(fleet, 0, 1)
    assert fleet["fresh"] == fresh[0]
    assert fresh[0] != fresh[1]
    assert fleet["one"]["greedy"] == [fresh[1], fresh[1]]
    assert fleet["two"]["greedy"] == [fresh[0], fresh[0]]
    assert (fleet["one"]["labels"], fleet["two"]["labels"]) == (["15"] * 2, ["16"] * 2)
    assert fleet["one"]["report"].version == 15


def test_requests_in_flight_on_every_engine_finish_with_their_versions(fleet):
    for (tokens, spans), before in zip(fleet["flight"], ["14", "default"], strict=True):
        assert tokens == 900
        ((old, start, switch), (new, again, end)) = spans
        assert (old, start, new, end) == (before, 0, "15", 900)
        assert switch == again


def test_a_flipped_byte_is_refused_by_all_and_the_old_weights_are_served(fleet):
    assert fleet["corrupt"]["kind"] == "CorruptionError"
    assert "fails its digest" in fleet["corrupt"]["message"]
    assert fleet["corrupt"]["engines"] == (0, 1)
    assert fleet["after_corrupt"] == {"greedy": answers(fleet, 0, 0), "labels": ["16", "16"]}


def test_an_engine_that_hangs_at_its_load_takes_the_other_back(fleet):
    assert fleet["hung"]["kind"] == "DeadlineError"
    assert fleet["hung"]["engines"] == (0,)
    assert fleet["hung"]["seconds"] < TIMEOUT_S
    assert fleet["after_hung"] == {"greedy": answers(fleet, 0), "labels": ["16"]}
    # It may have loaded when it goes on, so it must not serve yet.
    assert fleet["stays_paused"] == [True, False]
    assert fleet["after_retry"] == {"greedy": answers(fleet, 1, 1), "labels": ["17", "17"]}


def test_a_dead_engine_is_named_and_dropped(fleet):
    assert fleet["dead"]["kind"] == "EngineError"
    assert fleet["dead"]["engines"] == (0,)
    assert "Engine 0 of 2: the engine died" in fleet["dead"]["message"]
    assert fleet["dead"]["seconds"] < TIMEOUT_S / 2
    assert fleet["after_dead"] == {"greedy": answers(fleet, 1), "labels": ["17"]}
    assert fleet["dropped"] == {"greedy": answers(fleet, 0), "labels": ["18"]}


def test_a_server_that_hangs_or_is_gone(fleet):
    if "lost" not in fleet:
        pytest.skip("no server in this fleet")
    lost = fleet["lost"]
    assert lost["hung"]["kind"] == "DeadlineError"
    assert lost["hung"]["seconds"] < TIMEOUT_S
    assert lost["after"] == {"greedy": answers(fleet, 1), "labels": ["19"]}
    assert lost["gone"]["kind"] == "EngineError"
    assert "Restart the" in lost["gone"]["message"]
    assert lost["gone"]["seconds"] < TIMEOUT_S / 2

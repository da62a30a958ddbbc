"""A fleet of fakes of vLLM's engines, updated by weightsync (real ones: integration/)."""

import asyncio
import os
import sys
import traceback
import warnings
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.async_loop import AsyncLoop, Rollout, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import (
    DeadlineError,
    EngineError,
    MissingPackageError,
    PrimeblocksError,
    TransferError,
)
from primeblocks.serving.adapters import vllm as adapter
from primeblocks.serving.adapters.vllm import FleetMember, VllmFleet
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync.adapters.vllm import update_all
from primeblocks.weightsync.marker import Receipt
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.fake_engine import FakeEngine, in_a_loop


class Engine(FakeEngine):
    """Answers requests too: with what it serves, and under which salt it was asked."""

    def __init__(self, *, name="", **faults):
        super().__init__([0], **faults)
        self.name, self.asked, self.is_lost = name, [], False

    async def get_weight_version(self):
        return await self._call("version", lambda: self.label)

    async def generate(self, prompt, *, cache_salt):
        if self.is_lost or self.errored:
            raise EngineError("lost")
        self.asked.append((prompt, cache_salt))
        return self.name, self.serving, cache_salt

    @property
    def member(self):
        return FleetMember(self.generate, self)


def published(version):
    return Receipt(version, 0, 0.0, "")


def fleet_of(*names, faults=None, **options):
    """A fleet whose random name is "name"."""
    engines = {name: Engine(name=name, **(faults or {}).get(name, {})) for name in names}
    members = {name: engine.member for name, engine in engines.items()}
    with patch.object(adapter, "token_hex", lambda _: "name"):
        return engines, VllmFleet(members, update=options.pop("update", update_all), **options)


def serving(version):
    return (version,), str(version)


@in_a_loop
async def test_requests_wait_for_a_version_and_follow_its_salt():
    engines, fleet = fleet_of("a", "b")
    with pytest.raises(EngineError, match="no engine of the fleet has a version yet"):
        await fleet.generate("x")
    done = await fleet.update(published(3), timeout_s=TIMEOUT_S)
    assert (done.version, done.held_by, dict(done.drained)) == (3, ("a", "b"), {})
    assert await fleet.generate("x") == ("a", serving(3), "policy-3-name")
    assert await fleet.versions(timeout_s=TIMEOUT_S) == {"a": "3", "b": "3"}
    await fleet.update(published(4), timeout_s=TIMEOUT_S)
    assert await fleet.generate("x") == ("a", serving(4), "policy-4-name")
    assert engines["b"].serving == serving(4)


@pytest.mark.parametrize(
    "fault", [{"worker_faults": {(0, 2): ("TransferError", "full")}}, {"faults": {13: "die"}}]
)
@in_a_loop
async def test_an_engine_that_fails_an_update_is_drained_and_comes_back_with_it(fault, caplog):
    engines, fleet = fleet_of("a", "b", "c", faults={"b": fault})
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    done = await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert done.held_by == fleet.open == ("a", "c")
    assert set(done.drained) == {"b"}
    drained = "engine 'b' is drained, because it did not load version 2. The engines ['a', 'c']"
    assert drained in caplog.text
    answers = [await fleet.generate(i) for i in range(4)]
    assert {(name, held) for name, held, _ in answers} == {("a", serving(2))}
    engines["b"] = again = Engine(name="b")
    await fleet.join("b", again.member, timeout_s=TIMEOUT_S)
    assert again.serving == serving(2)
    assert set(fleet.open) == {"a", "b", "c"}
    await fleet.update(published(3), timeout_s=TIMEOUT_S)
    assert [each.serving for each in engines.values()] == [serving(3)] * 3


@in_a_loop
async def test_a_version_that_none_can_load_drains_nobody():
    bad = {"worker_faults": {(0, "verify"): ("CorruptionError", "a digest")}}

    engines, fleet = fleet_of("a", "b")
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    for engine in engines.values():
        engine.worker_faults |= bad["worker_faults"]
    with pytest.raises(PrimeblocksError, match="a digest"):
        await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert fleet.version == 1
    assert fleet.open == ("a", "b")
    name, held, salt = await fleet.generate("x")
    assert (name, held) == ("a", serving(1))
    assert salt.startswith("policy-1-name-unsettled")  # An error does not say that all went back.
    await fleet.update(published(3), timeout_s=TIMEOUT_S)
    assert await fleet.generate("x") == ("a", serving(3), "policy-3-name")


@in_a_loop
async def test_an_engine_that_joins_during_an_update_gets_the_newer_version():
    gate = asyncio.Event()

    async def slowly(engines, receipt, *, timeout_s):
        if receipt.version == 2 and not gate.is_set():
            await gate.wait()
        await update_all(engines, receipt, timeout_s=timeout_s)

    _, fleet = fleet_of("a", update=slowly)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    update = asyncio.ensure_future(fleet.update(published(2), timeout_s=TIMEOUT_S))
    new = Engine(name="b")
    joined = asyncio.ensure_future(fleet.join("b", new.member, timeout_s=TIMEOUT_S))
    for _ in range(50):
        await asyncio.sleep(0)
    assert fleet.open == ("a",)
    assert new.log == []
    gate.set()
    await update
    await joined
    assert new.serving == serving(2)
    assert fleet.open == ("a", "b")


@in_a_loop
async def test_an_engine_that_holds_something_else_stays_out():
    async def nothing(engines, receipt, *, timeout_s):
        pass

    _, fleet = fleet_of("a", update=nothing)
    await fleet.update(published(0), timeout_s=TIMEOUT_S)
    other = Engine(name="b")
    other.label = "default"
    with pytest.raises(EngineError, match="'b' reports version 'default'.*version 0"):
        await fleet.join("b", other.member, timeout_s=TIMEOUT_S)
    assert fleet.open == ("a",)
    failing = Engine(worker_faults={(0, 5): ("TransferError", "full")})
    _, fleet = fleet_of("a")
    await fleet.update(published(5), timeout_s=TIMEOUT_S)
    with pytest.raises(TransferError, match="full"):
        await fleet.join("a", failing.member, timeout_s=TIMEOUT_S)
    assert (await fleet.generate("x"))[:2] == ("a", serving(5))


@in_a_loop
async def test_what_hangs_ends_at_the_deadline_and_the_next_update_mends_it():
    clock, hangs = ManualClock(), [True]

    async def hang(engines, receipt, *, timeout_s):
        if hangs[0]:
            await asyncio.Event().wait()
        await update_all(engines, receipt, timeout_s=TIMEOUT_S)

    async def past(task, seconds):
        for _ in range(20):
            await asyncio.sleep(0)
        clock.advance(seconds)
        return await task

    _, fleet = fleet_of("a", update=hang, clock=clock)
    hangs[0] = False
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    hangs[0] = True
    task = asyncio.ensure_future(fleet.update(published(2), timeout_s=TIMEOUT_S))
    waiting = asyncio.ensure_future(fleet.join("b", Engine().member, timeout_s=TIMEOUT_S))
    with pytest.raises(DeadlineError, match="the opening of engine 'b'"):
        await past(waiting, TIMEOUT_S)
    with pytest.raises(DeadlineError, match="update of the fleet to version 2"):
        await past(task, TIMEOUT_S)
    # Nobody knows what the engine holds.
    assert "unsettled" in (await fleet.generate("x"))[2]
    hangs[0] = False
    await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert (await fleet.generate("x"))[1:] == (serving(2), "policy-2-name")


@in_a_loop
async def test_control_calls_reach_every_open_engine():
    engines, fleet = fleet_of("a", "b", "c")
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    fleet.drain("c")
    await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    assert [each.paused for each in engines.values()] == [True, True, False]
    await fleet.resume(timeout_s=TIMEOUT_S)
    assert not any(each.paused for each in engines.values())
    engines["a"].faults = {len(engines["a"].log): "refuse"}
    with pytest.raises(EngineError, match="pause_generation failed on 1 of 2 .* 'a': .*refused"):
        await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    assert [each.paused for each in engines.values()] == [False, True, False]
    for name in ("a", "b"):
        fleet.drain(name)
    with pytest.raises(EngineError, match="all 3 engines of the fleet are drained"):
        await fleet.update(published(2), timeout_s=TIMEOUT_S)


@in_a_loop
async def test_servers_get_calls_with_a_deadline_and_a_router_all_requests():
    engine, deadlines, clock = Engine(), [], ManualClock()

    def until(deadline):
        deadlines.append(deadline)
        return engine

    async def load(engines, receipt, *, timeout_s):
        await update_all([engine], receipt, timeout_s=timeout_s)

    async def routed(prompt, *, cache_salt):
        return "router", prompt, cache_salt

    member = FleetMember(engine.generate, SimpleNamespace(until=until))
    fleet = VllmFleet({"a": member}, update=load, through=routed, clock=clock)
    await fleet.update(published(7), timeout_s=TIMEOUT_S)
    assert await fleet.versions(timeout_s=TIMEOUT_S) == {"a": "7"}
    assert deadlines == [clock.now() + TIMEOUT_S]
    name, prompt, salt = await fleet.generate("x")
    assert (name, prompt, salt.startswith("policy-7-")) == ("router", "x", True)
    assert engine.asked == []


@in_a_loop
async def test_a_fleet_that_comes_later_shares_no_pages_with_one_before():
    """The engines outlive the trainer, which goes back to older weights and the same versions."""
    engine, salts = Engine(), []
    for _ in range(2):
        fleet = VllmFleet({"a": engine.member}, update=update_all)
        await fleet.update(published(1), timeout_s=TIMEOUT_S)
        salts += [(await fleet.generate(i))[2] for i in range(2)]
    assert salts[0] == salts[1] != salts[2] == salts[3]


@settings(max_examples=settings().max_examples // 3)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(0, 3)),
            st.tuples(st.sampled_from(["lose", "join"]), st.sampled_from("abc")),
            st.tuples(
                st.just("update"),
                st.dictionaries(
                    st.sampled_from("abc"), st.sampled_from(["verify", "load"]), max_size=3
                ),
            ),
        ),
        max_size=20,
    )
)
@in_a_loop
async def test_an_engine_that_is_open_serves_the_version_of_the_fleet(events):
    engines, fleet = fleet_of("a", "b", "c")
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    newest, is_settled = 1, True
    for kind, what in events:
        if kind == "join":
            engines[what] = Engine(name=what)
            await fleet.join(what, engines[what].member, timeout_s=TIMEOUT_S)
        elif kind == "lose":
            engines[what].is_lost = True
        elif kind == "ask":
            try:
                _, held, salt = await fleet.generate(what)
            except EngineError:
                continue
            assert held == serving(fleet.version)
            assert (salt == f"policy-{fleet.version}-name") == is_settled
        else:
            newest += 1
            for name, moment in what.items():
                act = newest if moment == "load" else moment
                engines[name].worker_faults = {(0, act): ("TransferError", "by script")}
            was_open, before = fleet.open, fleet.version
            try:
                done = await fleet.update(published(newest), timeout_s=TIMEOUT_S)
            except PrimeblocksError:
                assert (fleet.open, fleet.version) == (was_open, before)
                assert set(was_open) <= set(what)
                is_settled = is_settled and not was_open
            else:
                is_settled = True
                assert fleet.version == newest
                assert set(done.drained) == set(was_open) & set(what)
                assert done.held_by == fleet.open
        for name in fleet.open:
            assert engines[name].serving == serving(fleet.version)


@in_a_loop
async def test_a_run_survives_an_engine_that_dies_and_trains_every_prompt_once():
    """On AsyncLLM-like fakes: the loop, retries, a death in mid-run and a return."""
    trained = []

    engines, fleet = fleet_of("a", "b")

    async def generate(prompt, *, version):
        if prompt == 20:
            engines["b"].is_lost = True
        await asyncio.sleep(0)
        _, ((held,), _), _ = await fleet.generate(prompt)
        return [
            Rollout(
                tokens=np.array([prompt, 1]), prompt_length=1, logprobs=np.array([-1.0]),
                versions=np.array([held]),
                finish_reason="stop",
            )
        ]  # fmt: skip

    def train(groups, *, version):
        trained.extend(group.rollouts[0].tokens[0] for group in groups)

    async def publish(version):
        await fleet.update(published(version), timeout_s=TIMEOUT_S)
        if version == 9:
            engines["b"] = Engine(name="b")
            await fleet.join("b", engines["b"].member, timeout_s=TIMEOUT_S)

    await fleet.update(published(0), timeout_s=TIMEOUT_S)
    policy = StalenessPolicy(1, correction="none needed: nothing is learnt")
    loop = AsyncLoop(
        prompts=range(48),
        generate=generate,
        train=train,
        publish=publish,
        buffer=RolloutBuffer(capacity=16, staleness=policy),
        batch_size=4,
        max_in_flight=6,
        retries=Retries(attempts=3, backoff_s=0.0),
    )
    async with loop:
        steps = [step async for step in loop.steps(12)]
    assert [step.lost for step in steps if step.lost] == []
    assert sorted(map(int, trained)) == list(range(48))
    assert set(fleet.open) == {"a", "b"}
    assert engines["b"].serving == engines["a"].serving == serving(12)


def _use_without_vllm():
    for name in [name for name in sys.modules if "vllm" in name]:
        del sys.modules[name]
    sys.modules["vllm"] = None
    blocks = ("async_loop", "serving")
    vllm, fleets = (import_module(f"primeblocks.{each}.adapters.vllm") for each in blocks)
    fleets.VllmFleet({"a": fleets.FleetMember(print, None)}, update=print)
    for name in ("VllmEngine", "base_engine_args", "generate_in_parts"):
        with pytest.raises(MissingPackageError, match="^vllm is not installed"):
            getattr(vllm, name)
    with pytest.raises(AttributeError):
        vllm.nonsense  # noqa: B018


def test_a_fleet_needs_no_vllm_and_an_engine_says_that_it_does():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none
        child = os.fork()
    if child == 0:
        try:
            _use_without_vllm()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

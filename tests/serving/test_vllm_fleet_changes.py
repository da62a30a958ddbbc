"""A fleet while it changes: requests and control calls during updates, and after failed ones."""

import asyncio

import pytest

from primeblocks.errors import DeadlineError, TransferError, UsageError
from primeblocks.serving.adapters.vllm import FleetMember, VllmFleet
from primeblocks.weightsync.adapters.vllm import update_all
from primeblocks.weightsync.marker import Receipt
from tests.serving.test_vllm_fleet import TIMEOUT_S, Engine, fleet_of, published, serving
from tests.weightsync.fake_engine import in_a_loop


@pytest.mark.parametrize("first", [(0,), ()], ids=["one by one", "together"])
@in_a_loop
async def test_an_engine_that_loads_and_answers_late_shares_no_pages(first):
    async def late(engines, receipt, *, timeout_s):
        await update_all(engines, receipt, timeout_s=timeout_s)
        if receipt.version == 2:
            error = DeadlineError("a resume was late")
            error.engines = first if len(engines) == 2 else ()
            raise error

    _, fleet = fleet_of("a", "b", update=late)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    with pytest.raises(DeadlineError, match="late"):
        await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert (fleet.version, fleet.open) == (1, ("a", "b"))
    answers = [await fleet.generate(i) for i in range(3)]
    assert [held for _, held, _ in answers] == [serving(2)] * 3
    assert len({salt for _, _, salt in answers} | {"policy-1-name", "policy-2-name"}) == 5
    await fleet.update(published(3), timeout_s=TIMEOUT_S)
    assert (await fleet.generate("x"))[1:] == (serving(3), "policy-3-name")


@in_a_loop
async def test_a_version_below_the_fleets_is_refused():
    gate = asyncio.Event()

    async def slowly(engines, receipt, *, timeout_s):
        await gate.wait()
        await update_all(engines, receipt, timeout_s=timeout_s)

    _, fleet = fleet_of("a", update=slowly)
    newer = asyncio.ensure_future(fleet.update(published(3), timeout_s=TIMEOUT_S))
    older = asyncio.ensure_future(fleet.update(published(2), timeout_s=TIMEOUT_S))
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    await newer
    with pytest.raises(UsageError, match="version 2 after version 3.*a higher version"):
        await older
    await fleet.update(published(3), timeout_s=TIMEOUT_S)  # Once more is fine.
    assert await fleet.generate("x") == ("a", serving(3), "policy-3-name")


@in_a_loop
async def test_other_weights_under_the_same_version_share_no_pages():
    _, fleet = fleet_of("a")
    first, second = (Receipt(1, 0, 0.0, digest) for digest in ("first", "second"))
    salts = []
    for receipt in (first, second, second):
        await fleet.update(receipt, timeout_s=TIMEOUT_S)
        salts += [(await fleet.generate(i))[2] for i in range(2)]
    assert salts[:2] == ["policy-1-name"] * 2
    assert len({"policy-1-name", *salts[2:]}) == 5
    await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert (await fleet.generate("x"))[2] == "policy-2-name"


@in_a_loop
async def test_control_calls_wait_for_an_update():
    loading, gate = asyncio.Event(), asyncio.Event()
    engines, fleet = fleet_of("a", "b")
    a = engines["a"]
    load = a.update_weights

    async def slowly(request):
        loading.set()
        await gate.wait()
        return await load(request)

    a.update_weights = slowly
    update = asyncio.ensure_future(fleet.update(published(1), timeout_s=TIMEOUT_S))
    await loading.wait()
    resumed = asyncio.ensure_future(fleet.resume(timeout_s=TIMEOUT_S))
    paused = asyncio.ensure_future(fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S))
    for _ in range(50):
        await asyncio.sleep(0)
    assert a.paused  # Its weights are torn: nobody may be answered.
    gate.set()
    await update
    await resumed
    await paused
    assert a.paused  # The update did not undo what came after it.
    assert engines["b"].paused
    await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert a.serving == engines["b"].serving == serving(2)


@in_a_loop
async def test_no_two_requests_of_an_update_share_pages():
    gate, loading = asyncio.Event(), asyncio.Event()

    async def slowly(engines, receipt, *, timeout_s):
        loading.set()
        await gate.wait()
        await update_all(engines, receipt, timeout_s=timeout_s)

    _, fleet = fleet_of("a", update=slowly)
    gate.set()
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    gate.clear()
    loading.clear()
    task = asyncio.ensure_future(fleet.update(published(2), timeout_s=TIMEOUT_S))
    await loading.wait()
    salts = [(await fleet.generate(i))[2] for i in range(3)]
    assert len({*salts, "policy-1-name", "policy-2-name"}) == 5
    gate.set()
    await task
    assert (await fleet.generate("x"))[2] == "policy-2-name"


@in_a_loop
async def test_prefill_pauses_before_those_that_read_its_pages():
    engines, order = {name: Engine(name=name) for name in ("d", "p", "e")}, []
    for name, engine in engines.items():
        pause = engine.pause_generation

        async def told(name=name, pause=pause, **how):
            order.append(f"{name} pauses")
            for _ in range(10):  # as long as others read its pages
                await asyncio.sleep(0)
            await pause(**how)
            order.append(f"{name} paused")

        engine.pause_generation = told
    members = {
        name: FleetMember(engine.generate, engine, is_prefill=name == "p")
        for name, engine in engines.items()
    }
    fleet = VllmFleet(members, update=update_all)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    half = len(order) // 2
    for of_one in (order[:half], order[half:]):
        assert of_one[:2] == ["p pauses", "p paused"]
        assert set(of_one[2:4]) == {"d pauses", "e pauses"}  # together
    again = Engine(name="p")
    member = FleetMember(again.generate, again, is_prefill=True)
    await fleet.join("p", member, timeout_s=TIMEOUT_S)
    assert again.paused  # As the fleet is.
    await fleet.resume(timeout_s=TIMEOUT_S)
    assert again.serving == serving(1)


@in_a_loop
async def test_an_engine_that_hangs_while_it_joins_keeps_nobody_waiting():
    goes_on = asyncio.Event()
    slow = Engine(name="b")

    async def slowly(engines, receipt, *, timeout_s):
        if slow in engines and receipt.version == 1:
            await goes_on.wait()
            raise TransferError("version 1 is no longer there")
        await update_all(engines, receipt, timeout_s=timeout_s)

    engines, fleet = fleet_of("a", update=slowly)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    joined = asyncio.ensure_future(fleet.join("b", slow.member, timeout_s=TIMEOUT_S))
    await asyncio.sleep(0)
    await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    await fleet.update(published(2), timeout_s=TIMEOUT_S)
    assert engines["a"].serving == serving(2)
    assert fleet.open == ("a",)
    goes_on.set()
    await joined
    assert slow.serving == serving(2)
    assert fleet.open == ("a", "b")


def slow_to_load(engine):
    """An `update` that loads into this engine once the event is set, and the event."""
    goes_on = asyncio.Event()

    async def update(engines, receipt, *, timeout_s):
        if engine in engines:
            await goes_on.wait()
        await update_all(engines, receipt, timeout_s=timeout_s)

    return update, goes_on


async def turns(count=50):
    for _ in range(count):
        await asyncio.sleep(0)


@in_a_loop
async def test_an_update_waits_for_the_join_of_the_only_engine():
    new = Engine(name="b")
    update, goes_on = slow_to_load(new)
    _, fleet = fleet_of("a", update=update)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    fleet.drain("a")
    joined = asyncio.ensure_future(fleet.join("b", new.member, timeout_s=TIMEOUT_S))
    await turns()
    updated = asyncio.ensure_future(fleet.update(published(2), timeout_s=TIMEOUT_S))
    await turns()
    goes_on.set()
    await joined
    assert (await updated).held_by == ("b",)
    assert new.serving == serving(2)


@in_a_loop
async def test_an_engine_that_joins_a_paused_fleet_is_paused():
    new = Engine(name="b")
    update, goes_on = slow_to_load(new)
    engines, fleet = fleet_of("a", update=update)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    joined = asyncio.ensure_future(fleet.join("b", new.member, timeout_s=TIMEOUT_S))
    await turns()
    await fleet.pause(mode="keep", clear_cache=False, timeout_s=TIMEOUT_S)
    goes_on.set()
    await joined
    assert (new.paused, engines["a"].paused) == (True, True)
    await fleet.update(published(2), timeout_s=TIMEOUT_S)  # Ends the pause.
    third = Engine(name="c")
    await fleet.join("c", third.member, timeout_s=TIMEOUT_S)
    assert [each.paused for each in (new, engines["a"], third)] == [False] * 3


@in_a_loop
async def test_two_joins_of_one_engine_load_in_turn():
    new, loading = Engine(name="b"), []

    async def update(engines, receipt, *, timeout_s):
        loading.append(new in engines)
        assert loading.count(True) <= 1
        await turns(10)
        await update_all(engines, receipt, timeout_s=timeout_s)
        loading.pop()

    _, fleet = fleet_of("a", update=update)
    await fleet.update(published(1), timeout_s=TIMEOUT_S)
    joins = (fleet.join("b", new.member, timeout_s=TIMEOUT_S) for _ in range(2))
    await asyncio.gather(*joins)
    assert fleet.open == ("a", "b")
    assert new.serving == serving(1)

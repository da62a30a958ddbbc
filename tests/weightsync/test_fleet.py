"""Fleets of fake engines: every engine reaches a version or none does, at every fault."""

import asyncio
import contextlib
from functools import wraps
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import (
    CorruptionError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync.adapters.vllm import front, update_all
from primeblocks.weightsync.engines import remote
from primeblocks.weightsync.marker import Receipt
from tests.deadlines import HANG_S
from tests.weightsync.fake_engine import FakeEngine, hurried_loop

TIMEOUT_S = 0.25
CALLS = 15  # of an update that succeeds: see test_the_calls_of_an_update


class Fleet:
    """Fakes, and a check after each of their calls: one version is served, under its label."""

    def __init__(self, held, faults=None, worker_faults=None):
        self.mixed = []
        self.engines = [
            FakeEngine(
                versions,
                (faults or {}).get(index),
                (worker_faults or {}).get(index),
                seen=self.look,
            )
            for index, versions in enumerate(held)
        ]

    def look(self):
        served = [engine.serving for engine in self.engines if engine.serving is not None]
        told = {(str(held), label) for weights, label in served for held in weights}
        if len(told) > 1 or any(held != label for held, label in told):
            self.mixed.append(served)

    async def update(self, version, *, timeout_s=TIMEOUT_S, engines=None):
        fleet = self.engines if engines is None else engines
        return await update_all(fleet, Receipt(version, 0, 0.0, ""), timeout_s=timeout_s)

    async def fails(self, version, kind=PrimeblocksError, **how):
        now = asyncio.get_running_loop().time
        start = now()
        with pytest.raises(kind) as met:
            await self.update(version, **how)
        assert now() - start < TIMEOUT_S + 0.5
        return met.value

    async def repair(self, version):
        """What hangs goes on, what is dead is dropped, and the update is made again."""
        for engine in self.engines:
            engine.faults.clear()
            engine.worker_faults.clear()
            engine.wake()
            await engine.settle()
        self.look()
        self.engines = [engine for engine in self.engines if not engine.errored]
        if self.engines:
            await self.update(version, timeout_s=HANG_S)
        for engine in self.engines:
            assert (set(engine.weights), engine.label) == ({version}, str(version))
            assert not engine.paused
            assert not engine.active

    @property
    def weights(self):
        return [engine.weights for engine in self.engines]


def in_hurried_time(test):
    """Time is the loop's: whatever the machine does, nothing is late that did not wait."""

    @wraps(test)
    def run(*args, **named):
        with asyncio.Runner(loop_factory=hurried_loop) as runner:
            clock = SimpleNamespace(monotonic=runner.get_loop().time)
            with (
                mock.patch.object(remote, "time", clock),
                mock.patch.object(front, "time", clock),
            ):
                runner.run(test(*args, **named))

    return run


@in_hurried_time
async def test_the_calls_of_an_update():
    fleet = Fleet([[1, 1]])
    report = await fleet.update(2)
    assert report.version == 2
    assert 0 <= report.pause_seconds <= report.seconds
    (engine,) = fleet.engines
    ask, check = "primeblocks_state", "primeblocks_verify"
    before = ["is_paused", ask, check, ask, ask]
    paused = ["pause keep False", "start", "load 2", ask, "reset encoder", "finish", "resume"]
    assert engine.log == before + paused
    assert engine.features_of == set()
    assert len(engine.log) <= CALLS


@in_hurried_time
async def test_an_engine_that_loads_pages_is_asked_again_to_clear_its_cache():
    fleet = Fleet([[1], [1]])
    engine, receipt = fleet.engines[1], Receipt(2, 0, 0.0, "")
    pause, refusals = engine.pause_generation, 3

    async def once_loaded(**how):
        nonlocal refusals
        await pause(**how)
        refusals -= 1
        if refusals >= 0:
            raise RuntimeError("Failed to reset KV cache")

    engine.pause_generation = once_loaded
    await update_all(fleet.engines, receipt, in_flight="recompute", timeout_s=TIMEOUT_S)
    assert (refusals, fleet.weights, fleet.mixed) == (-1, [[2], [2]], [])
    refusals = 1 << 30
    receipt = Receipt(3, 0, 0.0, "")
    with pytest.raises(EngineError, match="Failed to reset KV cache") as met:
        await update_all(fleet.engines, receipt, in_flight="recompute", timeout_s=TIMEOUT_S)
    assert met.value.engines == (1,)
    assert (fleet.weights, engine.paused) == ([[2], [2]], False)


@in_hurried_time
async def test_an_engine_whose_pages_are_read_pauses_before_its_readers():
    fleet = Fleet([[1], [1], [1]])
    decode, prefill, other = fleet.engines
    pause, readers = prefill.pause_generation, []

    async def until_read(**how):
        await asyncio.sleep(TIMEOUT_S / 2)
        readers.append((decode.paused, other.paused))
        await pause(**how)

    prefill.pause_generation = until_read
    receipt = Receipt(2, 0, 0.0, "")
    await update_all(fleet.engines, receipt, prefill=[1], timeout_s=TIMEOUT_S)
    assert readers == [(False, False)]
    assert fleet.weights == [[2]] * 3
    assert fleet.mixed == []
    for beyond in ([3], [-1]):
        with pytest.raises(UsageError, match=r"of the 3 engines, counted from 0; got"):
            await update_all(fleet.engines, receipt, prefill=beyond, timeout_s=TIMEOUT_S)
    logs = [list(engine.log) for engine in fleet.engines]
    recompute = {"in_flight": "recompute", "timeout_s": TIMEOUT_S}
    with pytest.raises(UnsupportedError, match='Use "continue" or "abort"'):
        await update_all(fleet.engines, receipt, prefill=[1], **recompute)
    assert [engine.log for engine in fleet.engines] == logs
    await update_all([other], receipt, prefill=[0], **recompute)  # Nobody reads from it.


@in_hurried_time
async def test_an_engine_whose_pages_nobody_reads_stops_no_update_for_good():
    fleet = Fleet([[1], [1]], {0: {5: "hang"}})  # Its pause, until its leases end.
    prefill, decode = fleet.engines
    receipt = Receipt(2, 0, 0.0, "")
    with pytest.raises(DeadlineError, match="did not pause in time") as met:
        await update_all(fleet.engines, receipt, prefill=[0], timeout_s=TIMEOUT_S)
    assert met.value.engines == (0,)
    assert not any(call.startswith("pause") for call in decode.log)
    assert decode.serving == ((1,), "1")
    prefill.wake()
    await prefill.settle()
    await update_all(fleet.engines, receipt, prefill=[0], timeout_s=TIMEOUT_S)
    assert fleet.weights == [[2]] * 2
    assert fleet.mixed == []


@pytest.mark.parametrize("fault", ["die", "hang", "refuse"])
@pytest.mark.parametrize("engine", [0, 1])
@in_hurried_time
async def test_a_fault_at_every_call_of_either_engine(fault, engine):
    for position in range(CALLS):
        fleet = Fleet([[1, 1], [1, 1]], {engine: {position: fault}})
        hit = position < 12
        if hit:
            error = await fleet.fails(2)
            assert error.engines == (engine,)
            kind = DeadlineError if fault == "hang" else EngineError
            assert type(error) is kind
            assert str(error).startswith(f"Engine {engine} of 2: ")
        else:
            await fleet.update(2)
        assert fleet.mixed == []
        # The other one goes on, with the old weights or, past the last load, with the new.
        assert fleet.engines[1 - engine].serving in [((1, 1), "1"), ((2, 2), "2")]
        await fleet.repair(2)
        assert fleet.mixed == []


CASES = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, CALLS)),
    st.sampled_from(["die", "hang", "refuse"]),
    max_size=4,
)
WORKER = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from(["verify", 1, 2])),
    st.sampled_from(
        [("CorruptionError", "bucket 3"), ("TransferError", "full"), ("EngineError", "torn")]
    ),
    max_size=3,
)


@given(faults=CASES, worker_faults=WORKER, start=st.sampled_from([1, None]))
@in_hurried_time
async def test_any_faults_leave_one_version_and_a_retry_repairs_them(faults, worker_faults, start):
    by_engine, by_worker = {}, {}
    for (engine, position), fault in faults.items():
        by_engine.setdefault(engine, {})[position] = fault
    for (engine, worker, act), error in worker_faults.items():
        by_worker.setdefault(engine, {})[worker, act] = error
    fleet = Fleet([[start] * 2] * 3, by_engine, by_worker)
    with contextlib.suppress(PrimeblocksError):
        await fleet.update(2)
    assert fleet.mixed == []
    await fleet.repair(2)
    assert fleet.mixed == []


@in_hurried_time
async def test_bytes_that_fail_on_one_engine_are_loaded_by_none():
    bad = ("CorruptionError", "bucket 3")
    fleet = Fleet([[1], [1, 1]], worker_faults={1: {(1, "verify"): bad}})
    error = await fleet.fails(2, CorruptionError)
    assert "Engine 1 of 2: bucket 3" in str(error)
    assert error.engines == (1,)
    for engine in fleet.engines:
        assert not any(call.startswith(("load", "pause")) for call in engine.log)
    await fleet.repair(2)


@in_hurried_time
async def test_a_load_that_fails_on_one_engine_takes_the_others_back():
    fleet = Fleet([[1], [1, 1]], worker_faults={1: {(0, 2): ("TransferError", "full")}})
    error = await fleet.fails(2, TransferError)
    assert (error.engines, fleet.weights) == ((1,), [[1], [1, 1]])
    assert [engine.serving[1] for engine in fleet.engines] == ["1", "1"]
    assert [engine.log.count("load 1") for engine in fleet.engines] == [1, 1]
    assert fleet.mixed == []
    await fleet.repair(2)


@in_hurried_time
async def test_an_engine_that_cannot_go_back_stays_paused_until_an_update_succeeds():
    full = ("TransferError", "full")
    fleet = Fleet([[None], [None]], worker_faults={1: {(0, 2): full, (0, 3): full}})
    for version in (2, 3):
        error = await fleet.fails(version, TransferError)
        assert error.engines == (1,)
        assert fleet.engines[0].paused
        assert not fleet.engines[1].paused
    assert "Engines [0] stay paused" in str(error)
    await fleet.repair(2)


@in_hurried_time
async def test_a_torn_engine_stays_paused():
    fleet = Fleet([[1], [1]], worker_faults={0: {(0, 2): ("EngineError", "torn")}})
    error = await fleet.fails(2, EngineError)
    assert "Engine 0 of 2: torn Engines [0] stay paused" in str(error)
    assert [engine.paused for engine in fleet.engines] == [True, False]
    await fleet.repair(2)


@in_hurried_time
async def test_a_torn_worker_is_what_is_reported():
    faults = {(0, 2): ("TransferError", "full"), (1, 2): ("EngineError", "torn")}
    error = await Fleet([[1, 1], [1, 1]], worker_faults={1: faults}).fails(2, EngineError)
    assert "Engine 1 of 2: torn" in str(error)


@in_hurried_time
async def test_engines_that_were_not_asked_to_load_only_resume():
    fleet = Fleet([[1], [1]], {1: {5: "refuse"}})
    await fleet.fails(2, EngineError)
    assert [engine.log[5:] for engine in fleet.engines] == [["pause keep False", "resume"]] * 2


@in_hurried_time
async def test_workers_that_another_update_touched_are_noticed():
    fleet = Fleet([[1]])
    (engine,) = fleet.engines
    load = engine.update_weights

    async def after_another(request):
        engine.transaction = "of another update"
        await load(request)

    engine.update_weights = after_another
    error = await fleet.fails(2, TransferError)
    assert "another update came in between" in str(error)
    assert engine.weights == [1]
    engine.update_weights = load
    await fleet.repair(2)


@in_hurried_time
async def test_a_cancelled_update_serves_one_version():
    fleet = Fleet([[1], [1]], {0: {7: "hang"}})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fleet.update(2, timeout_s=HANG_S), 0.1)
    assert fleet.mixed == []
    await fleet.repair(2)


@in_hurried_time
async def test_an_update_cancelled_while_engines_pause_lets_them_go_on():
    fleet = Fleet([[1], [1]], {0: {5: "hang"}})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fleet.update(2, timeout_s=0.5), 0.1)
    assert fleet.engines[1].serving == ((1,), "1")
    await fleet.repair(2)

"""The simulator: virtual time, engines of numbers, and what the loop does in them."""

import asyncio
import functools
import math
import threading

import numpy as np
import pytest

from benchmarks.async_loop_parts import marin
from primeblocks import planning
from primeblocks.async_loop import StalenessPolicy
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import DeadlineError, EngineError, UsageError
from primeblocks.planning.engine import SimulatedEngine
from primeblocks.planning.virtual import VirtualClock, run_in_virtual_time
from tests.deadlines import HANG_S


def test_time_jumps_to_the_next_timer_and_the_order_is_kept():
    async def main():
        clock, order = VirtualClock(), []

        async def one(name, seconds):
            await clock.sleep(seconds)
            order.append((name, clock.now()))

        await asyncio.gather(one("year", 3e7), one("hour", 3600.0), one("now", 0.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5.0)
        return order, clock.now()

    order, end_s = run_in_virtual_time(main())
    assert [name for name, _ in order] == ["now", "hour", "year"]
    # Up to rounding, also where a nanosecond is less than that.
    assert [at_s for _, at_s in order] == pytest.approx([0.0, 3600.0, 3e7], rel=1e-14)
    assert end_s == pytest.approx(3e7 + 5, rel=1e-14)


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(DeadlineError, match="no timer is set"):
        run_in_virtual_time(main())


def test_an_error_comes_out_as_it_is():
    async def main():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_in_virtual_time(main())


def test_ctrl_c_ends_the_thread(monkeypatch):
    began = threading.Event()

    async def main():
        began.set()
        while True:
            await asyncio.sleep(1)

    def interrupted(thread):
        monkeypatch.undo()
        assert began.wait(HANG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(main())
    for each in threading.enumerate():
        if each.name == "virtual time":
            each.join(HANG_S)
            assert not each.is_alive()


def serve(body, model):
    async def main():
        loop, ends = asyncio.get_running_loop(), {}
        engine = SimulatedEngine(model, version=3)

        async def ask(name, at_s, tokens):
            await asyncio.sleep(at_s)
            spans = await engine.generate(tokens)
            ends[name] = round(loop.time(), 6), [(v, round(size, 6)) for v, size in spans]

        await body(engine, ask)
        return ends, engine.busy_s

    return run_in_virtual_time(main())


def shared(rate):
    """An engine of so many tokens a second, however many requests share it."""
    return planning.EngineModel(lambda running: rate)


SHARED = shared(10.0)


def test_requests_share_an_engine():
    async def body(engine, ask):
        await asyncio.gather(ask("a", 0, 30), ask("b", 1, 10), ask("c", 9, 10))

    ends, busy_s = serve(body, SHARED)
    # a alone for 1 s; both for 2 s, until b has its 10; a has 20 and goes on alone for 1 s.
    assert ends == {"b": (3.0, [(3, 10)]), "a": (4.0, [(3, 30)]), "c": (10.0, [(3, 10)])}
    assert busy_s == pytest.approx(5.0)


def test_requests_beyond_the_most_wait_their_turn():
    async def body(engine, ask):
        await asyncio.gather(ask("a", 0, 10), ask("b", 0, 10), ask("c", 0, 20))

    ends, _ = serve(body, planning.EngineModel(lambda running: 10.0 * running, max_running=2))
    assert {name: end for name, (end, _) in ends.items()} == {"a": 1.0, "b": 1.0, "c": 3.0}


def test_weights_change_under_a_request_and_a_pause_takes_its_time():
    async def body(engine, ask):
        async def update():
            await asyncio.sleep(1)
            engine.pause()
            await asyncio.sleep(5)
            engine.resume()
            engine.swap(4)
            await asyncio.sleep(0.5)
            engine.swap(5)

        await asyncio.gather(ask("a", 0, 30), update())

    ends, busy_s = serve(body, SHARED)
    assert ends == {"a": (8.0, [(3, 10), (4, 5), (5, 15)])}
    assert busy_s == pytest.approx(3.0)


def test_a_cancelled_request_leaves_its_place():
    async def body(engine, ask):
        running = asyncio.create_task(ask("a", 0, 100))
        waiting = asyncio.create_task(ask("b", 0, 100))
        last = asyncio.create_task(ask("c", 0, 10))
        await asyncio.sleep(1)
        running.cancel()
        waiting.cancel()
        await last

    ends, busy_s = serve(body, planning.EngineModel(lambda running: 10.0, max_running=1))
    assert ends == {"c": (2.0, [(3, 10)])}
    assert busy_s == pytest.approx(2.0)


def loop(spread=None, *, on_stale="pace", bound=2, **changes):
    spread = planning.lognormal(mean=1000, sigma=0.9, maximum=6000) if spread is None else spread
    workload = {
        key: changes.pop(key)
        for key in ("samples", "turns", "tool_s", "failure_rate")
        if key in changes
    }
    options = {
        "engines": [planning.EngineModel(planning.decode_latency(step_s=0.01, request_s=0.0002))]
        * 2,
        "train_s": 10.0,
        "publish_s": 1.0,
        "staleness": StalenessPolicy(bound, on_stale, correction="truncated"),
        "batch_size": 32,
        "max_in_flight": 256,
        "steps": 40,
    }
    return planning.simulate(planning.Workload(spread, **workload), **{**options, **changes})


def test_a_run_repeats_itself_and_other_seeds_do_not():
    first, again, other = (loop(seed=seed, steps=15) for seed in (1, 1, 2))
    assert first.steps == again.steps
    assert (first.trained_tokens != other.trained_tokens).any()
    # Prompts are the same whatever the limits are.
    slow = loop(seed=1, max_in_flight=8, steps=15)
    assert np.array_equal(slow.sampled_tokens[:32], first.sampled_tokens[:32])


def test_on_policy_nothing_overlaps():
    found = loop(planning.constant(1000), bound=0)
    # 16 requests on each of 2 engines: 1000 tokens of 13.2 ms.
    assert found.step_s == pytest.approx(13.2 + 10 + 1)
    assert found.lags == {0: 40 * 32}
    assert found.token_lag == 0
    assert found.trainer_idle == pytest.approx(13.2 / 24.2)
    assert found.engine_idle == pytest.approx(11 / 24.2)


def test_every_step_trains_a_batch_and_no_token_is_lost():
    found = loop(samples=2, steps=10)
    assert all(len(step.lags) == 32 and len(step.tokens) == 64 for step in found.steps)
    assert found.trained_tokens.sum() <= found.sampled_tokens.sum()
    assert "lag of a group" in found.table()


@pytest.mark.parametrize("on_stale", ["pace", "wait", "mask", "drop"])
def test_the_bound_is_kept_as_promised(on_stale):
    found = loop(on_stale=on_stale, samples=2, steps=15, settle=3)
    if on_stale in ("wait", "drop"):
        assert max(found.lags) <= 2
    else:
        assert max(found.lags) > 2  # some take longer, and are trained on all the same
    assert (found.masked > 0) == (on_stale == "mask")
    assert (found.dropped > 0) == (on_stale == "drop")


def distance(left, right):
    """Kolmogorov and Smirnov's: the largest difference of the two distribution functions."""
    values = np.sort(np.concatenate([left, right]))
    return max(
        abs(
            np.searchsorted(np.sort(left), values, "right") / len(left)
            - np.searchsorted(np.sort(right), values, "right") / len(right)
        )
    )


@pytest.mark.parametrize("on_stale", ["pace", "wait", "drop"])
def test_lengths_that_are_trained_on(on_stale, full):
    """What is trained on has the lengths of what was sampled, unless the slow are thrown away."""
    spread = planning.lognormal(mean=1000, sigma=0.9, maximum=6000)
    steps = 150 if full else 80
    found = loop(spread, on_stale=on_stale, bound=1, steps=steps, train_s=5.0)
    trained = found.trained_tokens
    sampled = spread.draw(np.random.default_rng(0), 50_000)
    # Refused by chance once in 1000 times.
    critical = 1.95 * math.sqrt((len(trained) + len(sampled)) / (len(trained) * len(sampled)))
    if on_stale == "drop":
        assert distance(trained, sampled) > 2 * critical
        assert trained.mean() < 0.9 * sampled.mean()
    else:
        assert distance(trained, sampled) < critical
        assert trained.mean() == pytest.approx(sampled.mean(), rel=0.05)


def test_tools_take_time_and_leave_the_engine_to_others():
    plain, tools = (
        loop(planning.constant(1000), bound=0, steps=5, **more)
        for more in ({}, {"turns": 3, "tool_s": planning.constant(7.0)})
    )
    assert tools.step_s == pytest.approx(plain.step_s + 2 * 7.0, rel=1e-6)


def test_failures_are_tried_again_and_counted(caplog):
    found = loop(failure_rate=0.2, steps=20, retries=Retries(attempts=2, backoff_s=0.1))
    tried = 20 * 32 / 0.8
    assert found.failed == pytest.approx(0.2 * tried, rel=0.35)
    lost = sum(step.lost for step in found.steps)
    assert lost == pytest.approx(0.04 * tried, rel=0.7)
    assert all(len(step.lags) == 32 for step in found.steps)  # batches are exact
    assert loop(samples=3, failure_rate=0.2, steps=2).failed
    told = [record for record in caplog.records if record.name.startswith("primeblocks.")]
    assert {record.exc_info[0] for record in told} == {EngineError}


def test_the_slower_engine_gets_fewer_requests():
    fast, slow = shared(400.0), shared(100.0)
    one = loop(engines=[fast, fast], train_s=1.0, steps=20)
    mixed = loop(engines=[fast, slow], train_s=1.0, steps=20)
    # Least loaded: 500 tokens a second in place of 800, and not 200, as halves would give.
    assert mixed.step_s / one.step_s == pytest.approx(800 / 500, rel=0.1)


def test_a_step_may_depend_on_its_tokens():
    found = loop(planning.constant(1000), train_s=lambda tokens: tokens / 1000, bound=0, steps=3)
    assert found.step_s == pytest.approx(13.2 + 32 + 1)


def test_it_runs_where_an_event_loop_runs_already():
    told = []

    async def notebook():
        return loop(steps=2, progress=lambda *at: told.append(at))

    assert len(asyncio.run(notebook()).steps) == 2
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    "broken", [{"engines": []}, {"settle": 40}, {"pause_s": 2.0}, {"steps": 0}]
)
def test_nonsense_is_refused(broken):
    with pytest.raises(UsageError, match="needs an engine"):
        loop(**broken)


@pytest.mark.parametrize("train_s", [planning.constant(1), -1.0, math.nan], ids=str)
def test_a_step_takes_seconds_or_a_function(train_s):
    with pytest.raises(UsageError, match="train_s must be seconds"):
        loop(train_s=train_s, steps=2)


@functools.cache
def marins(bound):
    return marin.run(marin.BRANCH[bound])


# The other rows are in the benchmark.
@pytest.mark.parametrize("row", [marin.BRANCH[bound] for bound in (0, 4)], ids=str)
def test_marins_rows(row):
    """Two numbers are fitted to 0, 1 and 4. The others are foretold, and the discards of all."""
    found = marins(row.bound)
    assert found.total_s == pytest.approx(row.seconds, rel=0.1)
    # "About a fifth" of the groups of asynchronous runs, and none otherwise.
    share = found.dropped / (found.dropped + marin.UPDATES * marin.BATCH)
    assert (0.1 < share < 0.25) if row.bound else share == 0


def test_speed_up_on_marins_shape():
    assert marins(0).total_s / marins(4).total_s >= 2.12

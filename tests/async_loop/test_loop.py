"""The loop with an engine and a trainer of a few lines: order, bounds, failures, shutdown."""

import asyncio
import gc
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from primeblocks.async_loop import AsyncLoop, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.reference import synchronous_steps
from primeblocks.async_loop.scheduler import AdaptiveLimit, Retries
from primeblocks.errors import ClosedError, DeadlineError, EngineError, UsageError
from primeblocks.testing.faults import ManualClock
from tests.deadlines import HANG_S

from .conftest import make_group, make_rollout


class World:
    """Records what the loop asks for; each call can be held back or made to fail."""

    def __init__(self):
        self.asked, self.trained, self.published = [], [], []
        self.running = self.most_running = 0
        self.fail = {}
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, prompt, *, version, sample=0):
        self.asked.append((prompt, version))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.hold.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        self._maybe_fail("generate")
        return [make_rollout(versions=(version, version))]

    def train(self, groups, *, version):
        self._maybe_fail("train")
        self.trained.append((version, [group.prompt for group in groups]))
        return {"size": len(groups)}

    async def publish(self, version):
        self._maybe_fail("publish")
        self.published.append(version)

    def _maybe_fail(self, what):
        if what in self.fail:
            raise self.fail[what]


def make_loop(
    world, *, bound=1, batch_size=2, max_in_flight=4, prompts=None, on_stale="drop", **more
):
    more = {"retries": Retries(attempts=1, give_up_after=1)} | more

    async def generate(prompt, **options):
        return await world.generate(prompt, **options)  # A test may set another.

    return AsyncLoop(
        prompts=itertools.count() if prompts is None else prompts,
        generate=generate,
        train=world.train,
        publish=world.publish,
        buffer=RolloutBuffer(
            capacity=(bound + 1) * batch_size,
            staleness=StalenessPolicy(
                max_off_policy_steps=bound, on_stale=on_stale, correction="none: a test"
            ),
        ),
        batch_size=batch_size,
        max_in_flight=max_in_flight,
        **more,
    )


def run(body, **options):
    async def main():
        world = World()
        return world, await body(world, make_loop(world, **options))

    return asyncio.run(asyncio.wait_for(main(), HANG_S))


async def collect(world, loop, count=5):
    async with loop:
        return [step async for step in loop.steps(count)]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_prompt_is_trained_on_once_and_never_too_late(bound):
    world, steps = run(collect, bound=bound, max_in_flight=16)
    assert [step.version for step in steps] == world.published == [1, 2, 3, 4, 5]
    assert [version for version, _ in world.trained] == [0, 1, 2, 3, 4]
    prompts = [prompt for _, batch in world.trained for prompt in batch]
    assert len(prompts) == len(set(prompts)) == 10
    assert max(age for step in steps for age in step.staleness) <= bound
    assert all(step.dropped == 0 for step in steps)
    # The capacity law, not max_in_flight, is what limited it.
    assert world.most_running <= (bound + 1) * 2
    assert steps[0].metrics == {"size": 2}


def test_without_staleness_it_is_the_synchronous_loop():
    world, _ = run(collect, bound=0)
    expected = []
    steps = synchronous_steps(
        prompts=range(10),
        generate=lambda prompt, *, version: [make_rollout(versions=(version,))],
        train=lambda groups, *, version: expected.append((version, [g.prompt for g in groups])),
        publish=lambda version: None,
        batch_size=2,
    )
    assert [version for version, _ in steps] == [1, 2, 3, 4, 5]
    assert world.trained == expected


def test_groups_that_wait_for_room_in_the_buffer_count_once():
    async def body(world, loop):
        loop._buffer.capacity = 2
        async with loop:
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(loop._buffer) == 2
            assert len(world.asked) == 4  # As many as two steps train on.

    run(body, bound=1, max_in_flight=3)


@pytest.mark.parametrize("limit", [AdaptiveLimit(start=2, most=2), SimpleNamespace(limit=2)])
def test_a_limit_that_follows_the_engine_binds(limit):
    world, _ = run(collect, bound=3, max_in_flight=limit)
    assert world.most_running == 2


@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_stale_groups_are_dropped_and_asked_again_and_a_step_counts_its_own(max_in_flight):
    async def body(world, loop):
        async with loop:
            while len(loop._buffer) < 4:
                await asyncio.sleep(0)
            loop.version = loop.published = 3  # As if other trainers had stepped.
            return [step async for step in loop.steps(3)]

    options = {"prompts": range(4), "max_in_flight": max_in_flight, "on_stale": "wait"}
    world, steps = run(body, bound=1, **options)
    assert [(step.dropped, step.staleness) for step in steps] == [(4, (0, 0)), (0, (1, 1))]
    assert world.asked == [(prompt, version) for version in (0, 3) for prompt in range(4)]


def test_prompts_of_dropped_groups_are_asked_again_in_their_order():
    async def body(world, loop):
        async with loop:
            world.hold.clear()  # Later groups keep the one place of the engine.
            for prompt in ("first", "second", "third"):
                loop._drop(make_group(prompt))
            world.hold.set()
            async for _ in loop.steps(2):
                pass

    world, _ = run(body, bound=1, max_in_flight=1, on_stale="wait")
    asked = [prompt for prompt, _ in world.asked]
    assert asked[:4] == [0, "first", "second", "third"]


def test_a_step_tells_its_times_and_the_engine_has_the_old_version_until_the_publish_ends():
    clock, versions = ManualClock(), []

    async def body(world, loop):
        generate = world.generate

        async def slow(prompt, *, version):
            clock.advance(1)
            return await generate(prompt, version=version)

        async def train(groups, *, version):
            clock.advance(4)

        async def publish(version):
            clock.advance(2)
            versions.append((version, loop.published))

        world.generate, loop._train, loop._publish = slow, train, publish
        return await collect(world, loop, count=3)

    _, steps = run(body, bound=0, clock=clock)
    assert [(s.trainer_idle_s, s.train_s, s.publish_s) for s in steps] == [(2, 4, 2)] * 3
    assert versions == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("what", ["train", "publish"])
def test_a_group_that_fails_ends_a_step_that_is_under_way(what):
    async def body(world, loop):
        begun, never = asyncio.Event(), asyncio.Event()

        async def hangs(*_, **__):
            begun.set()
            await never.wait()

        async def generate(prompt, *, version):
            if prompt >= 2:
                await begun.wait()
                raise EngineError("gone")
            return [make_rollout()]

        setattr(loop, f"_{what}", hangs)
        world.generate = generate
        with pytest.raises(EngineError, match="gone"):
            await collect(world, loop)

    run(body)


@pytest.mark.parametrize("what", ["train", "publish"])
def test_no_step_follows_a_step_that_failed(what):
    async def body(world, loop):
        async with loop:
            world.fail[what] = EngineError("gone")
            with pytest.raises(EngineError, match="gone"):
                await anext(loop.steps(1))
            del world.fail[what]
            with pytest.raises(ClosedError, match="a step has failed"):
                await anext(loop.steps(1))

    world, _ = run(body)
    assert world.published == []


def test_a_hung_engine_ends_at_the_deadline_and_nothing_stays_behind():
    async def body(world, loop):
        clock = loop._clock
        world.hold.clear()
        collecting = asyncio.create_task(collect(world, loop))
        for _ in range(50):
            await asyncio.sleep(0)
        assert world.running == 4
        clock.advance(7)
        with pytest.raises(DeadlineError, match="7 s"):
            await collecting
        assert world.running == 0

    async def main():
        world = World()
        clock = ManualClock()
        loop = make_loop(world, step_timeout_s=7, clock=clock)
        loop._buffer._clock = clock
        await body(world, loop)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_a_hung_training_step_ends_at_the_deadline():
    begun, release = threading.Event(), threading.Event()

    def train(groups, *, version):
        begun.set()
        release.wait(HANG_S)

    async def main():
        world, clock = World(), ManualClock()
        world.train = train
        # The end of the loop waits for `train` as long, by the machine's own clock.
        loop = make_loop(world, step_timeout_s=0.1, clock=clock)
        collecting = asyncio.create_task(collect(world, loop))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        clock.advance(0.1)
        with pytest.raises(DeadlineError, match="a step"):
            await collecting

    try:
        asyncio.run(asyncio.wait_for(main(), HANG_S))
    finally:
        release.set()


def test_leaving_closes_the_loop_and_hears_what_its_groups_say_of_that():
    complaints, ended = [], []

    async def body(world, loop):
        async def generate(prompt, *, version):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(prompt)
                if prompt:
                    raise
                raise EngineError("gone") from None

        world.generate = generate
        handler = lambda _, context: complaints.append(context["message"])  # noqa: E731
        asyncio.get_running_loop().set_exception_handler(handler)
        async with loop:
            await asyncio.sleep(0)
            thread = loop._worker._thread
        assert sorted(ended) == [0, 1, 2, 3]
        with pytest.raises(ClosedError):
            await anext(aiter(loop.steps(1)))
        thread.join(HANG_S)
        assert not thread.is_alive()
        gc.collect()  # asyncio complains at the end of a task whose error nobody took.

    run(body)
    assert complaints == []


def test_bad_use_is_refused():
    async def closed(world, loop):
        with pytest.raises(ClosedError, match="async with"):
            await anext(aiter(loop.steps(1)))
        async with loop:
            pass
        with pytest.raises(ClosedError, match="make a new loop"):
            await loop.__aenter__()

    run(closed)
    with pytest.raises(UsageError, match="batch of 9"):
        AsyncLoop(
            prompts=[],
            generate=None,  # type: ignore[arg-type]
            train=print,
            publish=print,
            buffer=RolloutBuffer(capacity=2, staleness=StalenessPolicy(0, "drop", "a test")),
            batch_size=9,
            max_in_flight=1,
        )


def test_time_in_which_the_bound_keeps_requests_back_is_counted(monkeypatch):
    monkeypatch.setattr(World, "train", lambda self, groups, *, version: time.sleep(0.05))
    _, steps = run(collect, bound=0, on_stale="pace")
    assert steps
    assert all(step.engine_idle_s >= 0.05 for step in steps)

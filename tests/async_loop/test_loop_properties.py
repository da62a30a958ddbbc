"""Any engine, any trainer, any failures: bounds are kept, prompts are used once, it ends."""

import asyncio
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop import (
    AsyncLoop,
    RolloutBuffer,
    StalenessPolicy,
    staleness,
)
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import DeadlineError, EngineError
from primeblocks.planning.virtual import VirtualClock, run_in_virtual_time

from .conftest import make_rollout

HARD = ("wait", "drop")

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "on_stale": st.sampled_from(["pace", "wait", "mask", "drop", "continue"]),
        "bound": st.integers(0, 3),
        "batch_size": st.integers(1, 4),
        "max_in_flight": st.integers(1, 12),
        "group_size": st.sampled_from([None, 1, 3]),
        "capacity": st.integers(4, 12),
        "capacity_bytes": st.sampled_from([None, 2000, 10_000]),
        "tail": st.sampled_from([0.0, 1.0, 3.0]),
        "failing": st.sampled_from([0.0, 0.2]),
        "filtering": st.sampled_from([0.0, 0.3]),
        "train_s": st.sampled_from([0.0, 1.0, 20.0]),
        "publish_s": st.sampled_from([0.0, 2.0, 30.0]),
        "ahead": st.booleans(),
        "prompts": st.integers(0, 60),
        "leave_after": st.sampled_from([None, 0.0, 7.5, 100.0]),
    }
)


class World:
    """An engine that takes a while, fails at times, and changes its weights in between."""

    def __init__(self, options):
        self.options, self.chance = options, random.Random(options["seed"])
        self.engine = self.running = self.most_running = 0
        self.trained, self.kept_out, self.events = [], [], []

    async def generate(self, prompt, *, version, sample=0):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            versions = []
            for _ in range(self.chance.randint(1, 4)):
                await asyncio.sleep(self.chance.lognormvariate(0.0, self.options["tail"]))
                if self.chance.random() < self.options["failing"] / 4:
                    raise EngineError("a request was lost")
                versions.append(self.engine)
        finally:
            self.running -= 1
        rollout = make_rollout(versions=versions)
        return rollout if self.options["group_size"] else [rollout, rollout]

    def keep(self, group):
        kept = random.Random(group.prompt).random() >= self.options["filtering"]
        if not kept:
            self.kept_out.append(group.prompt)
        return kept

    async def train(self, groups, *, version):
        await asyncio.sleep(self.options["train_s"])
        self.trained.append((version, groups))

    async def _send(self, version):
        await asyncio.sleep(self.options["publish_s"])
        self.engine = version

    def publish(self):
        if not self.options["ahead"]:
            return self._send

        async def copy_then_send(version):
            return asyncio.ensure_future(self._send(version))

        return copy_then_send


def loop_of(world, options):
    policy = StalenessPolicy(options["bound"], options["on_stale"], "a test")
    clock = VirtualClock()
    return AsyncLoop(
        prompts=range(options["prompts"]),
        generate=world.generate,
        train=world.train,
        publish=world.publish(),
        buffer=RolloutBuffer(
            capacity=options["capacity"],
            capacity_bytes=options["capacity_bytes"],
            staleness=policy,
            clock=clock,
        ),
        batch_size=options["batch_size"],
        max_in_flight=options["max_in_flight"],
        group_size=options["group_size"],
        keep=world.keep,
        retries=Retries(attempts=2, backoff_s=0.5, give_up_after=1000),
        source=str,
        step_timeout_s=1e6,
        clock=clock,
    )


async def _run(options):
    world = World(options)
    loop, steps = loop_of(world, options), []

    async def collect():
        async with loop:
            try:
                async for step in loop.steps(1000):
                    steps.append(step)
            except EngineError:  # Every prompt since the last step failed.
                assert loop.ended is not None
                assert loop.lost

    task = asyncio.ensure_future(collect())
    if options["leave_after"] is None:
        await task
    else:
        await asyncio.wait({task}, timeout=options["leave_after"])
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None
    assert len(asyncio.all_tasks()) == 1, "something is left running"
    assert world.running == 0
    return world, loop, steps


@given(options=worlds)
def test_bounds_are_kept_and_prompts_used_once(options):
    world, loop, steps = run_in_virtual_time(_run(options))
    policy = StalenessPolicy(options["bound"], options["on_stale"], "a test")
    assert world.most_running <= options["max_in_flight"]
    used = Counter()
    for version, groups in world.trained:
        assert len(groups) == options["batch_size"]
        for group in groups:
            used[group.prompt] += 1
            age = staleness(group, version=version)
            if policy.on_stale in HARD:
                assert age <= policy.max_off_policy_steps
            for rollout in group.rollouts:
                fresh = policy.fresh(rollout, version=version)
                if policy.on_stale == "mask":
                    assert not (rollout.loss_mask & ~fresh).any()
                else:
                    assert rollout.loss_mask.all()
    lost = [int(prompt) for prompt, counts in loop.sources.items() if counts["failed"]]
    used.update(lost)
    used.update(world.kept_out)
    assert {prompt for step in steps for prompt, _ in step.lost} <= set(lost)
    assert max(used.values(), default=0) <= 1
    if options["on_stale"] not in ("drop",):
        assert all(step.dropped == 0 for step in steps)
    if options["leave_after"] is None:
        # It ended because no batch was left.
        missing = options["prompts"] - len(used)
        assert missing < options["batch_size"]
        assert len(steps) == len(world.trained)
        assert [step.version for step in steps] == list(range(1, len(steps) + 1))
        assert world.engine == loop.published == loop.version == len(steps)


def test_waiting_keeps_the_bound_where_pacing_does_not():
    """One slow group: paced training leaves it behind, waiting training does not."""

    async def body(on_stale):
        seen = []

        async def generate(prompt, *, version):
            await asyncio.sleep(100.0 if prompt == 0 else 1.0)
            return [make_rollout(versions=(version,))]

        async def train(groups, *, version):
            seen.extend((group.prompt, staleness(group, version=version)) for group in groups)

        async def publish(version):
            pass

        clock = VirtualClock()
        loop = AsyncLoop(
            prompts=range(40), generate=generate, train=train, publish=publish,
            buffer=RolloutBuffer(
                capacity=8, staleness=StalenessPolicy(2, on_stale, "a test"), clock=clock
            ),
            batch_size=2, max_in_flight=6, clock=clock,
        )  # fmt: skip
        async with loop:
            steps = [step async for step in loop.steps(20)]
        return dict(seen), steps

    paced, _ = run_in_virtual_time(body("pace"))
    assert paced[0] > 2
    waited, steps = run_in_virtual_time(body("wait"))
    assert waited[0] == max(waited.values()) == 2
    assert sorted(waited) == sorted(paced) == list(range(40))
    assert max(step.trainer_idle_s for step in steps) > 90
    _, steps = run_in_virtual_time(body("drop"))
    assert sum(step.dropped for step in steps) > 0
    masked, steps = run_in_virtual_time(body("mask"))
    assert sum(step.masked_tokens for step in steps) == 1
    assert sorted(masked) == list(range(40))


def test_a_rollout_that_raises_is_data_until_all_of_them_do():
    async def body(broken, **more):
        async def generate(prompt, *, version):
            await asyncio.sleep(1.0)
            if prompt in broken:
                raise EngineError(f"prompt {prompt}")
            return [make_rollout(versions=(version,))]

        async def quiet(*_, **__):
            pass

        clock = VirtualClock()
        loop = AsyncLoop(
            prompts=range(20), generate=generate, train=quiet, publish=quiet,
            buffer=RolloutBuffer(capacity=4, staleness=StalenessPolicy(0), clock=clock),
            batch_size=2, max_in_flight=4, clock=clock, source=lambda p: ["even", "odd"][p % 2],
            **more,
        )  # fmt: skip
        async with loop:
            return loop, [step async for step in loop.steps(100)]

    loop, steps = run_in_virtual_time(body({3, 4}, retries=Retries(attempts=3, backoff_s=0.0)))
    assert [prompt for step in steps for prompt, _ in step.lost] == [3, 4]
    assert sum((Counter(step.failures) for step in steps), Counter()) == {"EngineError": 6}
    assert {name: dict(counts) for name, counts in loop.sources.items()} == {
        "even": {"trained": 9, "failed": 1},
        "odd": {"trained": 9, "failed": 1},
    }
    everything, once = set(range(20)), Retries(attempts=1, give_up_after=3)
    with pytest.raises(EngineError, match="prompt 2"):
        run_in_virtual_time(body(everything, retries=once))
    with pytest.raises(DeadlineError, match="the rollout of prompt 2 did not end within 0.5 s"):
        run_in_virtual_time(body(everything, retries=once, rollout_timeout_s=0.5))


@pytest.mark.parametrize("dies", [False, True])
def test_prompts_that_fail_at_once_do_not_end_a_run_of_long_rollouts(dies):
    """Until all that are in flight have failed."""
    finished = []

    async def generate(prompt, *, version):
        if prompt >= 96:
            await asyncio.Event().wait()
        fails = prompt < 48 and prompt % 2 == 0  # Half of those in flight, together.
        await asyncio.sleep(0.1 if fails else 1000.0)
        if dies or fails:
            raise EngineError(f"prompt {prompt}")
        finished.append(prompt)
        return [make_rollout()]

    async def nothing(*_, **__):
        pass

    async def body():
        clock = VirtualClock()
        policy = StalenessPolicy(0)
        loop = AsyncLoop(
            prompts=itertools.count(), generate=generate, train=nothing, publish=nothing,
            buffer=RolloutBuffer(capacity=48, staleness=policy, clock=clock), batch_size=48,
            max_in_flight=48, retries=Retries(attempts=1, give_up_after=8), clock=clock,
            step_timeout_s=1e6,
        )  # fmt: skip
        async with loop:
            return [step async for step in loop.steps(1)]

    if dies:
        with pytest.raises(EngineError, match="prompt"):
            run_in_virtual_time(body())
        assert not finished
        return
    (step,) = run_in_virtual_time(body())
    assert len(step.lost) == 24
    assert len(finished) == 48

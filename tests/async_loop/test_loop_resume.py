"""The real loop with a journal that stops at any call: the next one goes on, and nothing is lost.

In virtual time, in one process: a journal that has stopped answers no call any more, and the file
is opened anew. What a killed process leaves behind is the business of `test_journal_crash.py`.
"""

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.async_loop import (
    AsyncLoop,
    Group,
    Journal,
    Partial,
    Rollout,
    RolloutBuffer,
    StalenessPolicy,
)
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import CapacityError, EngineError
from primeblocks.planning.virtual import VirtualClock, run_in_virtual_time

CALLS = ("drawn", "started", "sampled", "finished", "dropped", "left_out", "taken", "trained")


def length_of(prompt, sample):
    return 1 + (prompt * 5 + sample * 3) % 6


def tokens_of(prompt, sample, count):
    return [100 * prompt + 10 * sample + t for t in range(count)]


def rollout_of(prompt, sample, versions):
    return {
        "tokens": np.array([1, *tokens_of(prompt, sample, len(versions))]),
        "prompt_length": 1,
        "logprobs": np.full(len(versions), -1.0),
        "versions": np.array(versions),
    }


class Stopping(Journal):
    """A journal that has no room any more from a call on, which it may have done or not."""

    def __init__(self, path, world, stop_at, *, done):
        super().__init__(path)
        self._left, self._done, self._world = stop_at, done, world
        for name in CALLS:
            setattr(self, name, self._wrap(name, getattr(self, name)))

    def _wrap(self, name, make):
        def call(ordinal, *args):
            self._left -= 1
            if self._left > 0 or (self._left == 0 and self._done):
                make(ordinal, *args)
                self._world.hear(name, ordinal, *args)
            if self._left <= 0:
                self._world.is_over = True
                raise CapacityError("no room")

        return call


class World:
    """An engine, a trainer and what outlives both: the weights, and what the journal was told."""

    def __init__(self, options):
        self.options, self.chance = options, random.Random(options["seed"])
        self.weights, self.saved = [], []  # Of a life; on disk.
        self.told, self.came_back, self.seen = {}, [], Counter()

    def hear(self, call, ordinal, *args):
        self.seen[call] += 1
        if call == "sampled":
            self.told[ordinal, args[0]] = args[1].versions.tolist()
        elif call in {"finished", "dropped", "left_out"}:
            self.told = {key: each for key, each in self.told.items() if key[0] != ordinal}

    async def generate(self, prompt, *, version, draft, sample=0):
        if self.options["group_size"] is not None:
            return await self.one(prompt, sample, version, draft)
        return [await self.one(prompt, i, version, draft) for i in range(2)]

    async def one(self, prompt, sample, version, draft):
        so_far = draft.partials.get(sample)
        versions = [] if so_far is None else so_far.versions.tolist()
        if not self.is_over:
            self.came_back.append(([*versions], self.told.get((prompt, sample), [])))
        while True:
            await asyncio.sleep(self.chance.lognormvariate(0.0, 2.0))
            if self.chance.random() < self.options["failing"]:
                raise EngineError("a request was lost")
            versions.append(len(self.weights))
            fields = rollout_of(prompt, sample, versions)
            if len(versions) == length_of(prompt, sample):
                return Rollout(**fields, finish_reason="stop")
            draft.save(sample, Partial(**fields))

    def keep(self, group):
        return group.prompt % 5 != 3 or not self.options["filtering"]

    async def train(self, groups, *, version):
        assert version == len(self.weights)
        await asyncio.sleep(2.0)
        self.weights = [*self.weights, groups]

    async def publish(self, version):
        await asyncio.sleep(1.0)


async def live(world, journal):
    """One life, from the weights on disk; True at the end of the prompts."""
    options, clock = world.options, VirtualClock()
    world.weights, world.is_over = world.saved, False
    # Tokens of policies that are trained anew count as those of the policy that is gone back to.
    back = len(world.saved)
    world.told = {key: [min(v, back) for v in versions] for key, versions in world.told.items()}
    loop = AsyncLoop(
        prompts=range(options["prompts"]),
        generate=world.generate,
        train=world.train,
        publish=world.publish,
        buffer=RolloutBuffer(
            capacity=options["capacity"],
            staleness=StalenessPolicy(options["bound"], options["on_stale"], "a test"),
            clock=clock,
        ),
        batch_size=options["batch_size"],
        max_in_flight=5,
        group_size=options["group_size"],
        keep=world.keep,
        retries=Retries(attempts=3, backoff_s=0.5, give_up_after=1000),
        ledger=journal,
        version=len(world.saved),
        step_timeout_s=1e4,
        clock=clock,
    )
    async with loop:
        try:
            async for step in loop.steps(1000):
                if step.version % options["save_every"] == 0:
                    world.saved = world.weights
                    journal.checkpointed(step.version)
        except EngineError:  # Every prompt since the last step failed.
            assert loop.ended is not None
    # The journal has these in flight if no group finished after them.
    world.lost = {prompt for prompt, _ in loop.lost}
    return True


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "on_stale": st.sampled_from(["pace", "wait", "mask", "drop", "continue"]),
        "bound": st.integers(0, 3),
        "batch_size": st.integers(1, 3),
        "group_size": st.sampled_from([None, 1, 3]),
        "capacity": st.integers(3, 9),
        "failing": st.sampled_from([0.0, 0.1]),
        "filtering": st.booleans(),
        "save_every": st.integers(1, 3),
        "prompts": st.integers(1, 24),
        "stops": st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=5),
    }
)


def play(options):
    world = World(options)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder, "journal")
        for stop_at, done in [*options["stops"], (10**9, False)]:
            with Stopping(path, world, stop_at, done=done) as journal:
                try:
                    run_in_virtual_time(live(world, journal))
                except CapacityError:
                    assert stop_at < 10**9
        with Journal(path) as journal:
            counts = journal.counts()
            left = [i for i, _, _ in journal.restore(len(world.weights)).again]
            left += [i for i, _ in journal.restore(len(world.weights)).finished]
    return world, counts, left


@settings(max_examples=settings().max_examples // 4)
@given(options=worlds)
def test_a_run_that_stops_anywhere_goes_on(options):
    world, counts, left = play(options)
    check(world, counts, left)


def check(world, counts, left):
    options = world.options
    for versions, told in world.came_back:
        assert versions == told  # All that the journal was told of a sample, and nothing else.
    trained = [group.prompt for groups in world.weights for group in groups]
    assert len(trained) == len({*trained}) == counts["trained"]
    assert not {*trained} & {*left}
    # Each prompt is somewhere, and what is left makes no batch.
    filtered = [i for i in range(options["prompts"]) if options["filtering"] and i % 5 == 3]
    assert not {*trained} & {*filtered}
    assert counts["filtered"] + counts["failed"] + len(trained) + len(left) == options["prompts"]
    assert len({*left} - world.lost) < options["batch_size"]
    for version, groups in enumerate(world.weights):
        assert len(groups) == options["batch_size"]
        for group in groups:
            if options["on_stale"] in ("wait", "drop"):
                assert version - group.oldest_version <= options["bound"]
            size = options["group_size"] or 2
            assert [r.completion.tolist() for r in group.rollouts] == [
                tokens_of(group.prompt, i, length_of(group.prompt, i)) for i in range(size)
            ]


def test_long_runs_come_by_everything():
    seen = Counter()
    for batch_size, on_stale in ((3, "pace"), (1, "drop")):
        options = {
            "seed": 0, "on_stale": on_stale, "bound": 1, "batch_size": batch_size, "group_size": 3,
            "capacity": 9, "failing": 0.2, "filtering": True, "save_every": 2, "prompts": 50,
            "stops": [(29 * n % 71 + 9, n % 3 == 0) for n in range(12)],
        }  # fmt: skip
        world, counts, left = play(options)
        check(world, counts, left)
        seen += world.seen
        seen["tokens that came back"] += sum(len(versions) for versions, _ in world.came_back)
        seen["failed"] += counts["failed"]
    assert {*CALLS} < seen.keys()
    assert min(seen.values()) > 2, seen


@pytest.fixture
def ledger(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        yield journal


@pytest.mark.parametrize("group_size", [1, 2, 3, 5])
def test_samples_that_had_ended_are_not_asked_again(group_size, ledger):
    """Two samples of a prompt had ended; groups may have another size by now."""
    asked, trained = [], []
    ledger.drawn(0, 0)
    ledger.started(0, 0)
    for sample in (0, 2):
        ended = Rollout(**rollout_of(0, sample, [0]), finish_reason="stop")
        ledger.sampled(0, sample, ended)

    async def generate(prompt, *, version, sample, draft):
        asked.append(sample)
        return Rollout(**rollout_of(prompt, sample, [version]), finish_reason="stop")

    async def train(groups, *, version):
        trained.extend(rollout.versions.tolist() for rollout in groups[0].rollouts)

    async def quiet(version):
        pass

    async def body():
        loop = AsyncLoop(
            prompts=range(1), generate=generate, train=train, publish=quiet, batch_size=1,
            buffer=RolloutBuffer(capacity=2, staleness=StalenessPolicy(7, correction="a test")),
            max_in_flight=9, group_size=group_size, ledger=ledger, version=7,
        )  # fmt: skip
        async with loop:
            async for _ in loop.steps(1):
                pass

    run_in_virtual_time(body())
    kept = {1: [], 2: [0], 3: [0, 2], 5: [0, 2]}[group_size]
    assert asked == [sample for sample in range(group_size) if sample not in kept]
    assert trained == [[0] if sample in kept else [7] for sample in range(group_size)]


def test_a_journal_without_room_ends_the_run_at_once(ledger, monkeypatch):
    """In a call that asyncio makes, too: nothing else would happen before the deadline."""

    def drawn(ordinal, prompt):
        if ordinal == 1:
            raise CapacityError("no room")
        Journal.drawn(ledger, ordinal, prompt)

    monkeypatch.setattr(ledger, "drawn", drawn)

    async def generate(prompt, *, version, draft):
        await asyncio.sleep(1.0)
        return [Rollout(**rollout_of(prompt, 0, [version]), finish_reason="stop")]

    async def quiet(*_, **__):
        pass

    async def body():
        clock = VirtualClock()
        buffer = RolloutBuffer(capacity=2, staleness=StalenessPolicy(0), clock=clock)
        loop = AsyncLoop(
            prompts=range(9), generate=generate, train=quiet, publish=quiet, buffer=buffer,
            batch_size=2, max_in_flight=1, ledger=ledger, clock=clock,
        )  # fmt: skip
        try:
            async with loop:
                async for _ in loop.steps(1):
                    pass
        finally:
            assert clock.now() < 2

    with pytest.raises(CapacityError, match="no room"):
        run_in_virtual_time(body())


def test_a_partial_in_flight_counts_with_the_age_of_its_tokens(ledger):
    """The trainer waits for a trajectory begun under an old policy, though it was asked anew."""
    trained = []
    ledger.drawn(0, 0)
    ledger.started(0, 0)
    ledger.sampled(0, 0, Partial(**rollout_of(0, 0, [0])))

    async def generate(prompt, *, version, sample, draft):
        so_far = draft.partials.get(sample)
        await asyncio.sleep(1.0 if so_far is None else 50.0)
        versions = [] if so_far is None else so_far.versions.tolist()
        return Rollout(**rollout_of(prompt, sample, [*versions, version]), finish_reason="stop")

    async def train(groups, *, version):
        trained.extend((version, group.prompt, group.oldest_version) for group in groups)

    async def quiet(version):
        pass

    async def body():
        clock = VirtualClock()
        policy = StalenessPolicy(2, correction="a test")
        loop = AsyncLoop(
            prompts=range(9), generate=generate, train=train, publish=quiet, batch_size=1,
            buffer=RolloutBuffer(capacity=4, staleness=policy, clock=clock),
            max_in_flight=9, group_size=1, ledger=ledger, version=2, clock=clock,
        )  # fmt: skip
        async with loop:
            async for _ in loop.steps(3):
                pass

    run_in_virtual_time(body())
    assert trained[0] == (2, 0, 0)


def test_a_fresh_group_waits_for_room_behind_restored_ones_as_long_as_steps_go_on(ledger):
    trained, many = [], 6
    for prompt in range(many):
        ledger.drawn(prompt, prompt)
        ledger.started(prompt, 0)
        rollout = Rollout(**rollout_of(prompt, 0, [0]), finish_reason="stop")
        ledger.finished(prompt, Group(prompt, (rollout,), 0, ordinal=prompt))

    async def generate(prompt, *, version, draft):
        return [Rollout(**rollout_of(prompt, 0, [version]), finish_reason="stop")]

    async def train(groups, *, version):
        await asyncio.sleep(10.0)
        trained.extend(group.prompt for group in groups)

    async def quiet(version):
        pass

    async def body():
        clock = VirtualClock()
        policy = StalenessPolicy(9, "continue", correction="a test")
        loop = AsyncLoop(
            prompts=range(many + 1),
            generate=generate,
            train=train,
            publish=quiet,
            buffer=RolloutBuffer(capacity=1, staleness=policy, clock=clock),
            batch_size=1,
            max_in_flight=1,
            ledger=ledger,
            step_timeout_s=15.0,
            clock=clock,
        )
        async with loop:
            async for _ in loop.steps(many + 1):
                pass

    run_in_virtual_time(body())
    assert trained == [*range(many + 1)]

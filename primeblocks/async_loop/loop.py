"""Generate, train and publish at the same time."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ClosedError, DeadlineError, UsageError, check_version
from .buffer import RolloutBuffer
from .clock import Clock, MonotonicClock, within
from .rollout import Group, Rollout
from .scheduler import Admission
from .staleness import staleness
from .worker import WorkerThread

__all__ = ["AsyncLoop", "Generate", "Publish", "Step", "Train"]

T = TypeVar("T")
Generate = Callable[..., Awaitable[Sequence[Rollout]]]
Train = Callable[..., Any]
Publish = Callable[[int], Any]


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step.

    Args:
        version: the policy after it, which the engine now has.
        groups: what it trained on.
        staleness: for each group, optimizer steps since its oldest token's policy.
        dropped: groups that were too old and were not trained on; their prompts are asked again.
        trainer_idle_s: seconds that training waited for rollouts.
        train_s: seconds of `train`.
        publish_s: seconds of `publish`.
        metrics: what `train` returned.
    """

    version: int
    groups: tuple[Group, ...]
    staleness: tuple[int, ...]
    dropped: int
    trainer_idle_s: float
    train_s: float
    publish_s: float
    metrics: Any


class AsyncLoop:
    """Keeps rollouts in flight while training steps and weight updates go on.

    The first failure of `generate`, `train` or `publish` ends the loop with that error; every
    wait ends at `step_timeout_s`. Leaving the context cancels what is in flight.

    Args:
        prompts: any iterable; each is used once, and asked again only if its group was dropped.
            The loop ends early when it is exhausted and no full batch is left.
        generate: `await generate(prompt, version=v)` returns the rollouts of one group.
        train: `train(groups, version=v)` makes one optimizer step from policy `v`; a plain
            function runs in a thread of its own, so that the event loop goes on.
        publish: `publish(v)` gives the engine policy `v` while rollouts go on; plain or async.
        buffer: its staleness policy is the loop's.
        batch_size: groups in a training batch.
        max_in_flight: groups being generated at a time.
        version: the policy that the engine starts with.
        step_timeout_s: the longest wait for a batch, a training step or a publish.

    Raises:
        UsageError: a batch does not fit the buffer, a limit is not positive, or `version` is not a
            policy version.
    """

    def __init__(
        self,
        *,
        prompts: Iterable[Any],
        generate: Generate,
        train: Train,
        publish: Publish,
        buffer: RolloutBuffer,
        batch_size: int,
        max_in_flight: int,
        version: int = 0,
        step_timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        if batch_size > buffer.capacity:
            raise UsageError(
                f"a batch of {batch_size} groups does not fit a buffer of {buffer.capacity}"
            )
        self.version = check_version(version)
        self._prompts, self._again = iter(prompts), deque[Any]()
        self._generate, self._train, self._publish = generate, train, publish
        self._buffer, self._batch_size = buffer, batch_size
        self._admission = Admission(
            batch_size=batch_size,
            max_off_policy_steps=buffer.staleness.max_off_policy_steps,
            max_in_flight=max_in_flight,
        )
        self._timeout_s = step_timeout_s
        self._clock = MonotonicClock() if clock is None else clock
        self._in_flight: set[asyncio.Task[None]] = set()
        self._finished = 0  # groups generated and not yet trained on
        self._dropped = 0  # groups, since the last step
        self._exhausted = False
        self._failed: asyncio.Future[BaseException] | None = None
        self._starved: asyncio.Future[BaseException] | None = None  # no batch will come
        self._worker: WorkerThread | None = None

    async def __aenter__(self) -> AsyncLoop:
        self._failed = asyncio.get_running_loop().create_future()
        self._starved = asyncio.get_running_loop().create_future()
        self._worker = WorkerThread("train")
        self._start_groups()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._in_flight = self._in_flight, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout_s)
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    async def steps(self, count: int) -> AsyncIterator[Step]:
        """Train `count` times.

        Raises:
            DeadlineError: a batch, a step or a publish took longer than `step_timeout_s`.
            ClosedError: outside the context.
        """
        for _ in range(count):
            try:
                step = await self._step()
            except _Exhausted:
                return
            yield step

    async def _step(self) -> Step:
        if self._failed is None or self._worker is None:
            raise ClosedError("the loop is not open. Use: async with loop: ...")
        start = self._clock.now()
        self._dropped = 0
        groups = await self._buffer.take(
            self._batch_size,
            version=self.version,
            timeout_s=self._timeout_s,
            on_drop=self._drop,
            unless=self._starved,
        )
        taken = self._clock.now()
        ages = tuple(staleness(group, version=self.version) for group in groups)
        metrics = await self._run(self._train, groups, what="a step", version=self.version)
        trained = self._clock.now()
        await self._run(self._publish, self.version + 1, what="a publish")
        self.version += 1
        self._finished -= len(groups)
        self._start_groups()
        return Step(
            version=self.version,
            groups=groups,
            staleness=ages,
            dropped=self._dropped,
            trainer_idle_s=taken - start,
            train_s=trained - taken,
            publish_s=self._clock.now() - trained,
            metrics=metrics,
        )

    async def _run(self, function: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
        assert self._worker is not None
        call: Awaitable[Any]
        if inspect.iscoroutinefunction(function):
            call = function(*args, **kwargs)
        else:
            call = self._worker.call(function, *args, **kwargs)
        return await within(
            call, timeout_s=self._timeout_s, clock=self._clock, what=what, unless=self._failed
        )

    def _drop(self, group: Group) -> None:
        self._dropped += 1
        self._finished -= 1
        self._again.append(group.prompt)
        self._start_groups()

    def _start_groups(self) -> None:
        room = self._admission.room(in_flight=len(self._in_flight), finished=self._finished)
        for _ in range(room):
            try:
                prompt = self._again.popleft() if self._again else next(self._prompts)
            except StopIteration:
                self._exhausted = True
                break
            task = asyncio.create_task(self._one_group(prompt, self.version))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)
        left = len(self._buffer) + len(self._in_flight) + len(self._again)
        if self._exhausted and left < self._batch_size:
            self._starve(_Exhausted())

    async def _one_group(self, prompt: Any, version: int) -> None:
        start = self._clock.now()
        rollouts = await self._generate(prompt, version=version)
        group = Group(prompt, tuple(rollouts), version, self._clock.now() - start)
        await self._buffer.put(group, timeout_s=self._timeout_s)
        self._finished += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task not in self._in_flight:
            # The loop is closing: nobody asks for the outcome any more.
            if not task.cancelled():
                task.exception()
            return
        self._in_flight.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._start_groups()
        elif self._failed is not None and not self._failed.done():
            cancelled = isinstance(error, asyncio.CancelledError)
            error = DeadlineError("a group was cancelled") if cancelled else error
            self._failed.set_result(error)
            self._starve(error)

    def _starve(self, reason: BaseException) -> None:
        if self._starved is not None and not self._starved.done():
            self._starved.set_result(reason)


class _Exhausted(Exception):
    """The prompts are used up, and what is left makes no batch."""

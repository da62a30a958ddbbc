"""The loop that generates, trains and publishes at the same time.

A step takes a batch from the buffer, trains, and publishes the new policy. Meanwhile the `Feeder`
starts as many groups as the staleness policy allows.

An error in a step ends the loop, and the batch does not return to the buffer. A ledger records the
batch as taken, or as trained if `publish` failed. A run that is resumed from the weights before
this step trains on the batch. Without a ledger, the batch is lost. `version` grows once `train`
returned, `published` once the engine has the weights.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, SupportsIndex

from ..clock import Clock, MonotonicClock, within
from ..errors import ClosedError, UsageError, check_counts, check_version
from ..rollout import Group
from .buffer import RolloutBuffer
from .feeder import Feeder, Generate, PromptJob
from .journal import Journal
from .scheduler import AdaptiveLimit, Retries
from .step import Step
from .worker import WorkerThread, check_call, is_async

__all__ = ["AsyncLoop", "Generate", "Publish", "Train"]

logger = logging.getLogger(__name__)

Train = Callable[..., Any]
Publish = Callable[[int], Any]


class AsyncLoop:
    """A loop that keeps rollouts in flight while it trains and updates weights.

    An error of `train` or `publish` ends the loop. If `generate` raises an error, the loop tries
    again, as `retries` allows, and logs the first error of each type with its traceback. The end of
    `async with` cancels requests and a running publish, and waits for a running `train`. You can
    open a loop once. After an error, make a new loop.

    Args:
        prompts: any iterable, whose iterator is made with the loop. Each prompt is used once, and
            again if its group was dropped and may be fresh next time. The loop ends early (`ended`)
            if the prompts run out before a batch is full.
        generate: `await generate(prompt, version=v)` returns the rollouts of one group. With
            `group_size`, `await generate(prompt, version=v, sample=i)` returns one rollout, and
            each sample is one request. With `ledger`, the call also gets `draft=`, a `Draft`. `v`
            is the version at the group's start. Record the engine's version for each token.
        train: `train(groups, version=v)` makes one optimizer step from policy `v`. A plain function
            runs in its own thread, and does not block the event loop.
        publish: `publish(v)`, plain or async, sends the weights of policy `v` to the engine during
            rollouts. A plain function may copy the weights and return an awaitable that sends the
            copy. The loop awaits the awaitable while the next step trains.
        buffer: a buffer for this loop alone. The loop uses the buffer's staleness policy.
        batch_size: the number of groups per batch.
        max_in_flight: the largest number of groups in flight. With `group_size`, the largest number
            of samples in flight. Pass a number or an `AdaptiveLimit`.
        group_size: the number of samples per group, if `generate` makes one sample per call.
        keep: `keep(group)` returns False to leave a finished group out. Other groups then fill the
            batch.
        retries: rules for calls of `generate` that raise an error or miss their deadline.
        rollout_timeout_s: the deadline of one call of `generate`, in seconds. None means unlimited.
        source: a function that returns the name of a prompt's source, for the counts in `sources`.
        ledger: a record of the training run, from which the run can be resumed.
        version: the policy version of the trainer's and the engine's weights at the start.
        step_timeout_s: seconds to wait at most for a batch, a training step or a publish.

    Attributes:
        version: the policy version of the trainer.
        published: the policy version of the engine.
        sources: counts per source: prompts trained, dropped, filtered or failed, and tokens masked.
        ended: the reason why `steps` ended early, or None.

    Raises:
        UsageError: a batch does not fit the buffer, `buffer` is not a `RolloutBuffer`, a number is
            out of range, or a function's signature does not fit.
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
        max_in_flight: int | AdaptiveLimit,
        group_size: int | None = None,
        keep: Callable[[Group], bool] | None = None,
        retries: Retries | None = None,
        rollout_timeout_s: float | None = None,
        source: Callable[[Any], str] | None = None,
        ledger: Journal | None = None,
        version: int = 0,
        step_timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(buffer, RolloutBuffer):
            raise UsageError(
                "AsyncLoop paces and records its groups, so it needs its own RolloutBuffer; got "
                f"a {type(buffer).__name__}. Take groups of other processes in your own loop: "
                "batch = buffer.take(...)."
            )
        check_counts(
            batch_size=batch_size,
            max_in_flight=getattr(max_in_flight, "limit", max_in_flight),
            group_size=1 if group_size is None else group_size,
        )
        if batch_size > buffer.capacity:
            raise UsageError(
                f"a batch of {batch_size} groups does not fit a buffer of {buffer.capacity} groups"
            )
        self._max_in_flight = max_in_flight
        more: dict[str, Any] = {"sample": 0} if group_size is not None else {}
        more |= {"draft": None} if ledger is not None else {}
        check_call("generate", generate, "prompt", kind="async", version=0, **more)
        check_call("train", train, "groups", version=0)
        check_call("publish", publish, "version")
        if keep is not None:
            check_call("keep", keep, "group", kind="plain")
        if source is not None:
            check_call("source", source, "prompt", kind="plain")
        self.version = self.published = check_version(version)
        self.ended: str | None = None
        self.sources: dict[str, Counter[str]] = {}
        self._train, self._publish = train, publish
        self._buffer, self._batch_size = buffer, batch_size
        self._source, self._ledger = source, ledger
        self._timeout_s = step_timeout_s
        self._clock = MonotonicClock() if clock is None else clock
        self._feeder = Feeder(
            prompts=prompts,
            generate=generate,
            buffer=buffer,
            group_size=group_size,
            keep=keep,
            retries=Retries() if retries is None else retries,
            rollout_timeout_s=rollout_timeout_s,
            ledger=ledger,
            clock=self._clock,
            fail=self._fail,
            ended=self._go_on,
            left=self._left_out,
        )
        self._failed: asyncio.Future[BaseException] | None = None
        self._is_stepping = False  # Stays True after an error: the batch was removed.
        self._starved: asyncio.Future[BaseException] | None = None  # Done if no batch will come.
        self._worker: WorkerThread | None = None
        self._publishing: asyncio.Future[Any] | None = None
        self._restored: list[asyncio.Task[None]] = []
        self._dropped = self._filtered = 0  # groups, since the last step
        self._lost: list[tuple[Any, str]] = []
        self._ends: Counter[str] = Counter()  # Prompts that were trained, filtered or failed.
        self._paced_since: float | None = None
        self._paced_s = 0.0

    async def __aenter__(self) -> AsyncLoop:
        if self._failed is not None:
            raise ClosedError(
                "a loop opens once. Publish loop.version to the engine and make a new loop from it."
            )
        running = asyncio.get_running_loop()
        self._failed, self._starved = running.create_future(), running.create_future()
        self._failed.add_done_callback(lambda failed: _end(self._starved, failed.result()))
        if self._ledger is not None:
            for group in self._feeder.resume(self._ledger.restore(self.version)):
                self._feeder.finished += 1
                put = asyncio.create_task(self._buffer.put(group, timeout_s=float("inf")))
                put.add_done_callback(self._restore_ended)
                self._restored.append(put)
            await asyncio.sleep(0)  # Now they are in the buffer, or wait for room in it.
        self._worker = WorkerThread("train")
        self._go_on()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._worker is not None
        worker, self._worker = self._worker, None
        worker.close()  # Before the waits, which may be cancelled.
        rest = [each for each in (*self._restored, self._publishing) if each is not None]
        for future in rest:
            future.cancel()
        await self._feeder.close(self._timeout_s)
        if rest:
            await asyncio.wait(rest, timeout=self._timeout_s)
        await worker.join(self._timeout_s)  # A `train` that runs changes weights.

    async def steps(self, count: int) -> AsyncIterator[Step]:
        """Make `count` training steps, and yield a `Step` after each step.

        Raises:
            DeadlineError: a batch, `train` or `publish` took longer than `step_timeout_s`.
            ClosedError: the loop is not open, a step has failed, or another call makes a step.
            Exception: the last error of `generate`, if the prompts ran out and all prompts since
                the last step failed. Before the loop's first step, one failed prompt is enough.
                Later, at least `batch_size` prompts must have failed.
        """
        for done in range(count):
            try:
                step = await self._step()
            except _Exhausted:
                await self._await_publish()
                self._end_early(done, count)
                return
            yield step
        await self._await_publish()

    @property
    def lost(self) -> tuple[tuple[Any, str], ...]:
        """Prompts that the loop gave up since the last step, each with the reason."""
        return tuple(self._lost)

    async def _step(self) -> Step:
        if self._worker is None:
            raise ClosedError("the loop is not open. Use: async with loop: ...")
        if self._is_stepping:
            raise ClosedError("a step has failed, or runs in another call. Make a new loop.")
        start, feeder = self._clock.now(), self._feeder
        self._dropped = 0
        for job in feeder.stale(self.version):
            self._drop(job)
        groups = await self._buffer.take(
            self._batch_size,
            version=self.version,
            timeout_s=self._timeout_s,
            in_flight=lambda: (job.oldest_version for job in feeder.jobs.values()),
            on_drop=self._drop,
            unless=self._starved,
        )
        self._is_stepping = True
        if self._failed is not None and self._failed.done():  # Although a batch was ready.
            raise self._failed.result()
        taken, version = self._clock.now(), self.version
        if self._ledger is not None:
            self._ledger.taken([group.ordinal for group in groups], version)
        metrics = await self._run(self._train, groups, what="a step", version=version)
        if inspect.isawaitable(metrics):  # From a plain function around an async one.
            metrics = await self._within(metrics, what="a step")
        trained = self._clock.now()
        self.version = version + 1  # Even if what follows fails: the weights have changed.
        if self._ledger is not None:
            self._ledger.trained(version)
        feeder.finished -= len(groups)
        await self._await_publish()
        rest = await self._run(self._publish, self.version, what="a publish")
        if inspect.isawaitable(rest):
            self._publishing = asyncio.ensure_future(rest)
            self._publishing.add_done_callback(partial(self._publish_ended, self.version))
        else:
            self.published = self.version
        self._feed()
        self._is_stepping = False
        published = self._clock.now()
        return self._record(groups, metrics, (start, taken, trained, published))

    def _record(
        self, groups: tuple[Group, ...], metrics: Any, times: tuple[float, float, float, float]
    ) -> Step:
        before, feeder, policy = self.version - 1, self._feeder, self._buffer.staleness
        masked = 0
        for group in groups:
            old = 0
            if policy.on_stale == "mask":
                old = sum(int((~policy.fresh(r, version=before)).sum()) for r in group.rollouts)
            masked += old
            self._ends["trained"] += 1
            self._count(group.prompt, "trained")
            self._count(group.prompt, "masked_tokens", old)
        lost, self._lost = tuple(self._lost), []
        filtered, self._filtered = self._filtered, 0
        failures, feeder.causes = dict(feeder.causes), Counter()
        start, taken, trained, published = times
        self._pace(self._paced_since is not None)
        idle_s, self._paced_s = self._paced_s, 0.0
        return Step(
            version=self.version,
            groups=groups,
            staleness=tuple(before - group.oldest_version for group in groups),
            dropped=self._dropped,
            trainer_idle_s=taken - start,
            train_s=trained - taken,
            publish_s=published - trained,
            metrics=metrics,
            filtered=filtered,
            failures=failures,
            lost=lost,
            masked_tokens=masked,
            engine_idle_s=idle_s,
        )

    def _end_early(self, done: int, count: int) -> None:
        """Record why there are fewer steps. Raise if failures are the only reason."""
        ends, feeder, left = self._ends, self._feeder, self._feeder.left
        self.ended = (
            f"{done} of {count} steps were trained, because the prompts are used up: "
            f"{ends['trained']} were trained on, {ends['failed']} failed, {ends['filtered']} were "
            f"filtered, and {left} are left. A batch needs {self._batch_size}."
        )
        all_failed = not left and feeder.failures_in_a_row >= len(self._lost) > 0
        if all_failed and (len(self._lost) >= self._batch_size or not ends["trained"]):
            assert feeder.last_failure is not None
            feeder.last_failure.add_note(self.ended)
            raise feeder.last_failure
        logger.log(logging.WARNING if ends["failed"] else logging.INFO, "%s", self.ended)

    def _count(self, prompt: Any, what: str, count: int = 1) -> None:
        if self._source is not None and count:
            self.sources.setdefault(self._source(prompt), Counter())[what] += count

    async def _await_publish(self) -> None:
        """Wait until the current publish has ended."""
        if self._publishing is not None:
            rest, self._publishing = self._publishing, None
            await self._within(rest, what="a publish")

    def _fail(self, error: BaseException) -> None:
        _end(self._failed, error)

    def _restore_ended(self, put: asyncio.Task[None]) -> None:
        if not put.cancelled() and (error := put.exception()):
            self._fail(error)

    def _publish_ended(self, version: int, rest: asyncio.Future[Any]) -> None:
        if rest.cancelled():
            return
        if error := rest.exception():
            return self._fail(error)
        self.published = version
        self._go_on()

    def _go_on(self) -> None:
        """Start new requests. asyncio calls this, and would only log an error."""
        try:
            self._feed()
        except Exception as error:  # From the ledger, or the iterable of prompts.
            self._fail(error)

    async def _run(self, function: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
        assert self._worker is not None
        call = function if is_async(function) else partial(self._worker.call, function)
        return await self._within(call(*args, **kwargs), what=what)

    async def _within(self, call: Awaitable[Any], *, what: str) -> Any:
        return await within(
            call, timeout_s=self._timeout_s, clock=self._clock, what=what, unless=self._failed
        )

    def _drop(self, item: Group | PromptJob) -> None:
        self._dropped += 1
        self._count(item.prompt, "dropped")
        self._feeder.drop(item)
        self._feed()

    def _left_out(self, prompt: Any, reason: str) -> None:
        self._ends[reason.partition(":")[0]] += 1
        if reason == "filtered":
            self._filtered += 1
            self._count(prompt, reason)
        else:
            self._lost.append((prompt, reason))
            self._count(prompt, "failed")

    def _feed(self) -> None:
        """Start as many groups and requests as there is room for."""
        feeder, most = self._feeder, self._max_in_flight
        limit = most if isinstance(most, SupportsIndex) else most.limit
        groups = self._buffer.staleness.room(
            batch_size=self._batch_size,
            in_flight=len(feeder.jobs),
            finished=feeder.finished,
            behind=self.version - self.published,
        )
        feeder.start(groups=groups, requests=limit - feeder.requests, version=self.published)
        self._pace(feeder.requests < limit and not feeder.exhausted)
        if feeder.exhausted and feeder.left < self._batch_size:
            _end(self._starved, _Exhausted())

    def _pace(self, idle: bool) -> None:
        """Count the time in which the engine has fewer requests than it may have."""
        now = self._clock.now()
        if self._paced_since is not None:
            self._paced_s += now - self._paced_since
        self._paced_since = now if idle else None


def _end(future: asyncio.Future[BaseException] | None, reason: BaseException) -> None:
    if future is not None and not future.done():
        future.set_result(reason)


class _Exhausted(Exception):
    """The prompts are used up, and the groups that are left do not fill a batch."""

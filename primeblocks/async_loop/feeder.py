"""Requests in flight: draws prompts, generates and retries their samples, and builds groups.

A prompt becomes a `PromptJob`. A job is *waiting* if it must be generated again, and *in flight* in
`jobs` while its samples are generated. It is *finished* once its group is in the buffer or
waits for room. A job leaves the run if `keep` refuses its group or a sample has no attempt left.
With `on_stale="drop"`, it also leaves if no step may train on its samples any more. The ledger
learns of a failed job once a later group has finished. If the engine dies, all jobs in flight fail
together, and a run that is resumed continues them.

All attempts of a sample, or of a whole group without `group_size`, are one request. A request
counts during its backoff too. The last request of a group counts until the group has room.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock, within
from ..errors import DeadlineError, PrimeblocksError, UsageError, shown
from ..rollout import Group, Rollout
from .buffer import RolloutBuffer
from .journal import Journal
from .ledger import Draft, Partial, Restored
from .scheduler import Retries

__all__ = ["Feeder", "Generate", "PromptJob"]

logger = logging.getLogger(__name__)

# Mistakes in code, which another attempt would repeat.
_MISTAKES = (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError)

Generate = Callable[..., Awaitable[Any]]


@dataclass(eq=False)
class PromptJob:
    """A prompt on its way to becoming a group."""

    ordinal: int
    prompt: Any
    version: int = 0
    started_s: float = 0.0
    partials: dict[int, Partial] = field(default_factory=dict)
    samples: dict[int, Rollout] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its start and its samples so far."""
        begun = [partial.oldest_version for partial in self.partials.values()]
        ended = [rollout.oldest_version for rollout in self.samples.values()]
        return min([self.version, *begun, *ended])


class Feeder:
    """Starts requests, and puts finished groups into the buffer. Use a feeder in one event loop.

    Args, in addition to those of `AsyncLoop`:
        fail: called with the error that ends the run.
        ended: called whenever a request has ended.
        left: called with each prompt that leaves the run without training, and the reason.
    """

    def __init__(
        self,
        *,
        prompts: Iterable[Any],
        generate: Generate,
        buffer: RolloutBuffer,
        group_size: int | None,
        keep: Callable[[Group], bool] | None,
        retries: Retries,
        rollout_timeout_s: float | None,
        ledger: Journal | None,
        clock: Clock,
        fail: Callable[[BaseException], None],
        ended: Callable[[], None],
        left: Callable[[Any, str], None],
    ) -> None:
        try:
            self._prompts: Iterator[Any] = iter(prompts)
        except TypeError as error:
            raise UsageError(
                f"prompts= must be an iterable; got {shown(prompts)}. Read an asynchronous one in "
                "a queue, and pass a plain iterable."
            ) from error
        self._generate, self._buffer = generate, buffer
        self._group_size, self._keep = group_size, keep
        self._retries, self._rollout_timeout_s = retries, rollout_timeout_s
        self._ledger, self._clock = ledger, clock
        self._fail, self._ended, self._leaves = fail, ended, left
        self._again: deque[PromptJob] = deque()
        self._pending: deque[tuple[PromptJob, int]] = deque()  # Samples of started jobs.
        self.jobs: dict[int, PromptJob] = {}  # In flight, by ordinal.
        self._tasks: set[asyncio.Task[None]] = set()  # One per request.
        self.finished = 0  # Groups that were put into the buffer and not yet trained on.
        self.drawn = 0
        self.exhausted = False
        self._resumed: set[int] = set()  # Prompts with samples from before a resume.
        self.causes: Counter[str] = Counter()  # Failed attempts by type, since the last step.
        self.failures_in_a_row = self._fatal = 0
        self.last_failure: BaseException | None = None
        self._failed: list[tuple[int, str]] = []  # Of these, the ledger does not know yet.
        self._logged: set[type[BaseException]] = set()
        self._closing = False

    @property
    def requests(self) -> int:
        """Requests of the engine: running, in their backoff, or waiting for room in the buffer."""
        return len(self._tasks)

    @property
    def left(self) -> int:
        """The number of prompts in flight, finished and not trained on, or to generate again."""
        return len(self.jobs) + self.finished + len(self._again)

    def resume(self, restored: Restored) -> list[Group]:
        """Continue from a ledger: skip drawn prompts, and return the finished groups."""
        known = {ordinal: prompt for ordinal, prompt, _ in restored.again}
        known |= {ordinal: group.prompt for ordinal, group in restored.finished}
        for ordinal in range(restored.cursor):
            if (prompt := next(self._prompts, self)) is self:
                raise UsageError(
                    f"the journal has drawn {restored.cursor} prompts, but the iterable has "
                    "fewer. Pass the same prompts from their start."
                )
            if ordinal in known and repr(prompt) != repr(known[ordinal]):
                logger.warning(
                    "Prompt %d is %s, but the journal has %s. Pass the same prompts in the same "
                    "order. This is logged for one prompt.",
                    *(ordinal, shown(prompt), shown(known[ordinal])),
                )
                known = {}
        self.drawn = restored.cursor
        last = (self._group_size or 1) - 1
        for ordinal, prompt, kept in restored.again:
            job = PromptJob(ordinal, prompt)
            for sample, trajectory in kept.items():
                if isinstance(trajectory, Partial):
                    job.partials[sample] = trajectory
                # At least one sample is generated, because its end builds the group.
                elif sample <= last and len(job.samples) < last:
                    job.samples[sample] = trajectory
            self._again.append(job)
        self._resumed = {ordinal for ordinal, _, kept in restored.again if kept}
        self._resumed |= {ordinal for ordinal, _ in restored.finished}
        return [group for _, group in restored.finished]

    def start(self, *, groups: int, requests: int, version: int) -> None:
        """Start at most `groups` groups and `requests` requests. Local."""
        each = self._group_size
        while requests > 0:
            if self._pending:
                job, sample = self._pending.popleft()
                self._spawn(job, sample)
                requests -= 1
                continue
            found = self._next_job() if groups > 0 else None
            if found is None:
                return
            groups -= 1
            found.version, found.started_s = version, self._clock.now()
            self.jobs[found.ordinal] = found
            if self._ledger is not None:
                self._ledger.started(found.ordinal, version)
            samples = (i for i in range(each or 1) if i not in found.samples)
            self._pending.extend((found, sample) for sample in samples)

    def stale(self, version: int) -> list[PromptJob]:
        """Return the jobs in flight on which policy `version` may not train, with "drop"."""
        policy = self._buffer.staleness
        if policy.on_stale != "drop":
            return []
        oldest = version - policy.max_off_policy_steps
        return [job for job in self.jobs.values() if job.oldest_version < oldest]

    def drop(self, item: Group | PromptJob) -> None:
        """Drop a finished group that was removed from the buffer, or cancel a job. Local.

        With "drop", the prompt leaves the run, because another attempt may take as long. Otherwise,
        or if the samples are from before a resume, the prompt is generated again.
        """
        ordinal, ledger = item.ordinal, self._ledger
        if isinstance(item, PromptJob):
            self._cancel(item)
            del self.jobs[ordinal]
        else:
            self.finished -= 1
        if self._buffer.staleness.on_stale != "drop" or ordinal in self._resumed:
            self._resumed.discard(ordinal)
            self._again.append(PromptJob(ordinal, item.prompt))
            if ledger is not None:
                ledger.dropped(ordinal)
            return
        self._leaves(item.prompt, "failed: dropped, because its rollouts took too many steps")
        if ledger is not None:
            ledger.left_out(ordinal, "failed")

    async def close(self, timeout_s: float) -> None:
        """Cancel everything in flight."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _next_job(self) -> PromptJob | None:
        if self._again:
            return self._again.popleft()
        try:
            prompt = next(self._prompts)
        except StopIteration:
            self.exhausted = True
            return None
        job = PromptJob(self.drawn, prompt)
        self.drawn += 1
        if self._ledger is not None:
            self._ledger.drawn(job.ordinal, prompt)
        return job

    def _spawn(self, job: PromptJob, sample: int) -> None:
        task = asyncio.create_task(self._attempt(job, sample))
        job.tasks.add(task)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(job, done))

    async def _attempt(self, job: PromptJob, sample: int) -> None:
        """Call `generate` until it succeeds or no attempt is left. The last sample ends the job.

        An error that this method raises ends the run: only errors of `generate` are retried.
        """
        while True:
            try:
                answer = await self._ask(job, sample)
                break
            except Exception as error:
                if self.jobs.get(job.ordinal) is not job:  # Another sample gave up.
                    return
                job.attempts[sample] += 1
                self.causes[type(error).__name__] += 1
                self._log(job, error)
                is_last = job.attempts[sample] >= self._retries.attempts
                if is_last or isinstance(error, _MISTAKES):
                    self._give_up(job, error)
                    return
                await self._clock.sleep(self._retries.wait_s(job.attempts[sample]))
        if self.jobs.get(job.ordinal) is not job:
            return
        rollouts = self._read(job, answer)
        if self._group_size is not None:
            job.samples[sample] = answer
            if len(job.samples) < self._group_size:
                if self._ledger is not None:
                    self._ledger.sampled(job.ordinal, sample, answer)
                return
            rollouts = tuple(job.samples[i] for i in range(self._group_size))
        await self._finish(job, rollouts)

    async def _ask(self, job: PromptJob, sample: int) -> Any:
        options: dict[str, Any] = {"version": job.version}
        if self._group_size is not None:
            options["sample"] = sample
        if self._ledger is not None:
            options["draft"] = Draft(job.ordinal, job.partials, self._ledger.sampled)
        what, timeout_s = f"the rollout of prompt {job.ordinal}", self._rollout_timeout_s
        call = self._generate(job.prompt, **options)
        try:
            if timeout_s is None:
                answer = await call
            else:
                answer = await within(call, timeout_s=timeout_s, clock=self._clock, what=what)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this task. Clients of tools leak cancellations of their own tasks.
            raise PrimeblocksError(f"{what} was cancelled by its own code") from error
        if self._group_size is None:
            answer = tuple(answer) if isinstance(answer, Iterator) else answer
            if isinstance(answer, Sized) and not len(answer):
                raise PrimeblocksError(f"{what} has no rollouts")
        return answer

    def _read(self, job: PromptJob, answer: Any) -> tuple[Rollout, ...]:
        """Return the rollouts of an answer. For another type, raise an error that ends the run."""
        is_group, is_many = self._group_size is None, isinstance(answer, Iterable)
        found = tuple(answer) if is_group and is_many else (answer,)
        wrong = [type(each).__name__ for each in found if not isinstance(each, Rollout)]
        if not wrong and is_group == is_many:
            return found
        inside = f" with a {wrong[0]} in it" if is_group and is_many else ""
        expected = (
            "an iterable of the rollouts of one group, such as [rollout]"
            if is_group
            else "one Rollout per call, because group_size is set"
        )
        raise UsageError(
            f"generate returned a {type(answer).__name__}{inside} for prompt {job.ordinal}, "
            f"{shown(job.prompt)}. It must return {expected}."
        )

    def _log(self, job: PromptJob, error: BaseException) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.warning(
                "generate failed for prompt %d. Later failures of type %s are counted in "
                "Step.failures, but not logged.",
                job.ordinal,
                type(error).__name__,
                exc_info=error,
            )

    async def _finish(self, job: PromptJob, rollouts: Sequence[Rollout]) -> None:
        took = self._clock.now() - job.started_s
        group = Group(job.prompt, tuple(rollouts), job.version, took, job.ordinal)
        self.failures_in_a_row = 0
        if self._ledger is not None:
            while self._failed:  # The engine lives, so these failed on their own account.
                self._ledger.left_out(*self._failed.pop())
        if self._keep is not None and not self._keep(group):
            self._leave(job, "filtered")
            if self._ledger is not None:
                self._ledger.left_out(job.ordinal, "filtered")
            return
        if self._ledger is not None:
            self._ledger.finished(job.ordinal, group)
        # The group counts as finished from here on: it can be taken while it waits for room.
        del self.jobs[job.ordinal]
        self.finished += 1
        self._buffer.look_again()
        # No deadline, because restored groups may fill the buffer for many steps. A step has one.
        await self._buffer.put(group, timeout_s=float("inf"))

    def _leave(self, job: PromptJob, reason: str) -> None:
        """Let the prompt leave the run without being trained on."""
        del self.jobs[job.ordinal]
        self._leaves(job.prompt, reason)
        self._buffer.look_again()

    def _give_up(self, job: PromptJob, error: BaseException) -> None:
        if not self.failures_in_a_row:  # If the engine is dead, no group in flight will finish.
            self._fatal = max(self._retries.give_up_after, len(self.jobs))
        self._cancel(job)
        self._leave(job, reason := f"failed: {error!r}")
        if self._ledger is not None:
            self._failed.append((job.ordinal, reason))
        self.failures_in_a_row += 1
        self.last_failure = error
        if self.failures_in_a_row >= self._fatal:
            raise error

    def _cancel(self, job: PromptJob) -> None:
        for task in job.tasks - {asyncio.current_task()}:
            task.cancel()
        self._pending = deque(entry for entry in self._pending if entry[0] is not job)

    def _settle(self, job: PromptJob, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        job.tasks.discard(task)
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()  # Read in any case, or asyncio warns.
        if self._closing:
            return
        # If another sample of the prompt gave up, the cancellation is not an error.
        if task.cancelled() and self.jobs.get(job.ordinal) is job:
            error = DeadlineError(f"the rollout of prompt {job.ordinal} was cancelled")
        if error is not None:
            self._fail(error)
        self._ended()

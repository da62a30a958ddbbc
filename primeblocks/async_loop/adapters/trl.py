"""Rollouts of an `AsyncLoop` for TRL 1.16's `AsyncGRPOTrainer`.

Pass a `TrlWorker` to the trainer as `rollout_worker=`. Pass the result of `TrlWorker.config_args()`
to `AsyncGRPOConfig`. An engine needs an event loop, which TRL does not have. `EventThread` runs an
event loop for the worker, the engine and the transfer of weights. A `TrlWorker` can be started
once, and runs until `stop`, an error, or the end of the prompts.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Self, TypeVar

import numpy as np
import torch

from ...errors import (
    ClosedError,
    DeadlineError,
    UnsupportedError,
    UsageError,
    needs,
)

with needs("trl", "accelerate", "datasets", extra="trl"):
    import trl
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ...rollout import Group, Rollout
from ..buffer import RolloutBuffer
from ..feeder import Generate
from ..loop import AsyncLoop
from ..scheduler import AdaptiveLimit
from ..step import Step

__all__ = ["EventThread", "TrlWorker"]

T = TypeVar("T")

# The longest wait for a cancelled coroutine to clean up.
_CLEANUP_S = 10.0


class EventThread:
    """An event loop in its own thread, for code that has no event loop.

    The thread is a daemon, so a call that hangs does not keep the process alive. If a coroutine
    hangs, `call` raises DeadlineError.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the event loop.

        Raises:
            ClosedError: the thread was closed.
        """
        if self.loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise ClosedError("this EventThread was closed. Create another EventThread.")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine in the event loop and return its result. Blocks the caller.

        Raises:
            DeadlineError: the coroutine took longer than `timeout_s`. `call` cancels the coroutine,
                but does not wait for its end.
            ClosedError: the thread was closed.
            concurrent.futures.CancelledError: the coroutine was cancelled.
        """
        future = self.spawn(work)
        try:
            return future.result(timeout_s)
        except CancelledError as error:
            if not self._is_closed:
                raise
            raise ClosedError("this EventThread was closed during the call.") from error
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                return future.result()  # This may be a deadline of the coroutine itself.
            future.cancel()
            raise DeadlineError(
                f"the event loop gave no answer within {timeout_s:g} s. Run blocking calls, for "
                "example in generate, in a thread."
            ) from error

    def close(self) -> None:
        """Cancel all running coroutines, and end the thread if they end within 10 s. Idempotent."""
        if self.loop.is_closed() or not self._thread.is_alive():
            return
        self._is_closed = True
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        try:
            ended.result(_CLEANUP_S)
        except TimeoutError:
            return  # It hangs, and is abandoned.
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLEANUP_S)
        if not self._thread.is_alive():
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrlWorker:
    """Feeds TRL's asynchronous trainer from an `AsyncLoop`, one batch per policy version.

    The loop puts each batch into TRL's queue. When TRL reports the next version, the loop treats
    the reported version as the engine's version. TRL reads a micro-batch of the next step before a
    step ends. Therefore, `max_off_policy_steps` must be at least 1, unless `on_stale` is
    "continue". The loop uses the buffer's staleness policy. TRL's own policy, which drops single
    samples of a batch, is off. TRL gets the log-probabilities of the engine. A token that no policy
    sampled does not count in the loss.

    `check_health` raises the error that ended the loop, such as the death of the engine. TRL calls
    `check_health` after the queue has been empty for five seconds. Every wait of the loop ends
    after at most `step_timeout_s` seconds.

    Args:
        thread: the thread that runs the loop. `generate` may use objects that were made in
            `thread`.
        prompts, buffer, batch_size, max_in_flight, group_size, step_timeout_s, options: as for
            `AsyncLoop`.
        generate: the argument `generate` of an `AsyncLoop` that has a `group_size`. Each call
            returns one rollout, which must have a reward.
        advantages: a function that computes advantages from rewards, both `[groups, members]`, such
            as `losses.advantages.group_advantages`.

    Attributes:
        rollout_buffer: the queue from which TRL takes samples.
        metrics_queue: the metrics that TRL logs, one mapping per batch.

    Raises:
        UsageError: the buffer's staleness policy allows no off-policy step.
        UnsupportedError: the installed TRL is not 1.16.
    """

    def __init__(
        self,
        thread: EventThread,
        *,
        prompts: Iterable[Any],
        generate: Generate,
        buffer: RolloutBuffer,
        batch_size: int,
        group_size: int,
        max_in_flight: int | AdaptiveLimit,
        advantages: Callable[[torch.Tensor], torch.Tensor],
        step_timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        if not trl.__version__.startswith("1.16."):
            raise UnsupportedError(
                f"TrlWorker was tested with TRL 1.16.*; found {trl.__version__}. Run: pip install "
                "'trl==1.16.*'"
            )
        policy = buffer.staleness
        if policy.max_off_policy_steps < 1 and policy.on_stale != "continue":
            raise UsageError(
                "max_off_policy_steps of the buffer must be at least 1; got "
                f"{policy.max_off_policy_steps}. TRL takes a micro-batch of the next step before "
                "it ends a step."
            )
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.version = 0
        self._thread, self._batch_size, self._group_size = thread, batch_size, group_size
        self._advantages, self._timeout_s = advantages, step_timeout_s
        self._arguments: dict[str, Any] = {
            "prompts": prompts,
            "generate": generate,
            "buffer": buffer,
            "batch_size": batch_size,
            "group_size": group_size,
            "max_in_flight": max_in_flight,
            "step_timeout_s": step_timeout_s,
            **options,
        }
        self._said: list[tuple[int, asyncio.Future[None]]] = []  # Versions that are awaited.
        self._running: Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None

    def config_args(self, *, world_size: int = 1, accumulate: int = 1) -> dict[str, Any]:
        """Return arguments for `AsyncGRPOConfig` with which each step trains one batch. Pure.

        Args:
            world_size: the number of trainer ranks.
            accumulate: the number of micro-batches per step.

        Raises:
            UsageError: the number of rollouts in a batch is not divisible by `world_size *
                accumulate`.
        """
        rows, parts = self._batch_size * self._group_size, world_size * accumulate
        if rows % parts:
            raise UsageError(
                f"a batch of {self._batch_size} groups of {self._group_size} is {rows} rows, "
                f"which {world_size} ranks x {accumulate} micro-batches cannot share equally. "
                "Change batch_size or accumulate."
            )
        return {
            "num_generations": self._group_size,
            "per_device_train_batch_size": rows // parts,
            "gradient_accumulation_steps": accumulate,
            "weight_sync_steps": 1,
            "token_budget": 0,  # Count rows, not tokens: otherwise the number of steps would vary.
            "max_staleness": 1 << 30,
            "max_inflight_tasks": rows,
        }

    def start(self) -> None:
        """Start the loop with the version that TRL reported last.

        Raises:
            UsageError: the worker was started before.
            ClosedError: the thread was closed.
        """
        if self._running is not None:
            raise UsageError("a TrlWorker can be started only once. Create another TrlWorker.")
        self._running = self._thread.spawn(self._run())

    def stop(self) -> None:
        """End the loop and cancel all its requests, but do not end the thread. Idempotent."""
        if self._running is None or self._running.done():
            return
        self._thread.call(self._cancel(), timeout_s=self._timeout_s + _CLEANUP_S)

    def update_model_version(self, model_version: int) -> None:
        """Receive from TRL the policy version of the engine's weights."""
        self._thread.loop.call_soon_threadsafe(self._hear, model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the loop, if the loop has ended.

        Raises:
            PrimeblocksError: an error of `AsyncLoop.steps` or of `generate`.
            DeadlineError: the event loop gave no answer within `stale_after_s`.
            ClosedError: the worker was stopped.
            UsageError: the prompts are used up, or `start` was not called.
        """
        if self._running is None:
            raise UsageError("the worker was not started. Call start() first.")
        if not self._running.done():
            self._thread.call(asyncio.sleep(0), timeout_s=stale_after_s)
            return
        if self._running.cancelled():
            raise ClosedError("the worker was stopped. Create another TrlWorker.")
        self._running.result()
        raise UsageError(
            f"the prompts are used up at version {self.version}, and TRL asks for more. Pass an "
            "endless iterable, or set max_steps."
        )

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        loop = AsyncLoop(
            train=self._hand_over,
            publish=self._publish,
            version=self.version,
            **self._arguments,
        )
        async with loop:
            async for step in loop.steps(1 << 62):
                self.metrics_queue.put(_metrics_of(step))

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _hand_over(self, groups: Sequence[Group], *, version: int) -> None:
        rewards = [[_reward_of(rollout) for rollout in group.rollouts] for group in groups]
        advantages = self._advantages(torch.tensor(rewards, dtype=torch.float32)).tolist()
        for group, row, values in zip(groups, rewards, advantages, strict=True):
            spread = statistics.pstdev(row)
            for rollout, advantage in zip(group.rollouts, values, strict=True):
                sample = _sample_of(rollout, advantage, group_id=group.ordinal, spread=spread)
                self.rollout_buffer.put(sample)

    def _publish(self, version: int) -> Coroutine[Any, Any, None]:
        # Not a coroutine function: the loop goes on with the next batch, and awaits this later.
        return self._until(version)

    async def _until(self, version: int) -> None:
        if self.version < version:
            said = asyncio.get_running_loop().create_future()
            self._said.append((version, said))
            await said

    def _hear(self, version: int) -> None:
        self.version = version
        for wanted, said in self._said:
            if wanted <= version and not said.done():
                said.set_result(None)
        self._said = [(wanted, said) for wanted, said in self._said if not said.done()]


def _sample_of(
    rollout: Rollout, advantage: float, *, group_id: int, spread: float
) -> RolloutSample:
    prompt = rollout.prompt_length
    named = {f"rewards/{name}": value for name, value in rollout.rewards.items()}
    return RolloutSample(
        prompt=[],  # Texts are only for TRL's traces, and a rollout has only tokens.
        completion=[],
        input_ids=np.array(rollout.tokens),
        completion_mask=np.concatenate([np.zeros(prompt, np.int64), rollout.loss_mask]),
        old_log_probs=np.concatenate([np.zeros(prompt), rollout.logprobs]).astype(np.float32),
        advantage=advantage,
        model_version=rollout.oldest_version,
        group_id=group_id,
        metrics={"reward": _reward_of(rollout), "reward_std": spread, **named},
        enqueued_at=time.time(),
    )


def _reward_of(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise UsageError(
            f"the rollout of {rollout.prompt_id!r} has no reward. Let generate set one: "
            "dataclasses.replace(rollout, reward=...)"
        )
    return rollout.reward


def _metrics_of(step: Step) -> dict[str, Any]:
    """Return a batch's metrics in TRL's form: counters have "total" in their names."""
    seconds = [group.generate_s for group in step.groups]
    lengths = [len(rollout.completion) for group in step.groups for rollout in group.rollouts]
    return {
        "rollout/generate_s": statistics.mean(seconds),
        "rollout/generate_s_max": max(seconds),
        "rollout/completion_tokens": statistics.mean(lengths),
        "rollout/off_policy_steps_max": float(max(step.staleness)),
        "rollout/engine_idle_s": step.engine_idle_s,
        "rollout/dropped_total": float(step.dropped),
        "rollout/filtered_total": float(step.filtered),
        "rollout/failed_total": float(sum(step.failures.values())),
        "rollout/masked_tokens_total": float(step.masked_tokens),
    }


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

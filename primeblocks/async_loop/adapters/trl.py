"""TRL 1.16's `AsyncGRPOTrainer`, fed by an `AsyncLoop`.

`TrlWorker` is the `rollout_worker=` of that trainer, and `TrlWorker.config_args()` what its
`AsyncGRPOConfig` must say. Engines belong to an event loop, and TRL has none: `EventThread` runs
one, for the worker, the engine and the transfer of weights alike.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import numpy as np
import torch

from ...errors import (
    ClosedError,
    DeadlineError,
    MissingPackageError,
    UnsupportedError,
    UsageError,
)

try:
    import trl
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ModuleNotFoundError as error:
    if error.name not in ("trl", "accelerate", "datasets"):
        raise
    raise MissingPackageError(str(error.name), "trl") from error

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
    """An event loop in a thread of its own, for callers that have none.

    A daemon: what hangs in it ends in an error of the caller, and keeps no process alive.
    """

    def __init__(self, name: str = "primeblocks-trl") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop.

        Raises:
            ClosedError: after close().
        """
        if self.loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise ClosedError("this EventThread was closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine in the loop and return its result; blocks the caller.

        Raises:
            DeadlineError: it took longer; it is cancelled, without waiting for that.
            ClosedError: after close().
        """
        future = self.spawn(work)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                return future.result()  # Or the deadline that the coroutine itself met.
            future.cancel()
            raise DeadlineError(
                f"the event loop gave no answer within {timeout_s:g} s. A call that blocks it, "
                "in generate for instance, belongs into a thread."
            ) from error

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Idempotent."""
        if self.loop.is_closed() or not self._thread.is_alive():
            return
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        try:
            ended.result(_CLEANUP_S)
        except TimeoutError:
            return  # It hangs, and is left behind.
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLEANUP_S)
        if not self._thread.is_alive():
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrlWorker:
    """Feeds TRL's asynchronous trainer from an `AsyncLoop`, one batch for each policy version.

    A step of the loop is what the trainer trains on between two updates of the engine. The loop
    hands a batch over, and counts the next version as the engine's once TRL says so; that TRL
    looks one micro-batch ahead is why `max_off_policy_steps` is at least 1. The staleness policy is
    the buffer's; TRL's own, which drops samples of a batch one by one, is off. Log-probabilities
    are the engine's. A token that no policy sampled is context, without a loss.

    What ends the loop, the engine's death say, is raised by `check_health`: TRL calls it once its
    queue has been empty for five seconds. Every wait inside ends at `step_timeout_s`.

    Args:
        thread: where everything runs; `generate` may use what was made there.
        prompts, generate, buffer, batch_size, max_in_flight, group_size, step_timeout_s, options:
            as for `AsyncLoop`; `generate` makes one rollout, with its reward.
        advantages: of the groups' rewards `[groups, members]`, as
            `losses.advantages.group_advantages` makes them.

    Attributes:
        rollout_buffer: what TRL takes from.
        metrics_queue: a mapping for each batch that TRL logs.

    Raises:
        UsageError: the buffer allows no off-policy step.
        UnsupportedError: another TRL than 1.16.
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
                f"tested with TRL 1.16.*; found {trl.__version__}. Run: pip install 'trl==1.16.*'"
            )
        policy = buffer.staleness
        if policy.max_off_policy_steps < 1 and policy.on_stale != "continue":
            raise UsageError(
                "TRL takes a micro-batch of the next step before it ends one, so max_off_policy_"
                f"steps must be at least 1; the buffer's is {policy.max_off_policy_steps}."
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
        self._said: list[tuple[int, asyncio.Future[None]]] = []  # Versions that are waited for.
        self._running: Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None

    def config_args(self, *, world_size: int = 1, accumulate: int = 1) -> dict[str, Any]:
        """Return arguments for `AsyncGRPOConfig`: one optimizer step trains one batch. Pure.

        Args:
            world_size: trainer ranks.
            accumulate: micro-batches of a step.

        Raises:
            UsageError: a batch does not divide.
        """
        rows, parts = self._batch_size * self._group_size, world_size * accumulate
        if rows % parts:
            raise UsageError(
                f"a batch of {self._batch_size} groups of {self._group_size} is {rows} rows, which "
                f"{world_size} ranks x {accumulate} micro-batches do not divide"
            )
        return {
            "num_generations": self._group_size,
            "per_device_train_batch_size": rows // parts,
            "gradient_accumulation_steps": accumulate,
            "weight_sync_steps": 1,
            "token_budget": 0,  # Rows are counted: a budget would make steps of any number.
            "max_staleness": 1 << 30,
            "max_inflight_tasks": rows,
        }

    def start(self) -> None:
        """Begin to generate, with the version that TRL named last.

        Raises:
            UsageError: it was started before.
            ClosedError: the thread was closed.
        """
        if self._running is not None:
            raise UsageError("a TrlWorker is started once. Make another.")
        self._running = self._thread.spawn(self._run())

    def stop(self) -> None:
        """End the loop and cancel what is in flight; the thread goes on. Idempotent."""
        if self._running is None or self._running.done():
            return
        self._thread.call(self._cancel(), timeout_s=self._timeout_s + _CLEANUP_S)

    def update_model_version(self, model_version: int) -> None:
        """Hear from TRL which policy the engine has now."""
        self._thread.loop.call_soon_threadsafe(self._hear, model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the loop, if anything did.

        Args:
            stale_after_s: how long the event loop may take to answer.

        Raises:
            PrimeblocksError: as `AsyncLoop.steps`, and as `generate`.
            DeadlineError: the event loop is blocked.
            UsageError: the prompts are used up.
        """
        if self._running is None:
            raise UsageError("the worker was not started")
        if not self._running.done():
            self._thread.call(asyncio.sleep(0), timeout_s=stale_after_s)
            return
        if self._running.cancelled():
            raise ClosedError("the worker was stopped")
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
        # Not a coroutine function: the loop goes on with the next batch, and awaits this then.
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
        prompt=[],  # Texts are for TRL's traces alone, and here are tokens.
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
            f"the rollout of {rollout.prompt_id!r} has no reward; generate must give it one: "
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

"""OpenEnv 0.10: episodes of OpenEnv environments, played by an engine that reads token ids."""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...clock import Clock, MonotonicClock, within
from ...errors import DeadlineError, PrimeblocksError, UsageError, needs
from ...rollout import Rollout
from ..conversation import Conversation

with needs("openenv", extra="openenv"):
    from openenv.core import EnvClient
    from openenv.core.client_types import StepResult

__all__ = ["OpenEnvError", "play_episode"]

T = TypeVar("T")
Sample = Callable[[list[int]], Awaitable[Rollout]]
Render = Callable[[Sequence["StepResult | Rollout"]], Sequence[int]]


class OpenEnvError(PrimeblocksError):
    """An environment died or refused a call, or its client could not read the answer."""


async def play_episode(
    env: EnvClient,
    generate: Sample,
    *,
    render: Render,
    act: Callable[[Rollout], Any],
    max_turns: int,
    timeout_s: float,
    reset: Mapping[str, Any] | None = None,
    prompt_id: Hashable = None,
    clock: Clock | None = None,
) -> tuple[Rollout, ...]:
    """Play one episode: reset, then call `generate` and `step` until the environment is done.

    If `render` changes tokens of earlier turns, the episode becomes several rollouts. The reward of
    each rollout is the sum of the steps' rewards, or None if no step had a reward. In addition to
    the attachments of its turns, each rollout has the attachments "step_rewards" and "done". The
    attachment "done" is False if `act` or `max_turns` ended the episode.

    Args:
        env: an async client of the environment. The call does not close the client, so you can call
            `await env.state()` afterwards.
        generate: an async function that samples one turn after a prompt of token ids.
        render: a function that returns the next prompt, as token ids. The argument of `render` is a
            tuple of the result of reset, the first turn, the result of the first step, and so on.
        act: a function that returns the action of a turn, or None to end the episode.
        timeout_s: the deadline of the whole episode, in seconds.
        reset: arguments of `env.reset`.

    Raises:
        DeadlineError: the episode did not end within `timeout_s`, or `env` stopped waiting for an
            answer.
        OpenEnvError: the environment failed.
        UsageError: no turn was played, because the environment was done after its reset or
            `max_turns` is below 1.
    """
    clock = MonotonicClock() if clock is None else clock
    conversation, rewards = Conversation(), list[float | None]()

    async def play() -> bool:
        """Fill the conversation. Return whether the environment is done."""
        result = await _called("reset", env.reset, **(reset or {}))
        happened: list[StepResult | Rollout] = [result]
        while not result.done and len(conversation.turns) < max_turns:
            turn = await generate([int(token) for token in render(tuple(happened))])
            conversation.append(
                turn.prompt,
                turn.completion,
                logprobs=turn.logprobs,
                versions=turn.versions,
                finish_reason=turn.finish_reason,
                attachments=turn.attachments,
            )
            action = act(turn)
            if action is None:
                break
            result = await _called("step", env.step, action)
            happened += [turn, result]
            rewards.append(result.reward)
        return result.done

    what = "an episode of an OpenEnv environment"
    done = await within(play(), timeout_s=timeout_s, clock=clock, what=what)
    told = [reward for reward in rewards if reward is not None]
    rollouts = conversation.rollouts(prompt_id=prompt_id, reward=sum(told) if told else None)
    if not rollouts:
        raise UsageError(
            f"no turn was played: {max_turns=}, and the environment returned {done=} after reset"
        )
    more = {"step_rewards": rewards, "done": done}
    return tuple(replace(each, attachments={**each.attachments, **more}) for each in rollouts)


async def _called(
    what: str, call: Callable[..., Awaitable[T]], /, *args: Any, **arguments: Any
) -> T:
    try:
        return await call(*args, **arguments)
    except TimeoutError as error:
        raise DeadlineError(f"the environment's client gave up waiting for a {what}") from error
    # A closed socket, an error from the environment, or an answer that its client cannot read.
    except Exception as error:
        text = f"a {what} of the environment failed: {type(error).__name__}: {error}"
        raise OpenEnvError(text) from error

"""Episodes of the real OpenEnv: its own echo environment, unchanged, behind a socket."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openenv", reason="openenv is not installed; scripts/peers does")

import uvicorn
from openenv.core import GenericEnvClient

from primeblocks.async_loop import Rollout
from primeblocks.capture.adapters.openenv import OpenEnvError, play_episode
from primeblocks.errors import DeadlineError, UsageError
from primeblocks.testing.faults import ManualClock
from tests.async_loop.sampler import Sampler, trained

ANSWER, SAID = 1, 2  # tokens before an answer, and before what the environment says


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The environment that `openenv init` writes: it says what it is told."""
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    folder = tmp_path_factory.mktemp("environments")
    made = CliRunner().invoke(app, ["init", "echo_env", "--output-dir", str(folder)])
    assert made.exit_code == 0, made.output
    sys.path.insert(0, str(folder))
    try:
        import echo_env.server.app
    finally:
        sys.path.remove(str(folder))
    return echo_env


class Player:
    """An engine and a renderer of letters, which remembers what the engine said."""

    def __init__(self, tokens_of: Callable[[list[int]], list[int]] = list) -> None:
        self.sampler = Sampler(ord("a"), ord("z") + 1)
        self.tokens_of = tokens_of
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: list[int]) -> Rollout:
        self.prompts.append(prompt)
        ids, logprobs = self.sampler(prompt)
        return Rollout(
            tokens=np.array(prompt + ids),
            prompt_length=len(prompt),
            logprobs=np.array(logprobs),
            versions=np.array(self.sampler.versions[tuple(logprobs)]),
            finish_reason="stop",
        )

    def render(self, happened: Any) -> list[int]:
        said = happened[-1].observation.echoed_message.encode()
        before = self.tokens_of(happened[-2].tokens.tolist()) if len(happened) > 1 else []
        return [*before, SAID, *said, ANSWER]


def on_server(echo: Any, use: Callable[[str, Any], Awaitable[Any]]) -> Any:
    """Use the environment's server: its address, and what ends it."""

    async def run() -> Any:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # Whoever connects before the server accepts waits for it.
        server = uvicorn.Server(uvicorn.Config(echo.server.app.app, log_level="error"))
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))

        async def end() -> None:
            server.should_exit = True
            await serving

        try:
            return await use(f"http://127.0.0.1:{bound.getsockname()[1]}", end)
        finally:
            await end()

    return asyncio.run(run())


def episode(echo: Any, player: Player, **other: Any) -> tuple[tuple[Rollout, ...], Any]:
    """Play an episode; return its rollouts and the environment's state after it."""

    def act(turn: Rollout) -> Any:
        return echo.EchoAction(message=bytes(turn.completion.tolist()).decode())

    async def use(url: str, _: Any) -> Any:
        async with echo.EchoEnv(base_url=url) as env:
            arguments = {"generate": player.generate, "render": player.render, "act": act}
            arguments |= {"max_turns": 4, "timeout_s": 60.0}
            rollouts = await play_episode(env, **arguments | other)
            return rollouts, await env.state()

    return on_server(echo, use)


def test_an_episode_is_a_rollout(echo):
    player = Player()
    (rollout,), state = episode(echo, player, prompt_id="p", reset={"episode_id": "mine"})
    assert (state.episode_id, state.step_count) == ("mine", 4)
    assert trained((rollout,)) == player.sampler.said
    assert rollout.prompt.tolist() == player.prompts[0]
    last = player.prompts[3]
    assert rollout.tokens[: len(last)].tolist() == last
    # The environment says what it is told, and pays a tenth for a letter.
    said = [bytes(prompt).split(b"\2")[-1].rstrip(b"\1") for prompt in player.prompts]
    assert said[0] == b"Echo Env environment ready!"
    paid = [0.1 * len(each) for each in said[1:]]
    paid.append(0.1 * (len(rollout.tokens) - len(last)))
    assert rollout.attachments["step_rewards"] == pytest.approx(paid)
    assert rollout.reward == pytest.approx(sum(paid))
    assert (rollout.prompt_id, rollout.attachments["done"]) == ("p", False)


def test_a_renderer_that_changes_history_costs_rollouts_not_tokens(echo):
    player = Player(lambda tokens: [*bytes(tokens).upper()])
    rollouts, _ = episode(echo, player)
    assert len(rollouts) == 4
    assert trained(rollouts) == player.sampler.said
    assert len({each.reward for each in rollouts}) == 1


def test_no_action_ends_an_episode(echo):
    (rollout,), state = episode(echo, Player(), act=lambda _: None)
    assert (state.step_count, rollout.reward) == (0, None)
    assert rollout.attachments == {"step_rewards": [], "done": False}
    with pytest.raises(UsageError, match="max_turns=0"):
        episode(echo, Player(), max_turns=0)


def test_the_end_of_the_server_is_a_typed_error(echo):
    player = Player()

    async def use(url: str, end: Any) -> Any:
        async def generate(prompt: list[int]) -> Rollout:
            if len(player.prompts) == 2:
                await end()
            return await player.generate(prompt)

        async with GenericEnvClient(base_url=url) as env:
            render = lambda _: [SAID]  # noqa: E731
            arguments = {"render": render, "max_turns": 4, "timeout_s": 60.0}
            with pytest.raises(OpenEnvError, match="a step .*Server error"):
                await play_episode(env, generate, act=lambda _: {"no": "message"}, **arguments)
            with pytest.raises(OpenEnvError, match="a step .*Connect"):
                await play_episode(env, generate, act=lambda _: {"message": "a"}, **arguments)
            with pytest.raises(OpenEnvError, match="a reset .*Connect"):
                await play_episode(env, generate, act=lambda _: {"message": "a"}, **arguments)

    on_server(echo, use)


def test_an_episode_has_a_deadline(echo):
    clock = ManualClock()

    async def generate(_: list[int]) -> Rollout:
        clock.advance(60.0)
        return await asyncio.Event().wait()

    with pytest.raises(DeadlineError, match="within 60 s"):
        episode(echo, Player(), generate=generate, clock=clock)

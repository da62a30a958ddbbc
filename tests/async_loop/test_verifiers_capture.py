"""Environments of the real verifiers, unchanged, recorded at the endpoint that they ask.

The engine is a fake that writes what it is told to; tokenizer and template are real.
"""

import asyncio
import importlib
import os
import re
import sys
from pathlib import Path

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed; scripts/peers does")

from verifiers.v1.runtimes.subprocess import SubprocessRuntime  # noqa: E402

from primeblocks.errors import EngineError  # noqa: E402
from tests.capture.capture_site import serve  # noqa: E402
from tests.capture.chat_site import Engine, template  # noqa: E402

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def plugged(monkeypatch):
    """The example's glue. Plug-ins are found, and programs run in this Python, not in one of uv."""

    async def prepare(self, script, env=None, *, activate=True):
        await self.write("program.py", script.encode() if isinstance(script, str) else script)
        return [sys.executable, "program.py"]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepare)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.syspath_prepend(FOLDER.parents[1] / "examples" / "plug_in")
    return importlib.import_module("verifiers_env")


def environment(taskset, harness, **options):
    agent = {"harness": {"id": harness, **options}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": taskset}, "agent": agent}
    return vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config))


class Model:
    """Adds number by number, but not 13, each time by a tool. New weights come with every answer.

    The first answers come when all sessions have asked. The engine fails behind some sums, as
    often as `fails` says. `said` are its completions by question, in order.
    """

    def __init__(self, sessions):
        self.engine, self.begin = Engine(self.write), asyncio.Barrier(sessions)
        self.fails, self.said = {"90": 1, "15": 9}, {}

    async def __call__(self, prompt, **options):
        question, sums = self.read(template().parse(prompt, calls=False)[0])
        if not sums:
            await self.begin.wait()
        elif self.fails.get(sums[-1]):
            self.fails[sums[-1]] -= 1
            raise EngineError("it died")
        completion = await self.engine(prompt, **options)
        self.said.setdefault(question, []).append(completion)
        return completion

    @staticmethod
    def read(text):
        (question,) = re.findall(r"user\n(.*\?)<", text)
        return question, re.findall(r"<tool_response>\n(.*)\n", text)

    def write(self, text):
        question, sums = self.read(text)
        first, *others = re.findall(r"\d+", question)
        if "13" in others or len(sums) == len(others):
            return f"<think>naïve</think>It is {[first, *sums][-1]}"
        asked = f'{{"a":{[first, *sums][-1]},"b":{others[len(sums)]}}}'
        call = f'{{"name":"calculator_add","arguments":{asked}}}'
        return f"Next.\n<tool_call>\n{call}\n</tool_call>"


def test_tasks_with_tools_are_recorded_side_by_side(plugged):
    async def run():
        env = environment("verifiers_sums", "null")
        tasks = [*env.taskset]
        model = Model(len(tasks))
        async with serve(model) as server, env.serving():
            plays = [plugged.record(server, env, task, temperature=0.5) for task in tasks]
            return model, await asyncio.gather(*plays)

    model, played = asyncio.run(run())
    recorded = []
    for session, episode in played:
        (trace,) = episode.traces
        (rollout,) = plugged.scored(session, episode)
        recorded.append((rollout, trace))
        said = model.said[session.prompt_id]
        mask = rollout.loss_mask
        assert rollout.completion[mask].tolist() == [id for each in said for id in each.token_ids]
        assert rollout.logprobs[mask].tolist() == [p for each in said for p in each.logprobs]
        assert rollout.versions[mask].tolist() == [v for each in said for v in each.versions]
        assert rollout.oldest_version < rollout.newest_version
        text = template().parse(rollout.tokens.tolist(), calls=False)[0]
        assert model.read(text)[0] == rollout.prompt_id == trace.task.data.prompt
    model.engine.check([rollout for rollout, _ in recorded])
    assert {options["temperature"] for options in model.engine.options} == {0.5}
    # The second got no answer once, and asked again.
    assert model.fails == {"90": 0, "15": 6}
    assert [len(model.said[rollout.prompt_id]) for rollout, _ in recorded] == [3, 4, 1, 1]
    scores = [(rollout.reward, dict(rollout.rewards)) for rollout, _ in recorded]
    assert scores == [
        (1.75, {"right": 1.0, "turns": 0.75}),
        (2.0, {"right": 1.0, "turns": 1.0}),
        (0.25, {"right": 0.0, "turns": 0.25}),
        (None, {}),
    ]
    assert [len(trace.errors) for _, trace in recorded] == [0, 0, 0, 1]
    error = recorded[3][1].last_error
    assert (error.type, error.status_code, recorded[3][1].reward) == ("ProviderError", 503, 0.0)
    assert "it died" in error.message


def test_a_program_that_edits_its_history_is_recorded_as_forks(plugged):
    async def run():
        env = environment("verifiers_guesses", "verifiers_guesses")
        (task,) = env.taskset
        engine = Engine(lambda prompt: "one or two")
        async with serve(engine) as server, env.serving():
            return engine, *await plugged.record(server, env, task)

    engine, session, episode = asyncio.run(run())
    assert episode.ok
    assert f"API_KEY_OF_{session.name}" not in os.environ
    continued = [turn.continuity for turn in session.conversation.turns]
    assert continued == ["start", "clean", "fork", "clean", "fork"]
    rollouts = plugged.scored(session, episode)
    engine.check(rollouts)
    assert {(each.reward, each.rewards["turns"]) for each in rollouts} == {(10.0, 10.0)}


def test_a_shell_and_a_compaction_are_recorded(plugged):
    def writes(text):
        if "produced a summary" in text:
            return "It is 6"
        if "CHECKPOINT" in text:
            return "1 + 2 is naïve 3"
        command = '{"name":"bash","arguments":{"command":"echo naïve $((1 + 2))"}}'
        return f"<tool_call>\n{command}\n</tool_call>"

    async def run():
        env = environment("verifiers_sums", "bash", compaction={"summarize_at_tokens": 1})
        engine = Engine(writes)
        async with serve(engine) as server, env.serving():
            return engine, *await plugged.record(server, env, next(iter(env.taskset)))

    engine, session, episode = asyncio.run(run())
    assert episode.ok
    # The summary is asked for with the same tools and no calls, and begins another conversation.
    continued = [turn.continuity for turn in session.conversation.turns]
    assert continued == ["start", "clean", "fork"]
    worked, went_on = rollouts = plugged.scored(session, episode)
    engine.check(rollouts)
    assert worked.reward == went_on.reward == 1.75
    assert "<tool_response>\nnaïve 3\n" in template().parse(worked.tokens.tolist(), calls=False)[0]

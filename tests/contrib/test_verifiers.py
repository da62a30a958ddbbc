"""Traces of the real verifiers as rollouts: every sampled token counts once, as it was sampled."""

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed; scripts/peers does")

from verifiers.v1 import graph  # noqa: E402

from primeblocks.contrib.adapters.verifiers import (  # noqa: E402
    episode_rollouts,
    trace_rollouts,
)
from primeblocks.errors import ShapeError, UnsupportedError  # noqa: E402
from tests.async_loop.sampler import Sampler, trained  # noqa: E402

GENERATION = 1  # the token that begins an answer
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
LETTERS = [*map(chr, range(32, 127)), "\n"]


# --- verifiers' own graph, with random histories -------------------------------------------------


def new_trace() -> Any:
    data = vf.TaskData(prompt="x")
    return vf.Trace(
        task=vf.TraceTask(type="T", data=data), agent=vf.AgentInfo(config=vf.AgentConfig())
    )


def tokens_of(message: Any, again: bool) -> list[int]:
    """Ids of a message in a prompt; `again` if an answer is made into other tokens than it was."""
    if message.role == "assistant":
        ids = [int(part) for part in message.content.split()]
        return [GENERATION, *([each + 100 for each in ids] if again else ids)]
    return [2, *message.content.encode()]


def turn(trace: Any, messages: list[Any], sampler: Sampler, *, again: bool = False) -> Any:
    """Commit one call the way verifiers' training client does; return the answer."""
    pending = graph.prepare_turn(trace, messages)
    prompt: list[int] = []
    spans = []
    for message in messages:
        start = len(prompt)
        prompt += tokens_of(message, again)
        spans.append((start, len(prompt)))
    prompt.append(GENERATION)
    ids, logprobs = sampler(prompt)
    answer = vf.AssistantMessage(content=" ".join(map(str, ids)))
    tokens = vf.TurnTokens(
        prompt_ids=prompt, completion_ids=ids, completion_logprobs=logprobs, message_spans=spans
    )
    response = {"id": "", "created": 0, "model": "m", "finish_reason": "stop"}
    node = pending.commit(vf.Response(**response, message=answer, tokens=tokens))
    trace.calls.append(vf.ModelCall(node=node, finish_reason="stop"))
    return answer


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=8))
def test_random_histories_are_trained_once(steps):
    trace, sampler = new_trace(), Sampler(10, 14)
    histories = [[vf.UserMessage(content="go")]]
    for number, again, drop in [(0, False, False), *steps]:
        history = histories[number % len(histories)]
        answer = turn(trace, history, sampler, again=again)
        follows = [*history, answer, vf.UserMessage(content=f"turn {number}")]
        histories.append(follows[2:] if drop else follows)
    rollouts = trace_rollouts(trace, version=sampler.version_of, prompt_id="p")
    assert trained(rollouts) == sampler.said
    for each in rollouts:
        np.testing.assert_array_equal(each.loss_mask, each.sampled)
        assert {each.prompt_id, each.finish_reason} == {"p", "stop"}


def two_turns() -> tuple[Any, Sampler]:
    trace, sampler = new_trace(), Sampler(10, 14)
    ask = vf.UserMessage(content="go")
    turn(trace, [ask, turn(trace, [ask], sampler), vf.UserMessage(content="on")], sampler)
    return trace, sampler


def test_a_trace_that_lacks_something_is_refused():
    def without(match: str, error: type, **fields: Any) -> None:
        trace, _ = two_turns()
        for name, value in fields.items():
            setattr(trace.nodes[-1], name, value)
        with pytest.raises(error, match=match):
            trace_rollouts(trace, version=0)

    without("no token ids.*TrainClientConfig", UnsupportedError, token_ids=[], mask=[], logprobs=[])
    without("no log-probabilities", UnsupportedError, logprobs=[])
    without("and 1 log-probabilities", ShapeError, logprobs=[-1.0])
    without("0 entries of mask", ShapeError, mask=[], logprobs=[])
    trace, _ = two_turns()
    with pytest.raises(ShapeError, match=r"shape \(9,\) for a message of 4"):
        trace_rollouts(trace, version=lambda _: [0] * 9)
    (rollout,) = trace_rollouts(trace, version=0)
    assert dict(rollout.attachments) == {}


def test_rewards_go_along_and_unscored_ones_leave_none():
    trace, _ = two_turns()
    trace.record_reward("right", 1.0, weight=0.5)
    trace.record_reward("brief", 3.0)
    (rollout,) = trace_rollouts(trace, version=0)
    assert (rollout.reward, dict(rollout.rewards)) == (3.5, {"right": 0.5, "brief": 3.0})
    trace.rewards["judged"] = None
    (rollout,) = trace_rollouts(trace, version=0)
    assert (rollout.reward, dict(rollout.rewards)) == (None, {"right": 0.5, "brief": 3.0})


def test_a_failed_compaction_is_left_out():
    trace, sampler = two_turns()
    said = sampler.said.copy()
    turn(trace, [vf.UserMessage(content="sum up")], sampler)
    trace.nodes[-1].semantic_parents.append(vf.ParentLink(node=0, type="compaction_attempt"))
    assert trained(trace_rollouts(trace, version=sampler.version_of)) == said


def test_the_policy_of_an_episode():
    trace, sampler = two_turns()
    other = new_trace()
    other.agent.trainable = False
    turn(other, [vf.UserMessage(content="judge")], sampler)
    task = vf.TraceTask(type="T", data=vf.TaskData(prompt="x"), key="the key")
    episode = vf.Episode(task=task, traces=[trace, other])
    with pytest.raises(UnsupportedError, match="has no recorded policy"):
        episode_rollouts(episode)

    def ran(start: int, end: int) -> None:
        work = vf.TrainWorkInfo(step=1, policy=vf.PolicySpan(start=start, end=end))
        episode.record_run(vf.TrainRunInfo(id="r", work=work))

    ran(3, 5)
    with pytest.raises(UnsupportedError, match="from version 3 to 5"):
        episode_rollouts(episode)
    assert len(episode_rollouts(episode, version=sampler.version_of)) == 1
    ran(4, 4)
    (rollout,) = episode_rollouts(episode)
    assert set(rollout.versions[rollout.sampled]) == {4}
    assert rollout.prompt_id == "the key"
    episode.group = vf.GroupInfo(id="the group")
    assert episode_rollouts(episode)[0].prompt_id == "the group"


# --- a whole environment: verifiers' own server in between, its client, its renderer ------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a letter, and the special ones of Qwen3."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: at for at, token in enumerate(["<unk>", *SPECIAL, *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="<unk>", additional_special_tokens=SPECIAL
    ).save_pretrained(path)
    return path


class Engine:
    """The endpoint that verifiers' training client asks, with routes of two layers, top-2 of 8."""

    def __init__(self) -> None:
        self.sampler = Sampler(10, 10 + len(LETTERS), end=(2,))
        self.routes: dict[tuple[int, ...], np.ndarray] = {}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["token_ids"]
        ids, logprobs = self.sampler(prompt)
        context = (*prompt, *ids)
        # A row follows from the tokens up to it, as in a model.
        rows = [self.row(context[: at + 1]) for at in range(len(context) - 1)]
        first = body["sampling_params"].get("routed_experts_prompt_start", 0)
        sent = np.array(rows[first:], np.uint8)
        names = [f"token_id:{each}" for each in ids]
        content = [{"token": n, "logprob": p} for n, p in zip(names, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "routed_experts": {
                "data": base64.b64encode(sent.tobytes()).decode(),
                "shape": sent.shape,
                "start": first,
            },
            "sampling_mask": [[each, 0] for each in ids],
        }
        return {"request_id": "r", "choices": [choice]}

    def row(self, tokens: tuple[int, ...]) -> np.ndarray:
        drawn = np.random.default_rng(tokens).integers(0, 8, (2, 2))
        return self.routes.setdefault(tokens, drawn)


def play(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Any], **client: Any) -> Any:
    """One episode of the environment in verifiers_guesses.py, on an endpoint that answers so."""
    from aiohttp import web

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "async_loop")

    async def serve(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        agent = {"harness": {"id": "verifiers_guesses"}, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": "verifiers_guesses"}, "agent": agent}
        env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config))
        asks = vf.TrainClientConfig(base_url=url, api_key_var="NONE", **client)
        context = vf.ModelContext("m", asks)
        try:
            async with env.serving():
                (slot,) = env.slots(next(iter(env.taskset)))
                return await env.run_slot(slot, context)
        finally:
            await runner.cleanup()

    episode = asyncio.run(run())
    assert episode.ok, episode.traces[0].errors
    return episode


def test_an_environment_runs_unchanged(monkeypatch, tokenizer):
    engine = Engine()
    render = {"renderer": {"name": "qwen3"}, "renderer_model_name": str(tokenizer)}
    episode = play(monkeypatch, engine.answer, **render)
    rollouts = episode_rollouts(episode, version=engine.sampler.version_of)
    assert len(rollouts) == 3  # One without the system prompt, one that asks again.
    assert trained(rollouts) == engine.sampler.said
    for each in rollouts:
        assert (each.reward, dict(each.rewards)) == (10.0, {"turns": 10.0})
        routes, ids, counts = each.attachments.values()
        assert (routes.start, routes.stop) == (0, len(each.tokens) - 1)
        seen = [engine.routes[tuple(each.tokens[: at + 1])] for at in range(routes.stop)]
        np.testing.assert_array_equal(routes.value, seen)
        assert counts.value[each.prompt_length :].tolist() == (2 * each.sampled).tolist()
        assert set(ids[1::2]) == {0}

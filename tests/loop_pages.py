"""Stand-ins for the pages of `async_loop` and `capture` that need no engine of a host."""

from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace

import numpy as np

from primeblocks.async_loop import Group, Partial, Rollout, RolloutBuffer, StalenessPolicy

__all__ = ["conversations", "processes", "resume"]


@contextmanager
def resume():
    """Prompts for twenty steps, and an engine that samples two tokens at a time."""
    saved = []

    async def sample_more(prompt, so_far, version):
        said = [] if so_far is None else so_far.completion.tolist()
        known = np.array([] if so_far is None else so_far.versions, np.int64)
        return Partial(
            tokens=np.array([prompt, *said, 5, 6]),
            prompt_length=1,
            logprobs=np.full(len(said) + 2, -1.0),
            versions=np.append(known, [version] * 2),
        )

    def finish(partial):
        parts = {field.name: getattr(partial, field.name) for field in fields(partial)}
        return Rollout(**parts, finish_reason="length")

    yield {
        "prompts": range(20 * 4),
        "sample_more": sample_more,
        "finish": finish,
        "train": lambda groups, *, version: None,
        "publish": lambda version: None,
        "buffer": RolloutBuffer(capacity=64, staleness=StalenessPolicy(0)),
        "load_weights": lambda: 0,
        "save_weights": saved.append,
    }
    assert saved == [20]


@contextmanager
def processes():
    ends = {"prompt_length": 2, "finish_reason": "stop"}
    rollout = Rollout(tokens=[5, 6, 7], logprobs=[-1.0], versions=[3], **ends)
    names = {"groups": [Group(i, [rollout], 3, ordinal=i) for i in range(8)], "version": 3}
    yield names
    assert sorted(group.ordinal for group in names["batch"]) == [*range(8)]


@contextmanager
def conversations():
    """An engine that says yes, and an agent that asks once."""
    from tests.capture.chat_site import END, tokenizer

    words = tokenizer()
    said = words.encode("yes" + END, add_special_tokens=False)

    async def generate(prompt, **options):
        return SimpleNamespace(
            token_ids=said,
            logprobs=[-1.0] * len(said),
            versions=np.full(len(said), 3),
            finish_reason="stop",
            routed_experts=np.zeros((len(prompt) + len(said) - 1, 1, 1), np.uint8),
        )

    async def agent(client):
        asked = [{"role": "user", "content": "well?"}]
        answer = await client.chat.completions.create(model="policy", messages=asked)
        return float(answer.choices[0].message.content == "yes")

    names = {"first_question": [1, 2], "generate": generate, "tool_result": lambda answer: [5]}
    names |= {"tokenizer": words, "agent": agent}
    yield names
    assert names["conversation"].counts == {"start": 1, "clean": 2}
    turn = [True] * len(said)
    assert names["rollout"].loss_mask.tolist() == [*turn, False, *turn, False, *turn]
    assert len(names["rollout"].attachments["routes"].value) == 2 + 3 * len(said) + 2 - 1
    (recorded,) = names["rollouts"]
    assert (recorded.reward, recorded.loss_mask.sum()) == (1.0, len(said))

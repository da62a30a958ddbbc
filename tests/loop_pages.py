"""Stand-ins for the pages of `async_loop` and `capture` that need no engine of a host."""

import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch

from primeblocks.async_loop import (
    AsyncLoop,
    Group,
    Partial,
    Rollout,
    RolloutBuffer,
    StalenessPolicy,
)
from primeblocks.kvoffload import HostTier, TieredStore
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync

__all__ = ["conversations", "metrics", "processes", "resume"]


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


class TwoSteps:
    """A loop that may be entered again: each time it trains on two prompts."""

    async def __aenter__(self):
        async def generate(prompt, *, version):
            ends = {"prompt_length": 2, "finish_reason": "stop", "reward": float(prompt)}
            return [Rollout(tokens=[5, 6, 7], logprobs=[-1.0], versions=[version], **ends)]

        self._loop = AsyncLoop(
            prompts=range(2),
            generate=generate,
            train=lambda groups, *, version: {"k3": 0.5},
            publish=lambda version: None,
            buffer=RolloutBuffer(capacity=1, staleness=StalenessPolicy(0)),
            batch_size=1,
            max_in_flight=1,
        )
        return await self._loop.__aenter__()

    async def __aexit__(self, *error):
        await self._loop.__aexit__(*error)

    def steps(self, count):
        return self._loop.steps(count)


class Logger(ModuleType):
    """What wandb, trackio and TensorBoard's writer are asked for, in one."""

    def __init__(self):
        super().__init__("logger")
        self.rows, self.calls = {}, []

    def init(self, *, project, config):
        self.calls.append((project, config))
        return self

    def SummaryWriter(self, folder):
        return self.init(project=folder, config=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.finish()

    def log(self, row, *, step):
        self.rows.setdefault(step, {}).update(row)

    def add_scalar(self, name, value, step):
        self.log({name: value}, step=step)

    def finish(self):
        self.calls.append("finish")


@contextmanager
def metrics():
    weights = {"w": torch.arange(32.0)}
    loggers = {name: Logger() for name in ("wandb", "trackio", "torch.utils.tensorboard")}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=64)
    tier = HostTier(capacity_bytes=1 << 12, page_bytes=1 << 8)
    with (
        mock.patch.dict(sys.modules, loggers),
        SharedMemoryTransport("metrics", owner=True, root=".") as transport,
        Publisher(plan, weights, transport) as publisher,
        TieredStore([tier]) as store,
    ):
        found = {"loop": TwoSteps(), "store": store, "publisher": publisher}
        yield found
    for logger in loggers.values():
        assert [type(call) for call in logger.calls] == [tuple, str]
        assert [row["reward"] for row in logger.rows.values()] == [0.0, 1.0]
        assert logger.rows[2]["rollout_corr/k3_kl"] == 0.5
    assert Path("run.png").stat().st_size > 0
    assert found["bar"].n == found["bar"].total == 128


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

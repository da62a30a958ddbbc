"""Stand-ins for the README, the quickstart and the recipes: most bring tiny models of their own."""

import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import torch

from primeblocks import losses
from primeblocks.async_loop import Rollout
from primeblocks.testing import tiny_models
from primeblocks.weightsync import SharedMemoryTransport

__all__ = ["FRONT"]


@contextmanager
def apart():
    """Names that engines look for in shared memory are this test's own: others run beside it."""
    memory = SharedMemoryTransport.__init__.__kwdefaults__
    with mock.patch.dict(memory, root=os.getcwd()):
        yield


@contextmanager
def readme():
    from primeblocks.replay.adapters.transformers import routers

    names = {}
    with apart():
        yield names
        names["publisher"].close()
        names["subscriber"].close()
    assert all(router.module.weight.grad is not None for router in routers(names["trainer"]))
    assert_served(names)
    assert names["loop"].version == 5


@contextmanager
def quickstart():
    names = {}
    with apart():
        yield names
    assert_served(names)
    assert (names["imposed"] - names["plain"]).abs().max() > 0


def assert_served(names):
    trained, served = names["trainer"].state_dict(), names["engine"].state_dict()
    assert all(torch.equal(served[name], trained[name].bfloat16()) for name in trained)


@contextmanager
def black_box():
    """An engine that says yes twice, and an agent that asks twice."""
    from tests.capture.chat_site import END, tokenizer

    words = tokenizer()

    async def generate(prompt, **options):
        ids = words.encode("yes" + END, add_special_tokens=False)
        return _Sampled(ids)

    async def agent(client):
        messages = [{"role": "user", "content": "well?"}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "again?"},
            ]
        return float(said == "yes")

    names = {"tokenizer": words, "generate": generate, "agent": agent}
    yield names
    (rollout,) = names["rollouts"]
    assert rollout.reward == 1.0
    assert rollout.loss_mask.sum() == 2 * len(words.encode("yes" + END, add_special_tokens=False))


class _Sampled:
    finish_reason = "stop"
    routed_experts = None

    def __init__(self, ids):
        self.token_ids = ids
        self.logprobs = [-1.0] * len(ids)
        self.versions = np.full(len(ids), 7)


@contextmanager
def kv_cache():
    from tests.pages import vllm_without_engines

    with vllm_without_engines() as (_, offline):
        yield {"model": str(tiny_models.save("qwen3_moe", "model", num_layers=2))}
        assert offline.generate.call_count == 1


def alone():
    return nullcontext({})


@contextmanager
def batches():
    draw = np.random.default_rng(0)
    rollouts = [
        Rollout(
            tokens=draw.integers(4, 512, size),
            prompt_length=3,
            logprobs=np.full(size - 3, -6.0),
            versions=np.zeros(size - 3, int),
            finish_reason="stop",
            reward=float(draw.random()),
            loss_mask=draw.random(size - 3) < 0.8,
        )
        for size in (60, 9, 31, 5, 24)
    ]
    names = {"rollouts": rollouts}
    yield names
    model = tiny_models.build("qwen3_moe", dtype="float32")
    for one, advantage in zip(rollouts, names["advantages"], strict=True):
        ids = torch.tensor(one.tokens)
        logprobs = model(ids[None]).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[3:, None])[:, 0]
        engine, mask = torch.tensor(one.logprobs).float(), torch.tensor(one.loss_mask)
        loss = losses.aipo_loss(logprobs, engine, advantage.expand_as(engine), mask=mask)
        (loss.sum / names["count"]).backward()
        names["total"] -= loss.sum.detach() / names["count"]
    assert abs(float(names["total"])) < 1e-5
    alone = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    assert abs(float(names["norm"]) / float(alone) - 1) < 1e-4


FRONT = {
    "README.md": readme,
    "docs/quickstart.md": quickstart,
    "docs/recipes/batches.md": batches,
    "docs/recipes/black_box.md": black_box,
    "docs/recipes/eviction.md": alone,
    "docs/recipes/float8.md": alone,
    "docs/recipes/hangs.md": alone,
    "docs/recipes/kv_cache.md": kv_cache,
    "docs/recipes/long.md": alone,
    "docs/recipes/memory.md": alone,
    "docs/recipes/mismatch.md": alone,
    "docs/recipes/stale.md": alone,
    "docs/recipes/weights.md": alone,
}

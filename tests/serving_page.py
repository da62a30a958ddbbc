"""What the pages on serving presuppose: engines that are mocks, and servers that are fakes."""

import os
from contextlib import closing, contextmanager
from unittest import mock

import torch

from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from tests.weightsync.test_vllm_server import FakeServer


class TokenServer(FakeServer):
    """Answers requests too: with one token, under the label of its weights."""

    def answer(self, target, body):
        label = self.engine.label
        if target == "/weight_info":
            return 200, {"weight_version": label}
        if target != "/inference/v1/generate":
            return super().answer(target, body)
        assert body["cache_salt"].startswith(f"policy-{label}-")
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [7],
            "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]},
            "weight_versions": [{"version": label, "start": 0, "end": 1}],
        }
        return 200, {"choices": [choice]}


@contextmanager
def serving():
    names = {name: mock.AsyncMock() for name in ("engine_a", "engine_b")}
    yield names
    assert names["fleet"].states(names["describe"]([1, 2, 3, 4], ""))[0].matched == 1


@contextmanager
def serving_vllm():
    model = torch.nn.Linear(2, 2)
    source = describe(model)
    plan = plan_sync([source], source.whole())
    with (
        closing(TokenServer()) as one,
        closing(TokenServer()) as other,
        SharedMemoryTransport("fleet", owner=True, root=os.getcwd()) as transport,
    ):
        names = {
            "plan": plan,
            "transport": transport,
            "publisher": Publisher(plan, model, transport),
            "urls": [one.client.url, other.client.url],
            "prompt": [1, 2, 3],
        }
        yield names
        assert one.engine.serving == other.engine.serving == ((7, 7), "7")
        assert set(names["served"].open) == set(names["urls"])
    assert [rollout.versions.tolist() for rollout in names["rollouts"]] == [[7]]

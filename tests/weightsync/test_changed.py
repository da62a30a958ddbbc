"""Trainers that changed after their plan was made: nothing is published of them."""

import pytest
import torch
from torch import nn

from primeblocks.errors import UsageError
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync

TIMEOUT_S = 120


class Model(nn.Module):
    """Tied as many are; the buffer is wanted by no reader."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))


def grow(model):
    model.embed.weight = nn.Parameter(torch.cat([model.embed.weight.data, torch.ones(2, 4)]))
    model.head.weight = model.embed.weight


def shrink(model):
    model.embed.weight = nn.Parameter(model.embed.weight.data[:5])
    model.head.weight = model.embed.weight


def untie(model):
    model.head.weight = nn.Parameter(model.embed.weight.data.clone())


def appear(model):
    model.extra = nn.Parameter(torch.ones(2))


def vanish(model):
    model.norm.bias = None


CHANGES = {
    grow: r"'embed.weight' is \(8, 4\) on rank 0 and \(6, 4\) in the plan.* resized after planning",
    shrink: r"'embed.weight' is \(5, 4\) on rank 0 and \(6, 4\) in the plan",
    untie: "rank 0 has 'head.weight', which no rank had when the plan was made.* untied",
    appear: "rank 0 has 'extra', which no rank had",
    vanish: "'norm.bias' and has no such tensor",
}


@pytest.fixture
def planned(tmp_path):
    model = Model()
    source = describe(model)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    del wanted["steps"]
    plan = plan_sync([source], describe(wanted).whole(dtype=torch.bfloat16), bucket_bytes=64)
    assert plan.unwanted == ("steps",)
    with SharedMemoryTransport("changed", owner=True, root=str(tmp_path)) as transport:
        yield model, plan, transport


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_of_other_tensors_is_refused(planned, change, published):
    """Before the first publish, and after one."""
    model, plan, transport = planned
    with Publisher(plan, model, transport) as publisher:
        if published:
            publisher.publish(1, timeout_s=TIMEOUT_S)
        change(model)
        with pytest.raises(UsageError, match=CHANGES[change]):
            publisher.publish(2, timeout_s=TIMEOUT_S)
    assert [marker.version for marker in transport.markers()] == [1] * published


def test_what_no_reader_wants_may_change(planned):
    model, plan, transport = planned
    model.steps = torch.zeros(9, dtype=torch.int32)
    Publisher(plan, model, transport).publish(1, timeout_s=TIMEOUT_S)
    del model.steps
    Publisher(plan, model, transport).publish(2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_a_dtype_of_another_kind_is_refused(planned, dtype):
    model, plan, transport = planned
    bias = nn.Parameter(model.norm.bias.data.to(dtype), requires_grad=False)
    with Publisher(plan, model, transport) as publisher:
        publisher.publish(1, timeout_s=TIMEOUT_S)
        model.norm.bias = bias
        with pytest.raises(UsageError, match=f"'norm.bias' is {dtype} on rank 0 and torch.bfloat"):
            publisher.publish(2, timeout_s=TIMEOUT_S)
        model.norm.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))
        publisher.publish(2, timeout_s=TIMEOUT_S)  # Another float is cast, as the planner allows.
    encode = lambda name, tensor: {name: tensor.to(dtype)}  # noqa: E731
    with (
        Publisher(plan, model, transport, encode=encode) as publisher,
        pytest.raises(UsageError, match=f"is {dtype} on rank 0"),
    ):
        publisher.publish(3, timeout_s=TIMEOUT_S)
    assert [marker.version for marker in transport.markers()] == [2]


def test_resized_embeddings_of_transformers_are_refused(tmp_path):
    model = tiny_models.build("qwen3_moe", dtype="float32")
    plan = plan_sync([describe(model)], describe(model).whole(), bucket_bytes=1 << 16)
    with SharedMemoryTransport("resized", owner=True, root=str(tmp_path)) as transport:
        publisher = Publisher(plan, model, transport)
        publisher.publish(1, timeout_s=TIMEOUT_S)
        model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
        with pytest.raises(UsageError, match="resized after planning"):
            publisher.publish(2, timeout_s=TIMEOUT_S)

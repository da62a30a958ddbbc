import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primeblocks.errors import TransferError
from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    digest_tensors,
    plan_sync,
    prove_round_trip,
)

ranks.preload(__name__)  # With all that it imports.


class Served:
    """A trainer of one rank and an engine behind shared memory; `spoil` changes what is loaded."""

    def __init__(self, folder, *, spoil=lambda name, tensor, version: tensor):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16)
        self.model.register_buffer("steps", torch.tensor(3))
        source = describe(self.model)
        plan = plan_sync([source], source.whole(), bucket_bytes=64)
        self.transport = SharedMemoryTransport("policy", owner=True, root=str(folder))
        self.publisher = Publisher(plan, self.model, self.transport)
        self.tensors, self.version, self.spoil = {}, None, spoil
        self.subscriber = Subscriber(plan, self.load, self.transport)

    def load(self, tensors):
        for name, tensor in tensors:
            loaded = self.spoil(name, tensor, self.version)
            if loaded is not None:
                self.tensors[name] = loaded.clone()

    def push(self, version):
        self.version = version
        self.publisher.publish(version, timeout_s=10)
        self.subscriber.receive(version, timeout_s=10)

    def observe(self):
        return digest_tensors(self.tensors)

    def prove(self):
        return prove_round_trip(self.model, self.push, self.observe, version=4, timeout_s=30)


@pytest.fixture
def before():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16).state_dict()


def assert_restored(model, before):
    for name, tensor in before.items():
        assert model.state_dict()[name].view(torch.int16).equal(tensor.view(torch.int16))


def test_an_engine_that_serves_what_it_is_sent_passes(tmp_path, before):
    served = Served(tmp_path)
    proof = served.prove()
    assert proof.versions == (4, 5, 6)
    assert 0 < proof.seconds < 30
    assert_restored(served.model, before)
    assert digest_tensors(served.model) == served.observe()


def test_every_element_is_perturbed(tmp_path):
    seen = []

    def spoil(name, tensor, version):
        seen.append((name, tensor.clone()))
        return tensor

    served = Served(tmp_path, spoil=spoil)
    served.prove()
    names = len(served.tensors)
    for (name, first), (_, second) in zip(seen[:names], seen[names : 2 * names], strict=True):
        if first.dtype.is_floating_point:
            # Equal bits only where a value stood opposite to one that differs in its lowest bit.
            assert first.view(torch.int16).eq(second.view(torch.int16)).float().mean() < 0.1, name
            assert second.isfinite().all()
        else:
            assert first.equal(second)


def test_an_update_that_loads_nothing_is_noticed(tmp_path, before):
    served = Served(tmp_path, spoil=lambda name, t, version: t if version == 4 else None)
    with pytest.raises(TransferError, match="after other weights: they do not arrive"):
        served.prove()
    assert_restored(served.model, before)


@pytest.mark.parametrize("where", ["0.weight", "1.bias"])
def test_garbage_in_one_element_is_noticed(tmp_path, before, where):
    def spoil(name, tensor, version):
        if name == where and version == 6:
            tensor.view(-1)[3] += 1
        return tensor

    served = Served(tmp_path, spoil=spoil)
    with pytest.raises(TransferError, match="after the same weights: it serves others"):
        served.prove()
    assert_restored(served.model, before)


def test_a_push_that_fails_leaves_the_parameters_as_they_were(tmp_path, before):
    served = Served(tmp_path)

    def push(version):
        if version == 5:
            raise TransferError("cut")
        served.push(version)

    with pytest.raises(TransferError, match="cut"):
        prove_round_trip(served.model, push, served.observe, version=4, timeout_s=30)
    assert_restored(served.model, before)


def ranks_body(fails):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(6, 4)
    parameters = {"w": distribute_tensor(whole.clone(), mesh, [Shard(0)])}
    answers = iter("aaa" if fails else "aba")
    observe = (lambda: next(answers)) if dist.get_rank() == 0 else None
    try:
        prove_round_trip(parameters, lambda version: None, observe, version=0, timeout_s=20)
    except TransferError as error:
        text = str(error)
    else:
        text = ""
    assert parameters["w"].full_tensor().equal(whole)
    return text


def test_all_ranks_hear_what_one_saw():
    assert ranks.run(ranks_body, False, world_size=2) == ["", ""]
    for text in ranks.run(ranks_body, True, world_size=2):
        assert "rank 0: the engine answers as before" in text

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primeblocks.errors import EngineError, TransferError, UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.engines import prove_round_trip
from primeblocks.weightsync.manifest import gather_manifests, named_tensors
from primeblocks.weightsync.observed import digest_tensors
from primeblocks.weightsync.verify import _perturb
from tests.deadlines import HANG_S

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
        self.publisher.publish(version, timeout_s=HANG_S)
        self.subscriber.receive(version, timeout_s=HANG_S)

    def observe(self):
        return self.tensors

    def verify(self):
        return verify_engine(self.model, self.tensors)

    def prove(self):
        return prove_round_trip(self.model, self.push, self.verify, version=4)


def _without_floats():
    rank, engine = dist.get_rank(), {"w": torch.zeros(4)}
    mine = {"table": torch.arange(5)} if rank else {"w": torch.ones(4)}
    plan = plan_sync(gather_manifests(describe(mine)), describe({"w": torch.zeros(4)}))

    def push(version):
        if rank == 0:
            engine["w"] = mine["w"].clone()

    verify = lambda: verify_engine(mine, None if rank else engine, plan=plan)  # noqa: E731
    return prove_round_trip(mine, push, verify, version=1).is_proved


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
    assert (proof.is_proved, proof.tensors, served.version) == (True, 5, 6)
    assert_restored(served.model, before)
    assert digest_tensors(served.model) == digest_tensors(served.observe())


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
            assert first.view(torch.int16).ne(second.view(torch.int16)).all(), name
            assert second.isfinite().all()
        else:
            assert first.equal(second)


def test_an_update_that_loads_nothing_is_noticed(tmp_path, before):
    served = Served(tmp_path, spoil=lambda name, t, version: t if version == 4 else None)
    with pytest.raises(TransferError, match="4 tensors, .* after the push of version 5"):
        served.prove()
    assert_restored(served.model, before)


def test_parameters_that_are_read_once_are_changed_all_the_same():
    model = nn.Linear(3, 2)
    engine = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TransferError, match="2 tensors, .* after the push of version 1"):
        prove_round_trip(
            model.named_parameters(), id, lambda: verify_engine(model, engine), version=0
        )


@pytest.mark.parametrize("where", ["0.weight", "1.bias"])
def test_garbage_in_one_element_is_noticed(tmp_path, before, where):
    def spoil(name, tensor, version):
        if name == where and version == 6:
            tensor.view(-1)[3] += 1
        return tensor

    served = Served(tmp_path, spoil=spoil)
    with pytest.raises(TransferError, match=f"1 tensors, such as '{where}', .* version 6"):
        served.prove()
    assert_restored(served.model, before)


def test_a_push_that_fails_leaves_the_parameters_as_they_were(tmp_path, before):
    served = Served(tmp_path)

    def push(version):
        if version == 5:
            raise TransferError("cut")
        served.push(version)

    with pytest.raises(TransferError, match="cut"):
        prove_round_trip(served.model, push, served.verify, version=4)
    assert_restored(served.model, before)


def ranks_body(lost):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(6, 4)
    parameters = {"w": distribute_tensor(whole.clone(), mesh, [Shard(0)])}
    held = gather_manifests(describe(parameters))
    plan, engine = plan_sync(held, held[0].whole(), bucket_bytes=64), {"w": torch.zeros(6, 4)}

    def push(version):
        sent = parameters["w"].full_tensor()
        if version != lost:
            engine["w"].copy_(sent)

    def verify():
        return verify_engine(parameters, None if dist.get_rank() else engine, plan=plan)

    try:
        prove_round_trip(parameters, push, verify, version=0)
    except TransferError as error:
        text = str(error)
    else:
        text = ""
    assert parameters["w"].full_tensor().equal(whole)
    return text


def all_ranks():
    return ranks_body(None), ranks_body(1), _without_floats()


def test_all_ranks_hear_what_one_saw_and_one_without_floating_parameters_takes_part():
    for whole, lost, without_floats in ranks.run(all_ranks, world_size=2):
        assert whole == ""
        assert "1 tensors, such as 'w', differ in the engine" in lost
        assert without_floats


@pytest.mark.parametrize("kind", ["module", "state_dict", "views"])
def test_tied_tensors_are_perturbed_once(kind):
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    parameters = model if kind == "module" else model.state_dict()
    if kind == "views":
        weight = model["embed"].weight.detach()
        parameters = {"all": weight, "first": weight[:3], "turned": weight.T}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = {}

    def push(version):
        engine.update({name: t.detach().clone() for name, t in named_tensors(parameters).items()})

    verify = lambda: verify_engine(parameters, engine)  # noqa: E731
    proof = prove_round_trip(parameters, push, verify, version=0)
    assert proof.tensors == {"module": 1, "state_dict": 2, "views": 3}[kind]
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())


def test_a_proof_of_nothing_is_refused():
    with pytest.raises(UsageError, match="nothing to prove"):
        prove_round_trip({"n": torch.ones(3, dtype=torch.int64)}, print, dict, version=0)


FLOATS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip


def pushed(tensor, to=None):
    """What an engine gets of a tensor, push by push."""
    parameters, engine, seen = {"w": tensor}, {}, []

    def push(version):
        engine["w"] = tensor.to(to or tensor.dtype, copy=True)
        seen.append(engine["w"])

    prove_round_trip(parameters, push, lambda: verify_engine(parameters, engine), version=0)
    return seen


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern_changes(dtype):
    bits = torch.randint(0, 256, (4096, 16), dtype=torch.uint8)
    bits[:2] = 0  # Zeros of every dtype.
    width = dtype.itemsize if not dtype.is_complex else 8
    seen = [one.view(torch.uint8).view(-1, width) for one in pushed(bits.view(dtype))]
    assert (seen[1] != seen[0]).any(1).all()
    assert seen[2].equal(seen[0])
    assert seen[2].equal(bits.view(-1, width))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-30, -3.5])
def test_a_perturbation_shows_in_narrower_dtypes(to, value):
    before, after, _ = pushed(torch.full((40,), value), to)
    assert (after.view(torch.uint8) != before.view(torch.uint8)).view(40, -1).any(1).all()
    assert after.isfinite().all()


def test_a_perturbation_makes_nothing_larger():
    before = torch.tensor([1e30, -2.0, 0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-30])
    after = before.clone()
    _perturb(after, "w")
    assert (after.signbit() ^ before.signbit()).all()
    usual = before.isfinite() & (before != 0)
    assert (after.abs() <= torch.where(usual, before.abs(), 1.0)).all()


# --- the receipt of a load -----------------------------------------------------------------------


@pytest.mark.parametrize("check", ["before", "ahead"])
def test_a_load_that_keeps_nothing_gets_no_receipt(tmp_path, check):
    served = Served(tmp_path)
    keeps = [True, False, True]
    load = lambda ts: served.load(ts) if keeps.pop(0) else [None for _ in ts]  # noqa: E731
    subscriber = Subscriber(
        served.subscriber.plan, load, served.transport, check=check, observe=served.observe
    )
    served.publisher.publish(1, timeout_s=HANG_S)
    assert subscriber.receive(timeout_s=HANG_S).version == 1
    served.model[0].weight.data.add_(1)
    served.publisher.publish(2, timeout_s=HANG_S)
    with pytest.raises(TransferError, match=r"1 of 5 tensors, such as '0.weight', are missing"):
        subscriber.receive(timeout_s=HANG_S)
    assert subscriber.version == 1
    keeps[:] = [True]
    assert subscriber.receive(timeout_s=HANG_S).version == 2


def test_a_first_load_that_keeps_nothing_gets_no_receipt(tmp_path):
    served = Served(tmp_path)
    served.publisher.publish(1, timeout_s=HANG_S)
    load = lambda ts: [None for _ in ts]  # noqa: E731
    subscriber = Subscriber(served.subscriber.plan, load, served.transport, observe=served.observe)
    with pytest.raises(EngineError, match="5 of 5 tensors, such as .* are missing in the engine"):
        subscriber.receive(timeout_s=HANG_S)
    assert subscriber.version is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_router_may_be_observed_as_the_engine_rounds_it(tmp_path, dtype):
    name, step = "mlp.gate.weight", 1 + 2**-12
    weights = {name: torch.tensor([step]), "w": torch.tensor([step])}
    engine = {name: torch.zeros(1, dtype=dtype), "w": torch.zeros(1, dtype=torch.bfloat16)}
    spoils = [0.0, 1.0]

    def load(tensors):
        for each, tensor in tensors:
            engine[each].copy_(tensor)
        engine[name] += spoils[0]

    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        plan = plan_sync([describe(weights)], describe(weights, dtype=torch.bfloat16))
        publisher = Publisher(plan, weights, transport)
        subscriber = Subscriber(plan, load, transport, observe=lambda: engine)
        publisher.publish(1, timeout_s=HANG_S)
        receipt = subscriber.receive(timeout_s=HANG_S)
        assert engine[name].item() == (1 if dtype == torch.bfloat16 else step)
        assert verify_engine(receipt.held, engine).is_proved
        assert verify_engine(weights, engine, plan=plan).is_proved
        publisher.publish(2, timeout_s=HANG_S)
        spoils.pop(0)
        with pytest.raises(EngineError, match=f"1 of 2 tensors, such as '{name}'"):
            subscriber.receive(timeout_s=HANG_S)

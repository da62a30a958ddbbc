"""A trainer and engines that share a name, and nothing else."""

import os
import uuid

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from primeblocks import fp8, weightsync
from primeblocks.errors import (
    DeadlineError,
    PlanError,
    RankError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import SharedMemoryTransport, convert
from primeblocks.weightsync.transports import FileTransport, GroupTransport, PullTransport, TcpWire
from tests.deadlines import HANG_S as TIMEOUT_S

ranks.preload(__name__)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))


def _end(kind, where, owner):
    if kind == "file":
        return FileTransport(where, owner=owner)
    if kind == "store":
        store = dist.FileStore(str(where / "store"), -1)
        return PullTransport(store, TcpWire("127.0.0.1"), owner=owner)
    return SharedMemoryTransport("policy", owner=owner, root=str(where))


def _meet(kind, where):
    """Two trainer ranks under FSDP2, an engine that comes first, in parts of its own."""
    rank, trainer = dist.get_rank(), model()
    group = dist.new_group([0, 1], backend="gloo")
    if rank == 2:
        engine = model(seed=1).bfloat16()
        plan, transport = weightsync.find(_end(kind, where, False), timeout_s=TIMEOUT_S)
        load = weightsync.load_into(engine, plan)
        weightsync.Subscriber(plan, load, transport).receive(timeout_s=TIMEOUT_S)
        wanted = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in trainer.state_dict().items()
        }
        for name, tensor in engine.state_dict().items():
            assert_same_bits(tensor, wanted[name])
    else:
        compiled = torch.compile(
            fully_shard(trainer, mesh=init_device_mesh("cpu", (2,))), backend="eager"
        )
        plan, transport = weightsync.announce(
            _end(kind, where, rank == 0), compiled, dtype=torch.bfloat16, group=group
        )
        publisher = weightsync.Publisher(plan, compiled, transport, group=group)
        publisher.publish(1, timeout_s=TIMEOUT_S)
    dist.barrier()
    transport.close()


@pytest.mark.parametrize("kind", ["shared_memory", "store"])
def test_a_sharded_trainer_and_an_engine_meet(kind, tmp_path):
    ranks.run(_meet, kind, tmp_path, world_size=3)


def test_a_name_alone_is_enough():
    name, trainer, engine = uuid.uuid4().hex, model(), model(seed=1)
    plan, sending = weightsync.announce(name, trainer)
    weightsync.Publisher(plan, trainer, sending).publish(1, timeout_s=TIMEOUT_S)
    found, receiving = weightsync.find(name, timeout_s=0)
    assert found == plan
    load = weightsync.load_into(engine, found)
    weightsync.Subscriber(found, load, receiving).receive(timeout_s=TIMEOUT_S)
    assert_same_bits(engine[0].weight.detach(), trainer[0].weight.detach())
    sending.close()
    with pytest.raises(
        DeadlineError, match="no trainer announced a plan in time. Check that the trainer"
    ):
        weightsync.find(name, timeout_s=0)


def _stages(where):
    """Each rank has a layer of its own, and one of both."""
    rank = dist.get_rank()
    mine = {"shared": torch.ones(2), f"layer{rank}": torch.full((3,), float(rank))}
    plan, transport = weightsync.announce(_end("file", where, rank == 0), mine)
    weightsync.Publisher(plan, mine, transport).publish(1, timeout_s=TIMEOUT_S)
    dist.barrier()
    transport.close()
    return list(plan.target)


def test_ranks_may_hold_other_tensors_each_and_the_last_version_is_found_later(tmp_path):
    assert ranks.run(_stages, tmp_path, world_size=2) == [["shared", "layer0", "layer1"]] * 2
    plan, transport = weightsync.find(FileTransport(tmp_path), timeout_s=0)
    held = {name: torch.zeros(spec.shape) for name, spec in plan.target.items()}
    load = weightsync.load_into(held.items(), plan)
    weightsync.Subscriber(plan, load, transport).receive(timeout_s=TIMEOUT_S)
    assert held["layer1"].tolist() == [1.0] * 3


def _one_is_refused(where):
    rank = dist.get_rank()
    mine = {"a": torch.ones(2) if rank else torch.ones(2).to_sparse()}
    with pytest.raises((PlanError, RankError)) as refused:
        weightsync.announce(_end("file", where, rank == 0), mine)
    return type(refused.value).__name__, str(refused.value)


def test_ranks_hear_that_one_of_them_cannot_describe_its_parameters(tmp_path):
    (own, why), *others = ranks.run(_one_is_refused, tmp_path, world_size=3)
    assert own == "PlanError"
    told = ("RankError", f"rank 0 cannot describe its parameters: PlanError: {why}")
    assert others == [told] * 2


def _names_differ():
    with pytest.raises(UsageError, match=r"different names: \['a-0', 'a-1'\]"):
        weightsync.announce(f"a-{dist.get_rank()}", {"w": torch.ones(2)})


def test_ranks_pass_one_name():
    ranks.run(_names_differ, world_size=2)


def test_converted_names_are_announced(tmp_path):
    tensors = {"a": torch.ones(2)}
    wiring = convert.record_wiring(lambda each: {"b": each["a"]}, weightsync.describe(tensors))
    with _end("file", tmp_path, True) as transport:
        plan, _ = weightsync.announce(transport, tensors, convert=wiring)
    assert list(plan.target) == ["b"]
    with pytest.raises(PlanError, match=r"does not receive 'a' .* drop convert= here"):
        weightsync.Subscriber(plan, dict, transport, convert=wiring)
    other = convert.record_wiring(
        lambda each: {"c": each["b"]}, weightsync.describe({"b": torch.ones(3)})
    )
    with pytest.raises(PlanError, match=r"does not receive 'b' with the shape \(3,\)"):
        weightsync.Subscriber(plan, dict, transport, convert=other)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_float8_weights_are_announced(is_renamed, tmp_path):
    trainer = nn.Sequential(nn.Linear(128, 130), nn.LayerNorm(130))
    encode = fp8.encode_weights(fp8.Recipe(), only="0", layouts=None)
    coded = encode.describe(weightsync.describe(trainer, dtype=torch.bfloat16))
    wiring = convert.record_wiring(lambda each: {f"e.{n}": t for n, t in each.items()}, coded)
    dtype, wiring = (None, wiring) if is_renamed else (torch.bfloat16, None)
    options = {"convert": wiring, "encode": encode}
    with _end("file", tmp_path, True) as transport:
        pairs = trainer.named_parameters()
        plan, _ = weightsync.announce(transport, pairs, dtype=dtype, **options)
        weightsync.Publisher(plan, trainer, transport, **options).publish(1, timeout_s=TIMEOUT_S)
        found, receiving = weightsync.find(FileTransport(tmp_path), timeout_s=0)
        held = {n: torch.zeros(spec.shape, dtype=spec.dtype) for n, spec in found.target.items()}
        load = weightsync.load_into(held, found)
        weightsync.Subscriber(found, load, receiving).receive(timeout_s=TIMEOUT_S)
        with pytest.raises(UsageError, match="or pass the .*convert= or encode="):
            weightsync.Publisher(plan, trainer, transport).publish(2, timeout_s=TIMEOUT_S)
    made = fp8.quantize(trainer[0].weight.bfloat16(), fp8.Tile(128, 128))
    wanted = {"0.weight": made.codes, "0.weight_scale_inv": made.scales}
    wanted |= {name: trainer.state_dict()[name].bfloat16() for name in ("0.bias", "1.weight")}
    for name, tensor in wanted.items():
        assert_same_bits(held["e." * is_renamed + name], tensor)
    assert len(held) == len(wanted) + 1


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("encode", [None, fp8.encode_weights(fp8.Recipe(), only="a", layouts=None)])
def test_a_dtype_that_no_weight_is_sent_in_is_refused(dtype, encode, tmp_path):
    with (
        _end("file", tmp_path, True) as transport,
        pytest.raises(PlanError, match=r"dtype must be one of .*torch.bfloat16.*; got "),
    ):
        weightsync.announce(transport, {"a": torch.ones(1, 1)}, dtype=dtype, encode=encode)


def test_codes_keep_their_dtype(tmp_path):
    held = {"codes": torch.ones(2).to(torch.float8_e4m3fn), "scales": torch.ones(2)}
    with _end("file", tmp_path, True) as transport:
        plan, _ = weightsync.announce(transport, held, dtype=torch.bfloat16)
        weightsync.Publisher(plan, held, transport).publish(1, timeout_s=TIMEOUT_S)
    assert plan.target["codes"].dtype == torch.float8_e4m3fn
    assert plan.target["scales"].dtype == torch.bfloat16


def test_a_folder_without_a_plan_is_named(tmp_path):
    with pytest.raises(DeadlineError, match=rf"^find\(FileTransport\) .* {tmp_path}"):
        weightsync.find(FileTransport(tmp_path), timeout_s=0)


def test_the_next_owner_announces_anew(tmp_path):
    for names in (["a"], ["a", "b"]):
        with pytest.raises(DeadlineError):
            weightsync.find(_end("shared_memory", tmp_path, False), timeout_s=0)
        with _end("shared_memory", tmp_path, True) as owner:
            weightsync.announce(owner, {name: torch.ones(1) for name in names})
            found, _ = weightsync.find(_end("shared_memory", tmp_path, False), timeout_s=0)
            assert list(found.target) == names
            assert owner.to_remove()
        assert list(tmp_path.iterdir()) == []


@AS_ROOT
def test_an_announcement_of_another_user_is_named_and_not_read(tmp_path):
    tmp_path.chmod(0o1777)
    with _end("shared_memory", tmp_path, True) as owner:
        weightsync.announce(owner, {"a": torch.ones(1)})
        (directory,) = tmp_path.iterdir()
        os.chown(directory, 12345, 12345)
        with pytest.raises(DeadlineError, match="Run trainer and engine on one host as one user"):
            weightsync.find(_end("shared_memory", tmp_path, False), timeout_s=0)
        os.chown(directory, 0, 0)


def test_a_text_that_is_no_plan(tmp_path):
    with _end("file", tmp_path, True) as owner:
        owner.commits.post("announced", "{", deadline=0.0)
        with pytest.raises(PlanError, match="does not describe a plan"):
            weightsync.find(FileTransport(tmp_path), timeout_s=0)


def test_a_transport_without_a_place_for_a_plan():
    transport = object.__new__(GroupTransport)  # Ranks of a group construct it together.
    for call in (
        lambda: weightsync.announce(transport, {"a": torch.ones(1)}),
        lambda: weightsync.find(transport, timeout_s=0),
    ):
        with pytest.raises(UnsupportedError, match=r"GroupTransport has no .*plan.to_json\(\)"):
            call()

"""Tensors into a module, by name: what does not fit is said before anything is loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primeblocks.errors import PlanError, UsageError
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import Publisher, convert, describe, load_into, plan_sync
from primeblocks.weightsync.transports import FileTransport
from tests.weightsync.toy_engine import moved

ranks.preload(__name__)


def plan_for(tensors, **options):
    source = describe(tensors)
    return plan_sync([source], source.whole(**options), bucket_bytes=1 << 10)


def test_parameters_and_buffers_are_filled_and_no_others():
    trainer, engine = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    engine.register_buffer("cache", torch.ones(2), persistent=False)
    with torch.no_grad():
        for tensor in trainer.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 7)
    before = engine.weight
    load_into(torch.compile(engine, backend="eager"), plan_for(trainer))(
        trainer.state_dict().items()
    )
    assert engine.weight is before
    assert engine.cache.tolist() == [1, 1]
    for name, tensor in engine.state_dict().items():
        if name != "cache":
            assert_same_bits(tensor, trainer.state_dict()[name])


def test_a_tensor_that_was_replaced_is_filled_where_it_is_now():
    engine = nn.Linear(2, 2, bias=False)
    load = load_into(engine, plan_for(engine))
    engine.weight = nn.Parameter(torch.zeros(2, 2))
    load([("weight", torch.ones(2, 2))])
    assert engine.weight.tolist() == [[1, 1], [1, 1]]
    for other in (torch.zeros(4, 2, 2), torch.zeros(2)):
        engine.weight = nn.Parameter(other)
        with pytest.raises(PlanError, match="'weight' changed since load_into"):
            load([("weight", torch.ones(2, 2))])
    with pytest.raises(PlanError, match="'bias' changed since"):
        load([("bias", torch.ones(2))])


def test_a_tensor_on_the_meta_device_is_neither_filled_nor_sent(tmp_path):
    engine = nn.Linear(2, 2)
    plan = plan_for(engine)
    load = load_into(engine, plan)
    engine.bias = nn.Parameter(engine.bias.to("meta"))
    for act in (lambda: load_into(engine, plan), lambda: load([("bias", torch.ones(2))])):
        with pytest.raises(PlanError, match=r"1 of 2 tensors are on the meta device .*'bias'"):
            act()
    with (
        FileTransport(tmp_path, owner=True) as transport,
        pytest.raises(UsageError, match="'bias' is on the meta device on rank 0 and has no bytes"),
    ):
        Publisher(plan, engine, transport).publish(0, timeout_s=120)
    assert describe(engine).keys() == plan.target.keys()  # A plan needs no memory.


A = {"a": torch.zeros(4, 2), "b": torch.zeros(3)}


def test_a_target_may_round_a_bias_that_a_plan_does_not():
    name = "gate.e_score_correction_bias"
    sent = describe({name: torch.zeros(1)}, dtype=torch.bfloat16)
    held = {name: torch.zeros(1, dtype=torch.bfloat16)}
    load_into(held, sent)([(name, torch.tensor([14.31]))])
    assert held[name].item() == torch.tensor(14.31).bfloat16().item()


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (
            {"a": A["a"]},
            r"1 tensors are not in the plan \(first 'b'\), and 0 planned tensors are not in",
        ),
        (
            A | {"c": torch.zeros(1)},
            r"^0 tensors .* and 1 planned tensors are not in the target \(first 'c'\)",
        ),
        (A | {"b": torch.zeros(1)}, r"'b' is torch.float32 Layout\(shape=\(3,\).* the plan. Plan"),
        (A | {"b": torch.zeros(3, dtype=torch.float64)}, "'b' is torch.float32 .*torch.float64"),
        (A | {"b": torch.zeros(3, dtype=torch.int64)}, "'b' is torch.float32 .*torch.int64"),
        (
            A | {"b": torch.zeros(3, dtype=torch.float8_e4m3fn)},
            "'b' is torch.float32 .*torch.float8_e4m3fn",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sent, match):
    with pytest.raises(PlanError, match=match):
        load_into(A, plan_for(sent))


def test_a_wider_float_takes_a_narrower_one():
    held = {"a": torch.zeros(2)}
    load_into(held, plan_for(held, dtype=torch.bfloat16))([("a", torch.ones(2).bfloat16())])
    assert held["a"].tolist() == [1, 1]
    halves = {"a": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(PlanError, match=r"float16 .*bfloat16 .* as dtype= to announce\(\)"):
        load_into(halves, plan_for(held, dtype=torch.bfloat16))


def test_converted_tensors_are_those_of_the_wiring():
    sent = {"a": torch.zeros(4)}
    halves = lambda each: dict(zip("bc", each["a"].chunk(2), strict=True))  # noqa: E731
    cut = convert.record_wiring(halves, describe(sent))
    held = {"b": torch.zeros(2), "c": torch.zeros(2)}
    load_into(held, cut.targets)(moved(cut, {"a": torch.arange(4.0)}).items())
    assert held["c"].tolist() == [2, 3]


def _boxes():
    """Two engine ranks, each with its half as a DTensor."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(12.0).view(6, 2)
    held = {"a": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])}
    rank, mine = mesh.get_rank(), describe(held)
    source = describe({"a": whole})
    boxes = [mine, source]
    plan = plan_sync([source], boxes, bucket_bytes=1 << 10)
    load_into(held, plan)([("a", whole[mine["a"].layout.shard.slices])])
    assert_same_bits(held["a"].to_local(), whole[3 * rank : 3 * rank + 3])
    with pytest.raises(PlanError, match="'a' is .*Plan with describe"):
        load_into(held, plan, reader=1)
    with pytest.raises(PlanError, match="reader 2 is not in the plan"):
        load_into(held, plan, reader=2)


def test_a_sharded_tensor_takes_its_own_box():
    ranks.run(_boxes, world_size=2)


def test_only_tensors_apart_from_each_other_are_written_in_place():
    buffer = torch.zeros(4, 6)

    def places(**tensors):
        return load_into(tensors, describe(tensors)).places()

    assert places(a=buffer[:2], b=buffer[2:], none=buffer[:0]).keys() == {"a", "b", "none"}
    assert places(a=buffer[:3], b=buffer[2:]) == {}
    assert places(a=buffer, b=buffer.view(-1)[-1:]) == {}
    assert places(a=buffer[:, :3], b=buffer[:, 3:]) == {}  # They may, as far as it looks.

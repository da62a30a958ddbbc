"""Random layouts of both sides over every transport: it arrives as if gathered and sliced."""

import random
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from primeblocks.errors import PlanError, UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    held,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.convert import record_wiring
from primeblocks.weightsync.manifest import gather_manifests
from tests.deadlines import HANG_S
from tests.weightsync.contents import KINDS, Side, contents, oracle, same_bytes, transport_of
from tests.weightsync.link_layouts import elements, random_layouts

ranks.preload(__name__)  # With all that it imports.


@contextmanager
def allocations():
    """The bytes of each tensor that torch.empty makes."""
    inner, sizes = torch.empty, []

    def empty(*args, **kwargs):
        tensor = inner(*args, **kwargs)
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    torch.empty = empty
    yield sizes
    torch.empty = inner


def random_body(kind, path, cases):
    rank, checked = dist.get_rank(), 0
    for seed, senders, receivers in cases:
        sources, targets = random_layouts(seed, senders=senders, receivers=receivers)
        if not sum(elements(target) for target in targets):
            continue
        rng = random.Random(seed)
        bucket_bytes = rng.choice([64, 200, 4096])
        # Files are read in chunks, short rows together.
        held._CHUNK_BYTES = rng.choice([8, 40, 1 << 20])
        held._LONG_ROW_BYTES = rng.choice([1, 8, 1 << 16])
        plan = plan_sync(sources, targets, bucket_bytes=bucket_bytes)
        parts = contents(sources, seed)
        transport = transport_of(kind, path, plan)
        mine = {"source": sources[rank]} if rank < senders else {}
        side = Side(plan, transport, parts[rank] if rank < senders else None, **mine)
        with allocations() as sizes:
            receipt = side.sync(seed)
        assert receipt.version == seed
        if side.is_engine:
            target = targets[side.reader]
            assert receipt.bytes == plan.read_bytes(side.reader)
            assert same_bytes(side.engine.tensors, oracle(sources, parts, target)), seed
        if kind == "group":
            engine = side.is_engine
            peak = plan.reader_peak_bytes(side.reader) if engine else plan.writer_peak_bytes(rank)
            assert sum(sizes) <= peak
        checked += 1
        dist.barrier()
        transport.close()
    return checked


@pytest.mark.parametrize("kind", KINDS)
def test_random_layouts_arrive_as_if_gathered_and_sliced(kind, full, tmp_path):
    sides = [(2, 2), (1, 3), (3, 1), *([(1, 1), (2, 1), (1, 2)] if full else [])]
    cases = [(seed, *sides[seed % len(sides)]) for seed in range(504 if full else 24)]
    checked = 0
    for size in {senders + receivers for senders, receivers in sides}:
        (path := tmp_path / str(size)).mkdir()
        mine = [case for case in cases if case[1] + case[2] == size]
        checked += ranks.run(random_body, kind, str(path), mine, world_size=size)[0]
    assert checked >= (500 if full else 16) * 0.8


def boxes_body(path):
    """The most bytes of boxes that exist at a time in the reader of a group, over versions."""
    weights = {f"w{i}": torch.zeros(16) for i in range(4)}
    plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=64)
    side = Side(plan, transport_of("group", path, plan), weights)
    inner, made, sizes = held.Boxes._make, [], [0]

    def make(boxes, name, box):
        tensor = inner(boxes, name, box)
        made.append(weakref.ref(tensor))
        sizes.append(sum(one.nbytes for ref in made if (one := ref()) is not None))
        return tensor

    held.Boxes._make = make
    for version in range(1, 4):
        side.sync(version)
    return max(sizes), plan.reader_peak_bytes(0) - 2 * 64


def test_a_reader_of_a_group_has_its_boxes_twice(tmp_path):
    _, (boxes, planned) = ranks.run(boxes_body, str(tmp_path))
    assert boxes == planned == 2 * 4 * 64


def turned_bodies(path):
    return {turn: turned_body(f"{path}/{turn}", turn) for turn in TURNS}


def turned_body(path, turn):
    """Publish, place the tensor otherwise, publish again: what was said, and what is served."""
    group_rank, whole = dist.get_rank(), torch.arange(16.0).view(4, 4)
    first = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    parameters = {"w": first}
    manifests = gather_manifests(describe(parameters))
    plan = plan_sync(manifests, manifests[0].whole(), bucket_bytes=64)
    transport = None
    if group_rank == 0:
        transport = SharedMemoryTransport("policy", owner=True, root=path)
    dist.barrier()
    transport = transport or SharedMemoryTransport("policy", root=path)
    publisher = Publisher(plan, parameters, transport)
    publisher.publish(1, timeout_s=HANG_S)
    if turn == "same":
        moved = distribute_tensor(whole + 1, init_device_mesh("cpu", (2,)), [Shard(0)])
    elif turn == "replicated":
        moved = distribute_tensor(whole + 1, init_device_mesh("cpu", (2,)), [Replicate()])
    elif turn == "mesh":
        moved = distribute_tensor(whole + 1, DeviceMesh("cpu", [1, 0]), [Shard(0)])
    else:
        moved = distribute_tensor(whole + 1, init_device_mesh("cpu", (2,)), [Shard(1)])
    publisher._parts._parameters["w"] = moved
    said = ""
    try:
        publisher.publish(2, timeout_s=HANG_S)
    except UsageError as error:
        said = str(error)
    got = {}
    with Subscriber(plan, got.update, transport) as subscriber:
        version = subscriber.receive(timeout_s=HANG_S).version
        right = got["w"].equal(whole + version - 1)
    dist.barrier()
    transport.close()
    return said, version, right


TURNS = ("same", "replicated", "mesh", "other dim")


def test_a_tensor_that_lies_otherwise_is_sent_from_where_it_is_or_refused(tmp_path):
    for turn in TURNS:
        (tmp_path / turn).mkdir()
    for found in ranks.run(turned_bodies, str(tmp_path), world_size=2):
        for turn, (said, version, right) in found.items():
            assert right
            assert version == (2 if turn in ("same", "replicated") else 1)
            assert ("plan again" in said.lower()) is (version == 1)


# --- what changed after the plan was made --------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 2)


def grow(model):
    """As `resize_token_embeddings` does."""
    model.embed.weight = model.head.weight = nn.Parameter(torch.ones(8, 4))


def untie(model):
    model.head.weight = nn.Parameter(torch.ones(6, 4))


def appear(model):
    model.norm = nn.LayerNorm(4)


def vanish(model):
    del model.unused.bias


def to(dtype):
    def change(model):
        model.embed.weight = nn.Parameter(model.embed.weight.to(dtype), requires_grad=False)
        model.head.weight = model.embed.weight

    return change


DTYPES = (torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64)
CHANGES = {
    grow: r"'embed.weight' is .*8, 4\)",
    untie: "'head.weight'",
    appear: "'norm.weight'",
    vanish: "'unused.bias'",
    **{to(dtype): f"'embed.weight' is {dtype}" for dtype in DTYPES},
}


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(("change", "said"), CHANGES.items())
def test_tensors_that_changed_after_planning_are_not_sent_nor_proved(
    change, said, is_converted, tmp_path
):
    model = Small()
    source = describe(model)
    convert = record_wiring(lambda tensors: tensors, source) if is_converted else None
    plan = plan_sync([source], source.whole(), bucket_bytes=64, convert=convert)
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        publisher = Publisher(plan, model, transport, convert=convert)
        first = publisher.publish(1, timeout_s=HANG_S)
        held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        assert verify_engine(model, held, plan=plan, convert=convert).is_proved
        change(model)
        for _ in range(2):
            with pytest.raises(UsageError, match=said):
                publisher.publish(2, timeout_s=HANG_S)
        with pytest.raises(PlanError, match=said):
            verify_engine(model, held, plan=plan, convert=convert)
        assert transport.markers()[-1].digest == first.digest


def test_tensors_that_no_reader_wants_may_be_there_and_no_others(tmp_path):
    model = Small()
    wanted = describe({"embed.weight": model.embed.weight})
    plan = plan_sync([describe(model)], wanted, bucket_bytes=64)
    assert plan.unsent == ("unused.weight", "unused.bias")
    assert type(plan).from_json(plan.to_json()) == plan
    whole = plan_sync([wanted], wanted, bucket_bytes=64)
    assert "unsent" not in whole.to_json()
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        Publisher(plan, model, transport).publish(1, timeout_s=HANG_S)
        with pytest.raises(
            UsageError, match="without 2 tensors .*'unused.weight'.*only the tensors of the plan"
        ):
            Publisher(whole, model, transport).publish(2, timeout_s=HANG_S)
        with pytest.raises(UsageError, match="without 2 tensors .*'unused.weight'"):
            Publisher(whole, model, transport, source=wanted).publish(2, timeout_s=HANG_S)
        only = {"embed.weight": model.embed.weight}
        Publisher(whole, only, transport, source=wanted).publish(2, timeout_s=HANG_S)
        untie(model)
        with pytest.raises(UsageError, match="without 1 tensors .*'head.weight'"):
            Publisher(plan, model, transport).publish(3, timeout_s=HANG_S)


def test_floats_may_change_and_what_encode_makes_may_not():
    weights = {"w": torch.arange(6.0)}
    plan = plan_sync([describe(weights)], describe(weights, dtype=torch.bfloat16), bucket_bytes=64)
    held = {"w": weights["w"].bfloat16()}
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert verify_engine({"w": weights["w"].to(dtype)}, held, plan=plan).is_proved
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes = lambda name, tensor, dtype=dtype: {name: tensor.to(dtype)}  # noqa: E731
        with pytest.raises(
            PlanError, match=f"'w' is {dtype} .*on rank 0, but was planned as torch.b"
        ):
            verify_engine(weights, held, plan=plan, encode=codes)


def grown_body(path):
    """Rows that are new on the last rank alone: the other ranks hold as many as before."""
    mesh = init_device_mesh("cpu", (4,))
    parameters = {"w": distribute_tensor(torch.ones(9, 2), mesh, [Shard(0)])}
    mine = describe(parameters)
    sources = gather_manifests(mine)
    plan = plan_sync(sources, sources[0].whole(), bucket_bytes=64)
    transport = None
    if dist.get_rank() == 0:
        transport = SharedMemoryTransport("policy", owner=True, root=path)
    dist.barrier()
    transport = transport or SharedMemoryTransport("policy", root=path)
    said = []
    for source in (None, mine):
        publisher = Publisher(plan, parameters, transport, source=source)
        publisher.publish(len(said) + 1, timeout_s=120)
        before = parameters["w"]
        publisher._parts._parameters["w"] = distribute_tensor(torch.ones(10, 2), mesh, [Shard(0)])
        with pytest.raises(UsageError) as met:
            publisher.publish(9, timeout_s=120)
        said.append(str(met.value))
        publisher._parts._parameters["w"] = before
    dist.barrier()
    transport.close()
    return said


def test_rows_that_only_the_last_rank_got_are_noticed(tmp_path):
    for both in ranks.run(grown_body, str(tmp_path), world_size=4):
        for said in both:
            for rank in range(4):
                assert f"'w' is (10, 2) on rank {rank}, but was planned as (9, 2)" in said

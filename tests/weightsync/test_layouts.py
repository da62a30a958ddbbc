"""Random layouts of both sides over every transport: it arrives as if gathered and sliced."""

import random
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from primeblocks.errors import UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
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


def random_body(kind, path, seeds, senders, receivers):
    rank, checked = dist.get_rank(), 0
    for seed in seeds:
        sources, targets = random_layouts(seed, senders=senders, receivers=receivers)
        if not sum(elements(target) for target in targets):
            continue
        bucket_bytes = random.Random(seed).choice([64, 200, 4096])
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
            assert receipt.bytes == plan.read_bytes(side.reader) == plan.box_bytes(side.reader)
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
    sides = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 1)]
    each = -(-(500 if full else 48) // len(sides))
    checked = 0
    for i, (senders, receivers) in enumerate(sides):
        seeds = list(range(i * each, (i + 1) * each))
        path = tmp_path / str(i)
        path.mkdir()
        args = (kind, str(path), seeds, senders, receivers)
        checked += ranks.run(random_body, *args, world_size=senders + receivers)[0]
    assert checked >= (500 if full else 48) * 0.8


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


@pytest.mark.parametrize("turn", ["same", "replicated", "mesh", "other dim"])
def test_a_tensor_that_lies_otherwise_is_sent_from_where_it_is_or_refused(turn, tmp_path):
    for said, version, right in ranks.run(turned_body, str(tmp_path), turn, world_size=2):
        assert right
        assert version == (2 if turn in ("same", "replicated") else 1)
        assert ("plan again" in said) is (version == 1)

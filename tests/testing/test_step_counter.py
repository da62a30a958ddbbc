"""Counts of hand-made functions, known beforehand."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from primeblocks.errors import UnsupportedError
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter


def _fill(x):
    x[x > 2] = 0.0


def _put(x):
    x[x > 2] = x[:3].clone()


READS = {
    "none": (lambda x: (x + 1).argsort().cumsum(0), 0),
    "item": (lambda x: x.sum().item(), 1),
    "two numbers": (lambda x: (int(x[0]), bool(x[1] > 0)), 2),
    "tolist": (lambda x: x.tolist(), 1),
    "numpy": (lambda x: x.numpy(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "to cpu": (lambda x: x.to("cpu", torch.float64), 1),
    "read once, used twice": (lambda x: (x.cpu().view(2, 3).sum(1).tolist(), x.cpu().max()), 2),
    "dtype alone": (lambda x: x.to(torch.float64), 0),
    "mask": (lambda x: x[x > 2], 1),
    "places": (lambda x: x[x.long()], 0),
    "fill by mask": (_fill, 0),
    "put by mask": (_put, 1),
    "nonzero": (lambda x: torch.where(x > 2), 1),
    "equal": (lambda x: torch.equal(x, x + 1), 1),
    "bincount": (lambda x: x.long().bincount(minlength=9), 1),
    "repeated": (lambda x: x.repeat_interleave(x.long()), 1),
    "repeated to a known size": (lambda x: x.repeat_interleave(x.long(), output_size=15), 0),
}


@pytest.mark.parametrize("case", READS)
def test_host_reads_on_a_cpu(case):
    step, expected = READS[case]
    x = torch.arange(6.0)
    with StepCounter() as counted:
        step(x)
    assert sum(counted.host_reads.values()) == expected, counted.host_reads


def test_operators_of_forward_and_backward():
    x = torch.ones(4, requires_grad=True)
    with StepCounter() as counted:
        (x.view(2, 2) * x.view(2, 2)).sum().backward()
    expected = {"mul": 3, "sum": 1, "ones_like": 1, "add": 1}
    assert counted.operators == expected
    assert not counted.host_reads + counted.collectives + counted.received_bytes


def _stages():
    a = torch.empty(1000)
    b = a.view(10, 100) + 1
    del a
    c = b[:2]  # A view: the whole of b lives on.
    del b
    d = torch.empty(500)
    return c, d


def test_peak_bytes_are_those_of_storages():
    with StepCounter() as counted:
        kept = _stages()
    assert counted.peak_bytes == 8000
    with StepCounter() as counted:
        kept[0].add_(1)  # What was there before is not counted.
    assert counted.peak_bytes == 0


def test_fake_tensors():
    with FakeTensorMode(shape_env=ShapeEnv()):
        weight = torch.empty(64, 64, requires_grad=True)
        with StepCounter() as counted:
            (weight @ weight).sum().backward()
            weight.detach().sum().item()
    assert counted.operators["mm"] == 3
    assert counted.host_reads == {"_local_scalar_dense": 1}
    assert counted.peak_bytes >= 4 * 64 * 64 * 3


def test_a_fake_cuda_device():
    """Without gradients: torch ends the process where autograd finds no CUDA to guard."""
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        x = torch.empty(6, device="cuda")
        with StepCounter(device="cuda") as counted:
            (x + 1).argsort()
            x.sum().item()
            x.cpu()
            x.to("cpu", non_blocking=True)
            torch.empty(1000).add(1)  # The host's own.
    assert counted.host_reads == {"_local_scalar_dense": 1, "_to_copy": 1}
    assert counted.peak_bytes == 6 * (4 + 4 + 8)  # A sum, its values and places.


def _exchange():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, whole = torch.ones(4, 3), torch.empty(12, 3)
    with StepCounter() as counted:
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.all_gather([torch.empty(4, 3) for _ in range(size)], x)
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        send, receive = [rank + 1] * 3, [1, 2, 3]
        dist.all_to_all_single(torch.empty(6, 3), torch.ones(sum(send), 3), receive, send)
        dist.all_to_all_single(torch.empty(3), torch.ones(3))
    return dict(counted.collectives), dict(counted.received_bytes)


def test_bytes_by_collective():
    part = 4 * 3 * 4
    for rank, (calls, received) in enumerate(ranks.run(_exchange, world_size=3)):
        assert calls.pop("alltoall_base_") == 2
        assert set(calls.values()) == {1}
        assert received == {
            "_allgather_base_": 2 * part,
            "_reduce_scatter_base_": 2 * part,
            "allgather_": 2 * part,
            "allreduce_": 2 * part * 2 // 3,
            "broadcast_": 0 if rank == 1 else part,
            "alltoall_base_": (6 - (rank + 1)) * 12 + 2 * 4,
        }


def _unknown():
    with StepCounter(), pytest.raises(UnsupportedError, match="how many bytes c10d.reduce_"):
        dist.reduce(torch.ones(3), 0)


def test_an_unknown_collective_is_refused():
    ranks.run(_unknown, world_size=2)


def _on_a_device_that_is_none():
    from tests.pretend import Device

    x = torch.arange(6.0).to("pretend")
    with Device(), StepCounter(device="pretend") as counted:
        x.tolist()
        x.cpu().sum().tolist()
        x[x > 2]
        torch.zeros(3).to(x.device)
        torch.zeros(3).tolist()
        (x + 1).sum().item()
    return counted.host_reads


def test_host_reads_of_a_device_are_those_alone():
    """In a process of its own: the device stays with the one that registers it."""
    expected = {"_to_copy": 3, "index": 1, "_local_scalar_dense": 1}
    assert ranks.run(_on_a_device_that_is_none, world_size=2) == [expected] * 2

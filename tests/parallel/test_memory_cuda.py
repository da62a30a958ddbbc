"""Memory on a CUDA device: what is said to be freed is free, and bits return."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from primeblocks.parallel.memory import GroupMemory, HostMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 1024


def _requested():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()


def test_the_device_is_free_while_all_is_away():
    model = _model()
    optimizer = AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [x for state in optimizer.state.values() for x in state.values()]
    before = [x.detach().cpu() for x in tensors]
    memory = HostMemory(model, optimizer)
    requested, reserved = _requested(), torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    with memory.released() as moved:
        assert moved.total_bytes == 4 * (4 * 4 * WIDTH * (WIDTH + 1) + 8)
        assert requested - _requested() == moved.total_bytes
        assert allocated - torch.cuda.memory_allocated() >= moved.total_bytes
        assert reserved - torch.cuda.memory_reserved() >= moved.total_bytes // 2
        assert all(c.is_pinned() for host in memory._host.values() for c in host._chunks)
    assert _requested() == requested
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, before, strict=True))
    optimizer.step()


@pytest.mark.skipif(
    not dist.is_nccl_available() or torch.cuda.nccl.version() < (2, 29, 7),
    reason="needs NCCL 2.29.7",
)
def test_a_group_communicates_again_after_restore():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        memory, x = GroupMemory(dist.group.WORLD), torch.arange(1 << 20, device="cuda")
        with memory.released() as moved:
            assert moved.total_bytes == 0  # No communicator yet.
        for _ in range(2):
            dist.all_reduce(x)
            backend = dist.group.WORLD._get_backend(x.device)
            size = backend.memory_stats()["suspend"]
            with memory.released() as moved:
                assert moved.total_bytes == size
                assert backend.memory_stats()["suspended"] == 1
            assert backend.memory_stats()["suspended"] == 0
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), torch.arange(1 << 20))
    finally:
        dist.destroy_process_group()

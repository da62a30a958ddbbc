"""HostMemory under FSDP2: training goes on over mixed meshes as if nothing had moved."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from primeblocks.errors import UsageError
from primeblocks.parallel import plan_mesh
from primeblocks.parallel.memory import HostMemory
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from tests.parallel.test_fsdp import Model, _loss, _shard

# Seven hidden units over two ranks: FSDP2 pads the smaller shard.
SIZES = {"experts": 4, "hidden": 7, "intermediate": 3}


def _sharded(degrees):
    torch.manual_seed(0)
    model = Model(**SIZES)
    _shard(model, plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _sharded_step(model, optimizer):
    optimizer.zero_grad()
    _loss(model, dist.get_rank(), 5).backward()
    optimizer.step()


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _phases(degrees):
    (model, optimizer), (twin, twins) = _sharded(degrees), _sharded(degrees)
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    with memory.released("weights"):  # Before FSDP2 first gathers.
        pass
    names = dict(model.named_parameters())
    for evaluate in (False, True):
        _sharded_step(model, optimizer)
        _sharded_step(twin, twins)
        if evaluate:  # Leaves the root's parameters gathered.
            for m in (model, twin):
                with torch.no_grad():
                    _loss(m, dist.get_rank(), 5)
        with memory.released() as moved:
            kept = [p.to_local() for p in (*names.values(), *(p.grad for p in names.values()))]
            assert sum(x.untyped_storage().nbytes() for x in kept) == 0
            with pytest.raises(UsageError, match="forward needs weights"):
                _loss(model, dist.get_rank(), 5)
        assert all(p is names[n] for n, p in model.named_parameters())
    _sharded_step(model, optimizer)
    _sharded_step(twin, twins)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(p.to_local().detach(), q.to_local().detach())
        assert_same_bits(p.grad.to_local(), q.grad.to_local())
        for name, value in optimizer.state[p].items():
            assert_same_bits(_local(value), _local(twins.state[q][name]))
    padded = sum(p.to_local().untyped_storage().nbytes() for p in names.values())
    return moved.num_bytes, padded, len(names)


def test_fsdp2_goes_on_as_if_nothing_had_moved():
    for num_bytes, padded, parameters in ranks.run(_phases, {"expert": 2}, world_size=2):
        # Half of each expert tensor; of the others, the larger share: 2 of 4 rows (gate),
        # 2 of 3 (head, bias), in float64.
        weights = 2 * (4 * 6 * 7 + 4 * 7 * 3) // 2 + 2 * 2 * 7 + 2 * 7 + 2
        assert num_bytes["weights"] == padded == 8 * weights
        assert 0 < num_bytes["gradients"] <= 8 * weights
        # AdamW keeps two moments without the padding, and a step in float32.
        assert num_bytes["optimizer"] <= 2 * 8 * weights + 4 * parameters

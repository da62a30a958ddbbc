"""HostMemory on one rank and under FSDP2: bits, bytes and refusals."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from primeblocks.errors import CapacityError, ShapeError, UnsupportedError, UsageError
from primeblocks.parallel.memory import HostMemory
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from tests.parallel.bodies import meshes_of
from tests.parallel.test_fsdp import Model, _loss, _shard

KINDS = ("weights", "gradients", "optimizer")


def _trainer(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6, bias=False)).to(dtype)
    model.append(nn.Linear(6, 6, bias=False, dtype=dtype))
    model.append(nn.Linear(6, 6, bias=False, dtype=dtype))
    model[4].weight = model[3].weight  # Tied: one storage, counted once.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    _step(model, optimizer)
    return model, optimizer


def _step(model, optimizer):
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 24, dtype=model[0].weight.dtype).view(4, 6)
    model(x).square().sum().backward()
    optimizer.step()


def _everything(model, optimizer):
    """Clones of all tensors, by place."""
    found = {f"weight {n}": p for n, p in (*model.named_parameters(), *model.named_buffers())}
    found |= {f"gradient {n}": p.grad for n, p in model.named_parameters()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"state {i} {n}": x for n, x in state.items()}
    return {name: x.detach().clone() for name, x in found.items()}


def _assert_same(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert_same_bits(got[name], want[name])


@pytest.mark.parametrize(
    ("dtype", "chunk_bytes"), [(torch.bfloat16, 512), (torch.float32, 1 << 20)], ids=str
)
def test_everything_leaves_and_returns_bit_for_bit(dtype, chunk_bytes):
    model, optimizer = _trainer(dtype)
    before = _everything(model, optimizer)
    # 54 + 48 + 36 weights beside 16 of the norm; buffers: 2 x 8 and a 64-bit count.
    weights, size = 6 * 8 + 8 + 2 * 8 + 8 * 6 + 6 * 6, dtype.itemsize
    alias = model[0].weight.data.view(-1)
    memory = HostMemory(model, optimizer, chunk_bytes=chunk_bytes)
    moved = memory.release()
    steps = 6 * 4  # One float32 a parameter.
    assert moved.num_bytes == {
        "weights": (weights + 16) * size + 8,
        "gradients": weights * size,
        "optimizer": 2 * weights * size + steps,
    }
    assert moved.total_bytes == sum(moved.num_bytes.values()) <= memory.host_bytes
    assert moved.table().splitlines()[-1].split() == ["total", f"{moved.total_bytes:,}", "bytes"]
    left = (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))
    left += tuple(x for state in optimizer.state.values() for x in state.values())
    assert sum(x.untyped_storage().nbytes() for x in left) == 0
    assert memory.restore() == moved
    _assert_same(_everything(model, optimizer), before)
    assert alias.data_ptr() == model[0].weight.data_ptr()
    assert torch.equal(alias, before["weight 0.weight"].view(-1))


def test_a_shared_storage_moves_once():
    flat = torch.arange(40.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:8].view(2, 4)), nn.Parameter(flat[8:20])
    memory = HostMemory(model, chunk_bytes=512)
    with memory.released() as moved:
        assert moved.num_bytes == {"weights": 160, "gradients": 0, "optimizer": 0}
        assert flat.untyped_storage().nbytes() == 0
        assert memory.host_bytes == 512
    assert_same_bits(flat, torch.arange(40.0))
    assert model.b.data_ptr() == flat[8:].data_ptr()


def test_host_memory_is_allocated_once():
    model, optimizer = _trainer()
    memory = HostMemory(model, optimizer, chunk_bytes=512)
    memory.release()
    held, pointers = memory.host_bytes, _chunks(memory)
    assert held % 512 == 0
    memory.restore()
    _step(model, optimizer)  # New gradients, elsewhere.
    with memory.released():
        assert memory.host_bytes == held
        assert _chunks(memory) == pointers


def _chunks(memory):
    return [c.data_ptr() for host in memory._host.values() for c in host._chunks]


def test_kinds_move_one_by_one():
    model, optimizer = _trainer()
    before = _everything(model, optimizer)
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    assert memory.release("optimizer").num_bytes.keys() == {"optimizer"}
    model(torch.ones(2, 6)).sum()  # Weights and gradients are here.
    memory.release()
    assert memory.away == ("optimizer", "weights", "gradients")
    memory.restore("weights")
    model.state_dict()  # What publishing needs.
    with torch.no_grad():
        model.eval()(torch.ones(2, 6))
    memory.release("weights")
    with pytest.raises(UsageError, match="cannot release anything"):
        memory.release()
    memory.restore("gradients", "weights")
    memory.restore()
    assert memory.away == ()
    after = _everything(model, optimizer)
    changed = {"weight 1.running_mean", "weight 1.running_var", "weight 1.num_batches_tracked"}
    _assert_same(*({n: x for n, x in y.items() if n not in changed} for y in (after, before)))


def test_a_with_restores_what_its_body_left_away():
    model, optimizer = _trainer()
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    memory.release("gradients")
    with memory.released():
        memory.restore("weights")
    assert memory.away == ("gradients",)
    memory.restore()
    with pytest.raises(ZeroDivisionError), memory.released():
        1 / 0  # noqa: B018
    with memory.released():
        memory.restore()
    _step(model, optimizer)


def test_use_while_away_is_refused_and_use_after_is_not():
    model, optimizer = _trainer()
    state, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    uses = {
        "forward needs weights, gradients": lambda: model(torch.ones(2, 6)),
        "forward needs weights": torch.no_grad()(lambda: model[0](torch.ones(2, 6))),
        "step needs weights, gradients, optimizer": optimizer.step,
        "state_dict needs weights": model.state_dict,
        "state_dict needs optimizer": optimizer.state_dict,
        "load_state_dict needs weights": lambda: model.load_state_dict(state),
        "load_state_dict needs optimizer": lambda: optimizer.load_state_dict(saved),
    }
    with memory.released():
        for message, use in uses.items():
            with pytest.raises(UsageError, match=f"^{message}, which HostMemory stores"):
                use()
    for use in uses.values():
        use()
    hooks = [m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)


def test_wrong_order_and_wrong_names_are_refused():
    model, optimizer = _trainer()
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    with pytest.raises(UsageError, match="cannot restore anything. The host stores none of"):
        memory.restore()
    with pytest.raises(UsageError, match="cannot release buffers. The host stores none of weights"):
        memory.release("buffers")
    memory.release("weights")
    with pytest.raises(UsageError, match="cannot release weights. The host stores weights of"):
        memory.release("weights")
    with pytest.raises(UsageError, match="cannot restore gradients"):
        memory.restore("gradients")
    assert memory.away == ("weights",)
    with pytest.raises(UsageError, match="does not have parameters"):
        HostMemory(nn.ReLU())
    with pytest.raises(UsageError, match="chunk_bytes must be at least 1; got 0"):
        HostMemory(model, chunk_bytes=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m[0].weight, "data", torch.zeros(2, 3)),
            r"is now torch.float32 \[2, 3\]",
        ),
        (lambda m: setattr(m[0].weight, "data", torch.zeros(8, 6)), "weights: 0.weight was"),
        (lambda m: m[0].weight.grad.untyped_storage().resize_(8), "1 released gradients were al"),
    ],
    ids=["shape", "memory", "allocated"],
)
def test_what_changed_in_between_is_refused(change, message):
    model, optimizer = _trainer()
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    memory.release()
    change(model)
    with pytest.raises(ShapeError, match=message):
        memory.restore()
    assert memory.away == KINDS


def test_a_gradient_that_is_gone_is_no_error():
    model, optimizer = _trainer()
    before = _everything(model, optimizer)
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    with memory.released():
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    weights = {n: x for n, x in before.items() if n.startswith("weight")}
    _assert_same({f"weight {n}": x for n, x in model.state_dict().items() if n[0] != "4"}, weights)


def test_memory_of_another_library_is_refused_before_anything_moves():
    model, optimizer = _trainer()
    model[0].weight.data = torch.from_numpy(np.ones((8, 6), np.float32))
    before = _everything(model, optimizer)
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    with pytest.raises(UnsupportedError, match=r"weights: 0.weight is in memory .* \(192 bytes"):
        memory.release()
    assert memory.away == ()
    _assert_same(_everything(model, optimizer), before)


def test_no_room_to_restore_changes_nothing(monkeypatch):
    model, optimizer = _trainer()
    before = _everything(model, optimizer)
    memory = HostMemory(model, optimizer, chunk_bytes=1024)
    moved = memory.release()
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage, size):
        calls.append(size)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("full")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(CapacityError, match=f"no room for {moved.total_bytes} bytes: full"):
            memory.restore()
    assert memory.away == KINDS
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    assert memory.restore() == moved
    _assert_same(_everything(model, optimizer), before)


# Seven hidden units over two ranks: FSDP2 pads the smaller shard.
SIZES = {"experts": 4, "hidden": 7, "intermediate": 3}


def _sharded(degrees):
    torch.manual_seed(0)
    model = Model(**SIZES)
    _shard(model, meshes_of(**degrees))
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

"""CpuAdamW against torch's fused AdamW, bit for bit."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from primeblocks.errors import ShapeError, UnsupportedError, UsageError
from primeblocks.parallel import plan_mesh
from primeblocks.parallel.memory import CpuAdamW
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from tests.parallel.test_fsdp import Model, _loss, _shard

SHAPES = ((37, 5), (64, 9), (3,), (), (0, 4))
HYPER = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def _parameters(dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in SHAPES]


def _groups(parameters):
    other = {"weight_decay": 0.0, "lr": 1e-3, "maximize": True}
    return [{"params": parameters[:2]}, {"params": parameters[2:], **other}]


def _set_gradients(step, *replicas):
    """Equal ones in every replica, in its dtype; each third parameter has none, now and then."""
    g = torch.Generator().manual_seed(step)
    for i, same in enumerate(zip(*replicas, strict=True)):
        grad = torch.randn(same[0].shape, generator=g).to(same[0].dtype)
        for p in same:
            p.grad = None if step % 4 == 3 and i % 3 == 2 else grad.to(p.dtype)


def _run(steps, ours, theirs, parameters, twins):
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (ours, theirs)]
    for step in steps:
        _set_gradients(step, parameters, twins)
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_fused_adamw_bit_for_bit(dtype):
    parameters, twins = _parameters(dtype), _parameters(dtype)
    ours, theirs = (
        CpuAdamW(_groups(parameters), **HYPER),
        AdamW(_groups(twins), **HYPER, fused=True),
    )
    _run(range(40), ours, theirs, parameters, twins)
    assert float(ours.state[parameters[2]]["step"]) == 30
    _assert_same_state(ours, theirs)
    for got, want in zip(parameters, twins, strict=True):
        assert_same_bits(got.detach(), want.detach())


def _assert_same_state(ours, theirs):
    got, want = ours.state_dict(), theirs.state_dict()
    assert got["state"].keys() == want["state"].keys()
    assert got["param_groups"] == want["param_groups"]
    for i, entry in want["state"].items():
        assert got["state"][i].keys() == entry.keys()
        for name, value in entry.items():
            assert_same_bits(got["state"][i][name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights_are_a_float32_run_rounded(dtype):
    parameters = _parameters(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    ours, theirs = (
        CpuAdamW(_groups(parameters), **HYPER),
        AdamW(_groups(masters), **HYPER, fused=True),
    )
    _run(range(40), ours, theirs, parameters, masters)
    for got, want in zip(parameters, masters, strict=True):
        assert_same_bits(got.detach(), want.detach().to(dtype))
        assert_same_bits(ours.state[got]["master"], want.detach())
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert_same_bits(ours.state[got][name], theirs.state[want][name])


def test_strided_weights_and_gradients():
    # torch's CPU kernel takes a gradient laid out otherwise than its weight for laid out alike.
    base, grad = torch.randn(6, 8), torch.randn(8, 6)
    ours, theirs = nn.Parameter(base.t()), nn.Parameter(base.t().contiguous())
    for p, optimizer in ((ours, CpuAdamW([ours])), (theirs, AdamW([theirs], fused=True))):
        for _ in range(3):
            p.grad = grad.clone()
            optimizer.step()
    assert ours.stride() == (1, 8)
    assert_same_bits(ours.detach().contiguous(), theirs.detach())


@pytest.mark.parametrize(
    ("dtype", "state", "master"), [(torch.float32, 8, 4), (torch.bfloat16, 8, 4)], ids=str
)
def test_host_bytes_are_what_the_device_is_spared(dtype, state, master):
    parameters, twins = _parameters(dtype), _parameters(torch.float32)
    ours, theirs = CpuAdamW(parameters), AdamW(twins, fused=True)
    assert ours.host_bytes == {"state": 0, "master": 0, "staging": 0}
    _set_gradients(0, parameters, twins)
    ours.step()
    theirs.step()
    numel = 37 * 5 + 64 * 9 + 3 + 1
    steps = 4 * len(SHAPES)
    assert ours.host_bytes == {
        "state": state * numel + steps,
        "master": master * numel,
        "staging": dtype.itemsize * numel,
    }
    device = [x for entry in theirs.state.values() for x in entry.values()]
    assert sum(x.untyped_storage().nbytes() for x in device) == ours.host_bytes["state"]


def test_float32_gradients_of_bfloat16_weights_are_not_rounded():
    ours, theirs = nn.Parameter(torch.ones(9).bfloat16()), nn.Parameter(torch.ones(9))
    ours.grad_dtype = torch.float32
    optimizer, twin = CpuAdamW([ours]), AdamW([theirs], fused=True)
    for step in range(3):
        grad = torch.randn(9, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        twin.step()
    assert_same_bits(optimizer.state[ours]["master"], theirs.detach())
    assert optimizer.host_bytes["staging"] == 9 * (2 + 4)


@pytest.mark.parametrize("source", [AdamW, CpuAdamW])
@pytest.mark.parametrize("target", [AdamW, CpuAdamW])
def test_a_run_resumes_from_either_class(source, target):
    """Ten steps, saved and loaded, ten more: the same bits as twenty."""
    options = {AdamW: {"fused": True}, CpuAdamW: {}}
    parameters, twins = _parameters(torch.float32), _parameters(torch.float32)
    first, whole = (
        source(_groups(parameters), **HYPER, **options[source]),
        CpuAdamW(_groups(twins), **HYPER),
    )
    _run(range(10), first, whole, parameters, twins)
    resumed = _parameters(torch.float32, seed=1)
    for new, old in zip(resumed, parameters, strict=True):
        new.data.copy_(old)
    second = target(_groups(resumed), **options[target])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _run(range(10, 20), second, whole, resumed, twins)
    for got, want in zip(resumed, twins, strict=True):
        assert_same_bits(got.detach(), want.detach())


def test_a_bfloat16_run_resumes_with_its_masters():
    parameters, twins = _parameters(torch.bfloat16), _parameters(torch.bfloat16)
    first, whole = CpuAdamW(parameters, **HYPER), CpuAdamW(twins, **HYPER)
    _run(range(10), first, whole, parameters, twins)
    resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
    second = CpuAdamW(resumed, **HYPER)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # Over a state that is there.
    _run(range(10, 20), second, whole, resumed, twins)
    for got, want in zip(resumed, twins, strict=True):
        assert_same_bits(second.state[got]["master"], whole.state[want]["master"])
        assert_same_bits(got.detach(), want.detach())


def test_masters_that_would_undo_a_write_are_refused():
    (p,), q = [nn.Parameter(torch.ones(4))], nn.Parameter(torch.ones(4))
    ours, theirs = CpuAdamW([p]), AdamW([q], fused=True)
    for x, optimizer in ((p, ours), (q, theirs)):
        x.grad = torch.ones(4)
        optimizer.step()
        with torch.no_grad():
            x.fill_(7)
    before = ours.state[p]["exp_avg"].clone()
    with pytest.raises(UsageError, match=r"parameter 0 of 1 .* Call refresh\(\)"):
        ours.step()
    assert torch.equal(p, torch.full((4,), 7.0))
    assert torch.equal(ours.state[p]["exp_avg"], before)
    ours.refresh()
    ours.step()
    theirs.step()
    assert_same_bits(p.detach(), q.detach())


def test_what_cannot_be_done_is_refused():
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = CpuAdamW([p])
    p.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(UnsupportedError, match="parameter 0 of 1 with a gradient: sparse"):
        optimizer.step()
    p.grad = torch.ones(4, 2)
    optimizer.step()
    for state in (AdamW([nn.Parameter(torch.ones(4, 3))]), AdamW([p], amsgrad=True)):
        (q,) = state.param_groups[0]["params"]
        q.grad = torch.ones_like(q)
        state.step()
    other = CpuAdamW([q := nn.Parameter(torch.ones(4, 3))])
    q.grad = torch.ones(4, 3)
    other.step()
    with pytest.raises(ShapeError, match=r"exp_avg of parameter 0 has shape \[4, 3\].*\[4, 2\]"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(CpuAdamW([p, q]).state_dict())
    assert float(optimizer.state[p]["step"]) == 1
    optimizer.load_state_dict(AdamW([p], amsgrad=True).state_dict())
    with pytest.raises(UnsupportedError, match="amsgrad=True"):
        optimizer.step()


def test_a_closure_and_step_hooks_run():
    p = nn.Parameter(torch.ones(3))
    optimizer, seen = CpuAdamW([p]), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert seen == [1]


def test_a_grad_scaler_unscales_before_the_step():
    p, q = nn.Parameter(torch.linspace(1, 2, 5)), nn.Parameter(torch.linspace(1, 2, 5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ours, theirs = CpuAdamW([p], eps=1.0), AdamW([q], eps=1.0, fused=True)
    scaler.scale(p.square().sum()).backward()
    scaler.step(ours)
    q.square().sum().backward()
    theirs.step()
    assert_same_bits(p.detach(), q.detach())


def _local(x):
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def _sharded(dtype):
    """Steps over mixed meshes beside fused AdamW on what this rank holds, then a saved resume."""
    torch.manual_seed(0)
    model = Model(experts=4, hidden=8, intermediate=8).to(dtype)
    _shard(model, plan_mesh(world_size=dist.get_world_size(), expert=2).build("cpu"))
    parameters = list(model.parameters())
    twins = [nn.Parameter(_local(p).clone().to(_wide(dtype))) for p in parameters]
    ours, theirs = CpuAdamW(parameters, lr=1e-2), AdamW(twins, lr=1e-2, fused=True)
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(get_optimizer_state_dict(model, ours))
            ours = CpuAdamW(parameters, lr=0.5)
            set_optimizer_state_dict(model, ours, saved)
        model.zero_grad()
        _loss_of(model, dtype).backward()
        for p, q in zip(parameters, twins, strict=True):
            q.grad = _local(p.grad).to(q.dtype)
        ours.step()
        theirs.step()
    for p, q in zip(parameters, twins, strict=True):
        assert_same_bits(_local(p), q.detach().to(dtype))
        assert_same_bits(_local(ours.state[p]["exp_avg_sq"]), theirs.state[q]["exp_avg_sq"])
        assert ours.state[p]["exp_avg"].placements == p.placements
    with torch.no_grad():
        parameters[0].zero_()
    model.zero_grad()
    _loss_of(model, dtype).backward()
    with pytest.raises(UsageError, match=r"parameter 0 of 8 .* Call refresh\(\)"):
        ours.step()
    return ours.host_bytes, sum(_local(p).numel() for p in parameters)


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def _loss_of(model, dtype):
    if dtype == torch.float64:
        return _loss(model, dist.get_rank(), 5)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(x.to(dtype)).square().sum() / 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_fsdp2_over_mixed_meshes(dtype):
    for host_bytes, numel in ranks.run(_sharded, dtype, world_size=2):
        size = _wide(dtype).itemsize
        assert host_bytes["state"] == 2 * size * numel + 4 * 8
        assert host_bytes["staging"] == dtype.itemsize * numel

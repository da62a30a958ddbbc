"""Activation offload: the same gradients, counted bytes, and what stays on the device."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from primeblocks.errors import UsageError
from primeblocks.parallel import plan_mesh
from primeblocks.parallel.memory import activations
from primeblocks.parallel.memory.activations import offload_activations
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from tests.parallel.test_fsdp import Model, _loss, _shard

ROWS, WIDTH, WIDE = 32, 16, 48
SMALL = 256  # Between a row statistic (128 bytes) and an activation.


class Block(nn.Module):
    """Attention with one projection for q, k and v, and a gated MLP."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, WIDE, bias=False, dtype=dtype)
        self.gate = nn.Linear(WIDTH, WIDE, bias=False, dtype=dtype)
        self.down = nn.Linear(WIDE, WIDTH, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.ones(ROWS, WIDTH, dtype=dtype))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, ROWS, 3, 2, WIDTH // 2).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, WIDTH)
        x = x * self.scale
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(Block(dtype), Block(dtype)), torch.randn(ROWS, WIDTH, dtype=dtype)


def _gradients(model, x, *, run=None, **options):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    run = run or model
    if not options:
        counts = None
        run(leaf).square().sum().backward()
    else:
        with offload_activations(model, **options) as counts:
            loss = run(leaf).square().sum()
        loss.backward()
    return [leaf.grad, *(p.grad for p in model.parameters())], counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("min_bytes", [0, SMALL, 1 << 30])
@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_gradients_are_the_same_bits(dtype, min_bytes, prefetch):
    model, x = _model(dtype)
    want, _ = _gradients(model, x)
    got, counts = _gradients(model, x, min_bytes=min_bytes, prefetch=prefetch)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert (counts.bytes_offloaded == 0) == (min_bytes == 1 << 30)


def test_bytes_are_those_of_distinct_activations():
    model, x = _model()
    _, counts = _gradients(model[0], x, min_bytes=SMALL)
    wide, narrow = 4 * ROWS * WIDE, 4 * ROWS * WIDTH
    # Wide: q, k, v in one; gate, silu(gate), up; silu(gate) * up. Narrow: x, its norm, the
    # attention's output, the MLP's input, the output (squared). The mask `scale` is no activation.
    logsumexp = 4 * 2 * ROWS
    assert counts.bytes_offloaded == 5 * wide + 5 * narrow + logsumexp
    assert counts.storages == 11
    # k and v beside q; the gate beside the up projection.
    assert counts.shared >= 3


def test_a_storage_is_copied_once_until_it_is_written():
    x = torch.randn(64, requires_grad=True)
    with offload_activations(nn.Identity(), min_bytes=1) as counts:
        y = x * 1.0
        z = y.sin() + y.view(8, 8).t().cos().t().reshape(64)
        assert (counts.storages, counts.shared, counts.bytes_offloaded) == (1, 1, 256)
        # What was saved keeps its bits; what is saved from now on is copied anew.
        y = y.detach().add_(1).requires_grad_()
        y.sin()
        assert (counts.storages, counts.shared) == (2, 1)
    z.sum().backward()
    assert_same_bits(x.grad, (x.cos() - x.sin()).detach())


def test_a_lazy_conjugate_stays():
    x = torch.randn(64, dtype=torch.complex64, requires_grad=True)
    with offload_activations(nn.Identity(), min_bytes=1) as counts:
        y = (x.conj() * x.conj().imag).abs().sum()  # A conjugated and a negated view.
    y.backward()
    got, x.grad = x.grad, None
    (x.conj() * x.conj().imag).abs().sum().backward()
    assert_same_bits(got, x.grad)
    assert counts.storages > 0


def test_parameters_buffers_small_tensors_and_small_parts_stay():
    linear = nn.Linear(8, 8)
    linear.register_buffer("table", torch.randn(8, 8))
    x, big = torch.randn(8, 8, requires_grad=True), torch.randn(100, 8)
    with offload_activations(linear, min_bytes=4 * 64 + 1) as counts:
        (linear(x) * linear.table.t()).sum().backward()  # 256 bytes each.
        (x * big[:8]).sum().backward()  # 8 of 100 rows.
        (x[:1] * linear.weight.t()[:1]).sum().backward()
    assert counts.bytes_offloaded == 0
    with offload_activations(linear, min_bytes=4 * 64) as counts:
        (linear(x) * linear.table.t()).sum().backward()
    assert counts.bytes_offloaded == 256  # x, for the weight's gradient.


def test_device_memory_is_let_go_until_backward():
    """No activation is alive between forward and backward but those that stay."""
    model, x = _model()
    alive = []

    def watch(module, _, out):
        alive.append(weakref.ref(out.untyped_storage()))

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(watch)
    loss = model(x).square().sum()
    # `down`'s output is only added; the others are saved.
    assert sum(a() is not None for a in alive) == 8
    del loss
    alive.clear()
    with offload_activations(model, min_bytes=SMALL) as counts:
        loss = model(x).square().sum()
    assert not any(a() is not None for a in alive)
    loss.backward()
    host = [weakref.ref(o) for o in gc.get_objects() if type(o).__name__ == "_Moved"]
    assert counts.storages > 0
    assert not host


def test_backward_twice_and_a_graph_without_backward():
    model, x = _model()
    want, _ = _gradients(model, x)
    with offload_activations(model, min_bytes=SMALL):
        model(x)  # Dropped.
        loss = model(x.clone().requires_grad_()).square().sum()
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    for p, b in zip(model.parameters(), want[1:], strict=True):
        assert_same_bits(p.grad, b)


def test_views_used_together_share_their_bytes():
    x = torch.randn(8, 8, requires_grad=True)
    with offload_activations(nn.Identity(), min_bytes=1):
        y = x * 1.0
        product = y * y.t()
    left, right = product.grad_fn._saved_self, product.grad_fn._saved_other
    assert left.data_ptr() == right.data_ptr()
    assert_same_bits(left.t(), right)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_each_storage_travels_once_each_way(prefetch, monkeypatch):
    copy, copies = activations._Moved._copy, []
    monkeypatch.setattr(
        activations._Moved, "_copy", lambda *a: (copies.append(a[1].nbytes), copy(*a))
    )
    x = torch.randn(16, requires_grad=True)
    with offload_activations(nn.Identity(), min_bytes=1, prefetch=prefetch):
        y = x.sin().sin().sin().sin().sum()
    assert copies == [64] * 4
    y.backward()
    assert copies == [64] * 8


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_graph_is_freed_without_the_garbage_collector(min_bytes):
    gc.disable()
    try:
        with offload_activations(nn.Identity(), min_bytes=min_bytes):
            y = torch.randn(16, requires_grad=True).exp()  # Saves what it returns.
        alive = weakref.ref(y.untyped_storage())
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_checkpointed_regions_keep_only_their_inputs_on_the_host():
    model, x = _model()
    want, _ = _gradients(model, x)

    def run(y):
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        return y

    got, counts = _gradients(model, x, run=run, min_bytes=SMALL)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert counts.bytes_offloaded == 3 * 4 * ROWS * WIDTH  # Two inputs, and the output (squared).


def test_hooks_leave_with_the_context():
    model, x = _model()
    with pytest.raises(KeyError), offload_activations(model, min_bytes=0):
        raise KeyError
    assert not any(m._forward_pre_hooks for m in model.modules())
    with (
        pytest.raises(UsageError, match="min_bytes=-1 and prefetch=2"),
        offload_activations(model, min_bytes=-1),
    ):
        pass
    with pytest.raises(UsageError, match="prefetch=-1"), offload_activations(model, prefetch=-1):
        pass
    assert model(x).shape == x.shape


def _sharded(degrees):
    torch.manual_seed(0)
    model = Model(experts=4, hidden=6, intermediate=3)
    _shard(model, plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu"))
    gradients, counts = [], []
    # Without; with; and with hooks that cannot tell weights from activations.
    for owner in (None, model, nn.Identity()):
        model.zero_grad()
        if owner is None:
            loss = _loss(model, dist.get_rank(), 5)
        else:
            with offload_activations(owner, min_bytes=1) as count:
                loss = _loss(model, dist.get_rank(), 5)
            counts.append(count.bytes_offloaded)
        loss.backward()
        gradients.append([p.grad.to_local().clone() for p in model.parameters()])
    for others in gradients[1:]:
        for a, b in zip(gradients[0], others, strict=True):
            assert_same_bits(a, b)
    return counts


@pytest.mark.parametrize("degrees", [{}, {"expert": 2}], ids=str)
def test_fsdp2_keeps_its_gathered_weights(degrees):
    (moved, with_weights), _ = ranks.run(_sharded, degrees, world_size=2)
    experts = 4 // degrees.get("expert", 1)
    # The first layer's gate and up projection are not saved: its input needs no gradient. The
    # head has a fourth row: FSDP2 pads it for two ranks.
    weights = experts * (6 * 3) + (4 * 6 + experts * (6 * 6 + 6 * 3)) + 4 * 6
    assert with_weights - moved == 8 * weights
    assert moved > 0

"""`batch_invariant(kernels=)`: which function computes what, on which device."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from primeblocks.errors import UnsupportedError
from primeblocks.exact import attend, batch_invariant, cpu, rows


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


class Recorder(SimpleNamespace):
    """The functions of a CPU, which note their names and require what a kernel may rely on."""

    def __init__(self):
        super().__init__(**{name: self._noting(getattr(cpu, name)) for name in cpu.__all__})
        self.called = []

    def _noting(self, function):
        @wraps(function)
        def noting(*operands, **more):
            assert not torch.is_grad_enabled()
            self.called.append(function.__name__)
            return function(*operands, **more)

        return noting


X, W = drawn(6, 8), drawn(2, 8, 4)
FOUR = drawn(1, 2, 6, 8)
ENDS = torch.tensor([2, 6], dtype=torch.int32)
CALLS = {
    "product": (lambda x: x @ W[0], "matmul"),
    "linear with a bias": (lambda x: F.linear(x, W[0].T, W[0, 0]), "matmul"),
    "grouped product": (lambda x: torch._grouped_mm(x, W, offs=ENDS), "grouped_matmul"),
    "sum": (lambda x: x.sum(0), "total"),
    "mean": (lambda x: x.mean((0, 1), keepdim=True), "total"),
    "rms norm": (lambda x: F.rms_norm(x, (8,), W[0, :, 0], 1e-6), "total"),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), "total total"),
    "softmax": (lambda x: x.bfloat16().softmax(0, dtype=torch.float32), "softmax"),
    "log-softmax": (lambda x: x.log_softmax(0), "log_softmax"),
    "logarithm of a sum": (lambda x: x.logsumexp(0), "total"),
    "bag": (lambda x: F.embedding_bag(ENDS[None].long() - 1, x, mode="sum"), "total"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(FOUR * x[0], FOUR, FOUR, is_causal=True),
        "attend",
    ),
    "elements": (F.silu, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_compute_what_adds_numbers_also_for_gradients(name):
    function, called = CALLS[name]
    x, kernels = X.clone().requires_grad_(), Recorder()
    with batch_invariant():
        plain = function(X)
    with batch_invariant(kernels=kernels):
        found = function(x)
    assert " ".join(kernels.called) == called
    assert torch.equal(found, plain)
    (found * found).sum().backward()
    assert x.grad.isfinite().all()


def on_meta(*shape):
    return torch.ones(*shape, device="meta")


def test_kernels_choose_the_device():
    """Elements are then computed in one call. Without kernels a CPU is needed."""
    kernels = SimpleNamespace(
        total=lambda x, *, dtype: x.new_empty(x.shape[:-1], dtype=dtype),
        attend=lambda query, key, value, *, positions, scale: query + positions[:, None, None],
    )
    with batch_invariant(kernels=kernels):
        assert on_meta(3, 5).sum(-1).shape == (3,)
        assert F.silu(on_meta(3, 5)).device.type == "meta"
    calls = []
    rows.pointwise(lambda x: calls.append(x.shape) or x, on_meta(3, 50000))
    assert calls == [(3, 50000)]
    query, at = on_meta(5, 2, 8), torch.arange(5)
    for call in (
        lambda: on_meta(3, 5).sum(-1),
        lambda: F.silu(on_meta(3, 5)),
        lambda: attend(query, query, query, positions=at, scale=1.0),
    ):
        with pytest.raises(UnsupportedError, match="on a CPU, not on meta"), batch_invariant():
            call()


@pytest.mark.parametrize("kernels", [None, Recorder()])
def test_what_threads_of_a_gpu_add_in_any_order_is_refused(kernels):
    at = torch.zeros(2, dtype=torch.int64, device="meta")
    at_each = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    x, y = on_meta(2, 3), on_meta(2, 3)
    for name, call in {
        "cumsum": lambda: x.cumsum(0),
        "index_add": lambda: x.index_add(0, at, y),
        "index_add_": lambda: x.clone().index_add_(0, at, y),
        "scatter_add": lambda: x.scatter_add(0, at_each, y),
        "scatter.reduce": lambda: x.scatter(0, at_each, y, reduce="add"),
        "index_put": lambda: x.index_put((at,), y, accumulate=True),
    }.items():
        with (
            pytest.raises(UnsupportedError, match=name),
            batch_invariant(kernels=kernels),
        ):
            call()
    with batch_invariant(kernels=kernels):
        assert at.cumsum(0).shape == (2,)
        assert at.index_add(0, at, at).shape == (2,)
        assert torch.ones(4).cumsum(0).tolist() == [1, 2, 3, 4]
        assert torch.zeros(2).index_add(0, torch.tensor([1, 1]), torch.ones(2)).tolist() == [0, 2]

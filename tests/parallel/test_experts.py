import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from primeblocks.errors import ShapeError
from primeblocks.parallel import reference
from primeblocks.parallel.experts import (
    GroupedExperts,
    LocalDispatcher,
    grouped_linear,
    grouped_swiglu,
)
from primeblocks.parallel.experts.grouped import expert_linear
from primeblocks.testing import strategies
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64, gradients_of

EXPERTS, HIDDEN, INTERMEDIATE = 4, 8, 8


def _weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g, dtype=torch.float64)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g, dtype=torch.float64)
    return gate_up, down


def _rows(counts, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(sum(counts), HIDDEN, generator=g, dtype=torch.float64)


def _one_by_one(counts):
    """Each expert's rows through a layer of their own."""

    def run(rows, weight, bias):
        parts = rows.split(counts)
        return torch.cat([x @ w.t() + b for x, w, b in zip(parts, weight, bias, strict=True)])

    return run


@given(counts=st.lists(st.integers(0, 5), min_size=EXPERTS, max_size=EXPERTS))
def test_a_linear_layer_an_expert(counts):
    weight, bias = _weights()[0], _weights(3)[0][:, :, 0]

    def ours(rows, weight, bias):
        return grouped_linear(rows, torch.tensor(counts), weight, bias)

    got = gradients_of(ours, _rows(counts), weight, bias)
    want = gradients_of(_one_by_one(counts), _rows(counts), weight, bias)
    assert_close_float64(got.output, want.output)
    assert_close_float64(got.gradients, want.gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [0, 0, 0, 16], [0, 0, 0, 0]], ids=str)
def test_the_grouped_kernel_is_as_precise_as_a_loop(dtype, counts):
    weight, bias = _weights()[0], _weights(3)[0][:, :, 0]

    def ours(rows, weight, bias):
        return grouped_linear(rows, torch.tensor(counts), weight, bias)

    rounded = [x.to(dtype) for x in (_rows(counts), weight, bias)]
    got = gradients_of(ours, *rounded)
    naive = gradients_of(_one_by_one(counts), *rounded)
    exact = gradients_of(_one_by_one(counts), *(x.double() for x in rounded))
    assert_as_precise(got.output, naive=naive.output, exact=exact.output)
    for ours_, theirs, right in zip(got.gradients, naive.gradients, exact.gradients, strict=True):
        # A bias's gradient is a sum of up to 16 rows in another order.
        assert_as_precise(ours_, naive=theirs, exact=right, factor=4.0)


def test_sizes_that_the_kernel_refuses_go_to_the_loop():
    weight = _weights()[0][:, :, :5]
    rows, counts = _rows([2, 1, 0, 3])[:, :5], torch.tensor([2, 1, 0, 3])
    exact = grouped_linear(rows, counts, weight)
    rounded = grouped_linear(rows.bfloat16(), counts, weight.bfloat16())
    torch.testing.assert_close(rounded.double(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_lie_apart_are_taken(dtype):
    weight, counts = _weights()[0].to(dtype), torch.tensor([2, 1, 0, 3])
    wide = torch.cat([_rows([6]), _rows([6], seed=2)], dim=1).to(dtype)
    for rows in (wide[:, 3 : 3 + HIDDEN], wide[:, :HIDDEN].t().contiguous().t()):
        expected = grouped_linear(rows.contiguous(), counts, weight)
        assert torch.equal(grouped_linear(rows, counts, weight), expected)


def test_an_expanded_gradient_is_taken():
    weight = _weights()[0].float().requires_grad_()
    grouped_linear(_rows([2, 1, 0, 3]).float(), torch.tensor([2, 1, 0, 3]), weight).sum().backward()
    assert weight.grad[0].abs().sum() > 0
    assert (weight.grad[2] == 0).all()


@given(ids=strategies.expert_ids(num_experts=EXPERTS, top_k=2))
def test_the_module_matches_the_reference(ids):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(len(ids), HIDDEN, generator=g, dtype=torch.float64)
    scores = torch.rand(len(ids), 2, generator=g, dtype=torch.float64)
    module = GroupedExperts(
        EXPERTS, HIDDEN, INTERMEDIATE, dispatcher=LocalDispatcher(), dtype=torch.float64
    )
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), _weights(), strict=True):
            parameter.copy_(weight)
    out = module(x, ids, scores)
    assert_close_float64(out.detach(), reference.experts(x, ids, scores, *_weights()))


def test_the_activation_is_the_given_one():
    gate_up, down = _weights()
    rows, counts = _rows([2, 1, 0, 3]), torch.tensor([2, 1, 0, 3])
    expected = []
    for x, w, back in zip(rows.split(counts.tolist()), gate_up, down, strict=True):
        gate, up = (x @ w.t()).chunk(2, dim=-1)
        expected.append((torch.tanh(gate) * up) @ back.t())
    found = grouped_swiglu(rows, counts, gate_up, down, activation=torch.tanh)
    assert_close_float64(found, torch.cat(expected))
    module = GroupedExperts(
        EXPERTS, HIDDEN, INTERMEDIATE, dispatcher=LocalDispatcher(), activation=torch.tanh
    ).double()
    with torch.no_grad():
        module.gate_up_proj.copy_(gate_up)
        module.down_proj.copy_(down)
    ids = torch.tensor([0, 0, 1, 3, 3, 3])[:, None]
    out = module(rows, ids, torch.ones(6, 1, dtype=torch.float64))
    assert_close_float64(out.detach(), torch.cat(expected))


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_may_lie_the_other_way_round(transposed):
    """As those of gpt-oss, with their biases."""
    weight, rows, counts = _weights()[0], _rows([2, 1, 0, 3]), torch.tensor([2, 1, 0, 3])
    module = nn.Module()
    module.is_transposed = transposed
    module.up = nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight)
    module.up_bias = nn.Parameter(_weights(3)[0][:, :, 0])
    expected = grouped_linear(rows, counts, weight, module.up_bias)
    assert_close_float64(expert_linear(module, "up", rows, counts).detach(), expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expert_without_rows_gets_a_zero_gradient(dtype):
    module = GroupedExperts(
        EXPERTS, HIDDEN, INTERMEDIATE, dispatcher=LocalDispatcher(), dtype=dtype
    )
    ids = torch.tensor([[0, 2], [2, 3]])
    module(torch.ones(2, HIDDEN, dtype=dtype), ids, torch.ones(2, 2)).sum().backward()
    for parameter in module.parameters():
        assert torch.equal(parameter.grad[1], torch.zeros_like(parameter.grad[1]))
        assert parameter.grad[2].abs().sum() > 0


def test_counts_must_add_up():
    gate_up, down = _weights()
    with pytest.raises(ShapeError, match="add up to 4, but tokens has 3 rows"):
        grouped_swiglu(_rows([3]), torch.ones(EXPERTS, dtype=torch.int64), gate_up, down)


def test_a_gradient_of_a_gradient_is_refused():
    x = _rows([3]).requires_grad_()
    sent = LocalDispatcher().dispatch(
        x, torch.ones(3, 1), torch.tensor([[0], [2], [1]]), num_experts=EXPERTS
    )
    out = LocalDispatcher().combine(sent.tokens.square(), sent)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

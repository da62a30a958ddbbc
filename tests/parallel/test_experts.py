import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError
from primeblocks.parallel import (
    GroupedExperts,
    LocalDispatcher,
    grouped_linear,
    grouped_swiglu,
    reference,
)
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
        assert_as_precise(ours_, naive=theirs, exact=right)


def test_sizes_that_the_kernel_refuses_go_to_the_loop():
    weight = _weights()[0][:, :, :5]
    rows, counts = _rows([2, 1, 0, 3])[:, :5], torch.tensor([2, 1, 0, 3])
    exact = grouped_linear(rows, counts, weight)
    rounded = grouped_linear(rows.bfloat16(), counts, weight.bfloat16())
    torch.testing.assert_close(rounded.double(), exact, rtol=0.1, atol=0.1)


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
    with pytest.raises(ShapeError, match="add up to 4; tokens has 3 rows"):
        grouped_swiglu(_rows([3]), torch.ones(EXPERTS, dtype=torch.int64), gate_up, down)

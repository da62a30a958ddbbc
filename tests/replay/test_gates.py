"""The three formulas where routers are saturated; tests of the adapters hold the usual range."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.replay.gates import sigmoid_gates, softmax_gates

FORMULAS = {
    "sigmoid": partial(sigmoid_gates, renormalise=True, epsilon=0.0),
    "softmax": partial(softmax_gates, renormalise=True),
}
SCORES = {"sigmoid": torch.sigmoid, "softmax": partial(torch.softmax, dim=-1)}


def run(formula, logits, ids, pull):
    """Gates, and what their gradients `pull` become at the logits."""
    leaf = logits.clone().requires_grad_()
    gates = formula(leaf, ids)
    gates.backward(pull)
    return gates.detach(), leaf.grad


def plain(kind, logits, ids):
    scores = SCORES[kind](logits).gather(-1, ids)
    return scores / scores.sum(-1, keepdim=True)


def draw(tokens, lowest, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(tokens, 8, generator=generator) * lowest
    ids = torch.rand(tokens, 8, generator=generator).topk(3).indices
    return logits, ids, torch.randn(tokens, 3, generator=generator)


@given(lowest=st.floats(-300, -1), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("kind", SCORES)
def test_saturated_scores_weigh_as_in_float64(kind, lowest, seed):
    # float64 holds scores down to e^-700, float32 to e^-87.
    logits, ids, pull = draw(16, lowest, seed)
    pull = pull * 1e4
    gates, gradients = run(FORMULAS[kind], logits, ids, pull)
    expected, expected_gradients = run(partial(plain, kind), logits.double(), ids, pull.double())
    torch.testing.assert_close(gates.double(), expected, rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(gradients.double(), expected_gradients, rtol=1e-4, atol=0.1)


@given(lowest=st.floats(-43, -1), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("kind", SCORES)
def test_the_guard_changes_no_bit_where_there_is_mass(kind, lowest, seed):
    logits, ids, pull = draw(16, lowest, seed)
    gates, gradients = run(FORMULAS[kind], logits, ids, pull)
    expected, expected_gradients = run(partial(plain, kind), logits, ids, pull)
    assert torch.equal(gates, expected)
    assert torch.equal(gradients, expected_gradients)


@pytest.mark.parametrize("depth", [50.0, 88.0, 95.0, 104.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_without_mass_poisons_nothing(depth, dtype):
    logits = torch.tensor([[depth, 0.0, 0.5, 0.0], [0.0, 1.0, 2.0, 3.0]], dtype=dtype)
    ids, pull = torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1e6, 0.0], [1e6, 0.0]])
    gates, gradients = run(FORMULAS["softmax"], logits, ids, pull)
    expected = torch.tensor([0.0, 0.5]).softmax(-1)
    torch.testing.assert_close(gates[0], expected, rtol=1e-5, atol=0.0)
    product = 1e6 * expected.prod()
    torch.testing.assert_close(
        gradients[0].float(), torch.tensor([0.0, product, -product, 0.0]), rtol=1e-2, atol=1.0
    )


@pytest.mark.parametrize("epsilon", [1e-20, 1e-6])
def test_a_host_that_adds_something_before_it_divides_is_followed(epsilon):
    logits, ids = torch.full((1, 4), -60.0), torch.tensor([[0, 1]])
    scores = logits.sigmoid().gather(-1, ids)
    expected = scores / (scores.sum(-1, keepdim=True) + epsilon) * 2.5
    found = sigmoid_gates(logits, ids, renormalise=True, scale=2.5, epsilon=epsilon)
    assert torch.equal(found, expected)


def test_without_a_guard_of_the_host_the_rows_sum_to_one():
    logits, ids = torch.full((1, 4), -60.0), torch.tensor([[0, 1]])
    assert sigmoid_gates(logits, ids, renormalise=True, epsilon=0.0).tolist() == [[0.5, 0.5]]

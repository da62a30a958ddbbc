import pytest
import torch

from primeblocks.errors import UsageError
from primeblocks.testing.oracles import (
    assert_as_precise,
    assert_close_float64,
    assert_same_bits,
    gradients_of,
    max_relative_error,
)

INF, NAN = float("inf"), float("nan")


def _doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_gradients_are_those_of_the_cotangent():
    x, y = _doubles(2.0, 3.0), _doubles(5.0, 7.0)
    output, (dx, dy, di) = gradients_of(
        lambda a, b, i: a * b[i], x, y, torch.tensor([1, 0]), cotangent=_doubles(1.0, 10.0)
    )
    assert output.tolist() == [14.0, 15.0]
    assert not output.requires_grad
    assert (dx.tolist(), dy.tolist(), di) == ([7.0, 50.0], [30.0, 2.0], None)
    assert x.grad is None


def test_the_default_cotangent_is_not_constant():
    _, (dx,) = gradients_of(lambda a: a, torch.zeros(4))
    assert dx.unique().numel() == 4


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.5], [0.0], 0.5),
        ([NAN, INF, 3.0], [NAN, INF, 3.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF], [-INF], INF),
        ([NAN], [NAN], 0.0),
        ([], [], 0.0),
    ],
)
def test_max_relative_error(actual, expected, error):
    assert max_relative_error(_doubles(*actual), _doubles(*expected)) == error


def test_max_relative_error_does_not_broadcast():
    with pytest.raises(UsageError, match=r"\(2,\) and \(1,\)"):
        max_relative_error(torch.ones(2), torch.ones(1))


def test_close_float64_sees_small_errors_in_nested_results():
    one = _doubles(1.0, 2.0)
    assert_close_float64(one, one + 1e-13)
    assert_close_float64((one, None), [one, None])
    with pytest.raises(AssertionError, match=r"at 1: relative error 5e-12 exceeds 1e-12"):
        assert_close_float64((one, one), (one, one + 1e-11 * _doubles(0.0, 1.0)))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.ones(2), torch.ones(2)),
        (_doubles(1.0), _doubles(1.0, 1.0)),
        (_doubles(1.0), None),
        (None, _doubles(1.0)),
        ([_doubles(1.0)], [_doubles(1.0), None]),
        (_doubles(1.0), [_doubles(1.0)]),
        ([_doubles(1.0)], _doubles(1.0)),
    ],
)
def test_close_float64_refuses_what_does_not_match(actual, expected):
    with pytest.raises(AssertionError):
        assert_close_float64(actual, expected)


def test_as_precise_allows_twice_the_naive_error():
    exact = _doubles(1.0)
    naive = torch.tensor([1.01])
    assert_as_precise(torch.tensor([0.981]), naive=naive, exact=exact)
    with pytest.raises(AssertionError, match=r"exceeds 2 x naive error 0\.01"):
        assert_as_precise(torch.tensor([0.97]), naive=naive, exact=exact)


def test_as_precise_forgives_one_rounding():
    exact = _doubles(1.0)
    assert_as_precise(torch.tensor([1.0 + 2**-23]), naive=torch.ones(1), exact=exact)
    with pytest.raises(AssertionError):
        assert_as_precise(torch.tensor([1.0 + 2**-22]), naive=torch.ones(1), exact=exact)


def test_same_bits_tells_zeros_and_dtypes_apart():
    assert_same_bits(_doubles(NAN, 0.0), _doubles(NAN, 0.0))
    codes = torch.ones(3).to(torch.float8_e4m3fn)
    assert_same_bits(codes, codes.clone())
    with pytest.raises(AssertionError, match="1 of 8 bytes differ"):
        assert_same_bits(_doubles(0.0), _doubles(-0.0))
    with pytest.raises(AssertionError, match="float64"):
        assert_same_bits(torch.ones(1), _doubles(1.0))
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(torch.ones(1), torch.ones(1, 1))

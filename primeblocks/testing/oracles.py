"""Comparisons with results that are known to be right.

There are two questions and two oracles. Is the algorithm right? Run it in float64 and compare with
a plain reference: `assert_close_float64`, including gradients (`gradients_of`). Is the precision
right? The error is at most twice that of the naive computation in the same dtype:
`assert_as_precise`. Tensors that were only moved must have the same bits: `assert_same_bits`.
`StepCounter` counts on a CPU what a step would cost on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from primeblocks.errors import UsageError

from .oracles_of_steps import StepCounter

__all__ = [
    "Gradients",
    "StepCounter",
    "assert_as_precise",
    "assert_close_float64",
    "assert_same_bits",
    "gradients_of",
    "max_relative_error",
]

Tensors = Tensor | Sequence["Tensor | None"] | None


class Gradients(NamedTuple):
    """The result of `gradients_of`: the output, and one gradient per input."""

    output: Tensor
    gradients: tuple[Tensor | None, ...]


def gradients_of(
    function: Callable[..., Tensor], *inputs: Tensor, cotangent: Tensor | None = None
) -> Gradients:
    """Call `function` on copies of `inputs`, and differentiate. Local.

    Args:
        function: returns one tensor.
        inputs: floating inputs are differentiated. Other inputs are passed through.
        cotangent: shaped like the output. With None, it is drawn from a fixed seed. A constant
            cotangent would hide errors that cancel in a sum.

    Returns:
        The detached output and the gradients, with None for an input without a gradient.
    """
    leaves = [_leaf(tensor) for tensor in inputs]
    output = function(*leaves)
    if cotangent is None:
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    output.backward(cotangent.to(output))
    return Gradients(output.detach(), tuple(leaf.grad for leaf in leaves))


def max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in units of the largest magnitude of `expected`. Local.

    Computed in float64. A NaN or an infinity on only one side gives infinity. If `expected` is
    zero everywhere, the largest difference itself is returned.

    Raises:
        UsageError: the shapes differ.
    """
    return _relative_error(actual, expected, of=lambda x: x.abs().max().item())


def _relative_error(actual: Tensor, expected: Tensor, *, of: Callable[[Tensor], float]) -> float:
    if actual.shape != expected.shape:
        raise UsageError(f"cannot compare shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = a.isfinite() & e.isfinite()
    same = finite | (a == e) | (a.isnan() & e.isnan())
    if not same.all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = of(e[finite])
    return of((a - e)[finite]) / (scale if scale > 0 else 1.0)


def _root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def assert_close_float64(actual: Tensors, expected: Tensors, *, tolerance: float = 1e-12) -> None:
    """Demand equal float64 results up to rounding: `max_relative_error` within `tolerance`.

    Takes a tensor, or sequences of tensors and None, such as gradients. Local.

    Raises:
        AssertionError: the results are too far apart, of another shape, or not float64. An error of
            1e-12 cannot be seen in float32.
    """
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        dtypes = {actual.dtype, expected.dtype}
        assert dtypes == {torch.float64}, f"needs float64 on both sides; got {dtypes}"
        assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
        error = max_relative_error(actual, expected)
        assert error <= tolerance, f"relative error {error:.3g} exceeds {tolerance:.3g}"
    elif actual is None or expected is None or isinstance(actual, Tensor | None):
        assert actual is expected, f"one side alone is None: {actual}, {expected}"
    else:
        assert not isinstance(expected, Tensor), "a sequence, expected one tensor"
        assert len(actual) == len(expected), f"length {len(actual)}, expected {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            try:
                assert_close_float64(ours, theirs, tolerance=tolerance)
            except AssertionError as error:
                raise AssertionError(f"at {index}: {error}") from None


def assert_as_precise(actual: Tensor, *, naive: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Demand that `actual` errs at most `factor` times as much as `naive` does. Local.

    Errors are root mean squares, because the largest of many errors depends on the processor and
    may double by chance. `assert_close_float64` finds an error in a single place.

    Args:
        naive: the straightforward computation in the dtype of `actual`.
        exact: the same in float64.

    Raises:
        AssertionError: `actual` errs more.
    """
    assert exact.dtype == torch.float64, f"exact must be float64; got {exact.dtype}"
    ours = _relative_error(actual, exact, of=_root_mean_square)
    theirs = _relative_error(naive, exact, of=_root_mean_square)
    # If the naive result is exact by luck, one rounding of the dtype is still fine.
    rounding = torch.finfo(actual.dtype).eps / 2 if actual.is_floating_point() else 0.0
    bound = factor * max(theirs, rounding)
    assert ours <= bound, f"error {ours:.3g} exceeds {factor:g} x naive error {theirs:.3g}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Demand equal dtype, shape and bits, also in NaN and minus zero. Local.

    Raises:
        AssertionError: something differs. The message counts the bytes.
    """
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    sides = (actual.detach(), expected.detach())
    # Not contiguous(), which is true for a single element with any stride.
    ours, theirs = (torch.empty(x.shape, dtype=x.dtype).copy_(x).flatten() for x in sides)
    different = (ours.view(torch.uint8) != theirs.view(torch.uint8)).sum().item()
    total = ours.numel() * ours.element_size()
    assert different == 0, f"{different} of {total} bytes differ"


def _leaf(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy

"""Comparisons of results with references.

`assert_close_float64` checks an algorithm: float64 results and gradients (`gradients_of`) must
equal a plain reference up to rounding. `assert_as_precise` checks precision: the error may be at
most twice the error of the naive computation in the same dtype. `assert_same_bits` checks code that
only moves tensors. `StepCounter` observes a step that runs on a CPU, and counts the operators, host
waits and collectives that the step would need on a GPU.
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
    """Call `function` on copies of `inputs`, and compute gradients. Local.

    Args:
        function: a function that returns one tensor.
        inputs: arguments of `function`. Gradients are computed for floating-point inputs.
        cotangent: the gradient of the output, in the shape of the output. The default is a random
            tensor with a fixed seed, because a constant would hide errors that cancel in a sum.

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
    """Return the largest difference, divided by the largest magnitude of `expected`. Local.

    Differences are computed in float64. If a NaN or an infinity of one tensor does not occur at the
    same position in the other tensor, the result is infinity. If `expected` is zero everywhere, the
    result is the largest difference.

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
    """Check that the `max_relative_error` of float64 results is at most `tolerance`. Local.

    `actual` and `expected` may be tensors, or sequences of tensors and None, such as gradients.

    Raises:
        AssertionError: the error exceeds `tolerance`, the shapes differ, or a tensor is not
            float64. The precision of float32 is too low to detect an error of 1e-12.
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
    """Check that the error of `actual` is at most `factor` times the error of `naive`. Local.

    Errors are root mean squares, because the largest of many errors depends on the processor and
    may double by chance. To find an error in a single element, use `assert_close_float64`. An error
    of at most `factor` times the rounding error of the dtype of `actual` always passes.

    Args:
        naive: the result of the straightforward computation in the dtype of `actual`.
        exact: the result of the straightforward computation in float64.

    Raises:
        AssertionError: the error of `actual` is larger than `factor` allows.
    """
    assert exact.dtype == torch.float64, f"exact must be float64; got {exact.dtype}"
    ours = _relative_error(actual, exact, of=_root_mean_square)
    theirs = _relative_error(naive, exact, of=_root_mean_square)
    # If the naive result is exact by luck, one rounding of the dtype is still fine.
    rounding = torch.finfo(actual.dtype).eps / 2 if actual.is_floating_point() else 0.0
    bound = factor * max(theirs, rounding)
    assert ours <= bound, f"error {ours:.3g} exceeds {factor:g} x naive error {theirs:.3g}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Check that two tensors have equal dtype, shape and bits, also in NaN and minus zero. Local.

    Raises:
        AssertionError: the dtype, the shape or a bit differs. The message states the number of
            bytes that differ.
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

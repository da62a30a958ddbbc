"""The functions in which `batch_invariant()` adds numbers, for a device other than a CPU."""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Kernels"]


class Kernels(Protocol):
    """Functions that give a row the same bits in any batch.

    `batch_invariant` calls the functions without gradients, under `torch.no_grad`. A function
    raises `UnsupportedError` for a dtype or device that it does not support. A module that contains
    all functions of `Kernels` is also a `Kernels`.
    """

    def matmul(self, left: Tensor, right: Tensor, /) -> Tensor:
        """Multiply `[rows, in]` by `[in, out]`."""

    def grouped_matmul(self, left: Tensor, right: Tensor, ends: Tensor, /) -> Tensor:
        """Multiply each group of rows of `[rows, in]` by the group's matrix of `[groups, in, out]`.

        For each group, `ends` contains the index after the group's last row. Rows of the result
        after the last group are zero.
        """

    def total(self, values: Tensor, /, *, dtype: torch.dtype | None = None) -> Tensor:
        """Sum `values` over the last dim.

        The result has `dtype`. The default is the dtype of `values`.
        """

    def softmax(self, values: Tensor, /, *, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the softmax over the last dim. `dtype` has the same meaning as in `total`."""

    def log_softmax(self, values: Tensor, /, *, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the logarithm of the softmax over the last dim. `dtype` is as in `total`."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        """Compute attention from queries to keys of one sequence, as `exact.attend` does."""

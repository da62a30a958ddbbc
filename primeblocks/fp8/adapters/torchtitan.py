"""Float8 products in the linear layers and experts of torchtitan 0.3.0."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MissingPackageError, UnsupportedError, needs
from ...layout import local_part
from ..modules import convert as convert_modules
from ..modules import modules_of
from ..recipe import Recipe
from ..rules import Expression

with needs("torchtitan", extra="torchtitan"):
    from torchtitan import __version__ as _RELEASE

_TESTED = "0.3.0"
if _RELEASE != _TESTED:
    raise UnsupportedError(
        f"this adapter was written for torchtitan {_TESTED}, because it replaces the forward of "
        f"experts; found {_RELEASE}. Run: pip install torchtitan=={_TESTED}"
    )

try:
    from torchtitan.models.common import moe
except ImportError as error:
    raise MissingPackageError(error.name or "torchtitan", "torchtitan") from error

__all__ = ["convert"]


def convert(
    model: nn.Module,
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
) -> tuple[str, ...]:
    """Convert some linear layers and experts of a torchtitan model to float8, in place. Local.

    Arguments, result and errors are the same as for `primeblocks.fp8.convert`. This function also
    converts `GroupedExperts`, which in torchtitan multiply in bfloat16, whatever the dtype of the
    weights. The output of converted experts has the dtype of the input rows.
    """
    stock: list[Any] = [m for _, m in modules_of(model) if type(m) is moe.GroupedExperts]
    for module in stock:
        module.grouped_mm = None
    try:
        return convert_modules(model, recipe, only=only, exclude=exclude)
    finally:
        for module in stock:
            if module.grouped_mm is None:
                del module.grouped_mm
            else:
                module.__class__ = _Fp8GroupedExperts


class _Fp8GroupedExperts(moe.GroupedExperts):
    grouped_mm: Any

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offsets = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def linear(name: str, rows: Tensor) -> Tensor:
            return self.grouped_mm(name, rows, local_part(getattr(self, name)), offsets)

        inner = F.silu(linear("w1_EFD", x_RD)) * linear("w3_EFD", x_RD)
        return linear("w2_EDF", inner)

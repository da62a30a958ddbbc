"""Float8 in existing models, and in what is sent to an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..errors import UsageError
from .matmul import matmul
from .quantize import round_trip
from .recipe import Recipe

__all__ = ["Fp8Linear", "convert", "encode_weights"]


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in float8; parameters and their names are those of Linear."""

    recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:
        y = matmul(input, self.weight, recipe=self.recipe)
        return y if self.bias is None else y + self.bias


def convert(model: nn.Module, recipe: Recipe, *, only: str | re.Pattern[str]) -> tuple[str, ...]:
    """Let some of a model's linear layers multiply in float8, in place.

    The parameters stay the same objects under the same names, so optimizers, FSDP2 (applied
    afterwards) and weight transfer do not notice. Local.

    Args:
        only: a regular expression; a layer is converted where it is found in the layer's name.

    Returns:
        The names of the converted layers.

    Raises:
        UsageError: the rule matches no linear layer.
    """
    pattern = re.compile(only)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and pattern.search(name)
    ]
    if not found:
        linear = [name for name, m in model.named_modules() if type(m) is nn.Linear]
        raise UsageError(
            f"{pattern.pattern!r} matches none of {len(linear)} linear layers; "
            f"they are named like {linear[:3]}"
        )
    for name, module in found:
        converted = Fp8Linear(
            module.in_features, module.out_features, bias=module.bias is not None, device="meta"
        )
        converted.weight, converted.bias = module.weight, module.bias
        converted.recipe = recipe
        converted.train(module.training)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, converted)
    return tuple(name for name, _ in found)


def encode_weights(
    recipe: Recipe, *, only: str | re.Pattern[str]
) -> Callable[[str, Tensor], Mapping[str, Tensor]]:
    """What weight transfer calls before it sends a tensor: weights rounded as training rounds them.

    The engine gets ordinary numbers that lie on the float8 grid, so one without float8 kernels
    serves what a float8 trainer computes with, up to the rounding of the transfer dtype. This is
    simulated quantization: no bytes are saved.

    Each rank rounds its own shard, whose tiles are those of the whole only if shards have a
    multiple of `recipe.weights.rows` rows (or are whole).

    Args:
        only: found in the names of the weights to round; others, and vectors, pass unchanged.
    """
    pattern = re.compile(only)

    def encode(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        if tensor.ndim != 2 or not pattern.search(name) or not tensor.numel():
            return {name: tensor}
        return {name: round_trip(tensor, recipe.weights)}

    return encode

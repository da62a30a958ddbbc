"""The tensors of quantized weights, for checkpoints and for weight transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import PlanError, ShapeError, UnsupportedError, UsageError
from ..layout import Layout, Shard, local_part
from .quantize import Quantized, Tile, check_choice
from .recipe import Recipe, check_recipe
from .rules import Expression, Rule, choose_weights

__all__ = [
    "SCALES_SUFFIX",
    "WeightEncoder",
    "config",
    "encode_weights",
    "pack_weight",
    "powers_of_two",
    "unpack_weights",
]

SCALES_SUFFIX = "_scale_inv"
"""End of the name of a weight's scales, as in `q_proj.weight_scale_inv`."""

Form = Literal["float8", "simulated"]


def pack_weight(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """Return a weight's codes and scales, with the names of DeepSeek-V3's checkpoints. Local.

    Codes get the weight's name, and scales get this name with the suffix `_scale_inv`. Scales are
    float32, also with a UE8M0 recipe. All tensors are contiguous, as file formats require.

    Raises:
        UsageError: `quantized` is not a `Quantized`, or `name` ends with `_scale_inv`.
        ShapeError: codes are not a float8_e4m3fn matrix, or scales are not float32 with one scale
            per tile.
    """
    if not isinstance(quantized, Quantized):
        raise UsageError(
            f"{name}: expected a Quantized; got a {type(quantized).__name__}. Call quantize."
        )
    if name.endswith(SCALES_SUFFIX):
        raise UsageError(f"{name} is the name of scales. Pass the weight's name.")
    _check_pair(name, quantized.codes, quantized.scales, quantized.tile)
    # If the last tiles of a matrix are cut, its codes are a view of whole tiles.
    codes = quantized.codes.view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    return {name: codes, name + SCALES_SUFFIX: quantized.scales.contiguous()}


def unpack_weights(state: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Quantized | Tensor]:
    """Join a checkpoint's codes and scales. Tensors without scales stay unchanged. Local.

    The results share memory with `state`, except scales in float8_e8m0fnu, which become float32.

    Raises:
        PlanError: the codes or the scales of a weight are missing. Also raised if the recipe needs
            scales that are powers of two, and a scale in `state` is not a power of two.
        ShapeError: codes or scales have a wrong dtype, or a weight does not have one scale per tile
            of `recipe.weights`.
    """
    check_recipe(recipe)
    weights: dict[str, Quantized | Tensor] = {}
    for name, tensor in state.items():
        scales = state.get(name + SCALES_SUFFIX)
        if name.endswith(SCALES_SUFFIX):
            if (owner := name.removesuffix(SCALES_SUFFIX)) not in state:
                raise PlanError(f"{name} contains scales, but {owner} is missing. Pass both.")
        elif scales is not None:
            if scales.dtype == torch.float8_e8m0fnu:
                scales = scales.float()
            _check_pair(name, tensor, scales, recipe.weights)
            if recipe.scale == "ue8m0" and not (powers_of_two(scales) | scales.isnan()).all():
                raise PlanError(
                    f"{name + SCALES_SUFFIX} holds scales that are not powers of two; the recipe's "
                    'are. Use Recipe(scale="float32"), or quantize the weights again.'
                )
            weights[name] = Quantized(tensor, scales, recipe.weights)
        elif _is_float8(tensor):
            raise PlanError(
                f"{name} contains codes, but {name + SCALES_SUFFIX} is missing. Pass both."
            )
        else:
            weights[name] = tensor
    return weights


def config(recipe: Recipe, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `quantization_config` for a checkpoint's config.json. Pure.

    `modules_to_not_convert` lists the full name of each module whose matrix in `state` is not
    quantized. Readers of the list differ: vLLM compares whole names, and transformers compares the
    beginnings and ends of names.

    Args:
        state: all tensors of the checkpoint, with the names from `pack_weight`. The tensors may be
            on the meta device, where tensors do not need memory.

    Raises:
        PlanError: `state` does not contain a quantized weight.
        PlanError: a quantized module's name begins or ends with the name of an unquantized module.
            Readers of the checkpoint would disagree about the quantized module.
        UnsupportedError: the format of checkpoints does not support the tiles of `recipe`.
    """
    check_recipe(recipe)
    tile = recipe.weights
    if recipe.activations != Tile(1, tile.rows) or tile.rows != tile.columns:
        raise UnsupportedError(
            "the format of checkpoints needs square tiles of weights, and tiles of activations "
            f"with one row of the same side; got weights {tile} and activations "
            f"{recipe.activations}. Use a recipe such as Recipe()."
        )
    scaled = {name.removesuffix(SCALES_SUFFIX) for name in state if name.endswith(SCALES_SUFFIX)}
    modules = {_module_of(name) for name in scaled}
    if not modules:
        raise PlanError(
            f"none of {len(state)} tensors is quantized. Call pack_weight first, or check only= of "
            "encode_weights, which matched none of their names."
        )
    kept = {
        _module_of(name)
        for name, tensor in state.items()
        if name not in scaled and not name.endswith(SCALES_SUFFIX) and _is_matrix(name, tensor)
    }
    for name in sorted(kept):
        if met := [m for m in sorted(modules) if m.startswith(name) or m.endswith(name)]:
            raise PlanError(
                f"{name} is not quantized, but {met[0]} is. A reader that compares prefixes or "
                "ends of names, as transformers does, excludes both. Quantize both, or neither."
            )
    made = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [tile.rows, tile.columns],
        "modules_to_not_convert": sorted(kept),
    }
    return made | ({"scale_fmt": "ue8m0"} if recipe.scale == "ue8m0" else {})


class WeightEncoder:
    """A function that converts a rank's part of a weight to tensors for a transfer.

    See `encode_weights`.

    `weightsync.Publisher` calls `origins` and `describe`, which check that shards do not cut tiles.
    """

    def __init__(
        self,
        recipe: Recipe,
        rules: dict[str, Expression],
        form: Form,
        held: dict[str, Layout] | None,
    ) -> None:
        self._recipe, self._rules, self._form, self._held = recipe, rules, form, held
        self._parsed = {argument: Rule(argument, text) for argument, text in rules.items()}
        if held is not None:
            self._choose(held)

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Encode this rank's part of a tensor. Local.

        Returns the tensors to send by name: codes and scales, numbers on the float8 grid, or the
        unchanged tensor.

        Raises:
            UsageError: a rule matches inside a word of the name, the tensor holds codes already, or
                the recipe needs master weights.
            PlanError: the part differs from `layouts`.
            UnsupportedError: the tensor is a DTensor.
        """
        if tensor.ndim < 2 or not tensor.is_floating_point() or not self._names(name):
            return {name: tensor}
        if local_part(tensor) is not tensor:
            raise UnsupportedError(f"{name} is a DTensor. Pass its local part: to_local().")
        if _is_float8(tensor):
            raise UsageError(f"{name} holds float8 codes already. Pass the weight before rounding.")
        if self._held is not None:
            place = self._held.get(name)
            if place is None or place.shard.sizes != tuple(tensor.shape):
                raise PlanError(
                    f"{name} is {list(tensor.shape)}, but layouts have {place}. Make layouts of "
                    "the tensors that are sent."
                )
        quantized = self._recipe.quantize_weight(tensor)
        if self._form == "float8":
            return pack_weight(name, quantized)
        return {name: quantized.dequantize().to(tensor.dtype)}

    def describe(self, held: Any) -> Any:
        """Convert the `weightsync.Manifest` of a rank to the manifest of encoded tensors. Pure.

        Raises:
            PlanError: a shard cuts through a tile.
            UsageError: `only` or `exclude` does not match any weight, or matches only a part of a
                word in a name.
        """
        chosen = self._choose({name: spec.layout for name, spec in held.items()})
        if self._form == "simulated":
            return held
        rows = []
        for name, spec in held.items():
            if name not in chosen or not spec.dtype.is_floating_point:
                rows.append((name, spec))
                continue
            scales = _layout_of_scales(spec.layout, self._recipe.weights)
            rows.append((name, replace(spec, dtype=torch.float8_e4m3fn)))
            rows.append((name + SCALES_SUFFIX, replace(spec, dtype=torch.float32, layout=scales)))
        return replace(held, tensors=tuple(rows), recipe=self._recipe.fingerprint())

    def origins(self, held: Any) -> dict[str, str]:
        """Map the name of each encoded tensor to the name of the original parameter.

        Pure. Raises the errors of `describe`.
        """
        made = dict.fromkeys(self.describe(held))
        return {name: name if name in held else name.removesuffix(SCALES_SUFFIX) for name in made}

    def _names(self, name: str) -> bool:
        if name.endswith("bias"):
            return False
        exclude = self._parsed.get("exclude")
        named = self._parsed["only"].names_weight(name)
        return named and not (exclude and exclude.names_weight(name))

    def _choose(self, held: dict[str, Layout]) -> set[str]:
        matrices = [name for name, layout in held.items() if len(layout.shape) > 1]
        chosen = choose_weights(matrices, **self._rules)
        for name in chosen:
            _check_cut(name, held[name], self._recipe.weights)
        return set(chosen)


def encode_weights(
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
    layouts: Mapping[str, Layout] | None,
    form: Form = "float8",
) -> WeightEncoder:
    """Return a function that quantizes weights for a transfer with the training recipe. Local.

    Pass the function to `weightsync.Publisher(encode=...)`. The function encodes matrices, and
    parameters `[experts, rows, columns]` of experts. The parameter `form` chooses the result:

    - `"float8"`: codes and scales, which take about half the bytes of bfloat16.
    - `"simulated"`: dequantized numbers in the weight's dtype, for engines without float8 kernels.
      If this dtype is bfloat16, the product of code and scale is also rounded to bfloat16.

    Each rank quantizes its own shards. A shard must not cut through a tile of `recipe.weights`.

    Args:
        only: the names that `convert` returned, or a regular expression for weights or their
            modules. Vectors and biases are sent unchanged, and so are weights that do not match.
        exclude: a regular expression for weights that are sent unchanged.
        layouts: the layouts of this rank's tensors by name (`primeblocks.layout.layout_of`), or
            None if this rank has whole tensors.
        form: see above.

    Raises:
        UsageError: `only` or `exclude` is not a regular expression, or `layouts` are not layouts by
            name.
        UsageError: `only` or `exclude` does not match any weight of `layouts`, or matches only a
            fragment between the dots of a name. Without `layouts`, the returned function checks
            only for fragments. Its `describe`, which `weightsync.Publisher` calls, checks both.
        PlanError: a shard of a quantized weight cuts through a tile.
        UnsupportedError: `form` is not supported.
    """
    check_recipe(recipe)
    check_choice("form", form, Form)
    if layouts is not None and not isinstance(layouts, Mapping):
        raise UsageError(
            f"layouts must be a dict by name, or None; got a {type(layouts).__name__}."
        )
    for name, layout in ({} if layouts is None else layouts).items():
        if not isinstance(layout, Layout):
            raise UsageError(
                f"layouts[{name!r}] is a {type(layout).__name__}, not a Layout. Use "
                "layout_of(tensor)."
            )
    given = {"only": only} if exclude is None else {"only": only, "exclude": exclude}
    rules: dict[str, Expression] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in given.items()
    }
    return WeightEncoder(recipe, rules, form, None if layouts is None else dict(layouts))


def powers_of_two(scales: Tensor) -> Tensor:
    """Return, per float32 scale, whether the scale is a power of two, 0 or infinite. Local."""
    return (scales.view(torch.int32) & 0x7FFFFF) == 0


def _is_float8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1


def _check_pair(name: str, codes: Tensor, scales: Tensor, tile: Tile) -> None:
    if codes.dtype != torch.float8_e4m3fn or codes.ndim < 2:
        raise ShapeError(
            f"{name} has scales, so it must be a float8_e4m3fn matrix; got {codes.dtype} "
            f"{list(codes.shape)}."
        )
    expected = [*codes.shape[:-2], *tile.grid(*codes.shape[-2:])]
    if scales.dtype != torch.float32 or list(scales.shape) != expected:
        raise ShapeError(
            f"{name + SCALES_SUFFIX} is {scales.dtype} {list(scales.shape)}; "
            f"{list(codes.shape)} in tiles of {tile.rows} x {tile.columns} needs float32 "
            f"{expected}."
        )


def _module_of(name: str) -> str:
    """Return the module of `module.weight`, or of experts' `module.gate_up_proj`."""
    return name.rpartition(".")[0]


def _is_matrix(name: str, tensor: Tensor) -> bool:
    # Readers quantize parameters named `weight`, and stacked experts of any name.
    return tensor.ndim > (1 if name.endswith(".weight") else 2) and tensor.is_floating_point()


def _check_cut(name: str, layout: Layout, tile: Tile) -> None:
    box = layout.shard
    if 0 in box.sizes:
        return
    sides = (tile.rows, tile.columns)
    cuts = zip(box.offsets[-2:], box.sizes[-2:], layout.shape[-2:], sides, strict=True)
    for start, size, whole, side in cuts:
        if start % side or (start + size != whole and size % side):
            raise PlanError(
                f"{name}: this rank holds {start}:{start + size} of {whole}, which cuts through "
                f"tiles of {side}. Choose weights=Tile(...) with a side that divides every cut."
            )


def _layout_of_scales(layout: Layout, tile: Tile) -> Layout:
    steps = [1] * (len(layout.shape) - 2) + [tile.rows, tile.columns]
    box = layout.shard
    shape, starts, sizes = (
        [-(-n // step) for n, step in zip(row, steps, strict=True)]
        for row in (layout.shape, box.offsets, box.sizes)
    )
    # An empty shard may begin after the last tile.
    starts = [min(a, n - size) for a, n, size in zip(starts, shape, sizes, strict=True)]
    return Layout(tuple(shape), Shard(tuple(starts), tuple(sizes)))

"""Compare, before step 0, a trainer's quantized weights with the weights that its engine serves."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..errors import CorruptionError, UnsupportedError, UsageError
from ..layout import local_part
from .checkpoint import SCALES_SUFFIX
from .quantize import Quantized, Quotient, Scale, quantize
from .recipe import Recipe, check_recipe
from .rules import Expression, Rule, choose_weights

__all__ = ["Audit", "Finding", "audit"]

_SHOWN = 5
_MASTER, _EXPORT, _TWICE = "float32", "bfloat16", "codes"
_SCALES = {"float32": "float32", "ue8m0": "UE8M0"}
_SOURCES = {
    _MASTER: "quantized from the float32 master, the recipe from the bfloat16 export",
    _EXPORT: "quantized from the bfloat16 export, the recipe from the float32 master",
    _TWICE: "quantized a second time, from codes times scales in bfloat16",
}


@dataclass(frozen=True)
class Finding:
    """The name of a tensor that differs between trainer and engine, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """The findings, and the number of the trainer's tensors, with those that the engine lacks.

    `bool(audit)` raises UsageError, because true could mean either findings or a passed audit.
    """

    findings: tuple[Finding, ...]
    compared: int

    def __bool__(self) -> bool:
        raise UsageError("an audit is neither true nor false. Look at findings, or call check().")

    def table(self) -> str:
        """Return one line per finding. Pure."""
        width = max((len(each.name) for each in self.findings), default=0)
        lines = [f"tensors {self.compared}, findings {len(self.findings)}"]
        return "\n".join([*lines, *(f"{f.name:<{width}}  {f.reason}" for f in self.findings)])

    def check(self) -> None:
        """Raise if the engine differs from the trainer. Local.

        Raises:
            CorruptionError: the audit has findings. The message lists the first five findings.
        """
        if not self.findings:
            return
        shown = "\n".join(f"  {each.name}: {each.reason}" for each in self.findings[:_SHOWN])
        more = len(self.findings) - _SHOWN
        raise CorruptionError(
            "the engine's tensors differ from the numbers that the trainer multiplies with: "
            f"tensors {self.compared}, findings {len(self.findings)}\n{shown}"
            + (f"\n  and {more} more, see audit.table()" if more > 0 else "")
        )


def audit(
    trainer: nn.Module | Mapping[str, Tensor],
    engine: nn.Module | Mapping[str, Tensor],
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
    excluded: Iterable[str] | None = None,
) -> Audit:
    """Quantize a trainer's weights with a recipe, and compare the bits with an engine's weights.

    For each tensor that differs, `audit` tries known causes, alone and in combination. The causes
    are another `source`, `scale` or `quotient` of the recipe, and codes that were rounded twice.
    `audit` reports a cause only if the cause reproduces the engine's bits. If several combinations
    of causes reproduce the engine's bits, `audit` reports all combinations with the fewest causes.
    `audit` also counts the codes, scales or plain values that differ.

    `audit` compares only the tensors that you pass. It does not check how the engine quantizes
    activations or the KV cache, or weights that the engine quantizes later. Local. `audit`
    compares one tensor at a time on the trainer's device, with some float32 copies.

    Args:
        trainer: a module, or a dict of whole tensors. Pass float32 master weights if they exist.
        engine: a module, or a dict of tensors with the trainer's names. Weights are codes with
            scales, or plain numbers, which may come from `encode_weights(form="simulated")`. Scales
            are named `NAME_scale_inv`, in float32 or float8_e8m0fnu. Before the call, split weights
            that the engine fuses.
        recipe: the recipe of the trainer.
        only: the names that `convert` returned, or a regular expression. The expression matches
            the weights that the trainer multiplies in float8, or the modules of these weights.
        exclude: a regular expression for weights that the trainer does not multiply in float8.
        excluded: the list `modules_to_not_convert` of the engine's `quantization_config`. With
            `excluded`, `audit` can report the entry that excluded a weight from quantization.

    Raises:
        UsageError: `only` or `exclude` does not match any weight, or matches only a fragment
            between the dots of a name.
        UsageError: the recipe has `source="float32"`, and a weight of the trainer has less
            precision than float32.
        UnsupportedError: a tensor is a DTensor.
    """
    check_recipe(recipe)
    if isinstance(excluded, str):
        raise UsageError(
            f"excluded must be the entries of a list; got {excluded!r}. Put it in a list."
        )
    mine, held = _named("trainer", trainer), _named("engine", engine)
    matrices = [name for name, tensor in mine.items() if tensor.ndim > 1]
    chosen = frozenset(choose_weights(matrices, only=only, exclude=exclude))
    rules = Rule("only", only), None if exclude is None else Rule("exclude", exclude)
    entries = None if excluded is None else tuple(excluded)
    kept = tuple(name.removesuffix(".weight") for name in matrices if name not in chosen)
    # With "nan", a value that is not finite does not raise here. It is a finding if it differs.
    sides = _Sides(mine, held, replace(recipe, nonfinite="nan"), chosen, *rules, entries, kept)
    reasons = {name: sides.compare(name) for name in mine}
    reasons |= {name: sides.extra(name) for name in held if name not in mine}
    return Audit(tuple(Finding(n, reason) for n, reason in reasons.items() if reason), len(mine))


@dataclass(frozen=True)
class _Sides:
    trainer: Mapping[str, Tensor]
    engine: Mapping[str, Tensor]
    recipe: Recipe
    chosen: frozenset[str]
    only: Rule
    exclude: Rule | None
    excluded: tuple[str, ...] | None
    kept: tuple[str, ...]

    def compare(self, name: str) -> str:
        """Return the reason why a tensor differs, or an empty text."""
        if name not in self.engine:
            return "missing in the engine"
        weight = _checked(name, self.trainer[name])
        held = _checked(name, self.engine[name]).to(weight.device)
        scales = self.engine.get(name + SCALES_SUFFIX)
        if unlike := self._unlike(name, weight, held, scales):
            return unlike
        if scales is not None:
            return self._codes(name, weight, held, scales.detach().to(weight.device))
        if name in self.chosen and weight.is_floating_point():
            return self._simulated(name, weight, held)
        same = _is_same(weight.to(held.dtype), held)
        return "" if same else _explain_plain(weight, held, self.recipe)

    def _unlike(self, name: str, weight: Tensor, held: Tensor, scales: Tensor | None) -> str:
        is_codes = held.is_floating_point() and held.element_size() == 1
        if held.shape != weight.shape:
            return f"shape {list(held.shape)} in the engine, {list(weight.shape)} in the trainer"
        if held.is_floating_point() != weight.is_floating_point():
            return f"{held.dtype} in the engine, {weight.dtype} in the trainer"
        if is_codes and scales is None:
            return f"codes without scales: the engine has no {name + SCALES_SUFFIX}"
        if scales is not None and not is_codes:
            return f"scales without codes: the engine holds the weight in {held.dtype}"
        return ""

    def extra(self, name: str) -> str:
        owner = name.removesuffix(SCALES_SUFFIX)
        if owner == name or owner not in self.trainer:
            return "only in the engine"
        # If the engine has the owner, `compare` reports on the owner.
        return "" if owner in self.engine else f"scales of {owner}, which the engine lacks"

    def _codes(self, name: str, weight: Tensor, codes: Tensor, scales: Tensor) -> str:
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.float()
        if (codes.dtype, scales.dtype) != (torch.float8_e4m3fn, torch.float32):
            return f"codes in {codes.dtype} with scales in {scales.dtype}"
        drifted = "" if name in self.chosen else self._quantized_by_the_engine(name)
        if drifted and not _can_quantize(weight, self.recipe):
            return drifted
        made = self._quantize(name, weight)
        if _is_same(made.codes, codes) and _is_same(made.scales, scales):
            return drifted
        return "; ".join(
            filter(None, [drifted, _explain_codes(weight, codes, scales, self.recipe)])
        )

    def _simulated(self, name: str, weight: Tensor, held: Tensor) -> str:
        expected = self._quantize(name, weight).dequantize()
        # A bfloat16 trainer sends bfloat16 numbers, which the engine may keep in another dtype.
        if any(
            _is_same(each.to(held.dtype), held) for each in (expected, expected.to(weight.dtype))
        ):
            return ""
        words = self._left_by_the_engine(name)
        return _explain_simulated(weight, held, self.recipe, unquantized=words)

    def _quantize(self, name: str, weight: Tensor) -> Quantized:
        try:
            return self.recipe.quantize_weight(weight)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error

    def _quantized_by_the_engine(self, name: str) -> str:
        rule = self.exclude if self.exclude and self.exclude.names_weight(name) else self.only
        verb = "names it" if rule is self.exclude else "does not name it"
        reason = f"quantized by the engine, though {rule.argument}={rule.text!r} {verb}"
        if self.excluded is None:
            return reason
        if entries := [entry for entry, is_named in self._entries(name) if is_named]:
            return f"{reason}; {entries[0]!r} of its list of excluded modules was not applied"
        return f"{reason}: its list of excluded modules is outdated, and no entry names it"

    def _left_by_the_engine(self, name: str) -> str:
        reason = f"not quantized by the engine, though only={self.only.text!r} names it"
        if self.excluded is not None:
            entries = list(self._entries(name))
            if named := [entry for entry, is_named in entries if is_named]:
                return f"{reason}: its list of excluded modules is outdated: {named[0]!r} names it"
            if entries:
                return f"{reason}: {entries[0][0]!r} of its list is found in the name by accident"
            return f"{reason}, and no entry of its list is found in the name"
        for module in self.kept:
            if name.startswith(module) and not name.startswith(f"{module}."):
                return (
                    f"{reason}: the name of {module!r}, which is not quantized, is found in this "
                    "one by accident, if the engine compares parts of words"
                )
        return reason

    def _entries(self, name: str) -> Iterator[tuple[str, bool]]:
        """Yield the engine's entries found in a name, and whether they name whole words."""
        for entry in self.excluded or ():
            if entry in name:
                yield entry, bool(re.search(rf"(^|\.){re.escape(entry)}(\.|$)", name))
            elif set(entry) & set("*[(^$|\\+"):
                with contextlib.suppress(re.error):
                    if re.search(entry.removeprefix("re:"), name):
                        yield entry, True


def _named(side: str, tensors: object) -> Mapping[str, Tensor]:
    held: Any = tensors
    if not isinstance(held, Mapping) and callable(getattr(held, "state_dict", None)):
        held = held.state_dict()
    if not isinstance(held, Mapping) or any(not isinstance(name, str) for name in held):
        kind = type(tensors).__name__
        raise UsageError(
            f"{side} must be a dict of tensors by name, or have a state_dict(); got a {kind}"
        )
    for name, tensor in held.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{name!r} of {side} is a {type(tensor).__name__}, not a tensor. Pass tensors."
            )
    return held


def _checked(name: str, tensor: Tensor) -> Tensor:
    if local_part(tensor) is not tensor:
        raise UnsupportedError(f"{name} is a DTensor. Pass whole tensors: full_tensor().")
    return tensor.detach()


class _Way(NamedTuple):
    """One way to quantize. A way that differs from the recipe's is a possible cause."""

    source: str
    scale: Scale
    quotient: Quotient

    def make(self, weight: Tensor, recipe: Recipe) -> Quantized:
        x = weight.bfloat16() if self.source == _EXPORT else weight
        if self.source == _TWICE:
            x = recipe.quantize_weight(weight).dequantize().bfloat16()
        how: Any = {"scale": self.scale, "quotient": self.quotient}
        return quantize(x, recipe.weights, **how, nonfinite="nan")

    def against(self, usual: _Way) -> str:
        words = [_SOURCES[self.source]] if self.source != usual.source else []
        if self.scale != usual.scale:
            words.append(f"{_SCALES[self.scale]} scales, the recipe's are {_SCALES[usual.scale]}")
        if self.quotient != usual.quotient:
            words.append(f"quotient {self.quotient!r}, the recipe's is {usual.quotient!r}")
        return ", and ".join(words)


def _causes(weight: Tensor, recipe: Recipe, fits: Callable[[_Way], bool]) -> list[str]:
    """Return the ways with the fewest changes that fit, in words."""
    usual = _Way(recipe.source, recipe.scale, recipe.quotient)
    sources = (_EXPORT, _MASTER, _TWICE) if _is_master(weight) else (_EXPORT, _TWICE)
    levels: dict[int, list[_Way]] = {1: [], 2: [], 3: []}
    for way in map(_Way._make, itertools.product(sources, get_args(Scale), get_args(Quotient))):
        changes = sum(a != b for a, b in zip(way, usual, strict=True))
        # If scales are powers of two, all quotients give the same bits.
        if changes and (way.scale == "float32" or way.quotient == usual.quotient):
            levels[changes].append(way)
    for ways in levels.values():
        if found := [way for way in ways if fits(way)]:
            return [way.against(usual) for way in found]
    return []


def _explain_codes(weight: Tensor, codes: Tensor, scales: Tensor, recipe: Recipe) -> str:
    def fits(way: _Way) -> bool:
        made = way.make(weight, recipe)
        return _is_same(made.codes, codes) and _is_same(made.scales, scales)

    expected = recipe.quantize_weight(weight)
    shape = list(expected.scales.shape)
    if list(scales.shape) != shape:
        return f"scales of shape {list(scales.shape)} where the recipe has {shape}"
    numbers = f"{_count(expected.codes, codes, 'codes')} and "
    numbers += f"{_count(expected.scales, scales, 'scales')} differ"
    if causes := _causes(weight, recipe, fits):
        return _explained(causes, numbers)
    held = Quantized(codes, scales, recipe.weights).dequantize()
    return f"other values: {numbers}, largest difference {_largest(expected.dequantize(), held)}"


def _explain_simulated(weight: Tensor, held: Tensor, recipe: Recipe, *, unquantized: str) -> str:

    def fits(way: _Way) -> bool:
        return _is_same(way.make(weight, recipe).dequantize().to(held.dtype), held)

    causes = [f"on the float8 grid, but {cause}" for cause in _causes(weight, recipe, fits)]
    if _is_rounding(weight, held):
        causes.insert(0, unquantized)
    return _explained(causes, _difference(recipe.quantize_weight(weight).dequantize(), held))


def _explain_plain(weight: Tensor, held: Tensor, recipe: Recipe) -> str:
    causes = []
    if _is_rounding(weight, held):
        causes.append(f"the bfloat16 rounding, in {held.dtype}")
    if _can_quantize(weight, recipe):
        rounded = recipe.quantize_weight(weight).dequantize()
        if _is_same(rounded.to(held.dtype), held):
            causes.append("rounded to the float8 grid, though the rule does not name it")
    return _explained(causes, _difference(weight, held))


def _explained(causes: list[str], numbers: str) -> str:
    if not causes:
        return f"other values: {numbers}"
    several = "; the bits are the same" if len(causes) > 1 else ""
    return f"{', or '.join(causes)}{several} ({numbers})"


def _difference(expected: Tensor, held: Tensor) -> str:
    cast = expected.to(held.dtype)
    return f"{_count(cast, held, 'values')} differ, largest difference {_largest(cast, held)}"


def _is_rounding(weight: Tensor, held: Tensor) -> bool:
    """Return whether an engine's numbers are the weight, cast directly or via bfloat16."""
    return any(_is_same(each.to(held.dtype), held) for each in (weight, weight.bfloat16()))


def _is_master(weight: Tensor) -> bool:
    return weight.dtype in (torch.float32, torch.float64)


def _can_quantize(weight: Tensor, recipe: Recipe) -> bool:
    is_matrix = weight.ndim > 1 and weight.is_floating_point()
    return is_matrix and (_is_master(weight) or recipe.source == _EXPORT)


def _count(expected: Tensor, held: Tensor, what: str) -> str:
    return f"{int(_other_bits(expected, held).sum())} of {held.numel()} {what}"


def _largest(expected: Tensor, held: Tensor) -> str:
    difference, scale = (expected.float() - held.float()).abs().max(), expected.float().abs().max()
    if scale == 0:
        return f"{float(difference):.1e}, where all are zero"
    return f"{float(difference / scale):.1e} of the largest value"


def _is_same(some: Tensor, other: Tensor) -> bool:
    if some.dtype != other.dtype or some.shape != other.shape:
        return False
    return not bool(_other_bits(some, other).any())


def _other_bits(some: Tensor, other: Tensor) -> Tensor:
    if not some.is_floating_point():
        return some != other
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[some.element_size()]
    return some.view(bits) != other.view(bits)

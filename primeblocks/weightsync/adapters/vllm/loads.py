"""A worker's loader, recorded without data, and a target with its drafter as one model.

The tensors of MTP heads have names of their own in a checkpoint. EAGLE heads, Medusa heads and
separate draft models use the target's names. `with_draft` puts `draft.` before these.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from ....errors import UnsupportedError
from ...convert.conversion import Reads, Wiring, filling, record_reads
from ...manifest import NEVER_ROUNDED, Manifest, NamedTensors, describe, named_tensors

__all__ = [
    "Recorded",
    "WithDrafts",
    "begin_reload",
    "captured_kernels",
    "casts_untold",
    "give_memory",
    "record_load",
    "refresh_captured",
    "refresh_copies",
    "tied",
    "to_fill",
    "unfilled",
    "with_draft",
    "with_drafts",
]

_DRAFT = "draft."


class Recorded(NamedTuple):
    """The record of a loader that read a checkpoint.

    Attributes:
        direct: layers with parameters that are loaded without a call of their `weight_loader`.
        lacking: parameters that the checkpoint does not fill, or fills only in part.
    """

    reads: Reads
    direct: list[str]
    lacking: list[str]


class WithDrafts(nn.Module):
    """A target and its drafter, which load one checkpoint.

    The drafter gets the tensors that only its loader reads. The layers that both share are loaded
    with the target.

    Args:
        own: the names of the drafter's tensors in the checkpoint.
    """

    def __init__(self, target: Any, draft: Any, own: Collection[str]) -> None:
        super().__init__()
        self.target, self.draft, self._own = target, draft, own

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load both. Returns the names of the parameters that were loaded."""
        kept: list[tuple[str, Tensor]] = []

        def rest() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name in self._own:
                    kept.append((_of_draft(name), tensor))
                elif not name.startswith(_DRAFT):  # The target has the others.
                    yield name, tensor

        return _load("target", self.target, rest()) | _load("draft", self.draft, kept)


@overload
def with_draft(target: Wiring, draft: NamedTensors) -> Wiring: ...
@overload
def with_draft(target: NamedTensors, draft: NamedTensors) -> dict[str, Tensor]: ...
def with_draft(target: Wiring | NamedTensors, draft: NamedTensors) -> Wiring | dict[str, Tensor]:
    """Return the tensors of a target and its drafter, with `draft.` before the drafter's names.

    Local. The drafter is an EAGLE or Medusa head, or a separate draft model. Pass the result to
    `describe`, `Publisher` and `verify_engine`. MTP heads do not need a prefix, because they are
    part of the target's checkpoint.

    Args:
        target: the tensors of the target model, or the `Wiring` that converts them, such as
            `to_checkpoint(model)`.
        draft: the drafter's tensors, under the names of its own checkpoint.

    Raises:
        PlanError: the drafter's tensors cannot be described.
    """
    if not isinstance(target, Wiring):
        own = {f"{_DRAFT}{name}": one for name, one in named_tensors(draft).items()}
        return named_tensors(target) | own
    rows = tuple((f"{_DRAFT}{name}", spec.whole()) for name, spec in describe(draft).items())
    same = filling(Manifest(rows), {name: (spec.layout.shard,) for name, spec in rows})
    both = [Manifest(side.tensors + rows, side.recipe) for side in (target.sources, target.targets)]
    return Wiring(both[0], both[1], target.pieces + same.pieces)


def with_drafts(
    target: nn.Module, drafter: nn.Module | None, checkpoint: Manifest, config: Any
) -> WithDrafts | None:
    """Return the target and its drafter, if the checkpoint has tensors of the drafter.

    Args:
        config: vLLM's configuration of the worker.

    Raises:
        UnsupportedError: the drafter's loader fails without values.
    """
    if drafter is None or config.speculative_config is None:
        return None
    mtp, own = config.speculative_config.method == "mtp", set[str]()
    drafts = {n: spec for n, spec in checkpoint.items() if n.startswith(_DRAFT)}
    if mtp:
        seen = record_load(target, checkpoint, config).reads.sources
        drafts = {name: spec for name, spec in checkpoint.items() if name not in seen}
    if drafts:
        rows = tuple((_of_draft(name), spec) for name, spec in drafts.items())
        reads = record_load(drafter, Manifest(rows), config).reads
        if len(reads.lost) == len(rows):
            raise UnsupportedError(
                f"{type(drafter).__name__}, which drafts tokens, cannot be updated: "
                f"{next(iter(reads.lost.values()))}. Leave out of the target manifest the tensors "
                f"that only this loader reads: {len(drafts)} tensors, such as "
                f"{next(iter(drafts))!r}."
            )
        shared = {id(one) for one in target.parameters()}
        into = {n: one for n, one in drafter.named_parameters() if id(one) not in shared}
        pieces = () if reads.into is None else reads.into.pieces
        read = {piece.source for piece in pieces if piece.target in into} | set(reads.lost)
        own = {name for name in drafts if _of_draft(name) in read}
    if own:
        return WithDrafts(target, drafter, own)
    logging.getLogger(__name__).warning(
        "%s, which drafts tokens, keeps its weights, because the target manifest lacks its "
        "tensors (%s)",
        type(drafter).__name__,
        "of the MTP heads" if mtp else "see with_draft",
    )
    return None


def record_load(model: Any, checkpoint: Manifest, config: Any) -> Recorded:
    """Record what vLLM's loader of a model does in an update. Changes no weights.

    Args:
        config: vLLM's configuration of the worker.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    loaded: set[str] | None = None

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        nonlocal loaded
        with casts_untold():
            loaded = model.load_weights(tensors)

    with set_current_vllm_config(config), _unprocessed(model) as (expected, called):
        held = itertools.chain(model.named_parameters(), model.named_buffers())
        into = {_loader_name(name): one for name, one in held}
        reads = record_reads(load, checkpoint, into=into)
        owners = tied(model)
        direct = [
            prefix
            for prefix, layer in model.named_modules()
            for name in set(layer._parameters) - called(layer)
            if loaded is not None and _loader_name(f"{prefix}.{name}") in loaded
            if f"{prefix}.{name}" not in owners  # Their owners' loaders load them.
        ]
        lacking = unfilled(expected, loaded, config)
        for name, written in reads.written.items():
            size = get_tensor_load_numel(into[name])  # Without the padding that vLLM declares.
            if written < size:
                lacking.append(f"{name} ({written} of {size} elements)")
    return Recorded(reads, direct, lacking)


@contextmanager
def casts_untold() -> Iterator[None]:
    """Leave out vLLM's warnings of casts of the tensors that `describe` does not round."""

    def is_told(record: logging.LogRecord) -> bool:
        name = record.args[0] if isinstance(record.args, tuple) and record.args else None
        is_cast = str(record.msg).startswith("Attempted to load weight")
        return not (is_cast and str(name).endswith(NEVER_ROUNDED))

    loads = logging.getLogger("vllm.model_executor.models.utils")
    loads.addFilter(is_told)
    try:
        yield
    finally:
        loads.removeFilter(is_told)


def tied(model: Any) -> dict[str, str]:
    """Return the names of parameters of which another layer is the owner, with the owner's."""
    first: dict[int, tuple[str, str]] = {}
    found = {}
    for path, layer in model.named_modules():  # Each layer once, under its first name.
        for own, one in layer._parameters.items():
            owner, its = first.setdefault(id(one), (path, own))
            if one is not None and owner != path:
                found[f"{path}.{own}"] = f"{owner}.{its}"
    return found


def begin_reload(model: Any) -> dict[str, Tensor]:
    """Begin vLLM's reload, in which a tied parameter would become its own. Return `to_fill`."""
    from vllm.model_executor.model_loader.reload import layerwise

    names = tied(model)
    layerwise.initialize_layerwise_reload(model)
    for name, owner in names.items():
        (path, _, own), (first, _, its) = name.rpartition("."), owner.rpartition(".")
        mine, held = model.get_submodule(path)._parameters, model.get_submodule(first)._parameters
        if own in mine and its in held:  # Kernels may have added other ones.
            mine[own] = held[its]
    return to_fill(model)


def give_memory(layer: Any) -> None:
    """Give memory to a layer of a begun reload, for a loader that writes to parameters itself.

    A tensor that kernels use in the shape of the checkpoint gets the kernel's memory. All such
    layers together may not fit into the device a second time. So a load that fails leaves values of
    two versions, and the receiver loads the previous version again.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(layer)
    assert info.kernel_tensors is not None, "a reload has begun"
    held = {name: one.data for each in info.kernel_tensors for name, one in each.items()}
    for name, empty in layerwise.get_layer_tensors(layer).items():
        own = held.get(name)
        # Subclasses may keep their values in another storage.
        is_here = type(own) is Tensor and own.device.type == info.restore_device.type
        if own is not None and is_here and empty.is_meta and _is_laid_out_as(own, empty):
            own.__class__, own.__dict__ = empty.__class__, empty.__dict__.copy()
            setattr(layer, name, own)
    layerwise.materialize_layer(layer, info)


def _is_laid_out_as(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.stride() == other.stride()


def captured_kernels(models: Sequence[Any], config: Any) -> list[tuple[Any, Any]]:
    """Return the layers of experts, with the kernels whose tensors CUDA graphs read.

    A reload of quantized experts makes a new kernel. The graphs still read the first kernel's
    tensors, so the caller keeps this kernel, and calls `refresh_captured` after each load.

    Args:
        config: vLLM's configuration of the worker.

    Raises:
        UnsupportedError: graphs read values that vLLM computes from the weights of experts and
            stores outside of parameters.
    """
    from vllm.config import CUDAGraphMode

    if config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return []
    found = []
    for layer in itertools.chain.from_iterable(model.modules() for model in models):
        method = getattr(layer, "quant_method", None)
        scales = getattr(method, "moe_quant_config", None)
        if scales is not None and (
            scales.weight_quant_dtype in ("nvfp4", "mxfp4") or scales.a1_gscale is not None
        ):
            raise UnsupportedError(
                f"after an update, CUDA graphs would read old scales of {type(method).__name__}, "
                "because vLLM stores scales of NVFP4 and MXFP4, and inverted scales of "
                "activations, outside of parameters. Start the engine with enforce_eager=True, or "
                "serve experts in bfloat16 or block-scaled FP8."
            )
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            found.append((layer, kernel))
    return found


def refresh_captured(kernels: Iterable[tuple[Any, Any]]) -> None:
    """Copy the tensors of new kernels into the first kernels. A sleep may have emptied these."""
    for layer, first in kernels:
        kernel = getattr(layer.quant_method, "moe_kernel", None)
        new = {} if kernel is None else vars(kernel.fused_experts)  # After a load that failed.
        for name, one in vars(first.fused_experts).items():
            other = new.get(name)  # A kernel makes its workspace later, in its first step.
            if (
                isinstance(one, Tensor)
                and isinstance(other, Tensor)
                and _is_laid_out_as(other, one)
            ):
                one.data.copy_(other)


def refresh_copies(model: Any) -> None:
    """Update what vLLM packed for a CPU besides weights, and what its reload leaves as it was."""
    for layer in model.modules():
        packed = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if packed is not None and "conv_weights" in layer._buffers:
            layer.conv_weights.copy_(packed)
    for name in tied(model):
        layer = model.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def to_fill(model: Any) -> dict[str, Tensor]:
    """Return what a load must fill in a model that has the parameters of its checkpoint."""
    every = list(model.named_parameters(remove_duplicate=False))
    # The only buffers in a checkpoint are the corrections of routers.
    buffers = model.named_buffers(remove_duplicate=False)
    every += [row for row in buffers if row[0].endswith("e_score_correction_bias")]
    return {_loader_name(name): one for name, one in every}


def unfilled(
    expected: Mapping[str, Tensor], loaded: Collection[str] | None, config: Any
) -> list[str]:
    """Return the names of parameters that a load left out.

    Args:
        expected: what `begin_reload` returned. During a load, vLLM adds parameters that it computes
            itself, such as the scales of weights that it quantizes.
        loaded: what `load_weights` returned.
    """
    if loaded is None:  # This loader does not return names.
        return []
    # Shared experts and tied parameters have several names, and are loaded under one of them.
    have = {one for name, one in expected.items() if name in loaded}
    left = sorted(name for name, one in expected.items() if one not in have)
    if config.model_config.quantization is None:
        return left
    # A quantized checkpoint need not have all scales.
    return [name for name in left if name.endswith(("weight", "bias")) or "weight_scale" in name]


def _loader_name(name: str) -> str:
    """Return a parameter's name as loaders report it, without the wrappers that LoRA adds."""
    return name.replace(".base_layer.", ".")


def _of_draft(name: str) -> str:
    """Return the drafter's own name of a tensor."""
    return name.removeprefix(_DRAFT)


def _load(prefix: str, model: Any, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    loaded = model.load_weights(tensors)  # Some loaders do not return names.
    return {f"{prefix}.{name}" for name in (every if loaded is None else loaded)}


@contextmanager
def _unprocessed(model: Any) -> Iterator[tuple[dict[str, Tensor], Callable[[Any], set[str]]]]:
    """Give a model parameters without memory, in the shapes that its checkpoint fills.

    Loaders are called as in an update. Yields what `begin_reload` returned, and a function that
    returns the names of the parameters of a layer that were loaded.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    process = layerwise._layerwise_process
    # Kernels replace the parameters that they packed by None, which vLLM would not restore.
    packed = [
        (layer, n) for layer in model.modules() for n, p in layer._parameters.items() if p is None
    ]
    expected = begin_reload(model)
    # vLLM's function would allocate memory for a complete layer, and load the layer.
    layerwise._layerwise_process = lambda layer, info: None
    try:
        yield (
            expected,
            lambda layer: {n for n, _ in layerwise.get_layerwise_info(layer).loaded_weights},
        )
    finally:
        layerwise._layerwise_process = process
        model._do_torchao_reload = model._original_do_torchao_reload
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
        for layer, name in packed:
            layer._parameters.setdefault(name, None)

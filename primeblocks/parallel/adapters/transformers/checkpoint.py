"""Fill a sharded model from a checkpoint of transformers, box by box.

transformers' own conversions run on deferred tensors, which know the place of their bytes in the
files. Each rank then reads only the boxes of its own shards.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from ....errors import PlanError, UnsupportedError
from ....groups import agreed
from ....layout import Shard, layout_of, local_part
from ...gathered import reshard
from .checkpoint_files import open_checkpoint, with_numbers
from .deferred import Deferred

# The errors that transformers raises if it cannot read a folder.
_UNREADABLE = (
    AttributeError, ImportError, LookupError, OSError, RuntimeError, SafetensorError, TypeError,
    ValueError,
)  # fmt: skip

# The longest wait for another rank. Gloo notices the end of a process at once.
PATIENCE = timedelta(days=1)

__all__ = [
    "PATIENCE",
    "class_before",
    "load_pretrained",
    "materialize",
    "patient_group",
    "refuse_adapters",
    "reporting",
]


def load_pretrained(
    model: PreTrainedModel,
    path: str | Path,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Load the weights of a checkpoint of transformers into a sharded model. Collective.

    Each rank reads only its own shards from the files, in the stored dtype. For float8 weights
    (`quant_method` "fp8"), a rank also reads the scales of the blocks that overlap its shards. The
    names of weights and their conversions come from transformers.

    Ranks do not exchange weights, so every rank must be able to read the folder. If the checkpoint
    is on the Hub, rank 0 downloads the checkpoint before other ranks open it.

    Args:
        model: the model that you passed to `parallelize`, possibly built on the meta device.
        progress: a function that is called after each tensor that this rank has read, with the
            number of read tensors and the number of all tensors. If `progress` raises an error,
            it is not called again, and the error is raised after the last tensor.

    Raises:
        UnsupportedError: the model has adapters, but a checkpoint of transformers does not contain
            adapters.
        PlanError: this rank cannot read the checkpoint, or the checkpoint's names or shapes differ
            from the model's.
        PlanError: the weights are quantized by another method than "fp8", or the conversion does
            arithmetic on weights. Save dequantized weights with transformers first.
        PlanError: float8 weights lack scales for their blocks, or two tied weights differ.
        RankError: another rank raised PlanError.

    Warns:
        UserWarning: the checkpoint contains weights without a matching parameter in the model.
    """
    refuse_adapters(model)
    reshard(model)
    first = dist.get_rank() == 0
    wanted: dict[str, Deferred] = {}
    boxes: dict[str, Shard] = {}
    with patient_group("load_pretrained", model) as group:
        for turn in (True, False):  # Rank 0 goes first, to fetch, and to name mistakes.
            with agreed("load_pretrained", group=group):
                if turn == first:
                    wanted = _plan(model, path)
                    boxes = {name: layout_of(x).shard for name, x in model.state_dict().items()}
        with agreed("load_pretrained", group=group) as call:
            call.facts["the checkpoint"] = f"{_stored_bytes(wanted)} bytes"
        with reporting(progress, len(boxes)) as tell, agreed("load_pretrained", group=group):
            try:
                _fill(model, path, wanted, boxes, tell)
            except (OSError, SafetensorError) as error:
                raise PlanError(f"{path} could not be read to its end: {error}") from error


def _plan(model: PreTrainedModel, path: str | Path) -> dict[str, Deferred]:
    """Return the tensors to read, by the model's names."""
    kind = class_before(model)
    try:
        told, _ = kind.config_class.get_config_dict(path)
        method = told.get("quantization_config") or {}
        if method and method.get("quant_method") != "fp8":
            raise UnsupportedError(
                f"its weights are quantized by {method.get('quant_method')!r}, but "
                'load_pretrained reads only "fp8". Save them dequantized first.'
            )
        # transformers' own default if a configuration leaves it out.
        block = method.get("weight_block_size", [128, 128]) if method else None
        stored = with_numbers(open_checkpoint(path), block)
        shadow = _shadow(model)
        config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(shadow))
        info, _ = convert_and_load_state_dict_in_model(shadow, stored, config)
        if info.conversion_errors:
            name, said = next(iter(info.conversion_errors.items()))
            raise UnsupportedError(
                f"{name} cannot be read box by box: {said.strip().splitlines()[-2:]}"
            )
    except _UNREADABLE as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and not Path(path).is_dir():
            said = f"it is not a folder on this machine. As a name on the Hub: {said}"
        raise PlanError(f"{path} cannot be read as a {kind.__name__}: {said}") from error
    found = {name: x for name, x in _state(shadow).items() if isinstance(x, Deferred)}
    odd = {name: tuple(there) for name, there, _ in info.mismatched_keys}
    _check(model, path, found, odd)
    _warn_of_others(model, info.unexpected_keys)
    return found


def _stored_bytes(wanted: dict[str, Deferred]) -> int:
    pieces = (piece for x in wanted.values() for piece in x.pieces)
    return sum(piece.box.numel * piece.source.dtype.itemsize for piece in pieces)


def _shadow(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the names and shapes of `model`, to be filled with deferred tensors."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("meta"):
        shadow: PreTrainedModel = class_before(model)(config)
    return shadow


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict. If only one of two tied names was read, it stands for both."""
    state = model.state_dict(keep_vars=True)
    for name, source in model.all_tied_weights_keys.items():
        for one, other in ((name, source), (source, name)):
            if isinstance(state[one], Deferred) and not isinstance(state[other], Deferred):
                state[other] = state[one]
    return state


def _check(
    model: PreTrainedModel, path: str | Path, found: Mapping[str, Tensor], odd: dict[str, Any]
) -> None:
    for name, here in sorted(model.state_dict().items()):
        there: Any = tuple(found[name].shape) if name in found else odd.get(name, "missing")
        if there != tuple(here.shape):
            raise PlanError(
                f"{path} is not a checkpoint of this model: {name} is {there} in the checkpoint "
                f"and {tuple(here.shape)} in the model. Build the model from the configuration of "
                "its checkpoint."
            )


def _warn_of_others(model: PreTrainedModel, names: set[str]) -> None:
    known = model._keys_to_ignore_on_load_unexpected or ()
    others = sorted(x for x in names if not any(re.search(pattern, x) for pattern in known))
    if others and dist.get_rank() == 0:
        shown = ", ".join(others[:3])
        warnings.warn(f"{len(others)} weights of the checkpoint match no parameter: {shown} ...",
                      stacklevel=4)  # fmt: skip


def _fill(
    model: PreTrainedModel,
    path: str | Path,
    wanted: dict[str, Deferred],
    boxes: dict[str, Shard],
    tell: Callable[[], None],
) -> None:
    """Read into each local part, box by box, and compare the two tensors of a tied weight."""
    state, names = model.state_dict(keep_vars=True), model.all_tied_weights_keys
    with torch.no_grad():
        sources_first = sorted(state, key=lambda name: name in names)
        for name in sources_first:
            source = names.get(name, name)
            second = source != name and state[name] is state[source]
            known = second and wanted[name] is wanted[source]
            local = local_part(state[name])
            for piece in () if known else wanted[name].within(boxes[name]):
                here, read = local[piece.place.slices], piece.source.read(piece.box)
                if not second:
                    here.copy_(piece.arrange(read))
                elif not torch.equal(here, piece.arrange(read).to(here)):
                    raise PlanError(
                        f"{path} has different tensors for {name} and {source}, which this model "
                        "ties. Build the model with tie_word_embeddings=False in its "
                        "configuration."
                    )
            tell()


def materialize(model: PreTrainedModel, device: torch.device, *, parts: str | None = None) -> None:
    """Give a model from the meta device memory for its local parts only. Local.

    Parameters are NaN until they are loaded, so that a forgotten parameter is noticed. Buffers that
    a checkpoint lacks, such as frequencies, are computed as at construction.

    Args:
        parts: the device of parameters, if not `device`.

    Raises:
        PlanError: some parameters are on the meta device and others are not.
    """
    bare = sum(parameter.is_meta for parameter in model.parameters())
    every = sum(1 for _ in model.parameters())
    if not bare:
        return
    if bare < every:
        raise PlanError(
            f"{bare} of {every} parameters are on the meta device. Build the whole model on the "
            "meta device."
        )
    model.to_empty(device=device if parts is None else parts)  # FSDP keeps tied weights tied.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
            # transformers does not draw values for a parameter with this attribute.
            parameter._is_hf_initialized = True
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel):
            for module in owner.modules():
                if any(True for _ in module.buffers(recurse=False)):
                    owner._init_weights(module)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextmanager
def reporting(
    progress: Callable[[int, int], object] | None, every: int
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `every` tensors, which calls `progress`.

    The first error of `progress` is raised at the end of the block. Until then, other ranks wait
    for this rank.
    """
    done, raised = count(1), list[Exception]()

    def tell() -> None:
        try:
            if progress is not None and not raised:
                progress(next(done), every)
        except Exception as error:
            raised.append(error)

    yield tell
    if raised:
        raise raised[0]


@contextmanager
def patient_group(name: str, model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """Make a group of all ranks on the host, for the time of the block. Collective.

    Ranks wait in this group while rank 0 downloads or writes a checkpoint. The model's own groups
    would raise an error at their timeout. NCCL counts the time from the start of a send, and does
    not block the sender.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    with agreed(name, next(model.parameters()), group=everyone):
        pass  # A rank that does not make this call is an error after the usual timeout.
    group = dist.new_group(backend="gloo")
    group.set_timeout(PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def class_before(model: PreTrainedModel) -> Any:
    """Return the class that the model had before it was sharded."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


def refuse_adapters(model: nn.Module) -> None:
    """Raise UnsupportedError if the model has adapters. Local."""
    for name, _ in model.named_parameters():
        if "lora_" in name or ".base_layer." in name:
            raise UnsupportedError(
                f"the model has adapters ({name}). Save adapters with PEFT and "
                "expert_lora_state_dict. For weights with adapters added use "
                "merged_expert_weights."
            )

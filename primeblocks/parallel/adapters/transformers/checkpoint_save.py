"""Save a sharded model as transformers would, one tensor of the checkpoint at a time."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ....errors import PlanError, UnsupportedError
from ....groups import Call, agreed
from ....layout import Shard, layout_of, local_part
from .checkpoint import backend_device, class_before, refuse_adapters, reshard
from .checkpoint_files import TensorFile, in_file_order
from .deferred import Deferred, TensorPiece

__all__ = ["save_pretrained"]

_SIZE = re.compile(r"\d{1,15}(\.\d{1,15})? ?[KMGT]B", re.ASCII | re.IGNORECASE)


def save_pretrained(
    model: PreTrainedModel,
    path: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write the whole model, as its own `save_pretrained` would from one rank. Collective.

    Rank 0 writes the tensors of the checkpoint one after the other. Each rank sends the part that
    it holds, and no rank holds more of the whole than one tensor. To resume a training run, save
    its parts instead: docs/parallel.md.

    Args:
        model: the model that you passed to `parallelize`.
        max_shard_size: the size of a file, equal on all ranks. A larger checkpoint is split into
            several files with an index.
        progress: called with the tensors written and to write, after each one. Not called if rank
            0 gathers the whole.

    Raises:
        UnsupportedError: the model has adapters. No reader could load them under these names.
        PlanError: rank 0 cannot write there.
        PlanError: `max_shard_size` is not a size, or differs between ranks. Nothing was written.
        RankError: another rank raised PlanError.

    Warns:
        UserWarning: the names of the checkpoint cannot be found tensor by tensor. Rank 0 then
            gathers the whole model in host memory.
    """
    refuse_adapters(model)
    reshard(model)
    with _agreed(model) as call:
        _check_size(max_shard_size)
        # Files are planned on every rank, and each tensor goes to the file of its plan.
        call.facts["max_shard_size"] = max_shard_size
    with _as_before(model):
        try:
            tensors: dict[str, Any] = revert_weight_conversion(model, _deferred(model))
        except UnsupportedError as error:
            _save_whole(model, path, max_shard_size, str(error))
            return
        with _agreed(model):  # All but the weights.
            _on_first(path, partial(type(model).save_pretrained, model, path, state_dict={}))
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors.items()},
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".", "{suffix}."),
        max_shard_size=max_shard_size,
    )
    boxes, problem, done = _boxes(model), None, count(1)

    def tell() -> None:
        if progress is not None:
            progress(next(done), len(tensors))

    for file, names in split.filename_to_tensors.items():
        held = {name: tensors[name] for name in names}
        problem = _write(Path(path) / file, held, boxes, problem, tell)
    with _agreed(model):
        if problem is not None:
            raise problem
        _on_first(path, partial(_finish, model, Path(path), split))


def _check_size(size: object) -> None:
    """Refuse a file size before transformers reads it in its own way."""
    if isinstance(size, str) and _SIZE.fullmatch(size):
        return
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 63:
        return
    shown = f"{size!r:.40}" if isinstance(size, str) else f"a {type(size).__name__}"
    raise PlanError(f'max_shard_size is bytes, or text like "5GB"; got {shown}.')


def _on_first(path: str | Path, write: Callable[[], object]) -> None:
    """Call `write` on rank 0, and raise a PlanError if it fails."""
    if dist.get_rank() == 0:
        try:
            write()
        except (OSError, SafetensorError, ValueError) as error:
            raise PlanError(f"{path} cannot be written: {error}") from error


def _finish(model: PreTrainedModel, path: Path, split: Any) -> None:
    """Write the index of several files after they are complete."""
    if split.is_sharded:
        total = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": total, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (path / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
    _remove_older(path, split.is_sharded)


def _remove_older(path: Path, several: bool) -> None:
    """Remove files that readers would prefer to the new ones: an older single file, or an index."""
    (path / (SAFE_WEIGHTS_NAME if several else SAFE_WEIGHTS_INDEX_NAME)).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Held:
    """A tensor of the model, of which each rank holds a part."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def _deferred(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the model's names, with tied weights once."""
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    state = model.state_dict()
    return {name: Deferred.of(_Held(name, state[name])) for name in state if name not in left_out}


def _boxes(model: PreTrainedModel) -> list[dict[str, Shard]]:
    """Return the boxes that each rank will send, on rank 0 only. Collective.

    Raises:
        PlanError: as for `layout_of`.
    """
    mine = {name: box for name, x in model.state_dict().items() if (box := _sent_box(x))}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    return everyone if dist.get_rank() == 0 else []


def _sent_box(x: Tensor) -> Shard | None:
    """Return the box that this rank is the first to hold, or None."""
    if not isinstance(x, DTensor):
        return layout_of(x).shard if dist.get_rank() == 0 else None
    at = x.device_mesh.get_coordinate()
    if at is None or any(
        isinstance(p, Replicate) and i for p, i in zip(x.placements, at, strict=True)
    ):
        return None
    box = layout_of(x).shard
    return None if 0 in box.sizes else box


def _write(
    path: Path,
    tensors: dict[str, Any],
    boxes: list[dict[str, Shard]],
    problem: PlanError | None,
    tell: Callable[[], None],
) -> PlanError | None:
    """Write a file, and return what went wrong, here or earlier. Collective: rank 0 receives all
    parts, and writes nothing after a problem.
    """
    file = None
    try:
        if dist.get_rank() == 0 and problem is None:
            file = TensorFile(path, tensors)
    except OSError as error:
        problem = PlanError(f"{path} cannot be written: {error}")
    for name in in_file_order(tensors):
        if dist.get_rank() != 0:
            _send(tensors[name])
            tell()
            continue
        whole = _receive(tensors[name], boxes)
        try:
            if problem is None and file is not None:
                file.write(whole)
        except OSError as error:
            problem = PlanError(f"{path} cannot be written: {error}")
        del whole  # Before the next one is made.
        tell()
    try:
        if file is not None:
            file.close()
    except OSError as error:
        problem = PlanError(f"{path} cannot be written: {error}")
    return problem


def _send(tensor: Deferred) -> None:
    for piece in tensor.pieces:
        held = piece.source.tensor
        box = _sent_box(held)
        part = None if box is None else piece.filled_by(box)
        if box is not None and part is not None:
            dist.send(_staged(held, part, box), 0)


def _receive(tensor: Deferred, boxes: list[dict[str, Shard]]) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    for piece in tensor.pieces:
        held = piece.source
        for rank, box in ((r, b[held.name]) for r, b in enumerate(boxes) if held.name in b):
            part = piece.filled_by(box)
            if part is None:
                continue
            target = out[part.place.slices]
            if rank == 0:
                target.copy_(part.arrange(local_part(held.tensor)[part.box.within(box).slices]))
                continue
            device, straight = backend_device(held.tensor), [d for d in part.dims if d is not None]
            alike = device == "cpu" and target.dtype == held.dtype
            if alike and target.is_contiguous() and straight == sorted(straight):
                dist.recv(target.view(part.box.sizes), rank)  # No second copy of it.
                continue
            staged = torch.empty(part.box.sizes, dtype=held.dtype, device=device)
            dist.recv(staged, rank)
            target.copy_(part.arrange(staged))
    return out


def _staged(held: Tensor, part: TensorPiece, box: Shard) -> Tensor:
    """Return this rank's part of the box, on the device from which the backend sends."""
    cut = local_part(held).detach()[part.box.within(box).slices]
    return cut.to(backend_device(held)).contiguous()


def _agreed(model: PreTrainedModel) -> AbstractContextManager[Call]:
    everyone = dist.group.WORLD
    assert everyone is not None
    device = backend_device(next(model.parameters()))
    return agreed("save_pretrained", group=everyone, device=device)


@contextmanager
def _as_before(model: PreTrainedModel) -> Iterator[None]:
    """Restore the class whose name gives transformers the names of a checkpoint."""
    sharded: Any = type(model)
    model.__class__ = class_before(model)
    try:
        yield
    finally:
        model.__class__ = sharded


def _save_whole(
    model: PreTrainedModel, path: str | Path, max_shard_size: int | str, why: str
) -> None:
    """Let transformers write the model that rank 0 gathered."""
    if dist.get_rank() == 0:
        warnings.warn(f"rank 0 gathers the whole model: {why}", stacklevel=3)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    with _agreed(model):
        _on_first(path, partial(_write_whole, model, Path(path), state, max_shard_size))


def _write_whole(
    model: PreTrainedModel, path: Path, state: dict[str, Any], max_shard_size: int | str
) -> None:
    path.mkdir(parents=True, exist_ok=True)  # Where it is a file, transformers only logs so.
    for name, source in model.all_tied_weights_keys.items():
        state[name] = state[source]  # Gathered one by one, they no longer share memory.
    type(model).save_pretrained(model, path, state_dict=state, max_shard_size=max_shard_size)
    # Of files that an index counts, it has left those that it wrote.
    _remove_older(path, any(path.glob(SAFE_WEIGHTS_NAME.replace(".", "-*-of-*."))))

"""Save a sharded model as transformers would, one tensor of the checkpoint at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ....errors import PlanError, shown
from ....groups import agreed
from ....layout import Shard, layout_of, local_part
from ...gathered import reshard
from .checkpoint import PATIENCE, class_before, patient_group, refuse_adapters, reporting
from .checkpoint_files import header, in_file_order
from .deferred import Deferred

__all__ = ["save_pretrained"]

_SIZE = re.compile(r"\d{1,15}(\.\d{1,15})? ?[KMGT]B", re.ASCII | re.IGNORECASE)


def save_pretrained(
    model: PreTrainedModel,
    path: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write the whole model, like the model's own `save_pretrained` on one rank. Collective.

    Rank 0 writes the tensors of the checkpoint one after the other. Each rank sends its own part of
    a tensor, and no rank stores more than one whole tensor at a time. To resume a training run,
    save the parts of all ranks instead, as docs/parallel.md describes.

    Args:
        model: the model that you passed to `parallelize`.
        max_shard_size: the maximum size of a file, in bytes or as text such as "5GB", equal on all
            ranks. A larger checkpoint is split into several files with an index.
        progress: a function that is called after each written tensor, with the number of written
            tensors and the number of all tensors. If `progress` raises an error, it is not called
            again, and the error is raised after the checkpoint is complete.

    Raises:
        UnsupportedError: the model has adapters, whose names other programs do not know.
        UnsupportedError: the conversion to the names of the checkpoint does arithmetic on weights.
        PlanError: rank 0 cannot write to `path`.
        PlanError: `max_shard_size` is not a size, or differs between ranks. Nothing was written.
        RankError: another rank raised PlanError.
    """
    refuse_adapters(model)
    reshard(model)
    with patient_group("save_pretrained", model) as group:
        with _as_before(model), agreed("save_pretrained", group=group) as call:
            tensors: dict[str, Any] = revert_weight_conversion(model, _deferred(model))
            split = _split(tensors, max_shard_size)
            # Every rank plans the files, so the plans must be equal.
            call.facts["max_shard_size"] = max_shard_size
        with _as_before(model), agreed("save_pretrained", group=group):  # All but the weights.
            _on_first(path, partial(type(model).save_pretrained, model, path, state_dict={}))
        boxes, problem = _boxes(model, group), None
        with reporting(progress, len(tensors)) as tell:
            for file, names in split.filename_to_tensors.items():
                held = {name: tensors[name] for name in names}
                wholes = _wholes(held, boxes, tell, group)
                problem = _write(Path(path) / file, held, wholes, problem)
            with agreed("save_pretrained", group=group):
                if problem is not None:
                    raise problem
                _on_first(path, partial(_finish, model, Path(path), split))


def _split(tensors: dict[str, Any], size: int | str) -> Any:
    """Plan the files."""
    whole = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in tensors.items()}
    name = SAFE_WEIGHTS_NAME.replace(".", "{suffix}.")
    text = isinstance(size, str) and _SIZE.fullmatch(size)
    number = isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 63
    if not text and not number:
        raise PlanError(
            f'max_shard_size must be a number of bytes, or text like "5GB"; got {shown(size)}.'
        )
    return split_torch_state_dict_into_shards(whole, filename_pattern=name, max_shard_size=size)


def _on_first(path: str | Path, write: Callable[[], object]) -> None:
    """Call `write` on rank 0, and raise a PlanError if it fails."""
    if dist.get_rank() == 0:
        try:
            write()
        except (OSError, SafetensorError, ValueError) as error:
            raise PlanError(f"{path} cannot be written: {error}") from error


def _finish(model: PreTrainedModel, path: Path, split: Any) -> None:
    """Write the index of complete files, and remove an older file that readers would prefer."""
    if split.is_sharded:
        total = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": total, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (path / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
    older = SAFE_WEIGHTS_NAME if split.is_sharded else SAFE_WEIGHTS_INDEX_NAME
    (path / older).unlink(missing_ok=True)


class _Held(NamedTuple):
    """A tensor of the model, of which each rank has a part, with its whole shape and its dtype."""

    name: str
    tensor: Tensor
    shape: torch.Size
    dtype: torch.dtype


def _deferred(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the model's names, with tied weights once."""
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    held = (_Held(name, x, x.shape, x.dtype) for name, x in model.state_dict().items())
    return {each.name: Deferred.of(each) for each in held if each.name not in left_out}


def _boxes(model: PreTrainedModel, group: dist.ProcessGroup) -> list[dict[str, Shard]]:
    """Return the boxes that each rank will send, on rank 0 only. Collective."""
    mine = {name: box for name, x in model.state_dict().items() if (box := _sent_box(x))}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None, group=group)
    return everyone if dist.get_rank() == 0 else []


def _sent_box(x: Tensor) -> Shard | None:
    """Return this rank's box if it is the first rank with this box, or None."""
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
    wholes: Iterator[Tensor],
    problem: PlanError | None,
) -> PlanError | None:
    """Write a file, and return the first problem of this or an earlier file. Collective: rank 0
    receives all parts, and stops writing after a problem.
    """
    try:
        if dist.get_rank() == 0 and problem is None:
            with path.open("wb") as file:
                file.write(header(tensors))
                for whole in wholes:
                    file.write(whole.contiguous().flatten().view(torch.uint8).numpy().data)
                    del whole  # Free this tensor before the next tensor is made.
    except OSError as error:
        problem = PlanError(f"{path} cannot be written: {error}")
    for _ in wholes:  # Receive the rest, because other ranks send it in any case.
        pass
    return problem


def _wholes(
    tensors: dict[str, Any],
    boxes: list[dict[str, Shard]],
    tell: Callable[[], None],
    group: dist.ProcessGroup,
) -> Iterator[Tensor]:
    """Yield the tensors on rank 0, in the order of a file. Other ranks send their parts."""
    for name in in_file_order(tensors):
        if dist.get_rank() == 0:
            yield _receive(tensors[name], boxes, group)
        else:
            _send(tensors[name], group)
        tell()


def _send(tensor: Deferred, group: dist.ProcessGroup) -> None:
    for piece in tensor.pieces:
        held = piece.source.tensor
        box = _sent_box(held)
        part = None if box is None else piece.filled_by(box)
        if box is not None and part is not None:
            cut = local_part(held).detach()[part.box.within(box).slices]
            _end(dist.isend(cut.cpu().contiguous(), 0, group=group))


def _receive(tensor: Deferred, boxes: list[dict[str, Shard]], group: dist.ProcessGroup) -> Tensor:
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
            dims = [d for d in part.dims if d is not None]
            if dims == sorted(dims) and target.dtype == held.dtype and target.is_contiguous():
                # Without a second copy of the part.
                _end(dist.irecv(target.view(part.box.sizes), rank, group=group))
                continue
            staged = torch.empty(part.box.sizes, dtype=held.dtype)
            _end(dist.irecv(staged, rank, group=group))
            target.copy_(part.arrange(staged))
    return out


def _end(work: dist.Work | None) -> None:
    """Wait for a send or a receive. In gloo, these do not follow the timeout of their group."""
    assert work is not None
    work.wait(PATIENCE)


@contextmanager
def _as_before(model: PreTrainedModel) -> Iterator[None]:
    """Restore the class from before sharding, because transformers reads its name."""
    sharded: Any = type(model)
    model.__class__ = class_before(model)
    try:
        yield
    finally:
        model.__class__ = sharded

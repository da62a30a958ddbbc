"""Files of safetensors, read box by box and written tensor by tensor.

Float8 codes are read as numbers. `with_numbers` joins a weight's codes and scales. A box of the
result then reads the codes of that box, and the scales of the blocks that the box touches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ....errors import PlanError, UnsupportedError
from ....layout import Shard
from .deferred import Deferred

__all__ = ["Numbers", "Stored", "header", "in_file_order", "open_checkpoint", "with_numbers"]

# safetensors stores tensors in this order of dtypes, the last ones first.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# Suffixes of a weight's scales, and of activation scales of engines, which trainers do not need.
_SUFFIX, _OF_ACTIVATIONS = "_scale_inv", (".activation_scale", ".input_scale")


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file, whose pages are mapped and belong to the system's cache."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Shard) -> Tensor:
        """Return a view of the box in the mapped file. A copy of the view reads the bytes."""
        if not self.shape:
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[box.slices]


@dataclass(frozen=True)
class Numbers:
    """A weight that is stored as float8 codes, with one scale for each block of its matrices.

    Attributes:
        codes: `[..., rows, columns]`.
        scales: `[..., row blocks, column blocks]`, or one scale for all.
        block: rows and columns of a block. Blocks at the ends of a matrix may be smaller.
    """

    codes: Stored
    scales: Stored
    block: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self, box: Shard) -> Tensor:
        """Return the box as code times scale, in float32."""
        out = self.codes.read(box).to(self.dtype)
        if len(self.scales.shape) < 2:
            return out.mul_(self.scales.read(Shard((0,), (1,))).to(self.dtype))
        (rows, first_row), (columns, first_column) = (
            _blocks(box.offsets[dim], box.sizes[dim], self.block[dim]) for dim in (-2, -1)
        )
        touched = Shard(
            (*box.offsets[:-2], first_row, first_column),
            (*box.sizes[:-2], int(rows[-1]) + 1, int(columns[-1]) + 1),
        )
        scales = self.scales.read(touched).to(self.dtype)[..., columns]
        start = 0
        # Multiply one row of blocks at a time, because the expanded scales would take memory.
        for at, size in enumerate(rows.bincount().tolist()):
            out[..., start : start + size, :].mul_(scales[..., at : at + 1, :])
            start += size
        return out


def _blocks(start: int, size: int, block: int) -> tuple[Tensor, int]:
    """Return each place's block, counted from the first block touched, and that block's number."""
    first = start // block
    return torch.arange(start, start + size) // block - first, first


def with_numbers(
    stored: Mapping[str, Deferred], block: Sequence[int] | None
) -> dict[str, Deferred]:
    """Join float8 codes and their scales to numbers, or raise PlanError. Local. Reads no data.

    Args:
        block: `weight_block_size` of the checkpoint's configuration. None if each matrix has one
            scale.
    """
    sizes = list(block) if isinstance(block, Sequence) else []
    if block is not None and (
        len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes)
    ):
        raise PlanError(
            f"weight_block_size is {block!r:.80}; expected the rows and the columns of a block, "
            "such as [128, 128]. Correct the checkpoint's config.json."
        )
    whole: dict[str, Deferred] = {}
    for name, tensor in stored.items():
        if name.endswith(_OF_ACTIVATIONS):
            continue
        if name.endswith(_SUFFIX):
            if name.removesuffix(_SUFFIX) not in stored:
                raise PlanError(
                    f"{name} contains scales, but {name.removesuffix(_SUFFIX)} is missing. Get "
                    "all files of the checkpoint."
                )
            continue
        scales = stored.get(name + _SUFFIX)
        coded = scales is not None or tensor.dtype in _CODES
        whole[name] = Deferred.of(_numbers(name, tensor, scales, sizes)) if coded else tensor
    return whole


def _numbers(name: str, codes: Deferred, scales: Deferred | None, sizes: Sequence[int]) -> Numbers:
    if scales is None:
        raise PlanError(
            f"{name} contains codes in {codes.dtype}, but {name}{_SUFFIX} is missing. Convert the "
            "checkpoint to bfloat16 with the tool that wrote it."
        )
    if codes.dtype not in _CODES or codes.ndim < 2 or scales.dtype not in _SCALES:
        raise PlanError(
            f"{name} is {tuple(codes.shape)} in {codes.dtype} with scales in {scales.dtype}; "
            f"expected matrices in {_CODES[0]} with scales in one of {list(_SCALES)}. Convert the "
            "checkpoint to bfloat16 with the tool that wrote it."
        )
    *lead, rows, columns = codes.shape
    height, width = sizes or (rows, columns)
    grid = (*lead, -(-rows // height), -(-columns // width))
    one = scales.ndim < 2 and scales.numel() == 1
    if tuple(scales.shape) != grid and not one:
        raise PlanError(
            f"{name} is {tuple(codes.shape)} with scales {tuple(scales.shape)}, but blocks of "
            f"{height} x {width} need scales {grid}. Correct weight_block_size in the "
            "checkpoint's config.json."
        )
    code, scale = (x.pieces[0].source for x in (codes, scales))
    return Numbers(code, scale, (height, width))


def open_checkpoint(path: str | Path) -> dict[str, Deferred]:
    """Return the tensors of a checkpoint in a folder or on the Hub, by name. Local.

    Reads only the headers of the files.

    Raises:
        OSError, SafetensorError: the checkpoint does not exist, has no files of safetensors, or a
            file is truncated.
        ValueError: the checkpoint's index names a file outside of the folder.
        UnsupportedError: a tensor has a dtype that torch does not compute with.
    """
    by_dtype = {name: dtype for dtype, name in _DTYPES.items()}
    paths, named = _files(str(path))
    files = [safe_open(file, framework="pt") for file in paths]
    tensors: dict[str, Deferred] = {}
    for at, file in zip(paths, files, strict=True):
        for name in file.keys():  # noqa: SIM118 (no mapping)
            if name in tensors and Path(named[name]).name != Path(at).name:
                continue  # The index names another file for this tensor.
            part = file.get_slice(name)
            if part.get_dtype() not in by_dtype:
                raise UnsupportedError(
                    f"{name} is stored as {part.get_dtype()}, which cannot be read."
                )
            dtype = by_dtype[part.get_dtype()]
            tensors[name] = Deferred.of(Stored(file, name, tuple(part.get_shape()), dtype))
    return tensors


def _files(path: str) -> tuple[list[str], dict[str, str]]:
    """Return the files, and the file of each tensor if the checkpoint has an index."""
    try:
        return [cached_file(path, SAFE_WEIGHTS_NAME)], {}
    except OSError as error:
        try:
            index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
        except OSError:
            raise error from None
    named = json.loads(Path(index).read_text())["weight_map"]
    for file in set(named.values()):  # Check before any file is opened, or fetched.
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ValueError(f"its index names a file outside of the folder: {file!r:.80}")
    files, _ = get_checkpoint_shard_files(path, index)
    return list(files), named


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which safetensors stores tensors."""
    order = list(_DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"{name} is {tensor.dtype}, which cannot be written.")
    return sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the start of a file, as `safetensors.torch.save_file` writes it.

    The bytes of the tensors follow, in the order of `in_file_order`.

    Source: github.com/huggingface/safetensors, "Format".
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in in_file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text

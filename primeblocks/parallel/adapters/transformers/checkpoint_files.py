"""Files of safetensors, read by the box and written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ....errors import UnsupportedError
from ....layout import Shard
from .deferred import Deferred

__all__ = ["Stored", "TensorFile", "in_file_order", "open_checkpoint"]

# In the order in which safetensors lays tensors out: the last ones first.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: an open one; its pages are mapped, and belong to the system's cache.
    """

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Shard) -> Tensor:
        """A view of the box in the mapped file: its bytes are read when they are copied."""
        if not self.shape:
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[box.slices]


def open_checkpoint(path: str | Path) -> dict[str, Deferred]:
    """The tensors of a checkpoint, in a folder or on the Hub, by name. Local; reads headers alone.

    Raises:
        OSError, SafetensorError: it is not there, without files of safetensors, or one is cut.
        ValueError: its index names a file outside of the folder.
        UnsupportedError: a tensor has a dtype that torch does not compute with.
    """
    by_dtype = {name: dtype for dtype, name in _DTYPES.items()}
    paths, named = _files(str(path))
    files = [safe_open(file, framework="pt") for file in paths]
    tensors: dict[str, Deferred] = {}
    for at, file in zip(paths, files, strict=True):
        for name in file.keys():  # noqa: SIM118 (no mapping)
            if name in tensors and Path(named[name]).name != Path(at).name:
                continue  # Of two the index says which.
            part = file.get_slice(name)
            if part.get_dtype() not in by_dtype:
                raise UnsupportedError(f"{name} is stored as {part.get_dtype()}.")
            dtype = by_dtype[part.get_dtype()]
            tensors[name] = Deferred.of(Stored(file, name, tuple(part.get_shape()), dtype))
    return tensors


def _files(path: str) -> tuple[list[str], dict[str, str]]:
    """The files, and what the index says of which tensor is where, if there is one."""
    try:
        return [cached_file(path, SAFE_WEIGHTS_NAME)], {}
    except OSError as error:
        try:
            index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
        except OSError:
            raise error from None
    named = json.loads(Path(index).read_text())["weight_map"]
    for file in set(named.values()):  # Before one is opened, or fetched.
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ValueError(f"its index names a file outside of the folder: {file!r:.80}")
    files, _ = get_checkpoint_shard_files(path, index)
    return list(files), named


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names, in the order in which a `TensorFile` takes tensors.

    Raises:
        UnsupportedError: safetensors has no name for a dtype.
    """
    order = list(_DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"{name} is {tensor.dtype}, which cannot be written.")
    return sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))


class TensorFile:
    """A file as `safetensors.torch.save_file` would write it, one tensor after the other. Local.

    Args:
        tensors: shapes and dtypes by name. `write` takes the tensors in the order of
            `in_file_order`.

    Source: github.com/huggingface/safetensors, "Format".
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._file = path.open("wb")
        _write_header(self._file, tensors)

    def write(self, tensor: Tensor) -> None:
        """Append the bytes of the next tensor, which lies on the host."""
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush, and close the file."""
        self._file.close()


def _write_header(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in in_file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)

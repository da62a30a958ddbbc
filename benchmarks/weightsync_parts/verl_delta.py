"""verl's delta path on one flat tensor, out of its own files.

Its trainer calls `shard_delta_indices` on each shard and sends positions as int32 beside the
changed values, with a checksum; its loader for SGLang fills a tensor with NaN, writes the values
into it, and copies what is not NaN; vLLM's patch loader writes the values by index. The functions
are verl's, found where it is installed and loaded by file, for `import verl` wants ray. What lies
between them (a cast to int32, a view as bytes) is spelled out here, and no names, manifests or
communication are counted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["VERL", "Flush", "VerlDelta"]

VERL = "verl 0.9.1"


class Flush(NamedTuple):
    """What travels."""

    positions: Tensor
    values: Tensor
    checksum: int

    @property
    def size_bytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes


class VerlDelta:
    def __init__(self) -> None:
        self._gather = _load("checkpoint_engine/delta_sync/sparse_gather.py")
        self._codec = _load("checkpoint_engine/delta_sync/encode.py")
        self._loader = _load("workers/rollout/sglang_rollout/delta_loader.py")

    def encode(self, new: Tensor, old: Tensor) -> Flush:
        at, values = self._gather.shard_delta_indices(new, old, 0)
        positions = at.to(torch.int32).view(torch.uint8)
        return Flush(positions, values, self._codec.checksum(positions, values))

    def apply_masked(self, target: Tensor, flush: Flush) -> None:
        """As its loader for SGLang does it."""
        self._check(flush)
        row = {
            "shape": list(target.shape),
            "dtype": str(target.dtype).removeprefix("torch."),
            "pos_start": 0,
            "pos_end": flush.positions.numel(),
            "val_start": 0,
            "val_end": flush.values.numel(),
        }
        with self._loader._masked_copy():
            dense = self._loader._decode_one("indices", flush.positions, flush.values, row)
            target.copy_(dense)

    def apply_indexed(self, target: Tensor, flush: Flush) -> None:
        """The least that a receiver can do: write the values where they belong."""
        self._check(flush)
        target.index_copy_(0, flush.positions.view(torch.int32).to(torch.int64), flush.values)

    def _check(self, flush: Flush) -> None:
        if self._codec.checksum(flush.positions, flush.values) != flush.checksum:
            raise ValueError("checksum")


def _load(path: str) -> ModuleType:
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{VERL} is not installed. Run: pip install --no-deps 'verl==0.9.1'")
    file = Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(f"verl_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up.
    spec.loader.exec_module(module)
    return module

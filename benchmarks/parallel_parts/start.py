"""Memory of a rank while weights come from a checkpoint and go to one, on four ranks."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from primeblocks.layout import local_part
from primeblocks.parallel import plan_mesh
from primeblocks.testing import ranks, tiny_models

__all__ = ["figures"]

SIZES = {"hidden": 512, "num_experts": 32, "num_layers": 4, "vocab": 8192}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


class _Peak:
    """The most private memory of this process within, over what it had at the start.

    Pages of mapped files are not in it: they are the system's cache of the disk.
    """

    def __enter__(self) -> _Peak:
        self._start = self.most = _private_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def added(self) -> int:
        return self.most - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, _private_bytes())
        self.most = max(self.most, _private_bytes())


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _model() -> Any:
    with torch.device("meta"):
        config = tiny_models.config("qwen3_moe", **SIZES)
        return tiny_models._model_class("qwen3_moe").from_config(config, dtype=torch.float32)


def _measure(path: Path) -> dict[str, float]:
    from primeblocks.parallel.adapters.transformers import (
        load_pretrained,
        parallelize,
        save_pretrained,
    )

    meshes = plan_mesh(world_size=dist.get_world_size(), expert=2).build("cpu")
    _give_pages_back()
    _model()  # What a first model imports is no memory of weights.
    with _Peak() as start:
        model = _model()
        parallelize(model, meshes)
        load_pretrained(model, path)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    with _Peak() as end:
        save_pretrained(model, path / "again")
    shard = sum(local_part(x).nbytes for x in model.state_dict().values())
    return {
        "start.peak_over_shard_plus_largest": start.added / (shard + largest),
        "start.shard_plus_largest_mb": (shard + largest) / 1e6,
        "save.added_over_largest": end.added / largest,
        "save.peak_over_shard_plus_largest": (start.added + end.added) / (shard + largest),
    }


def figures() -> dict[str, tuple[float, str, str]]:
    """Of the rank that has most."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.build("qwen3_moe", dtype="float32", **SIZES)
        model.save_pretrained(folder)  # type: ignore[operator]
        del model
        by_rank = ranks.run(_measure, Path(folder), world_size=4, timeout_s=300)
    return {
        f"parallel.{name}": (max(one[name] for one in by_rank), _unit(name), "")
        for name in by_rank[0]
    }


def _give_pages_back() -> None:
    """Undo what the timed parts ask of glibc's allocator, which keeps pages for them: they would be
    filled again, and the growth look smaller than it is.
    """
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(option, 128 << 10)
    libc.malloc_trim(0)


def _unit(name: str) -> str:
    return "MB" if name.endswith("_mb") else "ratio"

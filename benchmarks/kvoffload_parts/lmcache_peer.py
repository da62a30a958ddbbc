"""LMCache's LocalCPU backend, driven as LMCache's engine does it, without a GPU.

Of a store, `LMCacheEngine` allocates a memory object for each chunk, copies the chunk in, submits
the objects together and lets go of them; of a retrieval it gets each object and copies it out
(v1/cache_engine.py and v1/storage_backend/local_cpu_backend.py of LMCache 0.5.6). On a GPU a kernel
copies; here it is torch's `copy_`. No checksum, and no thread but the caller's.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LocalCpu"]


class LocalCpu:
    """Pages of bytes in an LMCache LocalCPU backend with room for `pages`."""

    def __init__(self, *, pages: int, page_bytes: int) -> None:
        logging.getLogger("lmcache").setLevel(logging.ERROR)
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=(pages + 1) * page_bytes / 2**30
        )
        # The shape only names the chunks of an engine; ours are as many bytes as a page.
        metadata = LMCacheMetadata(
            model_name="benchmark",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, 256, 1, page_bytes // 512),
        )
        self.name = f"LMCache {importlib.metadata.version('lmcache')} LocalCPU"
        self._backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._shape, self._format = torch.Size([page_bytes]), MemoryFormat.KV_2LTD
        self._keys = [
            CacheEngineKey("benchmark", 1, 0, number, torch.uint8) for number in range(pages)
        ]

    def put(self, pages: Sequence[Tensor]) -> None:
        objects = []
        for page in pages:
            room = self._backend.allocate(self._shape, torch.uint8, self._format)
            room.tensor.copy_(page)
            objects.append(room)
        self._backend.batched_submit_put_task(self._keys, objects)
        for room in objects:
            room.ref_count_down()

    def get(self, pages: Sequence[Tensor]) -> None:
        for key, page in zip(self._keys, pages, strict=True):
            held = self._backend.get_blocking(key)
            page.copy_(held.tensor)
            held.ref_count_down()

    def clear(self) -> None:
        for key in self._keys:
            self._backend.remove(key)

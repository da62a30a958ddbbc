"""vLLM's tiering with our manager, and its copy worker for the CPU platform."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from ....errors import PlanError, UnsupportedError
from .manager import StoreManager
from .routes import RoutesWorker, Tail

__all__ = [
    "ROUTES",
    "HostCopyWorker",
    "OffloadingConnector",
    "StoreOffloadingSpec",
    "UnlinkedRegion",
]

ROUTES = "primeblocks_routes_bytes_per_token"


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's connector with one addition: it tells our manager which requests are queued.

    It has the stock connector's name, because vLLM finds metrics and layouts by this name.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        if vllm.__version__.startswith("0.33.") and vllm_config.scheduler_config.async_scheduling:
            raise UnsupportedError(
                "vLLM 0.33 stores the last pages of a request after its end. With "
                "async_scheduling their blocks may belong to another request by then. Pass "
                "async_scheduling=False."
            )
        parallel = vllm_config.parallel_config
        if parallel.nnodes_within_dp > 1 or (parallel.use_ray and parallel.world_size > 1):
            raise UnsupportedError(
                "each node has its own part of vLLM's pool in host memory, but the store would "
                "read and write only that of the scheduler's node. Use one node per engine, with "
                'distributed_executor_backend="mp".'
            )
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            overlap = int(bool(vllm_config.scheduler_config.async_scheduling))
            self._manager().set_overlap(steps=overlap)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        state = self.scheduler._req_status[request.request_id]
        self._manager().expect(state.req_context, partial(self._keys, request))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # vLLM makes this call for each request that it schedules from its queue, new or resumed.
        self._manager().leave(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        parallel = self._vllm_config.parallel_config
        is_idle = not scheduler_output.total_num_scheduled_tokens and not meta.load_jobs
        # Other ranks, or the other batches of a pipeline, would wait too.
        if is_idle and parallel.data_parallel_size == parallel.pipeline_parallel_size == 1:
            self._manager().rest()
        return meta

    def _manager(self) -> StoreManager:
        manager = self.scheduler.manager
        assert isinstance(manager, StoreManager)
        return manager

    def _keys(self, request: Request) -> list[OffloadKey]:
        """Return the keys of the full-attention pages that a request would load now.

        Pages of windows are left out, because they depend on how many other pages are found.
        """
        state, pages = self.scheduler._req_status[request.request_id], self._kv_cache_manager
        if request.skip_reading_prefix_cache or state.max_load_tokens is not None or pages is None:
            return []
        state.update_offload_keys()
        most = request.num_tokens - 1
        here = pages.coordinator.find_longest_cache_hit(request.block_hashes, most)[1]
        found = []
        for index in self.scheduler._full_attention_groups:
            tokens = self.scheduler.config.kv_group_configs[index].tokens_per_chunk
            keys = state.group_states[index].offload_keys
            found += keys[here // tokens : -(-most // tokens)]
        return found


class StoreOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering with our manager, memory for routes, and a worker for the CPU platform.

    Attributes:
        tail: the part of each row of vLLM's pool that stores the routes of the row's page. None
            without routes.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.tail: Tail | None = None
        if self.extra_config.get(ROUTES):
            self._make_room_for_routes(self.extra_config[ROUTES])
        if self.num_chunks < 1:
            raise PlanError(
                f"primary_bytes={self.extra_config['cpu_bytes_to_use']} is too small for one page "
                f"of {self.kv_bytes_per_chunk} bytes. Raise primary_bytes."
            )

    def _make_room_for_routes(self, bytes_per_token: int) -> None:
        tokens = {*self.tokens_per_block, self.tokens_per_hash * self.blocks_per_chunk}
        if tokens != {self.tokens_per_hash}:
            raise UnsupportedError(
                f"routes are stored with pages of {self.tokens_per_hash} tokens, as vLLM hashes "
                f"them, but this engine's pages have {sorted(tokens)}. Use one block size for all "
                "groups of layers and blocks_per_chunk=1, or leave out routes_bytes_per_token."
            )
        if self.extra_config.get("sync_load_budget_bytes"):
            raise UnsupportedError(
                "routes need pages that are loaded before their request runs, but "
                "sync_load_budget_bytes loads pages within its first step. Leave out "
                "sync_load_budget_bytes or routes_bytes_per_token."
            )
        copies = 1 if self.replicated_layout else self.config.parallel.world_size
        self.tail = Tail(
            self.cpu_page_size_per_worker * copies, bytes_per_token * self.tokens_per_hash
        )
        self.kv_bytes_per_chunk = round_up(self.tail.end, self.BLOCK_SIZE_ALIGNMENT)
        self.num_chunks = self.extra_config["cpu_bytes_to_use"] // self.kv_bytes_per_chunk
        if (facts := getattr(self, "cpu_info", None)) is not None:  # a metric of vLLM 0.33
            self.cpu_info = facts.from_config(self.config, self.num_chunks, self.kv_bytes_per_chunk)

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            stock = super().get_manager()
            assert isinstance(stock, TieringOffloadingManager)
            self._manager = StoreManager(
                stock.primary_tier, stock.secondary_tiers, names_chunks=self.tail is not None
            )
            region = self._scheduler_mmap
            # The workers have mapped the pool before the scheduler exists. Without a name it
            # cannot outlive a killed engine.
            if region is not None and not region._creator:
                os.unlink(region.mmap_path)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker, region = self._copy_worker(kv_caches)
        if self.tail is None:
            return worker
        pool = region.base_tensor.view(self.num_chunks, -1).numpy()
        return RoutesWorker(worker, pool=pool, tail=self.tail, engine_id=self._engine_id)

    def _copy_worker(
        self, kv_caches: CanonicalKVCaches
    ) -> tuple[OffloadingWorker, SharedOffloadRegion]:
        if not current_platform.is_cpu():
            stock: Any = super().get_worker(kv_caches)
            stock._mmap_region.__class__ = UnlinkedRegion  # vLLM made the region itself
            return stock, stock._mmap_region
        if self.config.canonical_layout or self.blocks_per_chunk != 1:
            raise UnsupportedError(
                "the CPU platform does not support canonical_layout or several blocks per chunk. "
                "Leave out canonical_layout, and use blocks_per_chunk=1."
            )
        region = UnlinkedRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(kv_caches, region=region), region


class UnlinkedRegion(SharedOffloadRegion):
    """The shared pool. It does not warn about a name that the scheduler has already removed."""

    def cleanup(self) -> None:
        # By the file: at the path may be the pool of the next engine of this id.
        has_name = self.fd is not None and os.fstat(self.fd).st_nlink > 0
        self._creator = self._creator and has_name
        super().cleanup()


class HostCopyWorker(OffloadingWorker):
    """A worker that copies pages between the engine's cache and the pool, both in host memory."""

    def __init__(self, kv_caches: CanonicalKVCaches, *, region: SharedOffloadRegion) -> None:
        self._region = region
        self._references = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []
        # As NumPy arrays of bytes: a row is one memcpy, where torch goes byte by byte.
        self._device, self._host = [], []
        for cache in kv_caches.tensors:
            rows = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._host.append(region.create_next_worker_view(cache.page_size_bytes).numpy())
            self._device.append(rows.numpy())

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._transfer(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing. A copy is over when `submit_*` returns."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()

    def _transfer(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool
    ) -> bool:
        assert isinstance(host, CPULoadStoreSpec)
        start, moved, at = time.monotonic(), 0, 0
        for references, count in zip(self._references, device.group_sizes, strict=True):
            rows, chunks = device.block_ids[at : at + count], host.chunk_ids[at : at + count]
            for reference in references:
                size = reference.page_size_bytes
                engine = self._device[reference.tensor_idx]
                pool = self._host[reference.tensor_idx]
                if store:
                    pool[chunks, :size] = engine[rows, :size]
                else:
                    engine[rows, :size] = pool[chunks, :size]
                moved += count * size
            at += count
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - start))
        return True

"""vLLM 0.32: a `TieredStore` as a secondary tier of its offloading connector.

vLLM moves pages ("blocks") from the device into a primary pool in host memory that it shares
with our tier; the tier copies them into our store and back. On the CPU platform, where vLLM's own
copy worker refuses to start, ours takes its place; on CUDA the stock worker is used.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch

from ...errors import MissingPackageError, PlanError, UnsupportedError
from .. import DiskTier, HostTier, PageKey, Tier, TieredStore, VersionAware, lru
from ..jobs import PageJobs

try:
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        TransferResult,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
    from vllm.v1.metrics.reader import Counter as EngineCounter
    from vllm.v1.metrics.reader import get_metrics_snapshot
except ImportError as error:
    raise MissingPackageError("vllm", "vllm") from error

if not vllm.__version__.startswith("0.32."):
    raise UnsupportedError(
        f"primeblocks.kvoffload was tested with vLLM 0.32; this is {vllm.__version__}. "
        "Its offloading interface changes between releases: install vllm==0.32.*."
    )

__all__ = [
    "EngineStatistics",
    "StoreOffloadingSpec",
    "StoreTier",
    "engine_args",
    "engine_statistics",
    "version_args",
]

_VERSION_PARAMETER = "primeblocks_policy_version"
_METRIC = "vllm:primeblocks_kvoffload_"
_COUNTED = ("hits", "stores", "evictions", "checksum_failures", "failures", "bytes_read")
_TIMEOUT_S = 30.0
# What vLLM calls reused tokens that came from a tier like ours; its own pools are "device", "host".
_TOKENS, _SOURCE = "vllm:prompt_tokens_cached_by_source", "external_unspecified"


def engine_args(
    *,
    primary_bytes: int,
    host_bytes: int,
    disk_path: str | os.PathLike[str] | None = None,
    disk_bytes: int = 0,
    max_staleness: int | None = None,
    eviction_policy: str = "lru",
    offload_prompt_only: bool = False,
) -> dict[str, Any]:
    """Engine arguments that put our store behind vLLM: `LLM(model, **engine_args(...))`. Pure.

    Requests must carry one `cache_salt` for each policy version: vLLM's page hashes contain it, so
    pages of different weights never meet. vLLM's prefix cache must stay on.

    Args:
        primary_bytes: vLLM's transit pool in shared memory. The more it holds the less it asks us.
        host_bytes: our pages in host memory.
        disk_path: directory of our pages on disk; emptied when the engine starts and stops.
        disk_bytes: their quota.
        max_staleness: evict pages of versions older than this first (see `version_args`); None
            means least recently used.
        eviction_policy: vLLM's policy for the transit pool, "lru" or "arc".
        offload_prompt_only: leave generated tokens out.

    Raises:
        PlanError: sizes that do not fit together.
        UnsupportedError: a disk without host memory.
    """
    if host_bytes <= 0:
        raise UnsupportedError(
            f"host_bytes={host_bytes}: a disk alone is refused; give the host tier some pages"
        )
    if primary_bytes <= 0:
        raise PlanError(f"primary_bytes must be positive; got {primary_bytes}")
    if (disk_path is None) != (disk_bytes == 0) or disk_bytes < 0:
        raise PlanError(
            f"disk_path={disk_path!r} with disk_bytes={disk_bytes}: give both or neither"
        )
    if eviction_policy not in ("lru", "arc"):
        raise PlanError(f'eviction_policy is "lru" or "arc"; got {eviction_policy!r}')
    tier = {
        "type": "StoreTier",
        "module_path": __name__,
        "host_bytes": host_bytes,
        "disk_path": None if disk_path is None else os.fspath(disk_path),
        "disk_bytes": disk_bytes,
        "max_staleness": max_staleness,
    }
    extra = {
        "spec_name": "StoreOffloadingSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": primary_bytes,
        "eviction_policy": eviction_policy,
        "offload_prompt_only": offload_prompt_only,
        "secondary_tiers": [tier],
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True}


def version_args(version: int) -> dict[str, Any]:
    """What a request says about its policy: `SamplingParams(extra_args=version_args(7), ...)`.

    The tier learns the version of the pages from it and advances with the largest it has seen.
    It comes beside the request's `cache_salt`, not instead of it.
    """
    return {"kv_transfer_params": {_VERSION_PARAMETER: version}}


@dataclass(frozen=True)
class EngineStatistics:
    """What our tier has done for the engines of this process.

    Args:
        hits: pages handed to the engine.
        tokens: prompt tokens that a request took from those pages instead of computing them.
        tiers: counts by tier name, in the words of `TierStatistics`.
    """

    hits: int
    tokens: int
    tiers: Mapping[str, Mapping[str, int]]


def engine_statistics() -> EngineStatistics:
    """Read what the tier reported to the front end. Local.

    Call it in the process of `LLM` or `AsyncLLM`, with the engine's statistics on
    (`disable_log_stats=False`). The engine reports after each of its steps, so writes that end
    after the last step are counted later. Counts add up over the engines of this process.
    """
    tokens, tiers = 0, defaultdict[str, Counter[str]](Counter)
    for metric in get_metrics_snapshot():
        if not isinstance(metric, EngineCounter):
            continue
        if metric.name.startswith(_METRIC):
            tiers[metric.labels["tier"]][metric.name.removeprefix(_METRIC)] += metric.value
        elif metric.name == _TOKENS and metric.labels["source"] == _SOURCE:
            tokens += metric.value
    counts = {tier: {name: tiers[tier][name] for name in _COUNTED} for tier in tiers}
    return EngineStatistics(sum(tier["hits"] for tier in counts.values()), tokens, counts)


class StoreTier(SecondaryTierManager):
    """Our store behind vLLM's primary tier. Lives in the scheduler's process and never blocks it.

    A page that is missing, torn or changed is reported as failed, and vLLM computes it again.
    The pages are those of one engine run: the store starts empty and is emptied at the end, because
    nothing says that the next run has the same weights.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        host_bytes: int,
        disk_path: str | None = None,
        disk_bytes: int = 0,
        max_staleness: int | None = None,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        page_bytes = self.block_size_bytes
        tiers: list[Tier] = [HostTier(capacity_bytes=host_bytes, page_bytes=page_bytes)]
        if disk_path is not None:
            replica = f"engine-{offloading_spec.config.parallel.data_parallel_index}"
            directory = os.path.join(disk_path, replica)
            tiers.append(DiskTier(directory, capacity_bytes=disk_bytes, page_bytes=page_bytes))
        evict = lru if max_staleness is None else VersionAware(max_staleness)
        self._store = TieredStore(tiers, evict=evict)
        self._store.clear().wait(timeout_s=_TIMEOUT_S)
        self._jobs = PageJobs(self._store, page_timeout_s=_TIMEOUT_S)
        self._rows = np.asarray(primary_kv_view)
        self._moving: dict[int, TransferJob] = {}
        self._reported: Counter[tuple[str, str]] = Counter()
        self._resets = 0
        self._version = 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        version = _version_of(req_context)
        if version is not None and version > self._version:
            self._version = version
            self._store.advance(version=version)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._page_key(key, req_context) in self._store
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.save(*self._batch(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.load(*self._batch(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for job in self._jobs.finished():
            keys = self._moving.pop(job.id).keys
            yield JobResult(
                job_id=job.id,
                success=all(job.succeeded),
                successful_keys=tuple(compress(keys, job.succeeded)),
                transfer_time=job.seconds,
                transfer_bytes=sum(job.succeeded) * self.block_size_bytes,
            )

    def drain_jobs(self) -> None:
        self._jobs.drain(timeout_s=_TIMEOUT_S)

    def forget(self) -> None:
        """Make every page unreachable at once, and drop them in the background."""
        self._resets += 1
        self._store.clear()

    def shutdown(self) -> None:
        self._jobs.close(timeout_s=_TIMEOUT_S)
        self._store.clear()
        self._store.close(timeout_s=_TIMEOUT_S)
        # vLLM releases its memory view next, which fails while an array looks into it.
        self._rows = np.empty((0, 0), dtype=np.int8)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            _METRIC + name: OffloadingCounterMetadata(
                documentation=f"primeblocks page store: {name}, by tier.", labelnames=("tier",)
            )
            for name in _COUNTED
        }

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        for tier, counts in self._store.statistics().items():
            for name in _COUNTED:
                total = getattr(counts, name)
                if new := total - self._reported[tier, name]:
                    stats.increase_counter(_METRIC + name, new, labelvalues=(tier,))
                    self._reported[tier, name] = total
        return stats

    def _page_key(self, key: OffloadKey, req_context: ReqContext) -> PageKey:
        # vLLM's hash contains the request's cache_salt already; ours separates resets.
        return PageKey(
            salt=str(self._resets),
            hash=get_offload_block_hash(key),
            group=get_offload_group_idx(key),
            version=_version_of(req_context),
        )

    def _batch(self, job: TransferJob) -> tuple[int, list[PageKey], list[np.ndarray]]:
        self._moving[job.job_id] = job
        keys = [self._page_key(key, job.req_context) for key in job.keys]
        return job.job_id, keys, [self._rows[chunk] for chunk in job.chunk_ids]


def _version_of(req_context: ReqContext) -> int | None:
    version = (req_context.kv_transfer_params or {}).get(_VERSION_PARAMETER)
    return version if isinstance(version, int) else None


class ResettingManager(TieringOffloadingManager):
    """Stock, except that a reset reaches our tier too.

    Stock vLLM leaves secondary tiers alone when the connector is reset after a weight update, and
    then serves pages of the old weights.
    """

    def reset_cache(self) -> None:
        super().reset_cache()
        for tier in self.secondary_tiers:
            if isinstance(tier, StoreTier):
                tier.forget()


class StoreOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering, with a reset that reaches our store and a worker for the CPU platform."""

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            stock = super().get_manager()
            assert isinstance(stock, TieringOffloadingManager)
            self._manager = ResettingManager(stock.primary_tier, stock.secondary_tiers)
            region = self._scheduler_mmap
            # The workers have mapped the pool before the scheduler exists. Without a name it
            # cannot outlive a killed engine.
            if current_platform.is_cpu() and region is not None and not region._creator:
                os.unlink(region.mmap_path)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise UnsupportedError("canonical_layout is not supported on the CPU platform")
        region = UnlinkedRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(kv_caches, blocks_per_chunk=self.blocks_per_chunk, region=region)


class UnlinkedRegion(SharedOffloadRegion):
    """The shared pool, quiet about a name that the scheduler's side has removed already."""

    def cleanup(self) -> None:
        self._creator = self._creator and os.path.exists(self.mmap_path)
        super().cleanup()


class HostCopyWorker(OffloadingWorker):
    """Copies pages between the engine's cache and the shared pool where both are host memory."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, *, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._references = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []
        # As NumPy arrays of bytes: a row is one memcpy, where torch goes byte by byte.
        self._device, self._host = [], []
        for cache in kv_caches.tensors:
            pool = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            rows = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._host.append(pool.unflatten(1, (blocks_per_chunk, -1)).numpy())
            self._device.append(rows.numpy())

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._transfer(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a copy is over when `submit_*` returns."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()

    def _transfer(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool
    ) -> bool:
        assert isinstance(host, CPULoadStoreSpec)
        start, moved, block_at, chunk_at = time.monotonic(), 0, 0, 0
        per_group = zip(self._references, device.group_sizes, device.block_indices, strict=True)
        for references, count, first in per_group:
            if count == 0:
                continue
            # The first engine block of a group may lie inside its chunk of several blocks.
            place = np.arange(count) + first % self._blocks_per_chunk
            chunk, slot = np.divmod(place, self._blocks_per_chunk)
            rows = device.block_ids[block_at : block_at + count]
            chunks = host.chunk_ids[chunk_at + chunk]
            for reference in references:
                size = reference.page_size_bytes
                engine = self._device[reference.tensor_idx]
                pool = self._host[reference.tensor_idx]
                if store:
                    pool[chunks, slot, :size] = engine[rows, :size]
                else:
                    engine[rows, :size] = pool[chunks, slot, :size]
                moved += count * size
            block_at += count
            chunk_at += int(chunk[-1]) + 1
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - start))
        return True

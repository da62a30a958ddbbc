"""Our store behind vLLM's secondary-tier interface."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import compress
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ... import DiskTier, HostTier, PageKey, Tier, TieredStore, VersionAware, lru
from ...jobs import PageJobs

__all__ = ["COUNTED", "METRIC", "StoreTier", "version_args"]

METRIC = "vllm:primeblocks_kvoffload_"
COUNTED = ("hits", "stores", "evictions", "checksum_failures", "failures", "bytes_read")
_VERSION_PARAMETER = "primeblocks_policy_version"
_TIMEOUT_S = 30.0


def version_args(version: int) -> dict[str, Any]:
    """What a request says about its policy: `SamplingParams(extra_args=version_args(7), ...)`.

    The tier learns the version of the pages from it and advances with the largest it has seen.
    It comes beside the request's `cache_salt`, not instead of it.
    """
    return {"kv_transfer_params": {_VERSION_PARAMETER: version}}


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
            METRIC + name: OffloadingCounterMetadata(
                documentation=f"primeblocks page store: {name}, by tier.", labelnames=("tier",)
            )
            for name in COUNTED
        }

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        for tier, counts in self._store.statistics().items():
            for name in COUNTED:
                total = getattr(counts, name)
                if new := total - self._reported[tier, name]:
                    stats.increase_counter(METRIC + name, new, labelvalues=(tier,))
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

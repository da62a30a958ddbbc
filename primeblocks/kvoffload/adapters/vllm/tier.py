"""Our store behind vLLM's secondary-tier interface.

vLLM submits a `TransferJob`, and asks in each step for the jobs that ended. A job ends when its
`Pending` is over. After 30 s, the job ends in any case, and its pages count as failed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress
from time import monotonic
from typing import Any

import numpy as np
import vllm
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

from ....errors import PrimeblocksError, UsageError, check_version
from ... import DiskTier, HostTier, Loaded, PageKey, Pending, Saved, Tier, TieredStore
from ...evict import Evict, RolloutAware, VersionAware
from ...page import pack_attachments
from .routes import Tail

__all__ = [
    "COUNTED",
    "EVICT",
    "METRIC",
    "PageRequest",
    "StoreTier",
    "read_request",
    "read_state",
    "recipe",
    "request_args",
]

METRIC = "vllm:primeblocks_kvoffload_"
COUNTED = ("hits", "stores", "evictions", "checksum_failures", "failures", "bytes_read")
_VERSION = "primeblocks_policy_version"
_ROLLOUT = "primeblocks_rollout"
_ENDS = "primeblocks_rollouts_that_end"
_WAITS = "primeblocks_rollouts_that_wait"
_ROUTES = "routes"
_TIMEOUT_S = 30.0
_REST_S = 5e-3
_LEAP = 1 << 20  # updates between two requests

logger = logging.getLogger(__name__)

EVICT: Mapping[str, Callable[[int | None], Evict]] = {
    "versions": VersionAware,
    "rollouts": RolloutAware,
}


def request_args(
    version: Any = None, *, rollout: Any = None, ends: Any = (), waits: Any = None
) -> dict[str, Any]:
    """Describe a request to our tier: `SamplingParams(extra_args=request_args(7, rollout="a/3"))`.

    With vLLM's server, put the returned dictionary into the JSON of the request. The dictionary
    does not replace the request's `cache_salt`. Pure.

    Args:
        version: the policy version, a count of updates. Pages of different versions have different
            keys. The tier advances to the largest version seen since its last reset. If a version
            is more than 2**20 above the tier's version, the tier logs a warning and does not
            advance. Without this limit, one mistaken request would make all pages stale.
        rollout: the name of the rollout that will need the pages again, in its next turn.
        ends: the names of rollouts that end with this request and do not need their pages any more.
            In the last turn of `rollout`, name `rollout` here too. Also name rollouts that ended
            without a last turn.
        waits: the tool that each rollout between two turns waits for, as `{"a/2": "pytest"}`. If a
            rollout has no entry, the tier uses the name "turn" instead of a tool.

    Raises:
        UsageError: a name is not text, `ends` is not a list, or `waits` is not a dict. Also raised
            if the version is not an integer from 0 to 2**63 - 1.
    """
    if version is not None:
        version = check_version(version)
    is_list = isinstance(ends, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in ends):
        raise UsageError(f"ends must be a list of names of rollouts; got {ends!r}.")
    if rollout is not None and not isinstance(rollout, str):
        raise UsageError(f"the name of a rollout must be text; got {rollout!r}.")
    waits = {} if waits is None else waits
    is_map = isinstance(waits, dict)
    if not is_map or not all(isinstance(name, str) for pair in waits.items() for name in pair):
        raise UsageError(f"waits must be a dict from rollout names to tool names; got {waits!r}.")
    said = {_VERSION: version, _ROLLOUT: rollout, _ENDS: list(ends) or None, _WAITS: waits or None}
    return {"kv_transfer_params": {name: each for name, each in said.items() if each is not None}}


@dataclass(frozen=True)
class PageRequest:
    """The version and the rollouts that a request named."""

    version: int | None = None
    rollout: str | None = None
    ends: tuple[str, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict)


def read_request(parameters: Mapping[str, Any] | None) -> PageRequest:
    """Read `kv_transfer_params`. Malformed values are logged: an error would end the engine."""
    if not parameters:
        return PageRequest()
    version, rollout = parameters.get(_VERSION), parameters.get(_ROLLOUT)
    ends, waits = parameters.get(_ENDS) or [], parameters.get(_WAITS) or {}
    try:
        request_args(version, rollout=rollout, ends=ends, waits=waits)
    except UsageError as error:
        logger.warning("a request's rollout and version are ignored: %s", error)
        return PageRequest()
    return PageRequest(version, rollout, tuple(ends), waits)


@dataclass
class _Running:
    """A job in flight. `moved` are the pages on their way. The store already has the others."""

    transfer: TransferJob
    moved: Sequence[int]
    pending: Pending[Any]
    started_s: float
    ended_s: float | None = None  # where a drain saw its end


class StoreTier(SecondaryTierManager):
    """A secondary tier of vLLM that keeps its pages in a `TieredStore`.

    The tier runs in the scheduler's process. Calls for requests and jobs return at once, and only
    `rest`, `drain_jobs`, start and shutdown wait. A page that is missing, torn or changed is
    reported as failed, and vLLM computes the page again. Without `persist`, the store starts empty
    and is emptied when the engine ends, because the next engine may have other weights.
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
        evict: str = "versions",
        persist: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._tail: Tail | None = getattr(offloading_spec, "tail", None)
        self._page_bytes, beside = self.block_size_bytes, 0
        if self._tail is not None:
            self._page_bytes = self._tail.offset
            most = {_ROUTES: bytes(self._tail.end - self._tail.offset)}
            beside = len(pack_attachments(most))
        sizes: dict[str, Any] = {"page_bytes": self._page_bytes, "attachment_bytes": beside}
        tiers: list[HostTier | Tier] = [HostTier(capacity_bytes=host_bytes, **sizes)]
        if disk_path is not None:
            replica = f"engine-{offloading_spec.config.parallel.data_parallel_index}"
            directory = os.path.join(disk_path, replica)
            tiers.append(DiskTier(directory, capacity_bytes=disk_bytes, **sizes))
        self._store = TieredStore(tiers, evict=EVICT[evict](max_staleness))
        self._last_first = EVICT[evict] is not RolloutAware
        self._persists = persist is not None
        self._salt = os.urandom(16) if persist is None else persist.encode()
        self._recipe = recipe(offloading_spec)
        if not self._persists:
            self._store.clear().wait(timeout_s=_TIMEOUT_S)
        self._running: dict[int, _Running] = {}
        self._clock = monotonic
        self._rows = np.asarray(primary_kv_view)
        self._reported: Counter[tuple[str, str]] = Counter()
        self._version = 0
        self._active: Counter[str] = Counter()  # requests of rollouts
        # By request: pages whose load failed, so that the request does not ask for them again.
        self._lost: dict[str, set[OffloadKey]] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = read_request(req_context.kv_transfer_params)
        req_context.set_state(request)
        self._lost[req_context.req_id] = set()
        if request.version is not None and request.version > self._version:
            self._advance(request.version)
        if request.rollout is not None:
            self._active[request.rollout] += 1
        for rollout, tool in request.waits.items():
            if not self._active[rollout]:  # else its next turn has come already
                self._store.pause(rollout, tool)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = read_state(req_context)
        self._lost.pop(req_context.req_id, None)
        if request.rollout is not None:
            self._active[request.rollout] -= 1
            if self._active[request.rollout] <= 0:
                del self._active[request.rollout]
            self._store.pause(request.rollout, "turn")
        for rollout in request.ends:
            self._store.end(rollout)

    def queue(self, rollouts: list[str]) -> None:
        self._store.queue(rollouts)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        lost = key in self._lost.get(req_context.req_id, ())
        found = not lost and self._page_key(key, read_state(req_context)) in self._store
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        job, rows, keys = self._batch(job_metadata)
        attachments = [self._routes_of(*each) for each in zip(rows, keys, strict=True)]
        new = [index for index, key in enumerate(keys) if key not in self._store]
        pending = self._store.save_batch(
            [keys[index] for index in new],
            [rows[index][: self._page_bytes] for index in new],
            attachments=[attachments[index] for index in new],
            rollout=read_state(job.req_context).rollout,
        )
        self._running[job.job_id] = _Running(job, new, pending, self._clock())

    def submit_load(self, job_metadata: TransferJob) -> None:
        job, rows, keys = self._batch(job_metadata)
        rollout = read_state(job.req_context).rollout
        into = [row[: self._page_bytes] for row in rows]
        pending = self._store.load_batch(keys, into=into, rollout=rollout)
        self._running[job.job_id] = _Running(job, range(len(keys)), pending, self._clock())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        late_s = self._clock() - _TIMEOUT_S
        for job_id, job in list(self._running.items()):
            if job.pending.done() or job.started_s <= late_s:
                yield self._finish(self._running.pop(job_id))

    def rest(self) -> None:
        """Wait a few milliseconds for pages, or return at once if no load is running.

        A scheduler that has only waiting requests runs its steps without a pause. Without `rest`,
        the threads that read and copy pages would rarely get the lock of the Python interpreter.
        """
        loads = (job for job in self._running.values() if job.transfer.is_promotion)
        if (first := next(loads, None)) is not None:
            first.pending.done(within_s=_REST_S)

    def drain_jobs(self) -> None:
        """Wait at most 30 s until all jobs are over, and cancel the jobs that are not over then."""
        end = self._clock() + _TIMEOUT_S
        for job in self._running.values():
            if not job.pending.done(within_s=max(0.0, end - self._clock())):
                job.pending.cancel()
            if job.ended_s is None:  # `get_finished_jobs` reports the job.
                job.ended_s = self._clock()

    def forget(self) -> None:
        """Make all pages unreachable at once, and drop them in the background."""
        # Random: earlier pages and those of another engine have other salts.
        self._salt = os.urandom(16)
        self._store.clear()
        self._version = 0  # A trainer may have restarted from an older checkpoint.

    def shutdown(self) -> None:
        self.drain_jobs()
        last = self._store.flush() if self._persists else self._store.clear()
        with suppress(PrimeblocksError, OSError):  # a slow or full disk then has fewer pages
            last.wait(timeout_s=_TIMEOUT_S)
        self._store.close(timeout_s=_TIMEOUT_S)
        # vLLM releases its memory view next, which fails while an array refers to it.
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

    def _advance(self, version: int) -> None:
        if version - self._version > _LEAP:
            logger.warning(
                "version %d after version %d is ignored as a mistake of one request, because "
                "pages of the versions between would become stale. Count updates of the policy "
                "from 0.",
                version,
                self._version,
            )
            return
        self._version = version
        self._store.advance(version=version)

    def _finish(self, job: _Running) -> JobResult:
        transfer = job.transfer
        outcomes: list[Saved | Loaded] = [Saved(stored=True)] * len(transfer.keys)
        try:
            answers = job.pending.wait(timeout_s=0.0)
        except PrimeblocksError:  # given up, or the store is closed
            answers = [Loaded(None)] * len(job.moved)
        for index, outcome in zip(job.moved, answers, strict=True):
            outcomes[index] = outcome
        if transfer.is_promotion and self._tail is not None:
            for chunk, outcome in zip(transfer.chunk_ids, outcomes, strict=True):
                found = outcome.attachments if isinstance(outcome, Loaded) else {}
                self._tail.restore(self._rows[chunk], found.get(_ROUTES))
        succeeded = [each.stored if isinstance(each, Saved) else bool(each) for each in outcomes]
        lost = self._lost.get(transfer.req_context.req_id)
        if transfer.is_promotion and lost is not None:
            lost.update(compress(transfer.keys, (not came for came in succeeded)))
        return JobResult(
            job_id=transfer.job_id,
            success=all(succeeded),
            successful_keys=tuple(compress(transfer.keys, succeeded)),
            transfer_time=(self._clock() if job.ended_s is None else job.ended_s) - job.started_s,
            transfer_bytes=sum(succeeded) * self.block_size_bytes,
        )

    def _page_key(self, key: OffloadKey, request: PageRequest) -> PageKey:
        # vLLM's hash contains the request's cache_salt already; ours separates runs and resets.
        return PageKey(
            salt=self._salt,
            hash=get_offload_block_hash(key),
            group=get_offload_group_idx(key),
            version=request.version,
            recipe=self._recipe,
        )

    def _batch(self, job: TransferJob) -> tuple[TransferJob, list[np.ndarray], list[PageKey]]:
        """Return a job in the order that suits the policy, with its rows and keys."""
        request, position = read_state(job.req_context), job.req_context.get_offload_key_position
        given, sign = list(job.keys), -1 if self._last_first else 1  # vLLM passes a set
        order = np.argsort([sign * (position(key) or 0) for key in given], kind="stable")
        job = replace(job, keys=[given[at] for at in order], chunk_ids=job.chunk_ids[order])
        keys = [self._page_key(key, request) for key in job.keys]
        return job, [self._rows[chunk] for chunk in job.chunk_ids], keys

    def _routes_of(self, row: np.ndarray, key: PageKey) -> Mapping[str, bytes] | None:
        """Return the routes of a page, if they were captured in time."""
        if self._tail is None or self._tail.read(row, key.hash) is None:
            return None
        return {_ROUTES: self._tail.sealed(row)}


def recipe(spec: OffloadingSpec) -> str:
    """Return a fingerprint of what the bytes of a page mean: model, dtype, layout and sizes."""
    config = spec.config
    facts = (
        vllm.__version__,
        config.model,
        config.groups,
        config.cache,
        config.worker_kv_bytes_per_block,
        config.kv_cache_layout,
        config.replicated_layout,
        config.canonical_layout,
        (config.parallel.world_size, config.parallel.tp_size, config.parallel.pp_size),
        (config.parallel.pcp_size, config.parallel.dcp_size),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def read_state(context: ReqContext) -> PageRequest:
    """Return the `PageRequest` of a request. It is read once."""
    return context.get_state(PageRequest) or read_request(context.kv_transfer_params)

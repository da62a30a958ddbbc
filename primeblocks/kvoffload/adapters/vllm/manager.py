"""vLLM's tiering manager, extended for a store behind it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import vllm
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import JobMetadata, TieringOffloadingManager

from .routes import NamedChunks
from .tier import StoreTier, read_state

__all__ = ["Speeds", "StoreManager", "Turns"]

_UNMEASURED_S = 1.0
_FORGET = 0.9  # weight of what was measured before, at each new measurement
_AHEAD = 64  # pages of queued requests that a step looks up
# vLLM 0.32 ends a step's plan before it prepares the step's stores, 0.33 after it.
_STORES_COME_LAST = vllm.__version__.startswith("0.32.")


@dataclass
class _Speed:
    pages: float = 0.0
    seconds: float = 0.0

    def add(self, pages: int, seconds: float) -> None:
        self.pages = self.pages * _FORGET + pages
        self.seconds = self.seconds * _FORGET + seconds


class Speeds:
    """The measured times to load a page from the tiers and to compute it."""

    def __init__(self) -> None:
        self.load = _Speed()  # pages, and the time from request to arrival
        self.compute = _Speed()  # prompt pages of steps that began requests, and their time

    def patience_s(self, pages: int) -> float:
        """Return how long a request may wait for room for these pages: the time that a load saves.

        So even a request that waits in vain takes at most twice the time of the better choice.
        """
        if not self.load.pages or not self.compute.pages:
            return _UNMEASURED_S
        load, compute = (each.seconds / each.pages for each in (self.load, self.compute))
        return pages * max(0.0, compute - load)


@dataclass
class _Turn:
    waits_until_s: float | None = None
    pages: set[Hashable] = field(default_factory=set)


class Turns:
    """A first-come, first-served queue, so that requests do not evict each other's pages for ever.

    The first request may load all its pages into the pool. Later requests may do so if the pages of
    all fit together, and wait otherwise. A request goes on without its pages if it has waited
    longer than its patience, or needs more than the `capacity` pages of the pool. Pages that are
    loaded ahead of their request use the remaining room, and give way to requests that ask. A page
    that several requests share counts once.
    """

    def __init__(
        self,
        capacity: int,
        *,
        patience_s: Callable[[str], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}
        self._ahead: dict[str, set[Hashable]] = {}
        self._users = Counter[Hashable]()  # by page: the requests that asked
        self._all_users = Counter[Hashable]()  # and the requests whose pages are loaded ahead

    def is_first(self, request: str) -> bool:
        return next(iter(self._turns), None) == request

    def hold(self, request: str, page: Hashable) -> None:
        turn = self._turn(request)
        if page not in turn.pages:
            turn.pages.add(page)
            self._users[page] += 1
            self._all_users[page] += 1

    def ask(self, request: str, page: Hashable) -> Literal["come", "wait", "go on"]:
        """Return whether the request may load this page into the pool now."""
        turn = self._turn(request)
        if len(turn.pages) + (page not in turn.pages) > self._capacity:
            return "go on"
        needed = len(self._users) + (page not in self._users)
        if not self.is_first(request) and needed > self._capacity:
            return self.wait(request)
        self.hold(request, page)
        return "come"

    def ask_ahead(self, request: str, page: Hashable) -> bool:
        """Return whether there is room for a page that a queued request will ask for."""
        pages = self._ahead.setdefault(request, set())
        if page not in pages:
            if len(self._all_users) + (page not in self._all_users) > self._capacity:
                return False
            pages.add(page)
            self._all_users[page] += 1
        return True

    def has_asked(self, request: str) -> bool:
        return request in self._turns

    def wait(self, request: str) -> Literal["wait", "go on"]:
        """Return whether the request may wait for room that running transfers still use."""
        turn, now = self._turn(request), self._clock()
        if turn.waits_until_s is None:
            turn.waits_until_s = now + self._patience_s(request)
        return "wait" if now < turn.waits_until_s else "go on"

    def leave(self, request: str) -> None:
        _remove(self._all_users, self._ahead.pop(request, ()))
        turn = self._turns.pop(request, None)
        if turn is not None:
            _remove(self._users, turn.pages)
            _remove(self._all_users, turn.pages)

    def _turn(self, request: str) -> _Turn:
        if request not in self._turns:
            _remove(self._all_users, self._ahead.pop(request, ()))
            self._turns[request] = _Turn()
        return self._turns[request]


def _remove(users: Counter[Hashable], pages: Iterable[Hashable]) -> None:
    """Remove one user of each of these pages."""
    for page in pages:
        users[page] -= 1
        if not users[page]:
            del users[page]


@dataclass
class _Queued:
    """A request that is not scheduled, and the number of its pages brought ahead."""

    context: ReqContext
    wanted: Callable[[], Sequence[OffloadKey]] | None  # None: preempted, so its pages are unknown
    at: int = 0


@dataclass
class _Step:
    """A step of the engine: whether it began requests, and the pages that it computes."""

    began_s: float
    begins: bool
    pages: int = 0


class StoreManager(TieringOffloadingManager):
    """vLLM's manager with five changes.

    - A reset reaches our tier. Stock vLLM does not reset secondary tiers with the connector after a
      weight update, and then serves pages of the old weights.
    - A request waits for room in the pool if a tier has its page. It waits at most the time that a
      load saves (`Speeds`). Stock vLLM treats a full pool as a miss and computes the rest of the
      prompt. In stock vLLM, requests evict each other's pages before any request has all its pages.
    - Pages of queued requests come into the pool before they are scheduled. The head of the queue
      comes first, and only free room is used.
    - The engine's queue is passed to our tier, whose eviction policy may use it.
    - If routes travel with pages, workers get the hashes of the pages that they move.
    """

    def __init__(
        self, *tiers: Any, names_chunks: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(*tiers)
        self._names_chunks = names_chunks
        self._clock = clock
        self._speeds = Speeds()
        capacity = self.primary_tier._num_chunks
        self._turns = Turns(capacity, patience_s=self._patience_s, clock=clock)
        self._queue: dict[str, _Queued] = {}  # head first
        self._left = set[str]()  # requests that left the queue since the last step
        self._told: list[str] = []
        self._pages = 0  # prepared to be stored, of no step yet
        self._ours = [tier for tier in self.secondary_tiers if isinstance(tier, StoreTier)]
        self.set_overlap(steps=0)

    def expect(self, context: ReqContext, find: Callable[[], Sequence[OffloadKey]]) -> None:
        """Note that a request is last in the engine's queue. `find` returns the pages to load."""
        self._queue[context.req_id] = _Queued(context, cache(find))

    def leave(self, request: str) -> None:
        """Note that a request left the engine's queue."""
        self._turns.leave(request)
        self._queue.pop(request, None)
        self._left.add(request)

    def set_overlap(self, *, steps: int) -> None:
        """Set how many steps the engine plans while one step runs."""
        self._steps = deque([_Step(self._clock(), begins=False)], maxlen=steps + 1)

    def lookup(
        self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        look = partial(super().lookup, key, req_context, exclude_tier_idx=exclude_tier_idx)
        self._maybe_process_finished_jobs()
        request = req_context.req_id
        if self.primary_tier.lookup(key, req_context) is not LookupResult.MISS:
            self._turns.hold(request, key)
            if self._turns.is_first(request):
                self.primary_tier.touch([key], req_context)  # evict the others' before these
            return look()
        if exclude_tier_idx is not None or not self._is_below(key, req_context):
            return look()
        answer: str = self._turns.ask(request, key)
        if answer == "come":
            if (found := look()) is not LookupResult.MISS:
                return found
            answer = self._turns.wait(request)  # every chunk of the pool is on its way somewhere
        return LookupResult.RETRY if answer == "wait" else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.leave(req_context.req_id)
        chunks = super().prepare_load(keys, req_context)
        return NamedChunks(chunks, list(keys)) if self._names_chunks else chunks

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._pages += len(keys)
        output = super().prepare_store(keys, req_context)
        if output is not None and self._names_chunks:
            output.store_spec = NamedChunks(output.store_spec, output.keys_to_store)
        return output

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if _STORES_COME_LAST:
            self._steps[-1].pages, self._pages = self._pages, 0
        now, step = self._clock(), self._steps[0]
        if step.begins and step.pages:
            self._speeds.compute.add(step.pages, now - self._steps[-1].began_s)
        self._steps.append(_Step(now, begins=bool(context.new_req_ids), pages=self._pages))
        self._pages = 0
        for request in context.preempted_req_ids:
            state = self._req_state.get(request)
            # vLLM may schedule a preempted request again in the same step.
            if state is not None and request not in self._left:
                self._queue = {request: _Queued(state.req_context, None)} | self._queue
        self._left.clear()
        self._bring_ahead()
        super().on_schedule_end(context)
        self._tell_queue()

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        self.leave(req_context.req_id)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def rest(self) -> None:
        """Give the tiers' threads a few milliseconds while the engine is idle."""
        for tier in self._ours:
            tier.rest()

    def reset_cache(self) -> None:
        super().reset_cache()
        for tier in self._ours:
            tier.forget()

    def _is_below(self, key: OffloadKey, req_context: ReqContext) -> bool:
        allows = req_context.load_tier_filter.allows
        return any(
            allows(tier.medium, tier.locality) and tier.lookup(key, req_context) is LookupResult.HIT
            for tier in self.secondary_tiers
        )

    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        if completed_job.success and completed_job.transfer_time is not None:
            self._speeds.load.add(len(job_metadata.transfer_job.keys), completed_job.transfer_time)
        super()._complete_promotion(job_metadata, completed_job)

    def _bring_ahead(self) -> None:
        """Bring pages of queued requests into the pool, as long as there is room."""
        left = _AHEAD
        for request, queued in self._queue.items():
            if queued.wanted is None or self._turns.has_asked(request):
                continue
            keys = queued.wanted()
            if queued.at < len(keys):
                self.primary_tier.touch(keys[: queued.at], queued.context)  # not to push them out
            while queued.at < len(keys):
                key = keys[queued.at]
                if not left or not self._turns.ask_ahead(request, key):
                    return
                left -= 1
                if super().lookup(key, queued.context) is not LookupResult.MISS:
                    self.primary_tier.touch([key], queued.context)
                elif self._is_below(key, queued.context):
                    return  # every chunk of the pool is on its way somewhere
                else:
                    queued.at = len(keys)
                queued.at += 1

    def _patience_s(self, request: str) -> float:
        queued = self._queue.get(request)
        if queued is None or queued.wanted is None:
            return _UNMEASURED_S
        missing = (
            self._is_below(key, queued.context)
            for key in queued.wanted()
            if self.primary_tier.lookup(key, queued.context) is LookupResult.MISS
        )
        return self._speeds.patience_s(sum(missing))

    def _tell_queue(self) -> None:
        named = (read_state(queued.context).rollout for queued in self._queue.values())
        rollouts = [name for name in dict.fromkeys(named) if name is not None]
        if rollouts != self._told:
            self._told = rollouts
            for tier in self._ours:
                tier.queue(rollouts)

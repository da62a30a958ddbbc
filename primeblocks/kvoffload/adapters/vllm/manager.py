"""vLLM's tiering manager, completed for a store behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from .routes import NamedChunks
from .tier import StoreTier

__all__ = ["StoreManager", "Turns"]

_PATIENCE_S = 1.0


@dataclass
class _Turn:
    pages: set[Hashable] = field(default_factory=set)
    waiting_since_s: float | None = None


class Turns:
    """A first-come, first-served queue: requests do not evict each other's pages for ever.

    The first request may bring all of its pages. Those behind it may bring theirs while all fit
    together, and wait otherwise. A request that has waited longer than the patience, or needs more
    pages than the pool has, is told to go on without.

    Args:
        capacity: pages of the pool.
        patience_s: seconds that a request may wait in all; computing pages is seldom slower.
        clock: seconds.
    """

    def __init__(
        self, capacity: int, *, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}
        self._pages = 0  # of all requests together

    def is_first(self, request: str) -> bool:
        """Whether this request came before all others that have not left."""
        return next(iter(self._turns), None) == request

    def hold(self, request: str, page: Hashable) -> None:
        """Record that the pool has this page and the request will use it."""
        turn = self._turns.setdefault(request, _Turn())
        self._pages += page not in turn.pages
        turn.pages.add(page)

    def ask(self, request: str, page: Hashable) -> Literal["come", "wait", "go on"]:
        """Tell whether the request may bring this page into the pool now."""
        turn = self._turns.setdefault(request, _Turn())
        is_new = page not in turn.pages
        if len(turn.pages) + is_new > self._capacity:
            return "go on"
        if not self.is_first(request) and self._pages + is_new > self._capacity:
            return self.wait(request)
        self.hold(request, page)
        return "come"

    def wait(self, request: str) -> Literal["wait", "go on"]:
        """Tell whether the request may wait for room that transfers under way still take."""
        turn = self._turns.setdefault(request, _Turn())
        now = self._clock()
        if turn.waiting_since_s is None:
            turn.waiting_since_s = now
        return "wait" if now - turn.waiting_since_s < self._patience_s else "go on"

    def leave(self, request: str) -> None:
        """Remove a request that has its pages or no longer needs them."""
        turn = self._turns.pop(request, None)
        if turn is not None:
            self._pages -= len(turn.pages)


class StoreManager(TieringOffloadingManager):
    """The stock manager, except for three things.

    - A reset reaches our tier. Stock vLLM leaves secondary tiers alone when the connector is reset
      after a weight update, and then serves pages of the old weights.
    - A request waits, up to a second, for room in the pool on behalf of a page that a tier has.
      Stock vLLM takes a full pool for a miss and computes the rest of the prompt, and requests
      evict each other's pages before any has all of its own.
    - Workers learn the hashes of the pages they move, if routes travel with them.
    """

    def __init__(self, *tiers: Any, names_chunks: bool) -> None:
        super().__init__(*tiers)
        self._names_chunks = names_chunks
        self._turns = Turns(self.primary_tier._num_chunks, patience_s=_PATIENCE_S)

    def lookup(
        self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        def stock() -> LookupResult:
            return super(StoreManager, self).lookup(
                key, req_context, exclude_tier_idx=exclude_tier_idx
            )

        self._maybe_process_finished_jobs()
        request = req_context.req_id
        if self.primary_tier.lookup(key, req_context) is not LookupResult.MISS:
            self._turns.hold(request, key)
            if self._turns.is_first(request):
                self.primary_tier.touch([key], req_context)  # evict the others' before these
            return stock()
        if exclude_tier_idx is not None or not self._is_below(key, req_context):
            return stock()
        answer: str = self._turns.ask(request, key)
        if answer == "come":
            if (found := stock()) is not LookupResult.MISS:
                return found
            answer = self._turns.wait(request)  # every chunk of the pool is on its way somewhere
        return LookupResult.RETRY if answer == "wait" else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._turns.leave(req_context.req_id)
        chunks = super().prepare_load(keys, req_context)
        return NamedChunks(chunks, list(keys)) if self._names_chunks else chunks

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None and self._names_chunks:
            output.store_spec = NamedChunks(output.store_spec, output.keys_to_store)
        return output

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request in context.new_req_ids:
            self._turns.leave(request)
        super().on_schedule_end(context)

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        self._turns.leave(req_context.req_id)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def reset_cache(self) -> None:
        super().reset_cache()
        for tier in self.secondary_tiers:
            if isinstance(tier, StoreTier):
                tier.forget()

    def _is_below(self, key: OffloadKey, req_context: ReqContext) -> bool:
        allows = req_context.load_tier_filter.allows
        return any(
            allows(tier.medium, tier.locality) and tier.lookup(key, req_context) is LookupResult.HIT
            for tier in self.secondary_tiers
        )

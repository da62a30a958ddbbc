"""vLLM's tiering manager, completed for a store behind it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
from .turns import Turns

__all__ = ["StoreManager"]

_PATIENCE_S = 1.0


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

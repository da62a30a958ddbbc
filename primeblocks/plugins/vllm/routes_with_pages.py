"""Captured routes that leave and come back with the KV pages they belong to.

vLLM 0.32 keeps captured rows by page hash in its output worker and has no hook for a page that an
offloading tier brings back. The patched connector can be found by engine, gives the rows of a page
away, takes rows for pages that are about to be used, and survives a prompt of which every page came
back.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ..patch import Patch, SelfTest, ours, stock

__all__ = ["CONNECTOR", "PATCH"]

CONNECTOR = "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector"


def _reachable(base: type) -> type:
    """Give the connector of captured rows a way in and out, page by page."""

    class ReachableConnector(base):
        primeblocks_live: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()

        def __init__(self, *, vllm_config: Any, model: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config=vllm_config, model=model, kv_cache_config=kv_cache_config)
            self._hold_offers(kv_cache_config.num_blocks)
            transfer = vllm_config.kv_transfer_config
            if transfer is not None and self._store is not None:
                self.primeblocks_live[transfer.engine_id] = self

        def page_nbytes(self) -> int:
            """Bytes of one page's rows."""
            return int(self._buffer._rows[0].nbytes)

        def rows(self, page_hash: bytes) -> bytes | None:
            """The rows of a page, if the engine still has them."""
            return self._rows_under(*self._keys([page_hash]))

        def _rows_under(self, key: str) -> bytes | None:
            from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

            try:
                found = self._store.get_concatenated([key])
            except BlockObjectStoreError:
                return None
            return None if (np.frombuffer(found, np.uint8) == 0xFF).all() else found

        def offer(self, rows: Mapping[bytes, bytes]) -> None:
            """Hand in rows of pages that were loaded, before a request is scheduled with them."""
            for page_hash, each in rows.items():
                self._offered[page_hash] = each
                self._offered.move_to_end(page_hash)
            # A loaded page sits in a block of the engine, so more can never be waiting.
            while len(self._offered) > self._most_offered:
                self._offered.popitem(last=False)

        def begin_step(self, metadata: Any) -> None:
            generation = self._generation
            super().begin_step(metadata)
            if self._buffer is None or metadata is None:
                return
            if self._generation != generation:
                self._offered.clear()
            # Only now: the keys of these requests are retained, so the rows cannot be evicted.
            for hashes in metadata.block_hashes.values():
                self._take_offers(hashes)

        def process_output(self, pending: Any) -> Any:
            """Stock, after making up for requests that start inside a page.

            A prompt whose pages all came from a tier has its last token computed again, alone. The
            stock connector takes it for a gap and ends the engine.
            """
            with self._lock:
                for request_id, start in zip(
                    pending.request_ids, pending.token_starts, strict=True
                ):
                    state = self._requests[request_id]
                    if state.capture_cursor is None and start % self._buffer.block_size:
                        self._start_inside_a_page(request_id, state, int(start))
            return super().process_output(pending)

        def _start_inside_a_page(self, request_id: str, state: Any, start: int) -> None:
            buffer = self._buffer
            page, inside = divmod(start, buffer.block_size)
            shape = (buffer.block_size, *buffer.shape_per_token)
            rows = np.full(shape, np.iinfo(buffer.dtype).max, buffer.dtype)  # missing
            if page < len(state.aux_output_keys):
                found = self._rows_under(state.aux_output_keys[page])
                if found is not None:
                    rows = np.frombuffer(found, buffer.dtype).reshape(shape)
            buffer.capture(request_id, start - inside, rows[:inside])
            state.capture_cursor = start

        def _take_offers(self, hashes: Iterable[bytes]) -> None:
            from vllm.distributed.aux_output_connector.store import BlockObject

            taken = {each: self._offered.pop(each) for each in hashes if each in self._offered}
            keys = self._keys(taken)
            rows = zip(keys, taken.values(), strict=True)
            self._store.put([BlockObject(key=key, payload=each) for key, each in rows])

        def _keys(self, hashes: Iterable[bytes]) -> list[str]:
            from vllm.distributed.aux_output_connector.routed_experts import routed_experts_keys

            return routed_experts_keys(hashes, str(self._generation))

        def _hold_offers(self, most: int) -> None:
            self._offered: OrderedDict[bytes, bytes] = OrderedDict()
            self._most_offered = most

    return ReachableConnector


def _finds_offered_rows(connector_type: Any) -> bool:
    """Offer the rows of a page to a connector without a model, then schedule a request with it."""
    from vllm.distributed.aux_output_connector import connector as control
    from vllm.distributed.aux_output_connector import routed_experts, store

    connector = object.__new__(connector_type)
    connector._store = store.BackgroundBlockObjectStore(
        store.BlockObjectStore(max_bytes=8, object_nbytes=4), max_pending_batches=2
    )
    connector._buffer = routed_experts.RoutedExpertsBuffer(
        np.dtype(np.uint8), (1, 1), block_size=4, max_num_seqs=1, max_num_batched_tokens=4,
        max_concurrent_batches=1,
    )  # fmt: skip
    connector._requests, connector._pending_outputs = {}, []
    connector._generation, connector._lock = 0, Lock()
    if hasattr(connector, "offer"):
        connector._hold_offers(1)
        connector.offer({b"page": b"rows"})
    hashes = control.PackedBlockHashes(b"page", 4)
    connector.begin_step(control.AuxOutputConnectorMetadata(0, {"r": 0}, {"r": hashes}, ()))
    try:
        keys = routed_experts.routed_experts_keys([b"page"], "0")
        return bool(connector._store.get_concatenated(keys) == b"rows")
    except store.BlockObjectStoreError:
        return False
    finally:
        connector.close()


def _test() -> SelfTest:
    return SelfTest(
        needed=not _finds_offered_rows(stock(CONNECTOR)),
        effective=_finds_offered_rows(ours(CONNECTOR)),
    )


PATCH = Patch(
    name="routes_with_pages",
    reason="Captured routes are kept apart from the KV pages they belong to: a page that comes "
    "back from an offloading tier after its routes were evicted has none.",
    tested="vllm==0.32.*",
    replacements={CONNECTOR: _reachable},
    self_test=_test,
    asked=lambda config: config.aux_output_config.enabled and config.kv_transfer_config is not None,
    cpu_only=False,
)

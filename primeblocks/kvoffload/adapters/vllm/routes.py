"""Captured routes next to the keys and values, in every row of vLLM's shared pool.

A row of the pool ends with the routes of its page: a seal of 16 bytes, then the rows of routes. The
seal is a digest of the page's hash and the rows. So rows of another page, of an earlier page, or of
half a write fail the check, and count as missing. The worker fills the end of a row when it stores
a page. It passes the end of the row to the engine's capture when it loads a page. Our tier carries
seal and rows as an attachment of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from vllm.distributed.aux_output_connector import worker as capture
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    OffloadKey,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from ....errors import PlanError, UnsupportedError

__all__ = ["CapturedRows", "NamedChunks", "PendingRows", "RoutesWorker", "Tail"]

_SEAL_BYTES = 16


class PendingRows(Protocol):
    """The rows of blocks that a step will produce. Until they arrive, `rows` equals None."""

    rows: dict[int, bytes | None] | None


class CapturedRows(Protocol):
    """An engine's capture, with rows by block: the connector that `routes_with_pages` makes.

    The plug-in owns it. Its class has the connectors of living engines in `primeblocks_live`, by
    the engine's id.
    """

    group: int  # the KV cache group with rows for its blocks

    def page_nbytes(self) -> int:
        """Return the bytes of one page's rows."""
        ...

    def carry(self) -> None:
        """Declare that the rows of loaded pages will be passed to `offer`. Idempotent."""
        ...

    def rows_of(self, blocks: Sequence[int]) -> PendingRows:
        """Request the rows of blocks, as they are after the steps so far."""
        ...

    def offer(self, rows: Mapping[int, bytes | None]) -> None:
        """Pass the rows of loaded blocks to the engine, with None for missing rows."""
        ...


@dataclass(frozen=True)
class Tail:
    """The part of a row of the pool that has routes."""

    offset: int  # the first byte after the keys and values of all workers
    rows_bytes: int  # of one page

    @property
    def end(self) -> int:
        return self.offset + _SEAL_BYTES + self.rows_bytes

    def write(self, row: np.ndarray, page_hash: bytes, rows: bytes) -> None:
        row[self.offset : self.end] = np.frombuffer(_seal(page_hash, rows) + rows, row.dtype)

    def read(self, row: np.ndarray, page_hash: bytes) -> bytes | None:
        """Return the routes at the end of a row, or None if they are not of this page."""
        rows = self.sealed(row)[_SEAL_BYTES:]
        intact = row[self.offset : self.offset + _SEAL_BYTES].tobytes() == _seal(page_hash, rows)
        return rows if intact else None

    def sealed(self, row: np.ndarray) -> bytes:
        return row[self.offset : self.end].tobytes()

    def restore(self, row: np.ndarray, sealed: bytes | None) -> None:
        """Write back the result of `sealed`. With None, the routes are marked as missing."""
        row[self.offset : self.end] = 0
        if sealed is not None and len(sealed) == self.end - self.offset:
            row[self.offset : self.end] = np.frombuffer(sealed, row.dtype)


class NamedChunks(CPULoadStoreSpec):
    """Chunks of the pool together with the hashes of their pages."""

    def __init__(self, chunks: LoadStoreSpec, keys: Sequence[OffloadKey]) -> None:
        assert isinstance(chunks, CPULoadStoreSpec)
        super().__init__(list(chunks.chunk_ids))
        self._keys = list(keys)
        assert len(self._keys) == len(self.chunk_ids)

    def pages(self, blocks: GPULoadStoreSpec, *, group: int) -> list[_Page]:
        """Return the pages of one group of layers: hash, row of the pool, block of the engine."""
        every = zip(self._keys, self.chunk_ids, blocks.block_ids, strict=True)
        return [
            _Page(get_offload_block_hash(key), int(chunk), int(block))
            for key, chunk, block in every
            if get_offload_group_idx(key) == group
        ]


class RoutesWorker(OffloadingWorker):
    """A copy worker that moves routes with the pages that `inner` copies.

    The rows of a step arrive later than its keys and values. The store of a page is finished only
    when its rows have arrived.
    """

    def __init__(
        self, inner: OffloadingWorker, *, pool: np.ndarray, tail: Tail, engine_id: str
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._tail = tail
        self._engine_id = engine_id
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, list[_Page]] = {}
        # Looked up now: the plug-in replaces the class after this module may have been imported.
        live: Mapping[str, CapturedRows] | None = getattr(
            capture.AuxOutputWorkerConnector, "primeblocks_live", None
        )
        if live is None:
            raise UnsupportedError(
                "routes_bytes_per_token needs the plug-in's patch routes_with_pages, which is not "
                "applied here. Remove the patch from PRIMEBLOCKS_VLLM_PATCHES_OFF, or leave "
                "out routes_bytes_per_token."
            )
        self._connectors = live

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, NamedChunks)
        pages, later = [], None
        # The ranks share the rows. Only the rank that captures routes clears and writes them.
        if (connector := self._connector()) is not None:
            for chunk in dst_spec.chunk_ids:
                # The row may have held an earlier computation of the same page.
                self._tail.restore(self._pool[chunk], None)
            pages = dst_spec.pages(src_spec, group=connector.group)
            later = connector.rows_of([page.block for page in pages])
        self._stores[job_id] = _Store(pages, later)
        return self._inner.submit_store(job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        assert not expedited  # the spec refuses the setting that vLLM 0.33 has for it
        assert isinstance(src_spec, NamedChunks)
        connector = self._connector()
        self._loads[job_id] = (
            [] if connector is None else src_spec.pages(dst_spec, group=connector.group)
        )
        return self._inner.submit_load(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished = []
        for result in self._inner.get_finished():
            if result.job_id in self._loads:
                self._offer(self._loads.pop(result.job_id))
                finished.append(result)
            else:
                self._stores[result.job_id].result = result
        for job_id, store in list(self._stores.items()):
            if store.result is not None and store.is_ready():
                self._write(store)
                finished.append(store.result)
                del self._stores[job_id]
        return finished

    def wait(self, job_ids: set[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._pool = self._pool[:0].copy()  # the pool cannot be closed while somebody looks in
        self._inner.shutdown()

    def _write(self, store: _Store) -> None:
        found = (store.later and store.later.rows) or {}
        for page in store.pages:
            if (rows := found[page.block]) is not None:
                self._tail.write(self._pool[page.chunk], page.hash, rows)

    def _offer(self, pages: list[_Page]) -> None:
        if (connector := self._connector()) is not None:
            found = {
                each.block: self._tail.read(self._pool[each.chunk], each.hash) for each in pages
            }
            connector.offer(found)

    def _connector(self) -> CapturedRows | None:
        """Return the engine's capture; None on ranks without one."""
        connector = self._connectors.get(self._engine_id)
        if connector is not None and connector.page_nbytes() != self._tail.rows_bytes:
            raise PlanError(
                f"the routes of a page take {connector.page_nbytes()} bytes in this engine, not "
                f"{self._tail.rows_bytes}. Pass routes_bytes_per_token= layers x top_k x item "
                "size, which is RouterShape.bytes_per_token of primeblocks.replay.adapters.vllm."
            )
        if connector is not None:
            connector.carry()
        return connector


class _Page(NamedTuple):
    hash: bytes
    chunk: int
    block: int


@dataclass
class _Store:
    """A store in flight, and the routes of its pages as they arrive."""

    pages: list[_Page]
    later: PendingRows | None
    result: TransferResult | None = None

    def is_ready(self) -> bool:
        return self.later is None or self.later.rows is not None


def _seal(page_hash: bytes, rows: bytes) -> bytes:
    return xxhash.xxh3_128_digest(len(page_hash).to_bytes(4, "little") + page_hash + rows)

"""Captured routes, stored next to the KV pages to which they belong.

vLLM keeps captured rows by page hash. The page of one hash can be computed twice, and in bfloat16
the second computation may choose other experts. So the hash does not identify the rows of a page
that hits. The patched connector keeps rows by *block*, the place of the keys and values in the
engine's memory. A request that computes a position writes its row. A request that finds the block
finds the rows of that computation. An offloading tier stores the rows of a block with the block's
pages. When the tier loads the pages into another block, it passes the rows back.

Rows arrive a step or two after their keys and values, in the order of the steps. In a step, a block
gets an owner, is loaded, or is computed. The connector notes these events when the step begins, and
applies them when the step's rows arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ..patch import Patch
from .scheduled_blocks import Assigned, build_with_blocks

__all__ = ["CONNECTOR", "PATCH", "RowTable", "RowsBesidePages", "RowsLater"]

CONNECTOR = "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector"
_BUILD = (
    "vllm.distributed.aux_output_connector.connector:"
    "AuxOutputSchedulerConnector.build_connector_meta"
)
# Kinds of layers whose blocks stay with a request from its start to its end.
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")


@dataclass
class RowsLater:
    """Rows of blocks after a step. `rows` stays None until the rows of this step have arrived."""

    blocks: Sequence[int]
    step: int
    rows: dict[int, bytes | None] | None = None


@dataclass
class _Life:
    """A request since its start or resumption."""

    places: list[int]  # The places of its pages, in order.
    cursor: int | None = None  # The number of tokens whose rows have arrived.


@dataclass
class _Notes:
    """Changes of blocks since the last step."""

    copied: list[tuple[int, int]] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)
    loaded: dict[int, bytes | None] = field(default_factory=dict)
    overwritten: list[int] = field(default_factory=list)  # By a tier that may not carry rows.
    hits: list[tuple[str, list[int]]] = field(default_factory=list)  # Pages that requests found.


class RowTable:
    """One page of rows for each KV page in the engine's memory, by the place of the KV page.

    Not thread-safe. The memory is claimed from the system as it fills.

    Args:
        places: the number of pages in the engine's memory.
        page_tokens: the number of tokens of a page.
        row_shape: the shape of one token's row, layers and top_k.
    """

    def __init__(
        self, places: int, page_tokens: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.page_tokens = page_tokens
        self._rows = np.empty((places, page_tokens, *row_shape), dtype)
        self._known = np.zeros((places, page_tokens), np.bool_)
        self._missing = np.iinfo(dtype).max  # in every slot, as in `missing_routes`

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page's rows."""
        return int(self._rows[0].nbytes)

    def write(self, places: Sequence[int], start: int, rows: np.ndarray) -> None:
        """Store the rows of tokens from `start` on. `places` are those of the request's pages."""
        at = self._at(places, start, start + len(rows))
        self._rows[at], self._known[at] = rows, True

    def read(self, places: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Return a copy of the rows of tokens. Missing rows have the largest number."""
        at = self._at(places, start, stop)
        rows = np.array(self._rows[at])
        rows[~self._known[at]] = self._missing
        return rows

    def page(self, place: int) -> bytes | None:
        """Return the rows of a page, or None if no row is known."""
        is_empty = not self._known[place].any()
        return None if is_empty else self.read([place], 0, self.page_tokens).tobytes()

    def put(self, place: int, page: bytes | None) -> None:
        """Set all rows, given a result of `page`. With None, all rows become missing."""
        self.empty([place])
        if page is not None:
            rows = np.frombuffer(page, self._rows.dtype).reshape(self._rows[place].shape)
            missing = (rows == self._missing).reshape(self.page_tokens, -1).all(axis=1)
            self._rows[place], self._known[place] = rows, ~missing

    def fill(self, place: int, page: bytes | None) -> None:
        """Set only the rows that are missing, given a result of `page`."""
        rows, known = self._rows[place].copy(), self._known[place].copy()
        self.put(place, page)
        self._rows[place, known], self._known[place, known] = rows[known], True

    def copy(self, source: int, target: int) -> None:
        """Copy the rows of one place to another."""
        self._rows[target], self._known[target] = self._rows[source], self._known[source]

    def empty(self, places: Sequence[int]) -> None:
        """Make all rows of pages missing."""
        self._known[list(places)] = False

    def is_whole(self, place: int) -> bool:
        return bool(self._known[place].all())

    def _at(self, places: Sequence[int], start: int, stop: int) -> tuple[Any, Any]:
        tokens = self.page_tokens
        if stop - start == 1:
            return places[start // tokens], slice(start % tokens, start % tokens + 1)
        page, inside = np.divmod(np.arange(start, stop), tokens)
        first = start // tokens
        return np.array(places[first : -(-stop // tokens)], np.int64)[page - first], inside


# vLLM's class, which exists when the patch is made.
_Connector: Any = object


class RowsBesidePages(_Connector):
    """vLLM's connector of captured rows, with a table of rows by block that tiers can use."""

    primeblocks_live: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()
    _table: Any = None

    def __init__(self, *, vllm_config: Any, model: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, model=model, kv_cache_config=kv_cache_config)
        group = _whole_group(kv_cache_config, self._buffer)
        if group is None:
            return  # Blocks of other layers are freed before rows are read, so vLLM's code is used.
        transfer = vllm_config.kv_transfer_config
        tokens = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self._lay_table(group, kv_cache_config.num_blocks, tokens, alone=transfer is None)
        if transfer is not None:
            self.primeblocks_live[transfer.engine_id] = self

    def _lay_table(self, group: int, blocks: int, block_tokens: int, *, alone: bool) -> None:
        buffer = self._buffer
        self.group = group
        self._per_block = block_tokens // buffer.block_size
        places = blocks * self._per_block
        self._table = RowTable(places, buffer.block_size, buffer.shape_per_token, buffer.dtype)
        self._lives: dict[str, _Life] = {}
        self._notes = _Notes()
        self._offered: dict[int, bytes | None] = {}
        self._wanted: list[RowsLater] = []
        self._begun = self._arrived = 0
        # If a tier does not carry rows, only the hashes of its pages are known. For these pages,
        # vLLM's store has the rows, and each place has here the keys and the index of its page.
        self._by_hash = not alone
        self._pages: dict[int, tuple[list[str], int]] = {}

    def page_nbytes(self) -> int:
        """Bytes of one page's rows."""
        return int(self._table.page_nbytes)

    def carry(self) -> None:
        """Declare that a tier that loads pages here offers their rows. Idempotent."""
        self._by_hash = False

    def rows_of(self, blocks: Sequence[int]) -> RowsLater:
        """Return the rows of blocks after the steps so far. They are set once they have arrived."""
        with self._lock:
            later = RowsLater(blocks, self._begun)
            self._wanted.append(later)
            self._hand_out()
        return later

    def offer(self, rows: Mapping[int, bytes | None]) -> None:
        """Pass in the rows of blocks that were loaded. None stands for rows that are missing."""
        with self._lock:
            self._offered |= rows

    def begin_step(self, metadata: Any) -> None:
        generation = self._generation
        super().begin_step(metadata)
        if self._table is None or metadata is None:
            return
        with self._lock:
            if self._generation != generation:
                self._lives.clear()
            for request_id in metadata.finished_requests:
                self._lives.pop(request_id, None)
            self._assign(metadata.primeblocks_blocks)

    def _assign(self, assigned: Assigned) -> None:
        notes, tokens = self._notes, self._buffer.block_size
        notes.copied += assigned.copied
        for blocks in assigned.loading:
            notes.overwritten += self._places_in(blocks)
        for request_id, (blocks, computed) in assigned.started.items():
            places = self._places_in(blocks)
            self._lives[request_id] = _Life(places)
            here = -(-computed // tokens)
            notes.loaded |= {p: self._offered.pop(p) for p in places[:here] if p in self._offered}
            notes.hits.append((request_id, places[:here]))
            self._empty(places[here:])
        for request_id, blocks in assigned.grown.items():
            places = self._places_in(blocks)
            self._lives[request_id].places += places
            self._empty(places)

    def _places_in(self, blocks: Sequence[list[int]]) -> list[int]:
        each = range(self._per_block)
        return [block * self._per_block + i for block in blocks[self.group] for i in each]

    def _empty(self, places: list[int]) -> None:
        self._notes.emptied += places
        for place in places:
            self._offered.pop(place, None)

    def prepare_output(self, input_batch: Any) -> Any:
        pending = super().prepare_output(input_batch)
        if pending is not None and self._table is not None:
            with self._lock:
                self._begun += 1
                pending.primeblocks_lives = [self._lives[each] for each in pending.request_ids]
                pending.primeblocks_notes, self._notes = self._notes, _Notes()
        return pending

    def _commit_output(self, pending: Any) -> Any:
        if self._table is None:
            return super()._commit_output(pending)
        strange = self._settle(pending)
        written = self._write_all(pending)
        mixed = [found for each in strange if (found := self._find_by_hash(*each))]
        if mixed:
            self._publish_blocks(mixed)
        outputs = self._read_all(pending, written)
        self._arrived += 1
        self._hand_out()
        return outputs

    def _settle(self, pending: Any) -> list[tuple[Any, int, int]]:
        """Apply the changes of blocks that precede the computation of a step.

        Return the pages that a tier loaded without rows: the request's state, page and place.
        """
        notes, each = pending.primeblocks_notes, self._per_block
        for source, target in notes.copied:
            for i in range(each):
                self._table.copy(source * each + i, target * each + i)
        self._table.empty(notes.emptied + notes.overwritten)  # A tier may bring no rows.
        for place, found in notes.loaded.items():
            self._table.put(place, found)
        if not self._by_hash:
            return []
        for place in notes.overwritten:
            self._pages.pop(place, None)
        strange = []
        for request_id, places in notes.hits:
            state = self._requests[request_id]
            keys = state.aux_output_keys
            for page, place in enumerate(places):
                if not self._is_page(place, keys[page] if page < len(keys) else None):
                    self._table.empty([place])
                    strange.append((state, page, place))
        return strange

    def _write_all(self, pending: Any) -> list[tuple[int, np.ndarray]]:
        """Write a step's rows to the places of its keys. Return pairs (first token, rows)."""
        written, completed = [], []
        bounds = zip(pending.query_start_loc, pending.query_start_loc[1:], strict=False)
        for request_id, life, token_start, (begin, end), rejected in zip(
            pending.request_ids, pending.primeblocks_lives, map(int, pending.token_starts),
            bounds, pending.num_rejected, strict=True,
        ):  # fmt: skip
            rows = pending.routed_experts[begin : end - rejected]
            # If tokens were rejected after this step was scheduled, it starts at the cursor.
            start = min(token_start, token_start if life.cursor is None else life.cursor)
            life.cursor = start + len(rows)
            self._table.write(life.places, start, rows)
            written.append((start, rows))
            if self._by_hash:
                state = self._requests[request_id]
                completed.append((state, self._complete(state, life, start)))
        if self._by_hash:
            self._publish_blocks(completed)
        return written

    def _complete(self, state: Any, life: _Life, start: int) -> list[Any]:
        """Record which pages were written, and return the complete pages."""
        places, tokens = life.places, self._buffer.block_size
        stop = life.cursor or 0
        for page in range(start // tokens, -(-stop // tokens)):
            self._pages[places[page]] = state.aux_output_keys, page
        return [
            (page * tokens, self._table.read(places, page * tokens, (page + 1) * tokens))
            for page in range(start // tokens, stop // tokens)
            if self._table.is_whole(places[page])
        ]

    def _find_by_hash(self, state: Any, page: int, place: int) -> tuple[Any, list[Any]] | None:
        """Fill in the rows of a loaded page that this step did not compute.

        If this step computed some rows, the hash stood for another page. Then this page is
        returned, so that the store gets it too.
        """
        keys, table = state.aux_output_keys, self._table
        if page >= len(keys) or table.is_whole(place):
            return None
        is_mixed = table.page(place) is not None
        table.fill(place, self._under(keys[page]))
        self._pages[place] = [keys[page]], 0
        if not is_mixed or not table.is_whole(place):
            return None
        start, tokens = page * self._buffer.block_size, self._buffer.block_size
        return state, [(start, table.read([place], 0, tokens))]

    def _is_page(self, place: int, key: str | None) -> bool:
        keys, page = self._pages.get(place, ((), 0))
        return page < len(keys) and keys[page] == key

    def _under(self, key: str) -> bytes | None:
        from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

        with suppress(BlockObjectStoreError):
            return bytes(self._store.get_concatenated([key]))
        return None

    def _read_all(self, pending: Any, written: list[tuple[int, np.ndarray]]) -> dict[str, Any]:
        """Return rows for requests after all writes, because a request may use another's rows."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        outputs = {}
        for request_id, life, (start, rows), sampled in zip(
            pending.request_ids, pending.primeblocks_lives, written, pending.num_sampled,
            strict=True,
        ):  # fmt: skip
            state, stop = self._requests[request_id], start + len(rows)
            first = state.emit_cursor
            if sampled <= 0 or first > stop:
                continue
            found = rows[first - start :]
            if first < start:
                found = self._table.read(life.places, first, stop)
            outputs[request_id] = AuxRequestOutput(first, found)
            state.emit_cursor = stop
        return outputs

    def _hand_out(self) -> None:
        for later in self._wanted:
            if later.step <= self._arrived:
                later.rows = {block: self._table.page(block) for block in later.blocks}
        self._wanted = [later for later in self._wanted if later.rows is None]


def _beside_pages(base: type) -> type:
    return type(RowsBesidePages.__name__, (RowsBesidePages, base), {})


def _whole_group(kv_cache_config: Any, buffer: Any) -> int | None:
    """Return the first group of layers whose blocks are whole pages and stay with a request."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups if buffer is not None else ()):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        stay = all(type(each).__name__ in _WHOLE for each in specs.values())
        if stay and group.kv_cache_spec.block_size % buffer.block_size == 0:
            return index
    return None


PATCH = Patch(
    name="routes_with_pages",
    reason="Captured routes are kept by the hash of a page, and a hash can be computed twice, with "
    "other choices; nor do they leave and come back with a page that an offloading tier moves.",
    tested="vllm==0.32.*",
    replacements={CONNECTOR: _beside_pages, _BUILD: build_with_blocks},
    asked=lambda config: config.aux_output_config.enabled,
    cpu_only=False,
    compared="vllm==0.33.*",
)

"""A store of pages over several tiers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Self

import numpy as np

from ..errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    PlanError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from .evict import Evict, lru
from .host import HostTier
from .page import PageKey, checksum, pack_attachments, page_view, unpack_attachments
from .pending import Pending
from .tier import Level, Loaded, Saved, Tier, TierStatistics

__all__ = ["TieredStore"]

_Users = tuple[Hashable, ...]


class TieredStore:
    """Pages in fast memory first, in slower tiers when room runs out.

    A page is saved into the first tier. A full tier passes its victims on to the next; a page found
    in a lower tier is copied back to the first. One background thread does all of it, in the order
    of the calls, so a load sees every earlier save. Memory is bounded: the tiers, and room for
    `max_pending` pages on their way in.

    Args:
        tiers: fastest first; the first must be a `HostTier`. The store closes them.
        evict: who leaves a full tier: `lru`, `arc` or `VersionAware(...)`.
        max_pending: saves that may wait; further ones are declined.

    Raises:
        UnsupportedError: no host tier in front; a disk alone has nowhere to check a page.
        PlanError: the tiers differ in their page or attachment size.
    """

    def __init__(self, tiers: Sequence[Tier], *, evict: Evict = lru, max_pending: int = 64) -> None:
        if not tiers or not isinstance(tiers[0], HostTier):
            names = [tier.name for tier in tiers]
            raise UnsupportedError(
                f"the first tier must be a HostTier; got {names}. Put HostTier(...) in front."
            )
        sizes = {(tier.page_bytes, tier.attachment_bytes) for tier in tiers}
        if len(sizes) != 1:
            raise PlanError(f"tiers with different (page, attachment) bytes: {sorted(sizes)}")
        if max_pending < 1:
            raise PlanError(f"max_pending must be at least 1; got {max_pending}")
        self.page_bytes, self.attachment_bytes = sizes.pop()
        slot_bytes = self.page_bytes + self.attachment_bytes
        self._levels = [Level(tier) for tier in tiers]
        self._evict = evict
        self._version = 0
        self._lock = Lock()
        self._closed = False
        self._staging = np.empty((max_pending, slot_bytes), dtype=np.uint8)
        self._free = list(range(max_pending))
        self._loading = np.empty(slot_bytes, dtype=np.uint8)
        self._demoting = np.empty((len(tiers), slot_bytes), dtype=np.uint8)
        self._queue: SimpleQueue[tuple[Pending[Any], Callable[[Pending[Any]], None]] | None]
        self._queue = SimpleQueue()
        self._thread = Thread(target=self._run, name="primeblocks-kvoffload", daemon=True)
        self._thread.start()

    def save(
        self,
        key: PageKey,
        page: Any,
        *,
        attachments: Mapping[str, bytes] | None = None,
        rollout: Hashable = None,
    ) -> Pending[Saved]:
        """Keep a copy of a page; the caller may reuse it at once. Local.

        Replaces what `key` named before. Too many saves on their way, or a page
        that finds no room, is not an error: the result says that it was not stored.

        Args:
            rollout: who will ask for the page again, any name, until `end`; first page first.

        Raises:
            ShapeError: the page or its packed attachments have the wrong size.
            ClosedError: the store is closed.
        """
        view = page_view(page, page_bytes=self.page_bytes, writable=False)
        extra = pack_attachments(attachments or {})
        if len(extra) > self.attachment_bytes:
            raise ShapeError(
                f"the packed attachments have {len(extra)} bytes; the tiers keep "
                f"{self.attachment_bytes}. Make them with attachment_bytes={len(extra)} or more."
            )
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None:
            # The page that `key` named before must not outlive this call.
            self._submit(lambda pending: self._forget(key))
            declined: Pending[Saved] = Pending()
            declined.finish(Saved(False, f"{len(self._staging)} saves are on their way already"))
            return declined
        content = self._staging[slot, : len(view) + len(extra)]
        content[: len(view)] = view
        content[len(view) :] = np.frombuffer(extra, dtype=np.uint8)
        users = () if rollout is None else (rollout,)
        return self._submit(lambda pending: self._save(pending, key, content, slot, users))

    def load(self, key: PageKey, *, into: Any, rollout: Hashable = None) -> Pending[Loaded]:
        """Copy a page into `into`, or report a miss. Local.

        Never a wrong page: what does not pass its checksum is dropped and is a miss. `into` is
        written once, after the check, and not at all on a miss or after a deadline.

        Args:
            rollout: who asks, as in `save`.

        Raises:
            ShapeError: `into` has the wrong size or is read-only.
            ClosedError: the store is closed.
        """
        view = page_view(into, page_bytes=self.page_bytes, writable=True)
        users = () if rollout is None else (rollout,)
        return self._submit(lambda pending: self._load(pending, key, view, users))

    def __contains__(self, key: PageKey) -> bool:
        """Whether a load may hit; answers at once, from any thread."""
        return any(key in level.tier for level in self._levels)

    def advance(self, *, version: int) -> None:
        """The policy is now at `version`; older pages may have become useless. Local.

        Raises:
            UsageError: the version went backwards.
        """
        with self._lock:
            if version < self._version:
                raise UsageError(f"the store is at version {self._version}; got {version}")
            self._version = version

    def end(self, rollout: Hashable) -> Pending[None]:
        """Pages that only this rollout used go next; whoever names rollouts ends them. Local."""
        return self._submit(lambda pending: self._end(pending, rollout))

    def clear(self) -> Pending[None]:
        """Drop every page of every tier. Local."""
        return self._submit(self._clear)

    def statistics(self) -> dict[str, TierStatistics]:
        """Counts for each tier, by its name; answers at once, from any thread."""
        return {level.tier.name: level.statistics() for level in self._levels}

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Finish what was asked for, then release the tiers. A second call does nothing.

        Raises:
            DeadlineError: the background thread did not finish.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the page store did not finish its work within {timeout_s} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Everything below runs on the background thread, `_submit` aside.

    def _submit(self, work: Callable[[Pending[Any]], None]) -> Pending[Any]:
        pending: Pending[Any] = Pending()
        with self._lock:
            if self._closed:
                raise ClosedError("the page store is closed")
            self._queue.put((pending, work))
        return pending

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, work = item
            try:
                work(pending)
            except Exception as error:  # handed to whoever waits
                pending.fail(error)
        for level in self._levels:
            level.tier.close()

    def _save(
        self, pending: Pending[Saved], key: PageKey, content: np.ndarray, slot: int, users: _Users
    ) -> None:
        try:
            self._forget(key)
            reason = self._place(0, key, content, checksum(key, content), users)
        finally:
            with self._lock:
                self._free.append(slot)
        pending.finish(Saved(not reason, reason))

    def _load(
        self, pending: Pending[Loaded], key: PageKey, into: np.ndarray, users: _Users
    ) -> None:
        for depth, level in enumerate(self._levels):
            content, digest = self._read(level, key)
            if content is None:
                continue
            level.ledger.touch(key, rollouts=users)
            page, extra = content[: self.page_bytes], content[self.page_bytes :].tobytes()
            pending.finish(
                Loaded(level.tier.name, unpack_attachments(extra)),
                before=partial(np.copyto, into, page),
            )
            if depth > 0:
                self._place(0, key, content, digest, level.ledger.rollouts(key))
            return
        pending.finish(Loaded(None))

    def _read(self, level: Level, key: PageKey) -> tuple[np.ndarray | None, bytes]:
        found = None
        try:
            found = level.tier.get(key, into=self._loading)
            if found is not None:
                content, digest = self._loading[: found[0]], found[1]
                if checksum(key, content) != digest:
                    raise CorruptionError(f"{key} does not match its checksum")
        except CorruptionError:
            level.counts["checksum_failures"] += 1
            level.drop(key)
            found = None
        except OSError:
            level.counts["failures"] += 1
            level.drop(key)
        if found is None:
            level.counts["misses"] += 1
            return None, b""
        level.counts["hits"] += 1
        level.counts["bytes_read"] += content.nbytes
        return content, digest

    def _place(
        self, depth: int, key: PageKey, content: np.ndarray, digest: bytes, users: _Users
    ) -> str:
        """Put a page into a tier; returns why it could not."""
        level = self._levels[depth]
        level.ledger.arrive(key)
        while len(level.tier) >= level.tier.capacity_pages:
            self._evict_one(depth)
        try:
            level.tier.put(key, content, digest)
        except (CapacityError, OSError) as error:
            level.counts["failures"] += 1
            return str(error)
        level.ledger.touch(key, rollouts=users, front=depth > 0)
        level.counts["stores"] += 1
        level.counts["bytes_written"] += content.nbytes
        return ""

    def _evict_one(self, depth: int) -> None:
        level = self._levels[depth]
        key, demote = level.ledger.victim(self._evict, version=self._version)
        below = self._levels[depth + 1] if depth + 1 < len(self._levels) else None
        if demote and below is not None and key not in below.tier:
            room = self._demoting[depth]
            found = level.tier.get(key, into=room)
            if found is not None:
                users = level.ledger.rollouts(key)
                self._place(depth + 1, key, room[: found[0]], found[1], users)
        level.evict(key)

    def _forget(self, key: PageKey) -> None:
        for level in self._levels:
            level.drop(key)

    def _end(self, pending: Pending[None], rollout: Hashable) -> None:
        for level in self._levels:
            level.ledger.end(rollout)
        pending.finish(None)

    def _clear(self, pending: Pending[None]) -> None:
        for level in self._levels:
            for key in tuple(level.tier.keys()):
                level.drop(key)
        pending.finish(None)

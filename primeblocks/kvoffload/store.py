"""`TieredStore`: a store of pages over several tiers.

A call changes the `Catalogue` under the lock. Copier threads and one worker per lower tier make the
moves that follow, and report them. The heads of three files draw the states: `moves.py` of a page
in host memory, `lower.py` of a tier that is full, slow or silent, `pending.py` of a result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import itemgetter
from threading import Condition
from time import monotonic
from typing import Any, Literal, Self
from weakref import WeakSet

from ..errors import ClosedError, DeadlineError, PlanError, UsageError, check_version
from .catalogue import Catalogue
from .copier import Copiers, Copies
from .evict import Evict, facts_of, lru
from .lower import Level, in_order
from .moves import CopyIn, CopyOut, LoadRequest, PageRead, SaveRequest, Write
from .page import PageKey
from .pending import Batch, Pending, finish_all, load_requests, queue_of, save_requests, users_of
from .tier import HostTier, Loaded, Saved, Tier, TierStatistics
from .worker import Holds, Outcome, TierWorker, Until

__all__ = ["TieredStore", "load_prefix"]

logger = logging.getLogger(__name__)

_MAX_PENDING = 1024  # pages that may wait for room in host memory; further saves are declined


class TieredStore:
    """Keeps pages in host memory and in slower tiers. Thread-safe.

    A page found in a lower tier is copied back to host memory. Calls return at once, and threads of
    the store copy and do I/O. A load sees every save that was called before it. The result of a
    save is ready once host memory has or declines the page. If all lower tiers refuse a page, as on
    a full disk, the page is lost when it leaves host memory. `statistics()` counts refused writes.

    Args:
        tiers: the tiers, fastest first. The first must be a `HostTier`. The store closes all tiers.
        evict: the eviction policy: `lru`, `VersionAware(...)` or `RolloutAware(...)`. Only policies
            that need `Facts.STATES`, such as `RolloutAware`, use `pause`, `resume` and `queue`.
        write: when to write a page to the tiers below: when the page leaves host memory ("back"),
            or at once ("through").
        copy_threads: how many threads copy between the caller's buffers and host memory.
        patience_s: how many seconds saves wait for a slow tier. After this time, pages may leave
            host memory without a write to this tier. Loads skip a tier that does not answer.
        clock: a function that returns seconds.

    Raises:
        UnsupportedError: the first tier is not a `HostTier` or a later tier is, two tiers have one
            name, or a shared tier is not the last.
        PlanError: sizes of the tiers differ, or `copy_threads`, `patience_s` or `write` is wrong.
        UsageError: the host tier belongs to another store, or `evict` is not a policy.
    """

    def __init__(
        self,
        tiers: Sequence[HostTier | Tier],
        *,
        evict: Evict = lru,
        write: Literal["back", "through"] = "back",
        copy_threads: int = 2,
        patience_s: float = 1.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        host, below = in_order(tiers)
        if copy_threads < 1 or patience_s <= 0:
            raise PlanError(f"{copy_threads=} must be at least 1, and {patience_s=} above 0.")
        if write not in ("back", "through"):
            raise PlanError(f'write must be "back" or "through"; got {write!r}')
        self.page_bytes, self.attachment_bytes = host.page_bytes, host.attachment_bytes
        self._host, self._pid, self._closed = host, os.getpid(), False
        facts_of(evict)  # Raises if `evict` is not a policy, before the store claims host memory.
        levels = [Level(tier, evict, patience_s=patience_s, clock=clock) for tier in below]
        host.claim()
        self._answers: list[tuple[Batch[Any], int, Saved | Loaded]] = []
        self._catalogue = Catalogue(
            frames=host.capacity_pages,
            levels=levels,
            evict=evict,
            max_pending=_MAX_PENDING,
            through=write == "through",
            answer=self._answer,
        )
        self._changed = Condition()
        self._error: ClosedError | None = None  # the store broke
        self._pending: WeakSet[Pending[Any]] = WeakSet()
        copied, moved = partial(self._change, self._copied), partial(self._change, self._moved)
        self._copiers = Copiers(host, threads=copy_threads, report=copied, broke=self._break)
        self._workers = [TierWorker(tier, host, report=moved, broke=self._break) for tier in below]

    def save(
        self,
        key: PageKey,
        page: Any,
        *,
        attachments: Mapping[str, bytes] | None = None,
        rollout: Hashable = None,
    ) -> Pending[Saved]:
        """Save a page. Local.

        Do not change `page` before the result is ready. The page replaces a page of the same key,
        except in a shared tier. If 1,024 pages wait for room, the result's `stored` is False. Such
        a declined save also drops the earlier page, except in a shared tier.

        Args:
            page: `page_bytes` bytes, as a contiguous tensor, array or buffer, or a list of them.
            attachments: bytes by name, which are saved and loaded with the page.
            rollout: a name of the rollout that will load the page. With `RolloutAware`, save the
                pages of a rollout from first to last.

        Raises:
            ShapeError: the page is not a buffer, or the page or its attachments have a wrong size.
            UnsupportedError: the page is neither in host memory nor on a CUDA device.
            UsageError: `key` is not a `PageKey`, `rollout` not hashable, or attachments not bytes.
            ClosedError: the store is closed.
        """
        batch = Batch[Saved](1, itemgetter(0))
        asked = save_requests(batch, [key], [page], [attachments], host=self._host, rollout=rollout)
        return self._ask(self._catalogue.save, asked, pending=batch.pending)

    def save_batch(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Any],
        *,
        attachments: Sequence[Mapping[str, bytes] | None] | None = None,
        rollout: Hashable = None,
    ) -> Pending[list[Saved]]:
        """Save pages as `save` does, with one result per page. Checks all pages before any save."""
        attachments = [None] * len(keys) if attachments is None else attachments
        batch = Batch[Saved](len(keys))
        requests = save_requests(batch, keys, pages, attachments, host=self._host, rollout=rollout)
        return self._ask(self._catalogue.save, requests, pending=batch.pending)

    def load(self, key: PageKey, *, into: Any, rollout: Hashable = None) -> Pending[Loaded]:
        """Copy a page into `into`, or report a miss. Local, unless a tier is on the network.

        Drops a damaged copy, and then tries lower tiers. A miss leaves `into` unchanged.

        Args:
            into: a writable buffer, of a type that `save` accepts. `rollout` is as in `save`.

        Raises:
            ShapeError: `into` has the wrong size or is read-only. Otherwise as `save`.
        """
        batch = Batch[Loaded](1, itemgetter(0))
        asked = load_requests(batch, [key], [into], host=self._host, rollout=rollout)
        return self._ask(self._catalogue.load, asked, pending=batch.pending)

    def load_batch(
        self, keys: Sequence[PageKey], *, into: Sequence[Any], rollout: Hashable = None
    ) -> Pending[list[Loaded]]:
        """Load several pages as `load` does, with one result for each page."""
        batch = Batch[Loaded](len(keys))
        requests = load_requests(batch, keys, into, host=self._host, rollout=rollout)
        return self._ask(self._catalogue.load, requests, pending=batch.pending)

    def __contains__(self, key: PageKey) -> bool:
        """Whether a load may hit, without shared tiers. Returns at once, from any thread."""
        return self._catalogue.knows(key)

    def holds(self, keys: Sequence[PageKey]) -> Pending[list[bool]]:
        """Return for each page whether a load may find it in any tier. May use the network."""
        batch = Batch[bool](len(keys))
        known = [key in self for key in keys]
        with self._changed:
            shared = any(e.shared and not e.breaker.silent() for e in self._catalogue.levels[-1:])
        asked = {index: keys[index] for index, here in enumerate(known) if shared and not here}
        question = Holds([*asked.values()], lambda has: batch.finish(zip(asked, has, strict=True)))
        give = partial(self._workers[-1].give, question) if asked else lambda: None
        self._ask(give, pending=batch.pending)
        batch.finish((index, here) for index, here in enumerate(known) if here or not shared)
        return batch.pending

    def advance(self, *, version: int) -> None:
        """Tell the store the current policy version, so that old pages can be evicted first. Local.

        Raises:
            UsageError: the version is older than the current version, or is not a policy version.
        """
        with self._changed:
            if (version := check_version(version)) < (now := self._catalogue.version):
                raise UsageError(f"the store is at version {now}; got {version}, which is older.")
            self._catalogue.version = version

    def pause(self, rollout: Hashable, reason: Hashable) -> None:
        """Report that a rollout waits for `reason`, one of a few names such as "pytest". Local."""
        users_of(rollout, reason)
        self._ask(self._catalogue.note, lambda ledger: ledger.pause(rollout, reason))

    def resume(self, rollout: Hashable) -> None:
        """Report that a rollout runs again, as its saves and loads do, unless it queues. Local."""
        users_of(rollout)
        self._ask(self._catalogue.note, lambda ledger: ledger.resume(rollout))

    def queue(self, rollouts: Sequence[Hashable]) -> None:
        """Report the whole queue, next rollout first. Queued rollouts that it omits run. Local."""
        names = queue_of(rollouts)
        self._ask(self._catalogue.note, lambda ledger: ledger.queue(names))

    def end(self, rollout: Hashable) -> None:
        """Report that a rollout has ended, so that its pages may be evicted first. Local."""
        users_of(rollout)
        self._ask(self._catalogue.end, rollout)

    def clear(self) -> Pending[None]:
        """Drop every page, in a shared tier also the pages of other engines. Forget the version.

        If a tier fails, its pages may return when you reopen it. Local, except for a shared tier.
        """
        return self._after(self._catalogue.clear)

    def flush(self) -> Pending[None]:
        """Write pages that are only in host memory to lower tiers, and make them durable.

        Without a lower tier, `flush` does nothing. Pages whose save is still running are left out.
        An error means that a tier refused a page or did not have room for it. A later `flush` tries
        the refused page again. Local, except for a shared tier.
        """
        return self._after(self._catalogue.write_down, flush=True)

    def statistics(self) -> dict[str, TierStatistics]:
        """Return the counts of each tier by its name."""
        with self._changed:
            return self._catalogue.statistics()

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Finish the calls made so far, then release the tiers. A second call does nothing.

        Pages that are only in host memory are lost, unless you call `flush` before `close`.

        Raises:
            DeadlineError: the store's threads did not finish in time.
        """
        if os.getpid() != self._pid:  # A forked child has no threads, and a lock may be held.
            return
        end = monotonic() + timeout_s
        late = DeadlineError(f"the page store did not finish its work within {timeout_s} s")
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: self._error or self._catalogue.idle(), timeout_s):
                raise late
        for thread in [*self._copiers.stop(), *(worker.stop() for worker in self._workers)]:
            thread.join(max(0.0, end - monotonic()))
            if thread.is_alive():
                raise late
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _after(self, what: Callable[[], Exception | None], *, flush: bool = False) -> Pending[None]:
        """Do `what`, and finish when every lower tier has done all moves given to it so far."""
        batch = Batch[None](len(self._workers), lambda results: None)
        return self._ask(self._give_markers, batch, what, flush, pending=batch.pending)

    def _give_markers(
        self, batch: Batch[None], what: Callable[[], Exception | None], flush: bool
    ) -> None:
        before = [level.refusals if flush else None for level in self._catalogue.levels]
        missing = what()
        self._give_moves()
        for depth, worker in enumerate(self._workers):
            done = partial(self._pass_marker, batch, depth, before[depth], missing)
            worker.give(Until(done, flush=flush))

    def _pass_marker(
        self,
        batch: Batch[None],
        depth: int,
        refusals: int | None,
        missing: Exception | None,
        error: BaseException | None,
    ) -> None:
        level = self._catalogue.levels[depth]
        if refusals is not None and level.refusals > refusals:
            error = level.refusal
        if error is not None and not level.shared:  # another flush writes again what it lost
            with self._changed:
                here = {key: copy for key, copy in level.copies.items() if copy.here}
            lost = self._workers[depth].lacks(list(here))  # without the lock: a tier may hang
            with self._changed:
                level.lose({key: here[key] for key in lost})
        if (error := error or missing) is not None:
            batch.pending.fail(error)
        batch.finish([(depth, None)])

    def _ask(self, do: Callable[..., object], *of: Any, pending: Pending[Any] | None = None) -> Any:
        if os.getpid() != self._pid:
            raise ClosedError("the page store belongs to the parent process. Make a new one.")
        with self._changed:
            if self._closed:
                raise ClosedError("the page store is closed. Make a new page store.")
            if pending is not None:
                self._pending.add(pending)
            self._change(do, *of)
            if self._error is not None:
                raise self._error
        return pending

    def _change(self, what: Callable[..., object], *of: Any) -> None:
        with self._changed:
            if self._error is None:
                try:
                    what(*of)
                    self._give_moves()
                except BaseException as error:
                    self._break(error)
            answers, self._answers = self._answers, []
            if self._closed:
                self._changed.notify_all()
            finish_all(answers)

    def _answer(self, request: SaveRequest | LoadRequest, outcome: Saved | None) -> None:
        self._answers.append((request.batch, request.index, outcome or Loaded(None)))

    def _break(self, error: BaseException) -> None:
        """Leave the catalogue, which may be half changed, and fail all waiting calls."""
        logger.critical("the page store broke", exc_info=error)
        with self._changed:
            self._error = ClosedError(
                f"the page store broke: {error!r}. Close it, and make a new page store."
            )
            self._error.__cause__ = error
            self._changed.notify_all()
            for pending in list(self._pending):
                pending.fail(self._error)

    def _give_moves(self) -> None:
        while moves := self._catalogue.take():
            copies: list[CopyIn | CopyOut] = []
            below: list[list[Any]] = [[] for _ in self._workers]
            for move in moves:
                if isinstance(move, (CopyIn, CopyOut)):
                    copies.append(move)
                else:
                    below[move.depth].append(move)
            self._copiers.give(copies)
            for worker, given in zip(self._workers, below, strict=True):
                self._moved(worker.give(*given))

    def _copied(self, done: list[tuple[Copies, bool]]) -> None:
        for copies, copied in done:
            for copy in copies:
                if isinstance(copy, CopyIn):
                    self._catalogue.copied_in(copy, copied=copied)
                else:
                    self._catalogue.copied_out(copy)
        if not done:
            self._catalogue.settle()

    def _moved(self, outcomes: list[Outcome]) -> None:
        for move, answer in outcomes:
            error = answer if isinstance(answer, Exception) else None
            if isinstance(move, Write):
                self._catalogue.written(move, error)
            elif isinstance(move, PageRead):
                length = answer if isinstance(answer, int) else 0
                self._catalogue.read(move, length=length, error=error)
            else:
                self._catalogue.asked(move, held=answer is True)


def load_prefix(
    store: TieredStore,
    keys: Sequence[PageKey],
    *,
    into: Sequence[Any],
    timeout_s: float,
    rollout: Hashable = None,
) -> list[Loaded]:
    """Load the pages of a prompt up to the first missing page, and wait for them.

    The result has one entry per loaded page, and ends before a damaged page. Buffers of later pages
    may have been written. For eviction, pages in host memory are used in the order of `keys`.

    Args:
        keys: the keys of the prompt's pages, in order. `page_hashes` computes their hashes.
        into: a buffer for each page. Buffers and `rollout` are as in `TieredStore.load`.

    Raises:
        DeadlineError: the pages were not ready within `timeout_s`. The store stops using `into`.
    """
    end = monotonic() + timeout_s
    lead = sum(takewhile(bool, store.holds(keys).wait(timeout_s=timeout_s)))
    pending = store.load_batch(keys[:lead], into=into[:lead], rollout=rollout)
    return list(takewhile(bool, pending.wait(timeout_s=max(0.0, end - monotonic()))))

"""Batches of pages moved for a caller that must not wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from ..errors import ClosedError, DeadlineError
from .page import PageKey
from .tiers import TieredStore

__all__ = ["Job", "PageJobs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A batch that is over.

    Args:
        id: the caller's number.
        succeeded: for each page, in order, whether it was saved or loaded.
        seconds: time from the start of the batch to its end.
    """

    id: int
    succeeded: tuple[bool, ...]
    seconds: float


class PageJobs:
    """Saves and loads batches on a thread; the caller polls `finished`.

    For an engine's scheduler: no call waits for memory copies, checksums or disks, `drain`
    and `close` aside. The pages of a batch belong to it until it is finished.

    Args:
        store: where the pages go. The caller closes it, after `close`.
        page_timeout_s: a page that takes longer counts as failed.
    """

    def __init__(self, store: TieredStore, *, page_timeout_s: float) -> None:
        self._store = store
        self._page_timeout_s = page_timeout_s
        self._changed = Condition()
        self._running = 0
        self._finished: list[Job] = []
        self._closed = False
        self._queue: SimpleQueue[tuple[int, int, Callable[[], list[bool]]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="primeblocks-kvoffload-jobs", daemon=True)
        self._thread.start()

    def save(self, job_id: int, keys: Sequence[PageKey], pages: Sequence[Any]) -> None:
        """Start saving a batch; pages that the store has already count as saved."""

        def work() -> list[bool]:
            return [self._save_one(key, page) for key, page in zip(keys, pages, strict=True)]

        self._submit(job_id, len(keys), work)

    def load(self, job_id: int, keys: Sequence[PageKey], pages: Sequence[Any]) -> None:
        """Start loading a batch into `pages`; a miss leaves its page as it was."""

        def work() -> list[bool]:
            started = [
                self._store.load(key, into=page) for key, page in zip(keys, pages, strict=True)
            ]
            return [self._arrived(pending) for pending in started]

        self._submit(job_id, len(keys), work)

    def finished(self) -> list[Job]:
        """The batches that ended since the last call; answers at once."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def drain(self, *, timeout_s: float) -> None:
        """Wait until no batch is on its way.

        Raises:
            DeadlineError: some still are.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._running == 0, timeout_s):
                raise DeadlineError(f"{self._running} batches not finished within {timeout_s} s")

    def close(self, *, timeout_s: float) -> None:
        """Finish the batches and end the thread. A second call does nothing.

        Raises:
            DeadlineError: some are still on their way.
        """
        with self._changed:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"{self._running} batches not finished within {timeout_s} s")

    def _submit(self, job_id: int, count: int, work: Callable[[], list[bool]]) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError("page jobs are closed")
            self._running += 1
            self._queue.put((job_id, count, work))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job_id, count, work = item
            start = time.monotonic()
            try:
                succeeded = work()
            except Exception:
                # A batch that never ends would hang the engine; one that failed is computed again.
                logger.exception("a batch of %d pages failed", count)
                succeeded = [False] * count
            job = Job(job_id, tuple(succeeded), time.monotonic() - start)
            with self._changed:
                self._finished.append(job)
                self._running -= 1
                self._changed.notify_all()

    def _save_one(self, key: PageKey, page: Any) -> bool:
        if key in self._store:
            return True
        try:
            return self._store.save(key, page).wait(timeout_s=self._page_timeout_s).stored
        except DeadlineError:
            return False

    def _arrived(self, pending: Any) -> bool:
        try:
            return bool(pending.wait(timeout_s=self._page_timeout_s))
        except DeadlineError:
            return False

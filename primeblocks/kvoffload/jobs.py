"""Batches of pages, moved for a scheduler that must not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PrimeblocksError
from .page import PageKey
from .pending import Pending
from .store import TieredStore
from .tier import Loaded, Saved

__all__ = ["Job", "PageJobs"]

_SAVED = Saved(stored=True)


@dataclass(frozen=True)
class Job:
    """A batch that is over.

    Args:
        id: the caller's number of the batch.
        of: the value that the caller passed as `of`.
        succeeded: for each page, in order, whether it was saved or loaded.
        attachments: for each page, the attachments loaded with it. Empty for a save.
        seconds: the time from the start of the batch to its end.
    """

    id: int
    of: Any
    succeeded: tuple[bool, ...]
    attachments: tuple[Mapping[str, bytes], ...]
    seconds: float


class PageJobs:
    """The batches in flight of an engine's scheduler. Not thread-safe.

    Only `rest` and `drain` wait for memory or disks. Do not use the buffers of a batch until the
    batch is over or its deadline has passed. At the deadline, all its pages count as failed.

    Args:
        store: the store to save to and load from.
        timeout_s: how long a batch may take.
        clock: returns seconds.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._clock = clock
        self._running: dict[int, _Running] = {}

    def save(
        self,
        job_id: int,
        keys: Sequence[PageKey],
        pages: Sequence[Any],
        *,
        attachments: Sequence[Mapping[str, bytes] | None],
        rollout: Hashable = None,
        of: Any = None,
    ) -> None:
        """Start to save a batch. Pages that the store already has count as saved."""
        new = [index for index, key in enumerate(keys) if key not in self._store]
        pending = self._store.save_batch(
            [keys[index] for index in new],
            [pages[index] for index in new],
            attachments=[attachments[index] for index in new],
            rollout=rollout,
        )
        self._running[job_id] = _Running(of, len(keys), new, pending, self._clock())

    def load(
        self,
        job_id: int,
        keys: Sequence[PageKey],
        into: Sequence[Any],
        *,
        rollout: Hashable = None,
        of: Any = None,
    ) -> None:
        """Start to load a batch. A miss leaves its buffer unchanged."""
        pending = self._store.load_batch(keys, into=into, rollout=rollout)
        pages = range(len(keys))
        self._running[job_id] = _Running(of, len(keys), pages, pending, self._clock())

    def finished(self) -> list[Job]:
        """Return the batches that ended since the last call. Never waits."""
        now = self._clock()
        over = [
            job_id
            for job_id, each in self._running.items()
            if each.pending.done() or now >= each.started_s + self._timeout_s
        ]
        return [self._finish(job_id) for job_id in over]

    def running(self) -> Iterator[tuple[int, Any]]:
        """Return the number and the `of` of each batch in flight."""
        return ((job_id, each.of) for job_id, each in self._running.items())

    def rest(self, job_id: int, *, at_most_s: float) -> None:
        """Wait until a batch is over, for at most `at_most_s`. It stays in flight."""
        if (job := self._running.get(job_id)) is not None:
            job.pending.done(within_s=at_most_s)

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every batch is over, and give up the batches that take longer."""
        end = self._clock() + timeout_s
        for job in self._running.values():
            if not job.pending.done(within_s=max(0.0, end - self._clock())):
                job.pending.cancel()
            if job.ended_s is None:  # `finished` reports the batch.
                job.ended_s = self._clock()

    def _finish(self, job_id: int) -> Job:
        job = self._running.pop(job_id)
        outcomes: list[Saved | Loaded] = [_SAVED] * job.pages
        try:
            answers = job.pending.wait(timeout_s=0.0)
        except PrimeblocksError:  # given up, or the store is closed
            answers = [Loaded(None)] * len(job.moved)
        for index, outcome in zip(job.moved, answers, strict=True):
            outcomes[index] = outcome
        return Job(
            job_id,
            job.of,
            tuple(each.stored if isinstance(each, Saved) else bool(each) for each in outcomes),
            tuple({} if isinstance(each, Saved) else each.attachments for each in outcomes),
            (self._clock() if job.ended_s is None else job.ended_s) - job.started_s,
        )


@dataclass
class _Running:
    of: Any
    pages: int
    moved: Sequence[int]
    pending: Pending[Any]
    started_s: float
    ended_s: float | None = None  # where a drain saw its end

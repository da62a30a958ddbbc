"""Pages that a caller handed over, as requests, and their result, which is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...errors import CancelledError, DeadlineError, ShapeError, UsageError
from ..host import HostTier
from ..page import PageKey, pack_attachments
from ..tier import Loaded, Saved
from .copier import page_parts
from .moves import LoadRequest, SaveRequest

__all__ = [
    "Barrier",
    "Batch",
    "Pending",
    "finish_all",
    "load_requests",
    "same_length",
    "save_requests",
    "users_of",
]

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a `save` or `load` in progress: ask `done()`, `wait`, `await`, or `cancel`.

    A wait that ends at its deadline gives the operation up, as `cancel` does and as cancelling a
    task that awaits it does: afterwards the caller's buffers are neither read nor written any more.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._finished = False
        self._given_up = False
        self._busy = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], object]] = []

    def done(self, *, within_s: float = 0.0) -> bool:
        """Whether `wait` would return, or raise, at once; sleeps until then, at most so long."""
        if within_s and not self._finished:
            with self._changed:
                self._changed.wait_for(lambda: self._finished, within_s)
        return self._finished

    def wait(self, *, timeout_s: float) -> T:
        """Wait for the result and return it.

        Raises:
            DeadlineError: not ready within `timeout_s`; the operation is given up.
            CancelledError: the operation was cancelled.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._finished, timeout_s):
                self._give_up(DeadlineError(f"the page store took longer than {timeout_s} s"))
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an asyncio task, without a thread; `asyncio.timeout` sets a deadline."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop ended before this operation did
                loop.call_soon_threadsafe(over.set)

        with self._changed:
            self._then.append(wake)
            if self._finished:
                wake()
        try:
            yield from over.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait(timeout_s=0)

    def cancel(self) -> bool:
        """Give the operation up; return false if it was over. Pages that moved stay moved."""
        with self._changed:
            if self._finished:
                return False
            self._give_up(CancelledError("the caller cancelled this operation"))
            return True

    @contextmanager
    def buffers(self) -> Iterator[bool]:
        """Hold the caller's buffers for a copy; yield false if the operation was given up."""
        with self._changed:
            held = not self._given_up
            self._busy += held
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def finish(self, result: T) -> None:
        """Hand the result over; do nothing if the operation was given up."""
        with self._changed:
            if not self._finished:
                self._result = result
                self._end()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`, once no other page of the batch is being copied."""
        with self._changed:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Give up once no copy is under way; each lasts as long as copying 16 MiB in memory."""
        self._given_up = True
        self._changed.wait_for(lambda: self._busy == 0)
        if not self._finished:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._finished = True
        self._changed.notify_all()
        for wake in self._then:
            wake()


class Batch(Generic[T]):
    """Pages that a caller handed over together: `pending` is over when each of them is.

    Args:
        result: makes the result of the batch from those of its pages.

    Attributes:
        parts: for each page, its bytes where they lie: one part, or several in a row.
        extras: packed attachments, by page; they follow it in its frame.
        fences: copies on a device wait for this work, which the caller gave to it before.
    """

    def __init__(self, pages: int, result: Callable[[list[T]], Any] = list) -> None:
        self.pending: Pending[Any] = Pending()
        self.parts: Sequence[Any] = ()
        self.extras: dict[int, bytes] = {}
        self.fences: dict[Any, Any] = {}
        self._lock = Lock()
        self._result = result
        self._results: list[T | None] = [None] * pages
        self._missing = pages
        if not pages:
            self.pending.finish(result([]))

    def finish(self, results: Iterable[tuple[int, T]]) -> None:
        """Set the results of pages, by their index; call once for each page."""
        over = False
        with self._lock:
            for index, result in results:
                self._results[index] = result
                self._missing -= 1
                over = self._missing == 0
        if over:
            self.pending.finish(self._result(self._results))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Barrier:
    """A flush or a clear that the lower tiers have not all done yet.

    Args:
        batch: has one page for each lower tier.
        refusals: of each lower tier, when the order was given.
        missing: why a page is written to no tier.
    """

    batch: Batch[None]
    flush: bool
    refusals: Sequence[int]
    missing: Exception | None


def finish_all(results: Iterable[tuple[Batch[Any], int, Any]]) -> None:
    """Set the results of pages of several batches."""
    by_batch: dict[Batch[Any], list[tuple[int, Any]]] = {}
    for batch, index, result in results:
        by_batch.setdefault(batch, []).append((index, result))
    for batch, each in by_batch.items():
        batch.finish(each)


def save_requests(
    batch: Batch[Saved],
    keys: Sequence[PageKey],
    pages: Sequence[Any],
    attachments: Sequence[Mapping[str, bytes] | None],
    *,
    host: HostTier,
    rollout: Hashable,
) -> list[SaveRequest]:
    """Make one save request for each page.

    Raises:
        ShapeError: a page or its packed attachments have the wrong size.
        UnsupportedError: a page is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    _refer(batch, keys, pages, page_bytes=host.page_bytes, writable=False)
    for index, named in enumerate(attachments):
        if named:
            extra = batch.extras[index] = pack_attachments(named)
            if len(extra) > (room := host.attachment_bytes):
                raise ShapeError(
                    f"the packed attachments have {len(extra)} bytes; the tiers keep {room}. "
                    f"Make them with attachment_bytes={len(extra)} or more."
                )
    return [
        SaveRequest(key, host.page_bytes + len(batch.extras.get(index, b"")), users, batch, index)
        for index, key in enumerate(keys)
    ]


def load_requests(
    batch: Batch[Loaded],
    keys: Sequence[PageKey],
    into: Sequence[Any],
    *,
    host: HostTier,
    rollout: Hashable,
) -> list[LoadRequest]:
    """Make one load request for each page.

    Raises:
        ShapeError: a buffer has the wrong size or is read-only.
        UnsupportedError: a buffer is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    _refer(batch, keys, into, page_bytes=host.page_bytes, writable=True)
    return [LoadRequest(key, users, batch, index) for index, key in enumerate(keys)]


def _refer(
    batch: Batch[Any],
    keys: Sequence[PageKey],
    pages: Sequence[Any],
    *,
    page_bytes: int,
    writable: bool,
) -> None:
    for key in keys:
        if not isinstance(key, PageKey):
            raise UsageError(f"a page is named by a PageKey; got {key!r}")
    batch.parts = [page_parts(page, page_bytes=page_bytes, writable=writable) for page in pages]
    batch.fences = {
        part.device: torch.cuda.current_stream(part.device).record_event()
        for parts in batch.parts
        for part in (parts if isinstance(parts, list) else (parts,))
        if isinstance(part, Tensor) and part.is_cuda
    }


def users_of(*names: Hashable) -> tuple[Hashable, ...]:
    """Return the names that are not None; raise `UsageError` for one that is not hashable."""
    for name in names:
        try:
            hash(name)
        except TypeError as error:
            raise UsageError(
                f"rollouts, and what they wait for, have names that can be hashed, such as text; "
                f"got {name!r}"
            ) from error
    return tuple(name for name in names if name is not None)


def same_length(**sequences: Sequence[Any]) -> None:
    """Raise `ShapeError` unless a batch has one of each for every page."""
    lengths = {name: len(each) for name, each in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise ShapeError(f"a batch has one of each for every page; got {lengths}")

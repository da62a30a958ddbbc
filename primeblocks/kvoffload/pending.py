"""The requests of a batch of pages, and its `Pending` result.

A `Pending` is in one of three states:

- RUNNING: copies from and to the caller's buffers may begin.
- GIVEN_UP: further copies do not begin. A running copy ends within the time of copying 16 MiB.
- OVER: the result or the error is ready. The store does not use the caller's buffers any more.

RUNNING becomes OVER when every page of the batch has its result. RUNNING becomes GIVEN_UP at a
deadline, by `cancel`, or after an error of one page. GIVEN_UP becomes OVER when all running copies
have ended. If these were the last copies of the batch, the result may come instead of the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from threading import TIMEOUT_MAX, Condition, Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import (
    CancelledError,
    DeadlineError,
    ShapeError,
    UnsupportedError,
    UsageError,
    shown,
)
from .moves import LoadRequest, SaveRequest
from .page import PageKey, pack_attachments
from .tier import HostTier, Loaded, Saved

__all__ = [
    "Batch",
    "Parts",
    "Pending",
    "PendingState",
    "finish_all",
    "load_requests",
    "page_parts",
    "queue_of",
    "save_requests",
    "users_of",
]

T = TypeVar("T")
Part = Tensor | np.ndarray  # an array where it is read-only
Parts = Part | list[Part]


class PendingState(Enum):
    """The head of this file explains the states."""

    RUNNING = auto()
    GIVEN_UP = auto()
    OVER = auto()


class Pending(Generic[T]):
    """The result of a `save` or `load` in progress. Use `done()`, `wait`, `await` or `cancel`.

    The operation is given up after an error, at the deadline of `wait`, by `cancel`, or when a task
    that awaits it is cancelled. Once `wait` has raised an error or `cancel` has returned, the store
    does not use the caller's buffers.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._state = PendingState.RUNNING
        self._busy = 0  # copies under way
        self._result: T | None = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Pending: {self._state.name.lower()}>"

    def __bool__(self) -> bool:
        raise UsageError(f"{self} has no truth value. Test the result of .wait(timeout_s=...).")

    def done(self, *, within_s: float = 0.0) -> bool:
        """Whether `wait` would return or raise at once. Waits at most `within_s` seconds."""
        if within_s and not self._is_over():
            with self._changed:
                self._changed.wait_for(self._is_over, min(within_s, TIMEOUT_MAX))
        return self._is_over()

    def wait(self, *, timeout_s: float) -> T:
        """Wait for the result and return it.

        Raises:
            DeadlineError: the result was not ready within `timeout_s`. The operation is given up.
            CancelledError: the operation was cancelled.
            ClosedError: the store failed.
            CapacityError, CorruptionError, OSError: a tier failed in `flush` or `clear`.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_over, min(timeout_s, TIMEOUT_MAX)):
                self._give_up(
                    DeadlineError(
                        f"the page store took longer than {timeout_s} s. Pass a longer timeout_s."
                    )
                )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an asyncio task, without a thread. `asyncio.timeout` sets a deadline."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop ended before this operation did
                loop.call_soon_threadsafe(over.set)

        with self._changed:
            self._then.append(wake)
            if self._is_over():
                wake()
        try:
            yield from over.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait(timeout_s=0)

    def cancel(self) -> bool:
        """Give up the operation, or return False if the operation was already over.

        Pages that were already moved are not moved back.
        """
        with self._changed:
            if self._is_over():
                return False
            self._give_up(CancelledError("the caller cancelled this operation"))
            return True

    @contextmanager
    def buffers(self) -> Iterator[bool]:
        """Use the caller's buffers for a copy. Yields False if the operation was given up."""
        with self._changed:
            held = self._state is PendingState.RUNNING
            self._busy += held
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def finish(self, result: T) -> None:
        with self._changed:
            if not self._is_over():
                self._result = result
                self._end()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`, after the running copies of the batch have ended."""
        with self._changed:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self._is_over():
            self._state = PendingState.GIVEN_UP
        self._changed.wait_for(lambda: self._busy == 0)
        if not self._is_over():
            self._error = error
            self._end()

    def _is_over(self) -> bool:
        return self._state is PendingState.OVER

    def _end(self) -> None:
        self._state = PendingState.OVER
        self._changed.notify_all()
        for wake in self._then:
            wake()


class Batch(Generic[T]):
    """The pages of one call. `pending` is over when all pages have their results.

    Args:
        pages: the number of pages.
        result: makes the result of the batch from the results of its pages.

    Attributes:
        parts: for each page, the buffer with its bytes, or a list of buffers.
        extras: packed attachments by page. They follow the page in its frame.
        fences: device work that the caller submitted earlier. Copies on a device wait for it.
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
        """Set the results of pages by their index, once for each page."""
        over = False
        with self._lock:
            for index, result in results:
                self._results[index] = result
                self._missing -= 1
                over = self._missing == 0
        if over:
            self.pending.finish(self._result(self._results))  # type: ignore[arg-type]


def finish_all(results: Iterable[tuple[Batch[Any], int, Any]]) -> None:
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
    """Make one save request for each page. Raises the errors of `TieredStore.save`."""
    users = users_of(rollout)
    _same_length(keys=keys, pages=pages, attachments=attachments)
    _refer(batch, keys, pages, page_bytes=host.page_bytes, writable=False)
    for index, named in enumerate(attachments):
        if named:
            extra = batch.extras[index] = pack_attachments(named)
            if len(extra) > (room := host.attachment_bytes):
                raise ShapeError(
                    f"the packed attachments have {len(extra)} bytes, but the tiers keep at most "
                    f"{room}. Make tiers with attachment_bytes={len(extra)} or more."
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
    """Make one load request for each page. Raises the errors of `TieredStore.load`."""
    users = users_of(rollout)
    _same_length(keys=keys, into=into)
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
            raise UsageError(f"a key must be a PageKey; got {key!r}")
    batch.parts = [page_parts(page, page_bytes=page_bytes, writable=writable) for page in pages]
    devices = {
        part.device
        for parts in batch.parts
        for part in (parts if isinstance(parts, list) else (parts,))
        if isinstance(part, Tensor) and part.is_cuda
    }
    batch.fences = {each: torch.cuda.current_stream(each).record_event() for each in devices}


def page_parts(page: Any, *, page_bytes: int, writable: bool) -> Parts:
    """Return flat views of the bytes of a page, without a copy. A list is a page in parts."""
    parts: Parts
    if isinstance(page, list | tuple):
        parts = [each for part in page if (each := _bytes_of(part, writable=writable)).nbytes]
        size = sum(part.nbytes for part in parts)
    else:
        parts = _bytes_of(page, writable=writable)
        size = parts.nbytes
    if size != page_bytes:
        raise ShapeError(f"a page of this store has {page_bytes} bytes; got {size} bytes.")
    return parts


def _bytes_of(part: Any, *, writable: bool) -> Part:
    if isinstance(part, np.ndarray) and part.dtype.hasobject:
        raise UnsupportedError(
            f"a page must be bytes; got an array of {part.dtype}, which contains references. Pass "
            "a numeric dtype."
        )
    if isinstance(part, np.ndarray) and part.flags.c_contiguous and part.flags.writeable:
        flat = part if part.dtype == np.uint8 and part.ndim == 1 else part.reshape(-1).view("u1")
        return torch.from_numpy(flat)
    if isinstance(part, Tensor):
        if not (part.is_cpu or part.is_cuda):
            raise UnsupportedError(
                f"pages must be in host memory or on CUDA devices; got a tensor on {part.device}. "
                "Copy it with .cpu(), or let the engine's own worker copy."
            )
        if not part.is_contiguous():
            raise ShapeError(
                f"a page must be contiguous; got strides {part.stride()}. Pass its contiguous "
                "pieces as a list."
            )
        if part.dtype is torch.uint8 and part.stride() == (1,):
            return part
        return part.detach().as_strided((part.numel(),), (1,)).view(torch.uint8)
    try:
        raw = memoryview(part)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"a page must be a tensor, an array or a buffer of bytes; got {shown(part)}: {error}."
        ) from error
    if not raw.c_contiguous:
        raise ShapeError(
            f"a page must be contiguous; got strides {raw.strides}. Pass its contiguous pieces as "
            "a list."
        )
    if writable and raw.readonly:
        raise ShapeError("a page must be loaded into a writable buffer; got a read-only buffer")
    if raw.readonly or not raw.nbytes:  # torch refers to neither
        return np.frombuffer(raw, dtype=np.uint8)
    return torch.frombuffer(raw, dtype=torch.uint8)


def users_of(*names: Hashable) -> tuple[Hashable, ...]:
    """Return the names that are not None. UsageError: a name is not hashable."""
    for name in names:
        try:
            hash(name)
        except TypeError as error:
            raise UsageError(
                "the name of a rollout, or of the reason that it waits for, must be hashable, such "
                f"as text; got {name!r}"
            ) from error
    return tuple(name for name in names if name is not None)


def queue_of(rollouts: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Return the names in a queue. UsageError: `rollouts` is text, or a name is not hashable."""
    if isinstance(rollouts, str):
        raise UsageError(f"a queue is a list of names; got {rollouts!r}. Pass [{rollouts!r}].")
    return users_of(*rollouts)


def _same_length(**sequences: Sequence[Any]) -> None:
    lengths = {name: len(each) for name, each in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise ShapeError(
            f"a batch needs one entry per page in each argument; got lengths {lengths}."
        )

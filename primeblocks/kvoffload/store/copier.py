"""Threads that copy between the callers' buffers and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np

from ..attachments import unpack_attachments
from ..host import HostTier
from ..tier import Loaded, Saved
from .batch import Batch
from .buffers import Pieces
from .moves import CopyIn, CopyOut

__all__ = ["Copied", "Copiers", "Source", "Target"]

Copied = CopyIn | CopyOut

_TOGETHER = 8
_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a page, and the packed attachments that follow it in its frame."""

    batch: Batch[Saved]
    index: int
    pieces: Pieces
    extra: bytes

    def copy(self, frame: np.ndarray) -> bool:
        """Fill the frame; return false if the caller gave up."""
        with self.batch.pending.buffers() as held:
            if held:
                self.pieces.gather(frame)
        end = self.pieces.nbytes
        frame[end : end + len(self.extra)] = np.frombuffer(self.extra, dtype=np.uint8)
        return held


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a page."""

    batch: Batch[Loaded]
    index: int
    pieces: Pieces

    def copy(self, frame: np.ndarray) -> None:
        with self.batch.pending.buffers() as held:
            if held:
                self.pieces.scatter(frame)

    def finish(self, tier: str | None, attachments: Mapping[str, bytes]) -> None:
        self.batch.finish(self.index, Loaded(tier, attachments))


class Copiers:
    """A few threads that make copies in order of arrival.

    Args:
        report: called with finished moves, and whether a page was copied; while idle, with none,
            ten times a second.
        broke: called with an error that ended a thread.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        threads: int,
        report: Callable[[list[tuple[Copied, bool]]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._report = report
        self._broke = broke
        self._queue: SimpleQueue[Copied | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"primeblocks-kvoffload-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, move: Copied) -> None:
        self._queue.put(move)

    def stop(self) -> list[Thread]:
        """End after the copies given so far; return the threads to be joined."""
        for _ in self._threads:
            self._queue.put(None)
        return self._threads

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._broke(error)

    def _wait(self) -> Copied | None:
        while True:
            try:
                return self._queue.get(timeout=_TICK_S)
            except Empty:
                self._report([])

    def _serve(self) -> None:
        # Several are reported together: after a page has gone through the processor's caches, the
        # store's bookkeeping is slow the first time.
        done: list[tuple[Copied, bool]] = []
        while True:
            try:
                move = self._queue.get_nowait()  # For that reason without a timeout.
            except Empty:
                move = self._wait()
            if move is None:
                break
            frame = self._host.frame(move.page.frame)
            if isinstance(move, CopyIn):
                done.append((move, self._take(move.request.source, frame)))
            else:
                self._give(move, frame)
                done.append((move, True))
            if len(done) >= _TOGETHER or self._queue.empty():
                self._report(done)
                done = []
        if done:
            self._report(done)

    def _take(self, source: Source, frame: np.ndarray) -> bool:
        try:
            return source.copy(frame)
        except Exception as error:  # handed to the waiting caller
            source.batch.pending.fail(error)
            return False

    def _give(self, move: CopyOut, frame: np.ndarray) -> None:
        target: Target = move.request.target
        try:
            target.copy(frame)
            packed = frame[self._host.page_bytes : move.page.length].tobytes()
            target.finish(move.request.tier, unpack_attachments(packed))
        except Exception as error:  # handed to the waiting caller
            target.batch.pending.fail(error)

"""Threads that copy between the callers' buffers and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import numpy as np

from .attachments import unpack_attachments
from .batch import Batch
from .buffers import Pieces
from .host import HostTier
from .moves import CopyIn, CopyOut
from .tier import Loaded, Saved

__all__ = ["Copiers", "Source", "Target"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a page comes from, and the packed attachments that follow it in its slot."""

    batch: Batch[Saved]
    index: int
    pieces: Pieces
    extra: bytes

    def copy(self, slot: np.ndarray) -> bool:
        """Fill the slot; false if the caller gave up."""
        with self.batch.pending.buffers() as held:
            if held:
                self.pieces.gather(slot)
        end = self.pieces.nbytes
        slot[end : end + len(self.extra)] = np.frombuffer(self.extra, dtype=np.uint8)
        return held


@dataclass(frozen=True, slots=True)
class Target:
    """Where a page goes."""

    batch: Batch[Loaded]
    index: int
    pieces: Pieces

    def copy(self, slot: np.ndarray) -> None:
        with self.batch.pending.buffers() as held:
            if held:
                self.pieces.scatter(slot)

    def finish(self, tier: str | None, attachments: Mapping[str, bytes]) -> None:
        self.batch.finish(self.index, Loaded(tier, attachments))


class Copiers:
    """A few threads that take copies in the order of their coming."""

    def __init__(
        self,
        host: HostTier,
        *,
        threads: int,
        copied_in: Callable[[CopyIn, bool], None],
        copied_out: Callable[[CopyOut], None],
    ) -> None:
        self._host = host
        self._copied_in = copied_in
        self._copied_out = copied_out
        self._queue: SimpleQueue[CopyIn | CopyOut | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"primeblocks-kvoffload-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, move: CopyIn | CopyOut) -> None:
        self._queue.put(move)

    def stop(self) -> list[Thread]:
        """End after what was given; returns the threads to be joined."""
        for _ in self._threads:
            self._queue.put(None)
        return self._threads

    def _run(self) -> None:
        while (move := self._queue.get()) is not None:
            slot = self._host.slot(move.page.slot)
            if isinstance(move, CopyIn):
                self._copied_in(move, self._take(move.request.source, slot))
            else:
                self._give(move, slot)
                self._copied_out(move)

    def _take(self, source: Source, slot: np.ndarray) -> bool:
        try:
            return source.copy(slot)
        except Exception as error:  # handed to whoever waits
            source.batch.pending.fail(error)
            return False

    def _give(self, move: CopyOut, slot: np.ndarray) -> None:
        target: Target = move.request.target
        try:
            target.copy(slot)
            packed = slot[self._host.page_bytes : move.page.length].tobytes()
            target.finish(move.request.tier, unpack_attachments(packed))
        except Exception as error:  # handed to whoever waits
            target.batch.pending.fail(error)

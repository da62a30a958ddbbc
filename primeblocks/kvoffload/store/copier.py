"""Threads that copy between the callers' buffers and host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np

from ..attachments import unpack_attachments
from ..host import HostTier
from ..tier import Loaded
from .buffers import Buffer, copy_pages
from .moves import CopyIn, CopyOut

__all__ = ["Copiers", "Copies"]

Copies = Sequence[CopyIn | CopyOut]  # of one batch, in one direction

_TOGETHER = 256
_TICK_S = 0.1


class Copiers:
    """A few threads that make copies in order of arrival.

    Args:
        report: called with copies that are over, and whether they were made; while idle, with none,
            ten times a second.
        broke: called with an error that ended a thread.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        threads: int,
        report: Callable[[list[tuple[Copies, bool]]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._report = report
        self._broke = broke
        self._queue: SimpleQueue[Copies | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"primeblocks-kvoffload-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, copies: Copies) -> None:
        """Give copies of one batch and in one direction, which are made together."""
        self._queue.put(copies)

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

    def _wait(self) -> Copies | None:
        while True:
            try:
                return self._queue.get(timeout=_TICK_S)
            except Empty:
                self._report([])

    def _serve(self) -> None:
        # Many are reported together: the store's lock may be held while more are handed out.
        done: list[tuple[Copies, bool]] = []
        pages = 0
        while True:
            try:
                copies = self._queue.get_nowait()
            except Empty:
                copies = self._wait()
            if copies is None:
                break
            done.append((copies, self._copy(copies)))
            pages += len(copies)
            if pages >= _TOGETHER or self._queue.empty():
                self._report(done)
                done, pages = [], 0
        if done:
            self._report(done)

    def _copy(self, copies: Copies) -> bool:
        """Make the copies; return false if the caller gave them up or they failed."""
        copies = sorted(copies, key=lambda copy: copy.page.frame)
        buffers: list[Buffer] = [copy.request.buffer for copy in copies]
        batch = buffers[0].batch
        try:
            with batch.pending.buffers() as held:
                if held:
                    rooms = self._host.pages([copy.page.frame for copy in copies])
                    copy_pages(buffers, rooms, out=isinstance(copies[0], CopyOut))
            for copy in copies:
                if extra := copy.request.buffer.extra:
                    end = self._host.page_bytes
                    room = self._host.frame(copy.page.frame)[end : end + len(extra)]
                    room[:] = np.frombuffer(extra, dtype=np.uint8)
            batch.finish([self._loaded(copy) for copy in copies if isinstance(copy, CopyOut)])
            return held
        except Exception as error:  # handed to the waiting caller
            batch.pending.fail(error)
            return False

    def _loaded(self, copy: CopyOut) -> tuple[int, Loaded]:
        size, attachments = self._host.page_bytes, {}
        if copy.page.length > size:
            packed = self._host.frame(copy.page.frame)[size : copy.page.length].tobytes()
            attachments = unpack_attachments(packed)
        return copy.request.buffer.index, Loaded(copy.request.tier, attachments)

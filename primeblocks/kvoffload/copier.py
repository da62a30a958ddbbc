"""Threads that copy pages between the callers' buffers and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Thread, get_ident

import numpy as np
import torch
from torch import Tensor

from .moves import CopyIn, CopyOut
from .page import unpack_attachments
from .pending import Parts
from .tier import HostTier, Loaded

__all__ = ["Copiers", "Copies", "copy_pages"]

Copies = Sequence[CopyIn | CopyOut]  # of one batch, in one direction

_TOGETHER_BYTES, _TOGETHER_PAGES = 16 << 20, 256  # most of one copy
_SHARED_BYTES = 1 << 20  # least of one, where threads share a batch
_REPORTED_PAGES = 256
_TICK_S = 0.1

# Above it torch would start threads of its own for one copy: it counts elements, at most 32,768.
_SERIAL_BYTES = 32 << 10
_WIDE_BYTES = 64 << 10  # larger ones are faster one by one


class Copiers:
    """A few threads that make copies, in order of arrival.

    They call `report` with finished copies and whether each was made. A thread without copies calls
    `report` ten times per second. They call `broke` with an error that ended a thread.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        threads: int,
        report: Callable[[list[tuple[Copies, bool]]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._most = max(1, min(_TOGETHER_PAGES, _TOGETHER_BYTES // host.frame_bytes))
        self._least = max(1, _SHARED_BYTES // host.frame_bytes)
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
        """Queue copies. The copies of one batch in one direction are made together."""
        for _, each in groupby(copies, lambda copy: (type(copy), copy.request.batch)):
            alike = list(each)
            share = -(-len(alike) // len(self._threads))
            pages = min(self._most, max(self._least, share))
            for start in range(0, len(alike), pages):
                self._queue.put(alike[start : start + pages])

    def stop(self) -> list[Thread]:
        """End after the copies queued so far. Return the threads to join."""
        for _ in self._threads:
            self._queue.put(None)
        return self._threads

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._broke(error)

    def _serve(self) -> None:
        # Many are reported together: the store's lock may be held while more are handed out.
        done: list[tuple[Copies, bool]] = []
        pages = 0
        while True:
            try:
                copies = self._queue.get(timeout=0 if done else _TICK_S)
            except Empty:
                copies = ()
            if copies:
                done.append((copies, self._copy(copies)))
                pages += len(copies)
            if not copies or pages >= _REPORTED_PAGES:
                self._report(done)
                done, pages = [], 0
            if copies is None:
                return

    def _copy(self, copies: Copies) -> bool:
        """Make the copies, unless the caller gave them up. Return whether they were made."""
        copies = sorted(copies, key=lambda copy: copy.page.frame)
        batch, size = copies[0].request.batch, self._host.page_bytes
        try:
            with batch.pending.buffers() as held:
                if held:
                    parts = [batch.parts[copy.request.index] for copy in copies]
                    rooms = self._host.pages([copy.page.frame for copy in copies])
                    out = isinstance(copies[0], CopyOut)
                    copy_pages(parts, rooms, out=out, fences=batch.fences)
            if not held:
                return False
            for copy in copies if batch.extras else ():
                extra = batch.extras.get(copy.request.index, b"")
                room = self._host.frame(copy.page.frame)[size : size + len(extra)]
                room[:] = np.frombuffer(extra, dtype=np.uint8)
            batch.finish([self._loaded(copy) for copy in copies if isinstance(copy, CopyOut)])
            return True
        except Exception as error:  # handed to the waiting caller
            batch.pending.fail(error)
            return False

    def _loaded(self, copy: CopyOut) -> tuple[int, Loaded]:
        page, size, request = copy.page, self._host.page_bytes, copy.request
        if page.length == size:
            return request.index, Loaded(request.tier)
        packed = self._host.frame(page.frame)[size : page.length].tobytes()
        return request.index, Loaded(request.tier, unpack_attachments(packed))


def copy_pages(
    pages: Sequence[Parts],
    rooms: Sequence[Tensor],
    *,
    out: bool,
    fences: Mapping[torch.device, torch.cuda.Event],
) -> None:
    """Copy pages into frames of host memory, or out of the frames if `out` is true.

    Small pages are copied in one call. A call releases the interpreter's lock once. With one call
    per page, the thread would wait for the lock after each page.
    """
    parts: list[Tensor] = []
    spaces: list[Tensor] = []
    streams = {device: _stream_of(get_ident(), device) for device in fences}
    try:
        for device, fence in fences.items():
            streams[device].wait_event(fence)
        for page, room in zip(pages, rooms, strict=True):
            at = 0
            for part in page if isinstance(page, list) else (page,):
                size = part.nbytes
                space = room if size == room.nbytes else room[at : at + size]
                if isinstance(part, np.ndarray):
                    np.copyto(space.numpy(), part)
                elif part.is_cuda:
                    # Else the exit from the stream would make a context on this thread's device.
                    with torch.cuda.device(part.device), torch.cuda.stream(streams[part.device]):
                        target, source = (part, space) if out else (space, part)
                        target.copy_(source, non_blocking=True)
                elif size <= _SERIAL_BYTES:
                    parts.append(part)
                    spaces.append(space)
                elif size <= _WIDE_BYTES and not (size | at | int(part.storage_offset())) % 8:
                    parts.append(part.view(torch.int64))
                    spaces.append(space.view(torch.int64))
                else:
                    pair = part.numpy(), space.numpy()
                    np.copyto(*(pair if out else pair[::-1]))
                at += size
        if parts:
            torch._foreach_copy_(*((parts, spaces) if out else (spaces, parts)))
    finally:
        for stream in streams.values():
            stream.synchronize()


@cache
def _stream_of(thread: int, device: torch.device) -> torch.cuda.Stream:
    """Return a thread's own stream. If each batch took one, some would be the caller's streams."""
    return torch.cuda.Stream(device)

"""The index of a disk tier: a dictionary whose every change is logged first."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from ...errors import UsageError
from ..page import PageKey
from .records import DROP, MARK, PUT, Entry, Place, encode, replay
from .system import System

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQQQ")  # magic, generation, bytes of a page, of its attachments
_SUM = struct.Struct("<Q")
_MAGIC = b"pbkvjl01"
_START = _HEADER.size + _SUM.size
_SLACK_BYTES = 64 << 10  # a journal below this is not worth rewriting


class Journal:
    """Keys and places of pages, in a file that is only appended to.

    A put is written before `places` shows it. If a write fails, the file is repaired before
    anything else is written. Once the file is twice as long as when it was last rewritten, it is
    rewritten aside and renamed. A journal of pages of another size counts as empty.

    Args:
        path: the file, made if absent.

    Raises:
        UsageError: the file is no journal.
        OSError: the file system refused.
    """

    def __init__(
        self, path: Path, *, page_bytes: int, attachment_bytes: int, system: System
    ) -> None:
        self._path = path
        self._aside = path.with_suffix(".new")
        self._sizes = (page_bytes, attachment_bytes)
        self._system = system
        self.places: dict[PageKey, Place] = {}
        self._generation: int | None = None  # there is no header yet
        self._sequence = self._end = self._limit = 0
        self._flushed = False
        self._torn = False  # there are bytes behind the end
        self._wrong = False  # the file differs from `places`, and must be rewritten
        self._descriptor = system.open(path)
        try:
            system.remove(self._aside)
            self._load()
        except (OSError, UsageError):
            system.close(self._descriptor)
            raise

    def put(self, places: Sequence[tuple[PageKey, Place]]) -> None:
        """Name the places of pages; one write.

        Raises:
            OSError: the file system refused; nothing was changed.
        """
        self._append([Entry(PUT, key, place) for key, place in places])
        for key, place in places:
            self.places.pop(key, None)  # so that it becomes the newest
            self.places[key] = place
        self._shorten()

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Forget pages that are there; one write.

        Raises:
            OSError: the file system refused. The pages are gone from `places`, but whoever opens
                the file next may find them, unless another call succeeds first.
        """
        for key in keys:
            del self.places[key]
        try:
            self._append([Entry(DROP, key) for key in keys])
        except OSError:
            self._wrong = True
            raise
        self._shorten()

    def forget(self, keys: Sequence[PageKey]) -> None:
        """Forget pages that are gone; the file is rewritten before anything else is written."""
        for key in keys:
            del self.places[key]
        self._wrong = True

    def clear(self) -> None:
        """Forget everything, power cuts included.

        Raises:
            OSError: as `drop`.
        """
        self.places.clear()
        self._wrong = True
        if self._generation is not None:
            with suppress(OSError):
                self._cut()
        if self._wrong:
            self._rewrite()

    def ready(self) -> None:
        """Repair the file where a change failed.

        Raises:
            OSError: the file system still refuses.
        """
        if self._torn and not self._wrong:
            try:
                self._system.truncate(self._descriptor, self._end)
                self._torn = False
            except OSError:
                self._wrong = True
        if self._wrong:
            self._rewrite()

    def flush(self) -> None:
        """Make all changes so far survive a power cut.

        Raises:
            OSError: the file system refused.
        """
        self._flushed = True
        self.ready()
        try:
            self._system.sync(self._descriptor)
            # After the sync: a reader of the mark knows that all before it was on the disk.
            self._append([Entry(MARK)])
            self._system.sync(self._descriptor)
        except OSError:
            self._wrong = True  # what a failed sync leaves is unknown, and the next one may succeed
            raise

    def close(self) -> None:
        self._system.close(self._descriptor)

    @property
    def begun(self) -> bool:
        """Whether the file is a journal of ours; earlier content stays until the first change."""
        return self._generation is not None

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self._end

    def _load(self) -> None:
        data = bytearray(self._system.size(self._descriptor))
        count = _read_all(self._system, self._descriptor, data)
        del data[count:]
        header = bytes(data[:_START])
        self._generation = self._check(header, empty=len(data) == _START)
        if self._generation is None:
            self._wrong = True
            return
        said = replay(bytes(data), start=_START, generation=self._generation)
        self.places, self._sequence, self._end = said.places, said.sequence, said.end
        self._torn, self._wrong = said.end < len(data), said.damaged
        self._flushed = said.flushed > 0
        self._limit = 2 * self._end + _SLACK_BYTES

    def _check(self, header: bytes, *, empty: bool) -> int | None:
        """Return the generation of an intact journal of our page size; None: start a new one."""
        if len(header) == _START:
            _, generation, *sizes = _HEADER.unpack_from(header)
            (expected,) = _SUM.unpack_from(header, _HEADER.size)
            whole = xxhash.xxh3_64_intdigest(header[len(_MAGIC) : _HEADER.size]) == expected
            if whole and tuple(sizes) == self._sizes:
                return generation
            if whole:
                logger.log(
                    logging.DEBUG if empty else logging.WARNING,
                    "%s held pages of %d bytes with %d of attachments, and now takes %d with %d: "
                    "what it held is dropped. Give each size its own folder to keep both.",
                    *(self._path.parent, *sizes, *self._sizes),
                )
                return None
        if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
            raise UsageError(
                f"{self._path} is no journal of pages that this version can read. Delete its "
                "folder, or give the tier another."
            )
        return None

    def _cut(self) -> None:
        """Cut the file down to its header, which needs no room on the disk."""
        self._system.truncate(self._descriptor, _START)
        self._system.sync(self._descriptor)
        self._end = _START
        self._torn = self._wrong = False

    def _append(self, entries: Sequence[Entry]) -> None:
        self.ready()
        assert self._generation is not None
        data = self._encode(entries, self._generation)
        try:
            _write_all(self._system, self._descriptor, data, offset=self._end)
        except OSError:
            self._torn = True
            raise
        self._end += len(data)
        self._sequence += len(entries)

    def _encode(self, entries: Sequence[Entry], generation: int) -> bytes:
        numbered = enumerate(entries, start=self._sequence + 1)
        return b"".join(
            encode(entry, sequence=number, generation=generation) for number, entry in numbered
        )

    def _shorten(self) -> None:
        if self._end > self._limit:
            self._limit = 2 * self._end
            with suppress(OSError):  # the old one goes on
                self._rewrite()

    def _rewrite(self) -> None:
        generation = int.from_bytes(os.urandom(8), "little")
        header = _HEADER.pack(_MAGIC, generation, *self._sizes)
        header += _SUM.pack(xxhash.xxh3_64_intdigest(header[len(_MAGIC) :]))
        entries = [Entry(PUT, key, place) for key, place in self.places.items()]
        if self._flushed:
            entries.append(Entry(MARK))
        data = header + self._encode(entries, generation)
        descriptor = self._system.open(self._aside, truncate=True)
        try:
            _write_all(self._system, descriptor, data, offset=0)
            self._system.sync(descriptor)
            self._system.replace(self._aside, self._path)
        except OSError:
            self._system.close(descriptor)
            with suppress(OSError):
                self._system.remove(self._aside)
            raise
        self._system.close(self._descriptor)
        self._descriptor, self._generation = descriptor, generation
        self._sequence += len(entries)
        self._end = len(data)
        self._limit = 2 * self._end + _SLACK_BYTES
        self._torn = self._wrong = False
        self._system.sync_folder(self._path.parent)


def _write_all(system: System, descriptor: int, data: bytes, *, offset: int) -> None:
    """Write all bytes, however few each call takes.

    Raises:
        OSError: the file system refused; some of the bytes may have been written.
    """
    view = memoryview(data)
    while view:
        count = system.write(descriptor, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "a write took nothing")
        view, offset = view[count:], offset + count


def _read_all(system: System, descriptor: int, into: bytearray) -> int:
    """Read a file from its start; return the number of bytes read."""
    view, count = memoryview(into), 0
    while count < len(into):
        more = system.read(descriptor, [view[count:]], count)
        if not more:
            break
        count += more
    view.release()
    return count

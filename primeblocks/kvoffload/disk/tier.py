"""`DiskTier`: pages in a folder on a local disk. `index` and `data` describe the two files."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from ...errors import CapacityError, ClosedError, CorruptionError, ShapeError, UsageError
from ..page import DIGEST_BYTES, PageKey, checksum, frames_of
from ..tier import Found, Record
from .data import Answer, DataFile, Frames, Place, System, full, refusal, refusing
from .index import FolderState, Index

__all__ = ["DiskTier"]

_ROOM_BYTES, _ROW_BYTES = 16 << 10, 128  # a generous guess at what the index takes


class DiskTier:
    """A folder of pages, which survive the process that wrote the pages.

    The file `pages` has frames of equal size. New pages go to the next free frames. The SQLite
    database `index` has a row for each page, with the frame of the page. A page is acknowledged
    only after its row is committed. The frame of a removed page is reused only after the removal of
    its row is committed. After a kill, the next owner finds all acknowledged changes. A page whose
    `put` was interrupted does not have a row, and its frame is free.

    A power cut may undo changes since the last `flush` or `clear`. Damage to the index may undo
    changes or lose all pages. A load never gets a wrong page, because the caller compares the
    digest of key and bytes. Threads may share a tier: calls take turns, except `holds` and `len`.
    After `close` or in a forked child, calls raise ClosedError, except `holds`, `len` and `close`.

    If another program removes or replaces a file, or truncates the index, the next `put`, `flush`,
    or `drop` of a stored page reports CorruptionError. If `pages` or `lock` is removed or replaced,
    the tier refuses new pages until you open the folder again. If `pages` is truncated, the pages
    after the new end are lost, and the next `flush` raises CorruptionError. On a full disk, the
    tier continues with its existing frames. If the index then needs room, the tier drops the pages
    in its last frames.

    Args:
        path: the folder, which is made if absent. Only one tier at a time can own the folder.
            Pages that were written with another `page_bytes` or `attachment_bytes` are not served,
            and the first change drops them. `close` or garbage collection releases the folder.
        capacity_bytes: the largest size of the file `pages`, without the index. A frame has the
            size of a page and its attachments, rounded up to a multiple of 4096 bytes.
        page_bytes: the bytes of a page.
        attachment_bytes: the room next to each page for its packed attachments.
        io: "direct" bypasses the page cache, "buffered" uses it, "auto" bypasses it if possible.
        system: makes all calls to the file system. Pass a subclass of `System` to test faults.

    Raises:
        PlanError: `capacity_bytes` is too small for one page, or `io` is unknown.
        UnsupportedError: the file system does not support `io="direct"`.
        UsageError: the folder cannot be made, read or locked, has another owner, or has files
            that are not from a tier.
    """

    name = "disk"
    shared = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        page_bytes: int,
        attachment_bytes: int = 0,
        io: str = "auto",
        system: System | None = None,
    ) -> None:
        self.path = Path(path).absolute()  # The process may go elsewhere.
        self.page_bytes = page_bytes
        self.attachment_bytes = attachment_bytes
        self.frame_bytes, self.capacity_pages = frames_of(
            self.name,
            capacity_bytes=capacity_bytes,
            page_bytes=page_bytes,
            attachment_bytes=attachment_bytes,
        )
        self._system = System() if system is None else system
        self._frames = Frames(self.capacity_pages)
        self._closed = False
        self._turn = Lock()
        self._open(io)
        self._unsynced = len(self)  # at most this many of the newest pages are not on the disk yet
        self._refused = False  # the last sync
        self._freed_room = False  # since the index had room

    @property
    def direct(self) -> bool:
        """Whether pages bypass the page cache."""
        return self._data.direct

    def put(self, records: Sequence[Record]) -> list[Answer]:
        """Write pages: first their bytes, then their index rows in one transaction. Local.

        A page that replaces another page is written to a new frame. If a frame is free, a failed
        write leaves the old page in place. If no frame is free, the old page is removed first, and
        a failed write or a kill loses both pages. The result has `CapacityError` if the tier, disk
        or disk quota is full, `ShapeError` if the content does not fit, or an `OSError`. A
        `CorruptionError` means that the index and all pages are lost, or that a file was removed.
        """
        with self._in_turn():
            latest = {record.key: record for record in records}
            answers: dict[PageKey, Answer] = {k: self._misfit(x) for k, x in latest.items()}
            wanted = [record for key, record in latest.items() if answers[key] is None]
            try:
                self._ready()
                fitting = self._make_room(wanted)
            except (OSError, CorruptionError) as error:
                answers |= {record.key: refusal(error, self.path) for record in wanted}
            else:
                full = CapacityError(
                    f"all {self.capacity_pages} pages of {self.path} are taken. Drop some first."
                )
                answers |= {record.key: full for record in wanted} | self._write(fitting)
            return [answers[record.key] for record in records]

    def get(self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]) -> list[Found | Answer]:
        """Read pages, and return their lengths and digests, which the caller must compare. Local.

        The result has None for a missing page, an OSError if it cannot be read, and a ShapeError
        for its short buffer. CorruptionError: the file ends early, or the index is damaged.
        """
        with self._in_turn():
            try:
                places = self._index.places(keys)
            except (OSError, CorruptionError) as error:
                return [error] * len(keys)
            there = [(place.frame, each) for place, each in zip(places, into, strict=True) if place]
            errors = iter(self._data.read([at for at, _ in there], [each for _, each in there]))
            return [
                None if place is None else next(errors) or Found(place.length, place.digest)
                for place in places
            ]

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Remove pages. Unknown keys are ignored.

        Raises:
            CapacityError, OSError: the index could not be written. The pages are not served any
                more, but a crash before the next change may bring the pages back.
            CorruptionError: the index is damaged and all pages are lost, or a file was removed.
        """
        with self._in_turn(), refusing(self.path):
            self._remove(keys)

    def clear(self) -> None:
        """Remove every page and free its space. A power cut cannot bring the pages back.

        Raises:
            CapacityError, OSError: as `drop`.
        """
        with self._in_turn(), refusing(self.path):
            self._frames.clear()
            self._index.clear()
            self._data.shrink(0)
            self._unsynced = 0

    def flush(self) -> None:
        """Make all changes so far survive a power cut.

        Raises:
            CapacityError, OSError: the file system refused a write or a sync.
            CorruptionError: pages were lost, because an earlier sync failed or a file was truncated
                or damaged. Other pages survive. Also raised for the reasons given in `drop`.
        """
        with self._in_turn(), refusing(self.path):
            try:
                failed = self._write_again() if self._refused else []
                self._refused = True
                self._data.flush()
                self._refused, self._unsynced = False, 0
                self._index.lost += len(failed)
                self._remove(failed)
                self._ready()
                self._system.sync_folder(self.path)
                self._index.flush()
                if lost := self._index.lost:
                    raise CorruptionError(
                        f"{lost} pages of {self.path} were lost to a failed sync, or to a damaged "
                        "or cut file. The others survive. Put the lost ones again."
                    )
            except CorruptionError:
                self._index.lost = 0  # reported
                raise

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each page whether the tier has it. Any thread may call `holds`."""
        return [key in self._index for key in keys]

    def keys(self) -> list[PageKey]:
        """Read all keys from the disk, and return them in the order in which they were put.

        Raises:
            OSError, CorruptionError: as `drop`.
        """
        with self._in_turn():
            return self._index.keys()

    def close(self) -> None:
        """Release the folder. The pages stay. Does not flush. A second call does nothing."""
        with suppress(ClosedError), self._in_turn():
            if self._index.state is not FolderState.UNUSED:
                with suppress(OSError, CorruptionError):
                    self._ready()  # Changes that failed before may succeed now.
            self._closed = True
            self._release_folder()

    def __len__(self) -> int:
        return len(self._index)

    def _open(self, io: str) -> None:
        try:
            with ExitStack() as opened:
                lock = self._lock = self._system.own(self.path)
                opened.callback(self._system.close, lock)
                self._data = DataFile(
                    self.path / "pages", stride=self.frame_bytes, io=io, system=self._system
                )
                opened.callback(self._data.close)
                self._index = Index(
                    self.path / "index",
                    lock=lock,
                    page_bytes=self.page_bytes,
                    attachment_bytes=self.attachment_bytes,
                    # A 64th of the pages; a larger log than 4 MiB gains nothing.
                    log_pages=min(1000, max(4, self.capacity_pages * self.frame_bytes >> 18)),
                    system=self._system,
                )
                opened.callback(self._index.close)
                self._adopt()
                # Not at exit: a thread may still write to what would be another file by then.
                self._release_folder = weakref.finalize(self, opened.pop_all().close)
                self._release_folder.atexit = False
                os.register_at_fork(after_in_child=partial(_disown, weakref.ref(self)))
        except BlockingIOError as error:
            raise UsageError(
                f"{self.path} belongs to another store ({error}). Give each store its own folder."
            ) from error
        except OSError as error:
            raise UsageError(
                f"cannot keep pages in {self.path}: {error}. Choose another folder."
            ) from error

    def _adopt(self) -> None:
        """Adopt the pages that the index names and the data file has."""
        self._index.cut(min(self.capacity_pages, self._data.frames()))
        self._frames.adopt(self._index.frames())
        if self._index.state is FolderState.KEPT:  # else what is there stays until a change
            self._data.shrink(self.capacity_pages)

    def _ready(self) -> None:
        """Write the changes that failed before. On a full disk, give up the last pages for room."""
        self._look_at_files()
        kept = self._index.state is FolderState.KEPT
        if not kept:
            self._frames.clear()
        try:
            self._index.ready()
        except OSError as error:
            if not full(error) or self._freed_room:  # others took the room, and would again
                raise
            self._freed_room = True
            self._free_room()
            self._index.ready()
        self._freed_room = False
        if not kept:
            self._data.shrink(self.capacity_pages)

    def _look_at_files(self) -> None:
        """Raise if a file was removed. Forget the pages behind the end of a file that was cut."""
        files = {"lock": self._lock, "pages": self._data.descriptor}
        gone = [each for each in files if not self._system.in_place(files[each], self.path / each)]
        if gone:
            raise CorruptionError(
                f"{' and '.join(gone)} of {self.path} was removed or replaced while a tier had it "
                "open: pages that are put now would be lost. Close the tier, and make a new tier."
            )
        if self._data.frames() < self._frames.end():
            cut = self._index.cut(self._data.frames())
            self._index.lost += len(cut)
            self._frames.release(cut)

    def _free_room(self) -> None:
        """Free room for the index: first the frames behind the last page, then the last pages."""
        # A page behind the end of the file is not adopted, so a crash does not serve a wrong page.
        needed = -(-(_ROOM_BYTES + _ROW_BYTES * len(self._index)) // self.frame_bytes)
        end = min(self._frames.end(), max(0, self._data.frames() - needed))
        self._data.shrink(end)
        self._frames.fence(end)
        self._frames.release(self._index.cut(end))

    def _write_again(self) -> list[PageKey]:
        """Write again what a failed sync may have lost. Return the keys of pages that changed."""
        # The kernel counts pages whose write failed as written, and the next sync succeeds.
        lost, frame = [], np.frombuffer(mmap.mmap(-1, self.frame_bytes), dtype=np.uint8)
        keys = self._index.keys()[-self._unsynced :] if self._unsynced else []
        for key, place in zip(keys, self._index.places(keys), strict=True):
            if place is None:  # Its row is damaged.
                lost.append(key)
                continue
            (error,) = self._data.read([place.frame], [frame])
            if error is None and checksum(key, frame[: place.length]) == place.digest:
                (error,) = self._data.write([place.frame], [frame])
                if isinstance(error, OSError):
                    raise error
            else:
                lost.append(key)
        return lost

    def _misfit(self, record: Record) -> ShapeError | None:
        """Return why a record does not fit, or None if it fits."""
        content, frame, digest = record.content.nbytes, record.frame.nbytes, len(record.digest)
        room = self.page_bytes + self.attachment_bytes
        if content <= room and frame >= self.frame_bytes and digest == DIGEST_BYTES:
            return None
        return ShapeError(
            f"a page with attachments has at most {room} bytes, in a frame of {self.frame_bytes}, "
            f"and a digest of {DIGEST_BYTES}; got {content}, {frame} and {digest} bytes."
        )

    def _make_room(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that fit. If frames are scarce, give up pages that they replace."""
        free = self._frames.free
        if len(records) <= free:
            return list(records)
        here = {each.key for each in records if each.key in self._index}
        refused = [each.key for each in records if each.key not in here][free:]
        fitting = [each for each in records if each.key not in refused]
        short = max(0, len(fitting) - free)
        self._remove([each.key for each in fitting if each.key in here][:short])
        return fitting

    def _remove(self, keys: Sequence[PageKey]) -> None:
        # The frames are free at once, but nothing is put before the index has written the drop.
        if gone := self._index.forget(keys):
            self._frames.release(gone)
            self._ready()

    def _write(self, records: Sequence[Record]) -> dict[PageKey, Answer]:
        frames = self._frames.claim(len(records))
        placed = list(zip(records, frames, strict=True))
        answers: dict[PageKey, Answer] = {}
        errors = self._data.write(frames, [record.frame for record in records])
        for record, error in zip(records, errors, strict=True):
            answers[record.key] = error and refusal(error, self.path)
        if any(isinstance(answer, CapacityError) for answer in answers.values()):
            self._frames.fence(self._data.frames())
        self._frames.release([frame for record, frame in placed if answers[record.key] is not None])
        places = [
            (record.key, Place(frame, record.content.nbytes, record.digest))
            for record, frame in placed
            if answers[record.key] is None
        ]
        return answers | self._write_rows(places)

    def _write_rows(self, places: Sequence[tuple[PageKey, Place]]) -> dict[PageKey, Answer]:
        """Write the rows of pages. If the index is full, the last pages give up their room."""
        answers: dict[PageKey, Answer] = {}
        while places:
            try:
                self._frames.release(self._index.put(places))
                self._unsynced += len(places)
                break
            except (OSError, CorruptionError) as error:
                kept = len(places) // 2 if isinstance(error, OSError) and full(error) else 0
                answers |= {key: refusal(error, self.path) for key, _ in places[kept:]}
            self._frames.release([place.frame for _, place in places[kept:]])
            places = places[:kept]
            with suppress(OSError):
                self._data.shrink(self._frames.end())
                self._frames.fence(self._data.frames())
        return answers

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Let one thread in at a time. After `close`, raise ClosedError."""
        if not self._closed:  # A forked child would wait for a thread that it does not have.
            with self._turn:
                if not self._closed:
                    yield
                    return
        raise ClosedError(f"the disk tier of {self.path} is closed. Open the folder again.")


def _disown(tier: weakref.ref[DiskTier]) -> None:
    """Leave the folder to the parent, in a forked child, even if the child outlives it."""
    if (inherited := tier()) is not None:
        inherited._closed = True
        inherited._release_folder()

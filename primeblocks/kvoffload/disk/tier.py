"""Pages on a local disk."""

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

from ...errors import CapacityError, ClosedError, CorruptionError, UsageError
from ..page import PageKey, checksum, frames_of
from ..tier import Found, Record
from .data import Answer, DataFile, Frames, Place, System, full, misfit, refusal, refusing
from .index import FolderState, Index

__all__ = ["DiskTier"]

_ROOM_BYTES, _ROW_BYTES = 16 << 10, 128  # a generous guess at what the index takes


class DiskTier:
    """A folder of pages that survives a crash.

    `pages` is cut into equal frames, and new pages go to the next free ones: pages written
    together lie together, each page is written once, and the file never outgrows `capacity_bytes`.
    `index`, an SQLite database, says which page lies where. A page counts once its row is
    committed; its frame is used again once its drop is committed too. So after a crash, whoever
    opens the folder finds the state after the last change that was answered, or a later one.

    A power cut may undo the newest changes, back to the last `flush` or `clear`: a page just put
    may be missing, a page that was dropped may be there again, and a key may have its page from
    before. Damage to the index may do so too, or cost all pages. Neither makes a wrong page: the
    caller compares the digest, which covers the key and the bytes. After `close`, and in a forked
    child, everything but `holds` and `len` raises ClosedError. Threads may share a tier: its calls
    run one after the other, and `holds` and `len` do not wait.

    A change or a `flush` raises CorruptionError if something else removed, replaced or cut a file
    of the tier. Without its index the tier begins anew. Where `pages` was cut, the pages behind its
    end are lost. Without its `pages` or `lock` it keeps nothing until the folder is opened again.

    On a full disk the tier goes on with the frames that it has, and gives up the last of them
    where the index needs room.

    Args:
        path: folder, made if absent; one owner at a time. Pages in it are adopted, those of
            another size dropped. It is free again after `close`, or when the tier is collected.
        capacity_bytes: bound of `pages`; a frame takes the page and its attachments, rounded up to
            4096 bytes. The index comes on top: for each frame some 50 bytes and the encoded key,
            and a log of 4 MiB and as much as one call changes.
        page_bytes: bytes of a page.
        attachment_bytes: room beside each page for its packed attachments.
        io: "direct" bypasses the page cache, "buffered" does not, "auto" does where it can.
        system: the operating system; tests pass one that fails.

    Raises:
        PlanError: not even one page fits.
        UnsupportedError: `io="direct"` on a file system without it.
        UsageError: the folder cannot be made, read or locked, has another owner, or has files
            that are not a tier's.
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
        self._gave_back = False  # since the index had room

    @property
    def direct(self) -> bool:
        """Whether pages bypass the page cache."""
        return self._data.direct

    def put(self, records: Sequence[Record]) -> list[Answer]:
        """Keep pages: their data in runs of frames, then one transaction. Local.

        A page in place of another takes a new frame. If no frame is free, the old page goes first.
        If several records have one key, the last counts. A page that is not kept leaves what was
        there as it was; its answer is a `CapacityError` where quota or disk is full, a
        `ShapeError` for content that does not fit, a `CorruptionError` where the index turns out
        to be damaged, which costs all pages, or else the `OSError`.
        """
        with self._in_turn():
            room = self.page_bytes + self.attachment_bytes
            latest = {record.key: record for record in records}
            answers: dict[PageKey, Answer] = {
                key: misfit(each, room=room) for key, each in latest.items()
            }
            wanted = [record for key, record in latest.items() if answers[key] is None]
            try:
                self._ready()
                fitting = self._make_room(wanted)
            except (OSError, CorruptionError) as error:
                answers |= {record.key: refusal(error, self.path) for record in wanted}
            else:
                full = CapacityError(f"all {self.capacity_pages} pages of {self.path} are taken")
                answers |= {record.key: full for record in wanted} | self._write(fitting)
            return [answers[record.key] for record in records]

    def get(self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]) -> list[Found | Answer]:
        """Read pages, those in adjacent frames at once. Local.

        Returns:
            Length and digest that each page came with, which the caller compares; None for a page
            that is not here, CorruptionError where the file ends before it or the index turns out
            to be damaged, OSError where the file system refuses.
        """
        with self._in_turn():
            try:
                places = self._index.places(keys)
            except (OSError, CorruptionError) as error:
                return [error] * len(keys)
            there = [(place.frame, each) for place, each in zip(places, into, strict=True) if place]
            errors = iter(
                self._data.read([frame for frame, _ in there], [each for _, each in there])
            )
            return [
                None if place is None else next(errors) or Found(place.length, place.digest)
                for place in places
            ]

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Forget pages; unknown keys are ignored.

        Raises:
            CapacityError, OSError: the index could not be written. The pages are no longer
                served, and their drop is written before anything else is kept; until then a crash
                brings them back.
            CorruptionError: the index is damaged, and every page is lost; or a file was removed.
        """
        with self._in_turn(), refusing(self.path):
            self._leave(keys)

    def clear(self) -> None:
        """Forget every page and give the room back; not even a power cut brings them back.

        Raises:
            CapacityError, OSError: as `drop`.
        """
        with self._in_turn(), refusing(self.path):
            self._frames.clear()
            self._index.clear()
            self._data.shrink(0)
            self._unsynced = 0

    def flush(self) -> None:
        """Make what was kept and dropped so far survive a power cut.

        Raises:
            CapacityError, OSError: the file system refused.
            CorruptionError: pages were lost, because it had refused before or the file was cut; the
                others do survive. Or as `drop`.
        """
        with self._in_turn(), refusing(self.path):
            try:
                failed = self._write_again() if self._refused else []
                self._refused = True
                self._data.flush()
                self._refused, self._unsynced = False, 0
                self._index.lost += len(failed)
                self._leave(failed)
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
        """Tell for each page whether it is here. From any thread."""
        return [key in self._index for key in keys]

    def keys(self) -> list[PageKey]:
        """Return all keys, in the order in which they were put. They are read from the disk.

        Raises:
            OSError, CorruptionError: as `drop`.
        """
        with self._in_turn():
            return self._index.keys()

    def close(self) -> None:
        """Give the folder up; the pages stay. Does not flush. A second call does nothing."""
        with suppress(ClosedError), self._in_turn():
            if self._index.state is not FolderState.LEFT:
                with suppress(OSError, CorruptionError):
                    self._ready()  # what could not be written, perhaps it can now
            self._closed = True
            self._give_up()

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
                self._give_up = weakref.finalize(self, opened.pop_all().close)
                self._give_up.atexit = False
                os.register_at_fork(after_in_child=partial(_disown, weakref.ref(self)))
        except BlockingIOError as error:
            raise UsageError(
                f"{self.path} belongs to another store ({error}). Give each its own folder."
            ) from error
        except OSError as error:
            raise UsageError(f"cannot keep pages in {self.path}: {error}") from error

    def _adopt(self) -> None:
        """Adopt the pages that the index names and the data file has."""
        self._index.cut(min(self.capacity_pages, self._data.frames()))
        self._frames.adopt(self._index.frames())
        if self._index.state is FolderState.KEPT:  # else what is there stays until a change
            self._data.shrink(self.capacity_pages)

    def _ready(self) -> None:
        """Write what failed before; on a full disk, with room that is taken from the last pages."""
        self._look_at_files()
        kept = self._index.state is FolderState.KEPT
        if not kept:
            self._frames.clear()
        try:
            self._index.ready()
        except OSError as error:
            if not full(error) or self._gave_back:  # others took the room, and would again
                raise
            self._gave_back = True
            self._give_back()
            self._index.ready()
        self._gave_back = False
        if not kept:
            self._data.shrink(self.capacity_pages)

    def _look_at_files(self) -> None:
        """Refuse to go on without a file; forget pages behind the end of one that was cut."""
        files = {"lock": self._lock, "pages": self._data.descriptor}
        gone = [each for each in files if not self._system.in_place(files[each], self.path / each)]
        if gone:
            raise CorruptionError(
                f"{' and '.join(gone)} of {self.path} was removed or replaced while a tier had it "
                "open: pages that are put now would be lost. Close the tier, and make it anew."
            )
        if self._data.frames() < self._frames.end():
            cut = self._index.cut(self._data.frames())
            self._index.lost += len(cut)
            self._frames.release(cut)

    def _give_back(self) -> None:
        """Free what the index takes: frames behind the last page, then those of the last pages."""
        # A page behind the end of the file is not adopted, so a crash does not serve a wrong page.
        needed = -(-(_ROOM_BYTES + _ROW_BYTES * len(self._index)) // self.frame_bytes)
        end = min(self._frames.end(), max(0, self._data.frames() - needed))
        self._data.shrink(end)
        self._frames.fence(end)
        self._frames.release(self._index.cut(end))

    def _write_again(self) -> list[PageKey]:
        """Write again what a failed sync may have lost; return the keys of pages that changed."""
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

    def _make_room(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that fit; where frames are short, give up pages that they replace."""
        free = self._frames.free
        if len(records) <= free:
            return list(records)
        here = {each.key for each in records if each.key in self._index}
        refused = [each.key for each in records if each.key not in here][free:]
        fitting = [each for each in records if each.key not in refused]
        short = max(0, len(fitting) - free)
        self._leave([each.key for each in fitting if each.key in here][:short])
        return fitting

    def _leave(self, keys: Sequence[PageKey]) -> None:
        # Free at once, even if the drop is not written now: nothing is put before it is.
        if gone := self._index.forget(keys):
            self._frames.release(gone)
            self._ready()

    def _write(self, records: Sequence[Record]) -> dict[PageKey, Answer]:
        frames = self._frames.claim(len(records))
        placed = list(zip(records, frames, strict=True))
        answers: dict[PageKey, Answer] = {}
        # The whole frame where there is one, so that it goes out together with its neighbours.
        contents = [each.content if each.frame is None else each.frame for each, _ in placed]
        for (record, _), error in zip(placed, self._data.write(frames, contents), strict=True):
            answers[record.key] = error and refusal(error, self.path)
        if any(isinstance(answer, CapacityError) for answer in answers.values()):
            self._frames.fence(self._data.frames())
        self._frames.release([frame for record, frame in placed if answers[record.key] is not None])
        places = [
            (record.key, Place(frame, record.content.nbytes, record.digest))
            for record, frame in placed
            if answers[record.key] is None
        ]
        return answers | self._name(places)

    def _name(self, places: Sequence[tuple[PageKey, Place]]) -> dict[PageKey, Answer]:
        """Name the places of pages; the last ones give their room to a full index."""
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
        raise ClosedError(f"the disk tier of {self.path} is closed")


def _disown(tier: weakref.ref[DiskTier]) -> None:
    """Leave the folder to the parent, in a forked child, even if the child outlives it."""
    if (inherited := tier()) is not None:
        inherited._closed = True
        inherited._give_up()

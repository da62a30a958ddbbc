"""Room in shared memory that outlives any process that uses it.

A table has an entry for each group, and each cell, a piece of memory of fixed size, has an owner.
A group gets as many cells as it needs, so that room never is in fragments.

Two things make a death harmless, at any moment. Locks end with their process: one for the table,
held for microseconds, and one for each entry while it is filled. And every change of the table
comes down to one store of a word. Before it, the entry belongs to a process, and is free again once
that is dead; after it, it is done, or the next to lock the table finishes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from ...errors import CorruptionError
from .file import SharedFile
from .scatter import Reader, scatter

__all__ = ["Arena", "Head", "State", "Word"]


class State(IntEnum):
    """The state of an entry."""

    FREE = 0
    WAITING = 1  # For cells; its process holds its lock.
    WRITING = 2  # It has cells; its process holds its lock.
    READY = 3


class Word(IntEnum):
    """A word of an entry."""

    STATE = 0
    TURN = 1  # Its place in the queue for room.
    BATCH = 2  # It was removed in this one, if that is the arena's last one.
    SIZE = 3
    HEADER_SIZE = 4
    OLDEST_VERSION = 5
    ORDINAL = 6
    ARRIVAL = 7  # Its place among those that are ready.
    DIGEST = 8  # Of the words from SIZE to ORDINAL, and of all bytes.


class Head(IntEnum):
    """A word of the arena."""

    CHANGES = 0  # Counts what others may wait for.
    TURNS = 1
    ARRIVALS = 2
    BATCHES = 3
    FINISHED_BATCHES = 4
    CLOSED = 5


WORDS = 16
WAITERS = 256  # Entries beside those of the capacity. Who finds none has no place in the queue.
_TABLE, _TAKER, _ENTRIES = 0, 1, 16  # Locks.


class Arena:
    """The table and the cells of a file. Everything is local and never waits.

    Args:
        capacity: groups that fit.
        cells: cells that fit.
        cell_bytes: bytes of each.

    Raises:
        CorruptionError: the file has another size.
    """

    def __init__(self, file: SharedFile, *, capacity: int, cells: int, cell_bytes: int) -> None:
        self.capacity, self.cells, self.cell_bytes = capacity, cells, cell_bytes
        self._file = file
        table, owners, first, size = _layout(capacity, cells, cell_bytes)
        memory = file.memory
        if len(memory) != size:
            raise CorruptionError(
                f"{file.path} has {len(memory):,} bytes where its settings ask for {size:,}. "
                "Remove it and create it again."
            )
        self._head = memory[:table].view(np.int64)
        self._table = memory[table:owners].view(np.int64).reshape(-1, WORDS)
        self._owners = memory[owners : owners + 4 * cells].view(np.int32)
        self._memory = memory[first:].data
        # Locks of the file keep out processes, these the threads of this one.
        self._mutex, self._taker_mutex = threading.Lock(), threading.Lock()
        self._mine: set[int] = set()  # Entries that this process fills.

    @staticmethod
    def size_bytes(*, capacity: int, cells: int, cell_bytes: int) -> int:
        """Bytes that such an arena takes."""
        return _layout(capacity, cells, cell_bytes)[-1]

    def try_lock(self) -> bool:
        """Lock the table, and finish a batch that a process died in. Return whether it could."""
        if not self._mutex.acquire(blocking=False):
            return False
        if not self._file.try_lock(_TABLE):
            self._mutex.release()
            return False
        if self.head(Head.BATCHES) != self.head(Head.FINISHED_BATCHES):
            self._finish_batch()
        return True

    def unlock(self) -> None:
        """Unlock the table."""
        self._file.unlock(_TABLE)
        self._mutex.release()

    def try_lock_taker(self) -> bool:
        """Become the one that may read and remove entries. Return whether it could."""
        if not self._taker_mutex.acquire(blocking=False):
            return False
        if not self._file.try_lock(_TAKER):
            self._taker_mutex.release()
            return False
        return True

    def unlock_taker(self) -> None:
        """Let another one read and remove entries."""
        self._file.unlock(_TAKER)
        self._taker_mutex.release()

    def __len__(self) -> int:
        """Entries that may be taken; needs no lock."""
        ready = self.entries(State.READY)
        if self.head(Head.BATCHES) != self.head(Head.FINISHED_BATCHES):
            ready = ready[self._table[ready, Word.BATCH] != self.head(Head.BATCHES)]
        return len(ready)

    def head(self, word: Head) -> int:
        """A word of the arena."""
        return int(self._head[word])

    def word(self, index: int, word: Word) -> int:
        """A word of an entry."""
        return int(self._table[index, word])

    def words(self, indices: np.ndarray, word: Word) -> np.ndarray:
        """A word of several entries."""
        return self._table[indices, word]

    def entries(self, *states: State) -> np.ndarray:
        """Return the entries in some states, by index."""
        found = self._table[:, Word.STATE]
        return np.flatnonzero(np.logical_or.reduce([found == state for state in states]))

    @property
    def used_cells(self) -> int:
        """Cells that have an owner."""
        return int(np.count_nonzero(self._owners))

    @property
    def busy(self) -> bool:
        """Whether this process waits for room, writes or takes."""
        return bool(self._mine) or self._taker_mutex.locked()

    # The table is locked in all that follows, unless it says otherwise.

    def claim(self, size: int) -> int | None:
        """Queue for room for so many bytes. Return the entry, or None where all are in use."""
        free = self.entries(State.FREE)
        if not len(free) or not self._file.try_lock(_ENTRIES + (index := int(free[0]))):
            return None
        self._mine.add(index)
        row = self._table[index]
        row[Word.BATCH], row[Word.SIZE] = 0, size
        row[Word.TURN] = self._count(Head.TURNS)
        row[Word.STATE] = State.WAITING  # From here on it is in use.
        return index

    def admit(self) -> bool:
        """Give those that wait their cells, in the order of coming. Return whether any still wait.

        Whoever looks for room does this for all, so that nobody waits for one that does not look.
        """
        waiting = self.entries(State.WAITING)
        for index in waiting[self.words(waiting, Word.TURN).argsort()].tolist():
            cells = self.cells_of(self.word(index, Word.SIZE))
            inside = len(self.entries(State.WRITING, State.READY))
            if inside == self.capacity or cells > self.cells - self.used_cells:
                return True
            self._owners[np.flatnonzero(self._owners == 0)[:cells]] = index + 1
            self._table[index, Word.STATE] = State.WRITING
            self._count(Head.CHANGES)
        return False

    def write(
        self,
        index: int,
        parts: Sequence[bytes | memoryview],
        *,
        oldest_version: int,
        ordinal: int,
    ) -> None:
        """Fill the cells of an entry, the first part being its header. Needs no lock."""
        row = self._table[index]
        row[Word.HEADER_SIZE] = len(parts[0])
        row[Word.OLDEST_VERSION], row[Word.ORDINAL] = oldest_version, ordinal
        described = row[Word.SIZE : Word.ARRIVAL].tobytes()
        row[Word.DIGEST] = scatter(parts, self._pieces(index), described)

    def publish(self, index: int) -> None:
        """Let an entry be seen."""
        self._table[index, Word.ARRIVAL] = self._count(Head.ARRIVALS)
        self._table[index, Word.STATE] = State.READY  # From here on it is there.
        self._count(Head.CHANGES)
        self._mine.discard(index)
        self._file.unlock(_ENTRIES + index)

    def leave(self, index: int) -> None:
        """Give up an entry, as death would: the next `sweep` frees it. The table is not locked."""
        with self._mutex:
            if index in self._mine:
                self._mine.discard(index)
                self._file.unlock(_ENTRIES + index)

    def sweep(self) -> bool:
        """Free what processes left that died or gave up. Return whether there was any."""
        swept = False
        for index in self.entries(State.WAITING, State.WRITING).tolist():
            if index in self._mine or not self._file.try_lock(_ENTRIES + index):
                continue
            self._owners[self._owners == index + 1] = 0
            self._table[index, Word.STATE] = State.FREE
            self._count(Head.CHANGES)
            self._file.unlock(_ENTRIES + index)
            swept = True
        return swept

    def read(self, index: int) -> Reader:
        """Return a reader of an entry that is ready, for who may remove it. Needs no lock.

        Raises:
            CorruptionError: it is not what was written.
        """
        row = self._table[index].copy()
        return Reader(
            self._pieces(index),
            row[Word.SIZE : Word.ARRIVAL].tobytes(),
            size=int(row[Word.SIZE]),
            digest=int(row[Word.DIGEST]),
            what=f"a group of {row[Word.SIZE]:,} bytes whose ordinal was {row[Word.ORDINAL]}",
        )

    def remove(self, indices: np.ndarray | Sequence[int]) -> None:
        """Free entries that are ready: all of them, or none."""
        batch = self.head(Head.BATCHES) + 1
        self._table[:, Word.BATCH] = 0
        self._table[indices, Word.BATCH] = batch
        self._head[Head.BATCHES] = batch  # From here on they are gone.
        self._finish_batch()

    def shut(self) -> None:
        """Let everyone know that it is removed."""
        self._head[Head.CLOSED] = 1
        self._count(Head.CHANGES)
        self._file.remove()

    def cells_of(self, size: int) -> int:
        """Cells that so many bytes take."""
        return max(1, -(-size // self.cell_bytes))

    def _count(self, word: Head) -> int:
        self._head[word] += 1
        return int(self._head[word])

    def _finish_batch(self) -> None:
        batch = self.head(Head.BATCHES)
        ready = self.entries(State.READY)
        gone = ready[self._table[ready, Word.BATCH] == batch]
        owns_nothing = np.zeros(len(self._table) + 1, np.bool_)
        owns_nothing[gone + 1] = True
        self._owners[owns_nothing.take(self._owners, mode="clip")] = 0
        self._table[gone, Word.STATE] = State.FREE
        self._head[Head.FINISHED_BATCHES] = batch
        self._count(Head.CHANGES)

    def _pieces(self, index: int) -> list[memoryview]:
        """The memory of an entry, in order; neighbouring cells are one piece."""
        cells = np.flatnonzero(self._owners == index + 1)
        is_last = np.diff(cells, append=-1) != 1
        is_first = np.roll(is_last, 1)
        starts = (cells[is_first] * self.cell_bytes).tolist()
        ends = ((cells[is_last] + 1) * self.cell_bytes).tolist()
        return [self._memory[a:b] for a, b in zip(starts, ends, strict=True)]


def _layout(capacity: int, cells: int, cell_bytes: int) -> tuple[int, int, int, int]:
    """Where the table, the owners and the cells begin, and where they end."""
    table = 8 * WORDS
    owners = table + 8 * WORDS * (capacity + WAITERS)
    first = -(-(owners + 4 * cells) // 4096) * 4096
    return table, owners, first, first + cells * cell_bytes

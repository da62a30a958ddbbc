"""The thread and the queue of one lower tier. They tolerate tiers that break their contract."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, ClassVar

import numpy as np

from ..errors import CorruptionError
from .moves import Ask, Clear, Drop, PageRead, Recall, Recalled, Write
from .page import PageKey, checksum
from .tier import Found, HostTier, Record, Tier

__all__ = ["Holds", "Order", "Outcome", "TierWorker", "Until"]

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20
_BATCH_PAGES = 256
_IN_A_ROW = 8  # batches of reads while a change waits


@dataclass(frozen=True, slots=True)
class Until:
    """A marker that reports when all earlier moves are done, and durable if `flush`."""

    done: Callable[[BaseException | None], None]
    flush: bool = False


@dataclass(frozen=True, slots=True)
class Holds:
    """A question to a shared tier about which of these pages it has."""

    keys: Sequence[PageKey]
    done: Callable[[list[bool]], None]


_Question = PageRead | Ask | Holds
Given = _Question | Write | Drop | Clear | Until
# A read has the length that was read, 0 for a miss. A question has whether the tier holds the page.
Outcome = tuple[Write | PageRead | Ask, Exception | int | None]

_CHANGES = (Write, Drop)  # In a full tier they alternate: they go together.


class Order:
    """A queue of moves. `Write`, `Drop`, `Clear` and `Until` keep their order.

    Reads and questions overtake these moves, but not a `Clear`, because they must not find pages
    that it will drop. They do not overtake for ever, because frames wait for writes.
    `next` returns at most `reads` reads or questions, or at most `writes` writes.
    """

    def __init__(self, *, reads: int, writes: int) -> None:
        self.changed = Condition()
        self._reads, self._writes = reads, writes
        self._first: deque[_Question] = deque()
        self._in_turn: deque[Given] = deque()
        self._clears = 0  # that wait
        self._in_a_row = 0
        self._stopping = False

    def give(self, *moves: Given | Recall) -> list[Write | PageRead]:
        """Queue moves. Return moves that a `Recall` takes back before `next` returned them."""
        taken: list[Write | PageRead] = []
        with self.changed:
            for move in moves:
                if isinstance(move, Recall):
                    taken += self._recall()
                elif isinstance(move, (PageRead, Ask, Holds)) and not self._clears:
                    self._first.append(move)
                else:
                    self._clears += isinstance(move, Clear)
                    self._in_turn.append(move)
            self.changed.notify(len(moves))
        return taken

    def _recall(self) -> list[Write | PageRead]:
        queues = (self._first, self._in_turn)
        taken = [move for queue in queues for move in queue if isinstance(move, Write | PageRead)]
        for queue in queues:
            kept = [move for move in queue if not isinstance(move, Write | PageRead)]
            queue.clear()
            queue.extend(kept)  # type: ignore[arg-type]
        return taken

    def stop(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify()

    def next(self) -> list[Any]:
        """Wait for moves of one kind and return them. After `stop` the result is empty.

        `Write` and `Drop` are one kind. A batch does not drop a page after writing it, and does not
        write it twice.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._first or self._in_turn or self._stopping)
            queue = self._queue()
            if not queue:
                return []
            moves: list[Any] = []
            kind = _CHANGES if isinstance(queue[0], _CHANGES) else type(queue[0])
            written: set[PageKey] = set()
            drops = 0
            most = self._reads if queue is self._first else self._writes
            while queue and isinstance(move := queue[0], kind) and len(moves) - drops < most:
                if isinstance(move, Drop):
                    if move.key in written:
                        break
                    drops += 1
                elif isinstance(move, Write):
                    if move.page.key in written:
                        break
                    written.add(move.page.key)
                moves.append(queue.popleft())
            self._clears -= len(moves) if kind is Clear else 0
            return moves

    def _queue(self) -> deque[Any]:
        if self._first and (not self._in_turn or self._in_a_row < _IN_A_ROW):
            self._in_a_row += 1
            return self._first
        self._in_a_row = 0
        return self._in_turn


class TierWorker:
    """A thread that makes the moves of one tier. `broke` gets an error that ended the thread."""

    def __init__(
        self,
        tier: Tier,
        host: HostTier,
        *,
        report: Callable[[list[Outcome]], None],
        broke: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._tier = tier
        self._host = host
        self._report = report
        self._broke = broke
        # A tier that hangs keeps the frames of one batch at most. A request waits for reads.
        pages = min(_BATCH_PAGES, _BATCH_BYTES // host.frame_bytes)
        reads, writes = (max(1, min(pages, host.capacity_pages // share)) for share in (2, 4))
        self._order = Order(reads=reads, writes=writes)
        self._error: BaseException | None = None
        name = f"primeblocks-kvoffload-{tier.name}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, *moves: Given | Recall) -> list[Outcome]:
        """Queue moves. Return moves that a `Recall` takes back, as refused by the tier."""
        error = Recalled(f"{self._tier.name} does not answer, so the page was not moved")
        return [(move, error) for move in self._order.give(*moves)]

    def lacks(self, keys: Sequence[PageKey]) -> list[PageKey]:
        answers = self._each(len(keys), lambda: self._tier.holds(keys))
        return [key for key, held in zip(keys, answers, strict=True) if held is False]

    def stop(self) -> Thread:
        """Close the tier after the moves queued so far. Return the thread to join."""
        self._order.stop()
        return self._thread

    def _run(self) -> None:
        try:
            while moves := self._order.next():
                self._DO[type(moves[0])](self, moves)
        except BaseException as error:
            self._broke(error)
        self._try(self._tier.close)

    def _change(self, moves: Sequence[Write | Drop]) -> None:
        """Drop first, to make room. `Order` leaves no page that is dropped after its write."""
        if drops := [move.key for move in moves if isinstance(move, Drop)]:
            self._try(lambda: self._tier.drop(drops))
        if writes := [move for move in moves if isinstance(move, Write)]:
            self._write(writes)

    def _write(self, moves: Sequence[Write]) -> None:
        records = []
        for move in moves:
            frame = self._host.frame(move.page.frame)
            content = frame[: move.page.length]
            digest = checksum(move.page.key, content)
            records.append(Record(move.page.key, content, digest, frame))
        answers = self._each(len(moves), lambda: self._tier.put(records))
        for at, answer in enumerate(answers):
            if answer is not None and not isinstance(answer, Exception):
                answers[at] = RuntimeError(f"{self._tier.name} answered a put with {answer!r}")
        self._report(list(zip(moves, answers, strict=True)))

    def _read(self, moves: Sequence[PageRead]) -> None:
        keys = [move.page.key for move in moves]
        frames = [self._host.frame(move.page.frame) for move in moves]
        found = self._each(len(moves), lambda: self._tier.get(keys, into=frames))
        parts = zip(moves, frames, found, strict=True)
        self._report([(move, self._length(move, frame, each)) for move, frame, each in parts])

    def _length(
        self, move: PageRead, frame: np.ndarray, found: Found | Exception | None
    ) -> Exception | int:
        """Return the length of what was found, 0 for a miss, or the error."""
        if not isinstance(found, Found):
            return found if isinstance(found, Exception) else 0
        key, room = move.page.key, self._host.page_bytes + self._host.attachment_bytes
        length = found.length if isinstance(found.length, int) else 0
        fits = self._host.page_bytes <= length <= room
        if fits and checksum(key, frame[:length]) == found.digest:
            return length
        return CorruptionError(f"{key} does not match its checksum")

    def _ask(self, moves: Sequence[Ask]) -> None:
        held = self._held([move.request.key for move in moves])
        self._report(list(zip(moves, held, strict=True)))

    def _holds(self, moves: Sequence[Holds]) -> None:
        for move in moves:
            move.done(self._held(move.keys))

    def _clear(self, moves: Sequence[Clear]) -> None:
        self._error = None  # what was not dropped is now, or is said again
        self._try(self._tier.clear)

    def _until(self, moves: Sequence[Until]) -> None:
        for move in moves:
            if move.flush:
                self._try(self._tier.flush)
            error, self._error = self._error, None
            move.done(error)

    def _held(self, keys: Sequence[PageKey]) -> list[bool]:
        answers = self._each(len(keys), lambda: self._tier.holds(keys))
        return [not isinstance(each, Exception) and bool(each) for each in answers]

    # A tier that breaks its contract must not end the thread.

    def _each(self, pages: int, do: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return an answer for each page, even if the tier raised."""
        try:
            answers = list(do())
            if len(answers) != pages:
                raise RuntimeError(f"the tier returned {len(answers)} answers for {pages} pages")
            return answers
        except Exception as error:
            logger.exception("%s failed with a batch of %d pages", self._tier.name, pages)
            return [error] * pages

    def _try(self, do: Callable[[], None]) -> None:
        """Call `do`, and keep its error for the next `Until`."""
        try:
            do()
        except Exception as error:
            logger.warning("%s: %s", self._tier.name, error)
            self._error = error

    _DO: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Write: _change,
        PageRead: _read,
        Ask: _ask,
        Holds: _holds,
        Drop: _change,
        Clear: _clear,
        Until: _until,
    }

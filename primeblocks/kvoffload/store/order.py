"""The order of a tier's moves: reads first, changes in turn, in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

from ..page import PageKey
from .moves import Ask, Clear, Drop, Read, Write

__all__ = ["Given", "Holds", "Order", "Until"]

_IN_A_ROW = 8  # batches of reads while a change waits


@dataclass(frozen=True, slots=True)
class Until:
    """A marker that reports when all before it is done, and durable if `flush`, or an error."""

    done: Callable[[BaseException | None], None]
    flush: bool = False


@dataclass(frozen=True, slots=True)
class Holds:
    """A question to a shared tier: which of these pages it has."""

    keys: Sequence[PageKey]
    done: Callable[[list[bool]], None]


_Question = Read | Ask | Holds
Given = _Question | Write | Drop | Clear | Until

# In a full tier, drops and writes alternate: they go together.
_KINDS: dict[type, Any] = {Write: Write | Drop, Drop: Write | Drop}


class Order:
    """A queue of moves. `Write`, `Drop`, `Clear` and `Until` keep their order.

    Reads and questions overtake them, except for a `Clear`: after it they must not find what it
    will drop. They do not overtake for ever, because frames wait for writes.

    Args:
        reads: most pages that are read together.
        writes: most pages that are written together.
    """

    def __init__(self, *, reads: int, writes: int) -> None:
        self.changed = Condition()
        self._reads, self._writes = reads, writes
        self._first: deque[_Question] = deque()
        self._in_turn: deque[Given] = deque()
        self._clears = 0  # that wait
        self._in_a_row = 0
        self._stopping = False

    def give(self, move: Given) -> None:
        with self.changed:
            if isinstance(move, _Question) and not self._clears:
                self._first.append(move)
            else:
                self._clears += isinstance(move, Clear)
                self._in_turn.append(move)
            self.changed.notify()

    def recall(self) -> list[Write | Read]:
        """Take back the writes and reads that `next` has not handed out yet."""
        with self.changed:
            queues = (self._first, self._in_turn)
            taken = [move for queue in queues for move in queue if isinstance(move, Write | Read)]
            for queue in queues:
                kept = [move for move in queue if not isinstance(move, Write | Read)]
                queue.clear()
                queue.extend(kept)  # type: ignore[arg-type]
            return taken

    def stop(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify()

    def next(self) -> list[Any]:
        """Wait for moves of one kind, `Write` and `Drop` being one; return none after `stop`.

        A batch does not drop a page after writing it, and does not write it twice.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._first or self._in_turn or self._stopping)
            queue = self._queue()
            moves: list[Any] = []
            kind = _KINDS.get(type(queue[0]), type(queue[0])) if queue else ()
            written: set[PageKey] = set()
            drops = 0
            most = self._reads if queue is self._first else self._writes
            while queue and isinstance(queue[0], kind) and len(moves) - drops < most:
                move = queue[0]
                if isinstance(move, Write | Drop):
                    key = move.key if isinstance(move, Drop) else move.page.key
                    if key in written:
                        break
                    if isinstance(move, Drop):
                        drops += 1
                    else:
                        written.add(key)
                moves.append(queue.popleft())
            self._clears -= len(moves) if kind is Clear else 0
            return moves

    def _queue(self) -> deque[Any]:
        if self._first and (not self._in_turn or self._in_a_row < _IN_A_ROW):
            self._in_a_row += 1
            return self._first
        self._in_a_row = 0
        return self._in_turn

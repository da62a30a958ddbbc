"""Which frames of the data file are free, and where the next page goes."""

from __future__ import annotations

__all__ = ["Frames"]


class Frames:
    """Equal frames behind a head that sweeps forward and starts again at the front.

    Free frames are taken in the order of the sweep, so pages that are written together lie together
    as long as there is room, and nothing that lives is ever moved.

    Source: the threaded log of F2FS (FAST 2015).
    """

    def __init__(self, count: int) -> None:
        self._taken = bytearray(count)
        self._head = 0
        self.free = count

    def take(self, frame: int) -> None:
        """A frame that is in use already; the sweep goes on behind it."""
        assert not self._taken[frame]
        self._taken[frame] = 1
        self.free -= 1
        self._head = frame + 1

    def claim(self, count: int) -> list[int]:
        """The next free frames, in the order of the sweep; fewer where fewer are free."""
        claimed: list[int] = []
        while len(claimed) < count and self.free:
            start = self._taken.find(0, self._head)
            if start < 0:
                self._head = 0
                continue
            stop = min(start + count - len(claimed), len(self._taken))
            found = self._taken.find(1, start, stop)
            stop = stop if found < 0 else found
            self._taken[start:stop] = b"\1" * (stop - start)
            self.free -= stop - start
            self._head = stop
            claimed += range(start, stop)
        return claimed

    def release(self, frame: int) -> None:
        assert self._taken[frame]
        self._taken[frame] = 0
        self.free += 1

    def rewind(self) -> None:
        """Sweep from the front, whose frames have room on the disk already."""
        self._head = 0

    def clear(self) -> None:
        self._taken = bytearray(len(self._taken))
        self._head = 0
        self.free = len(self._taken)

    def __len__(self) -> int:
        return len(self._taken)

"""Free frames of the data file, in the order in which new pages take them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Frames"]


class Frames:
    """Equal frames behind a head that sweeps forward and starts again at the front.

    Free frames are taken in the order of the sweep, so pages that are written together lie together
    as long as there is room, and no live page is ever moved.

    Source: the threaded log of F2FS (FAST 2015).
    """

    def __init__(self, count: int) -> None:
        self._taken = bytearray(count)
        self._head = 0
        self._fence = count  # the disk had no room behind it
        self.free = count

    def adopt(self, frames: Sequence[int]) -> None:
        """Take frames that are in use already, oldest first; the sweep goes on behind the last."""
        for frame in frames:
            self._taken[frame] = 1
        self.free -= len(frames)
        self._head = frames[-1] + 1 if frames else 0

    def claim(self, count: int) -> list[int]:
        """Claim the next free frames, in the order of the sweep; fewer where fewer are free.

        Frames behind a fence come last, and lift it: writing them shows whether there is room now.
        """
        fenced = self._fence < len(self._taken)
        near = self._taken.count(0, 0, self._fence) if fenced else self.free
        claimed = self._sweep(min(count, near), end=self._fence)
        more = min(count - len(claimed), self.free)
        if more:
            self._fence = len(self._taken)
        return claimed + self._sweep(more, end=len(self._taken))

    def _sweep(self, count: int, *, end: int) -> list[int]:
        """Claim `count` free frames before `end`; at least as many must be free there."""
        claimed: list[int] = []
        while len(claimed) < count:
            start = self._taken.find(0, self._head, end)
            if start < 0:
                self._head = 0
                continue
            stop = min(start + count - len(claimed), end)
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

    def fence(self, frames: int | None = None) -> None:
        """Sweep from the front; frames behind the first `frames` come last, unless it is None."""
        self._head = 0
        self._fence = len(self._taken) if frames is None else min(frames, len(self._taken))

    def end(self) -> int:
        """Return the number of the frame behind the last taken one."""
        return self._taken.rfind(1) + 1

    def clear(self) -> None:
        self._taken = bytearray(len(self._taken))
        self.free = len(self._taken)
        self.fence()

    def __len__(self) -> int:
        return len(self._taken)

"""Adaptive replacement (ARC): recency against frequency, balanced by what came back."""

from __future__ import annotations

from collections import OrderedDict

from ..page import PageKey
from .evict import Choice, Snapshot

__all__ = ["Ghosts", "arc"]


def arc(snapshot: Snapshot) -> Choice:
    """Choose as ARC's REPLACE: a page used once if those exceed their target, else another.

    Pure: the target is part of the snapshot. `Ghosts` moves it.

    Source: Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
    """
    once, often = snapshot.once, snapshot.often
    if often is None or once is None:
        page = once if once is not None else often
        assert page is not None
        return Choice(page)
    above = snapshot.once_pages > snapshot.once_target
    exactly = snapshot.once_pages == snapshot.once_target
    return Choice(once if above or (exactly and snapshot.from_often) else often)


class Ghosts:
    """Keys of pages that left lately, and ARC's target, which moves when one of them returns.

    Attributes:
        target: number of pages used once to keep, `p` of the paper.
        from_often: whether the page that came last had left as one used often.
    """

    def __init__(self, *, capacity_pages: int) -> None:
        self.target = 0.0
        self.from_often = False
        self._returns = False
        self._capacity = capacity_pages
        self._once: OrderedDict[PageKey, None] = OrderedDict()
        self._often: OrderedDict[PageKey, None] = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._once or key in self._often

    def arrive(self, key: PageKey, *, once_pages: int, often_pages: int) -> None:
        """Note a page that asks for room in the tier; call before the victim is chosen."""
        once, often = len(self._once), len(self._often)
        self._returns, self.from_often = key in self, key in self._often
        if key in self._once:
            self.target = min(self.target + max(1.0, often / once), self._capacity)
        elif self.from_often:
            self.target = max(self.target - max(1.0, once / often), 0.0)
        elif once_pages + once >= self._capacity:
            if once:
                self._once.popitem(last=False)
        elif often and once_pages + often_pages + once + often >= 2 * self._capacity:
            self._often.popitem(last=False)

    def leave(self, key: PageKey, *, often: bool, once_pages: int) -> None:
        """Note an evicted page; `once_pages` still counts it."""
        if often:
            self._often[key] = None
        elif self._returns or once_pages < self._capacity:
            # A new page pushed out of a tier full of new pages tells nothing.
            self._once[key] = None

    def forget(self, key: PageKey) -> bool:
        """Forget a page that is back, or void; return whether it was remembered."""
        found = key in self
        self._once.pop(key, None)
        self._often.pop(key, None)
        return found

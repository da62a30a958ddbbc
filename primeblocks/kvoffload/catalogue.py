"""`Catalogue`: the place of each page and the next moves, without threads, memory or I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..errors import CapacityError
from .evict import Evict
from .evict.ledger import PageLedger
from .lower import Level, is_below, no_room, statistics_of
from .moves import (
    Ask,
    Clear,
    CopyIn,
    CopyOut,
    Drop,
    HostPage,
    HostState,
    LoadRequest,
    LowerCopy,
    Move,
    PageRead,
    Recall,
    SaveRequest,
    Users,
    Write,
)
from .page import PageKey
from .tier import Saved, TierStatistics

__all__ = ["Catalogue"]

_STORED = Saved(stored=True)
_SUPERSEDED = "a later save of the same page, or a clear, came first"
_RESERVE = 16  # one page in so many is chosen, and written down, before its frame is needed


class Catalogue:
    """A catalogue of pages. It decides on moves, and gets their results. Not thread-safe.

    `take` returns the moves to make. Within a lower tier `Write`, `Drop` and `Clear` keep their
    order, and a `PageRead` or `Ask` may overtake them. Report results with `copied_in`,
    `copied_out`, `written`, `read` and `asked`.

    Args:
        frames: how many pages fit in host memory.
        max_pending: how many pages may wait for a frame. Further saves are declined.
        through: write a page to the lower tiers when it arrives, not when it leaves.
        answer: called with a save and its result, or with a load that missed and None.
    """

    def __init__(
        self,
        *,
        frames: int,
        levels: Sequence[Level],
        evict: Evict,
        max_pending: int,
        through: bool,
        answer: Callable[[Any, Saved | None], None],
    ) -> None:
        self._moves: list[Move] = []
        self._unsettled = False  # a frame came free, or a page waits, since `settle`
        self.levels = levels
        self.version = 0
        self._max_pending = max_pending
        self._through = through
        self._answer = answer
        self._frames = frames
        self._reserve = frames // _RESERVE if levels else 0  # without one, nothing is written
        self._feed = max(1, self._reserve)  # writes at a time to a tier that does not keep up
        self._free = list(range(frames - 1, -1, -1))
        self._pages: dict[PageKey, HostPage] = {}
        self._ledger = PageLedger(evict)  # of pages that are here
        self._leaving: dict[HostPage, None] = {}
        self._ready: OrderedDict[HostPage, None] = OrderedDict()  # leaving, and not busy
        self._waiting: deque[HostPage] = deque()
        self._coming: dict[HostPage, None] = {}
        self._counts: Counter[str] = Counter()
        self._underway = self._clears = 0

    # Requests of callers.

    def save(self, requests: Iterable[SaveRequest]) -> None:
        """Save pages. Later loads get the new pages, and earlier loads are still served."""
        for request in requests:
            if (page := self._pages.get(request.key)) is not None:
                self._detach(page)
            for depth, level in enumerate(self.levels):
                if level.forget(request.key):
                    self._moves.append(Drop(depth, request.key))
            if len(self._waiting) >= self._max_pending:
                self.settle()
            if len(self._waiting) >= self._max_pending:
                declined = f"{self._max_pending} pages wait for room in host memory already"
                self._answer(request, Saved(False, declined))
            else:
                self._expect(HostPage(request.key, length=request.length, request=request))
        self.settle()

    def load(self, requests: Iterable[LoadRequest]) -> None:
        for request in requests:
            if (page := self._pages.get(request.key)) is not None:
                self._serve(page, request)
            else:
                self._counts["misses"] += 1
                self._look_below(request, 0)

    def clear(self) -> None:
        self._clears, self.version = self._clears + 1, 0
        for page in list(self._pages.values()):
            self._detach(page)
        for depth, level in enumerate(self.levels):
            level.clear()
            self._moves.append(Clear(depth))

    def note(self, fact: Callable[[PageLedger], None]) -> None:
        for ledger in (self._ledger, *(level.ledger for level in self.levels)):
            fact(ledger)

    def end(self, rollout: Hashable) -> None:
        self.note(lambda ledger: ledger.end(rollout))
        for page in (*self._coming, *self._leaving):
            page.ended += (rollout,)

    def write_down(self) -> CapacityError | None:
        """Start to write every page that lower tiers lack. Return an error if one had no room."""
        here = {key: page for key, page in self._pages.items() if page not in self._coming}
        waiting = deque(here.values())
        while waiting:  # a page that had to leave for another is written again
            left = self._write(waiting.popleft(), feed=None)
            waiting += [here[key] for key in left if key in here]
        return no_room(list(here.values()), self.levels)

    def settle(self) -> None:
        """Give frames to waiting pages, and make room ahead of need. Reads the clock."""
        if not self._waiting and len(self._free) >= self._reserve:
            return
        while True:
            while self._waiting and (frame := self._take_frame()) is not None:
                self._start(self._waiting.popleft(), frame)
            unawaited = max((level.breaker.unawaited() for level in self.levels), default=0)
            ready = len(self._free) + max(0, len(self._leaving) - unawaited)
            short = min(len(self._waiting) + self._reserve - ready, len(self._ledger))
            if short <= 0:
                break
            for _ in range(short):  # each of them adds one at most
                self._let_one_go()
        for depth, level in enumerate(self.levels if self._waiting else ()):
            if level.breaker.page_waits():
                self._moves.append(Recall(depth))

    def take(self) -> list[Move]:
        """Return the new moves. Assigns the frames that results have freed since the last call."""
        if self._unsettled:
            self.settle()
            self._unsettled = False
        moves, self._moves = self._moves, []
        return moves

    def knows(self, key: PageKey) -> bool:
        """Whether a load may hit a tier that is not shared. From any thread."""
        return key in self._pages or any(level.found(key) for level in self.levels)

    def idle(self) -> bool:
        """Whether all running moves are a `Drop` or a `Clear`."""
        return self._underway == 0 and not self._waiting

    def statistics(self) -> dict[str, TierStatistics]:
        pages = len(self._ledger) + len(self._leaving)
        host = statistics_of(self._counts, pages=pages, capacity_pages=self._frames)
        return {"host": host} | {level.name: level.statistics() for level in self.levels}

    # Results of moves.

    def copied_in(self, move: CopyIn, *, copied: bool) -> None:
        """Note that the frame has the page, or that its caller gave up."""
        self._underway -= 1
        page = move.page
        if not copied:
            self._lose(page, 0)
            return
        self._answer(move.request, Saved(False, _SUPERSEDED) if page.gone else _STORED)
        for waiter in self._arrive(page, move.request.users, by=move.request.users):
            self._serve(page, waiter)
        if self._through and not page.gone:
            self._write(page, feed=self._feed)
        self._release(page)

    def copied_out(self, move: CopyOut) -> None:
        self._underway -= 1
        move.page.pins -= 1
        self._release(move.page)

    def written(self, move: Write, error: Exception | None) -> None:
        """Note that a tier has the page or refused it. A page in no tier is lost with its frame."""
        self._underway -= 1
        page, level = move.page, self.levels[move.depth]
        page.writes -= 1
        level.breaker.heard(error, write=True)
        if error is not None:
            if level.refused(page.key, move.copy, error):
                self._moves.append(Drop(move.depth, page.key))
        else:
            here = page.state is HostState.HERE and not page.gone
            users = self._ledger.rollouts(page.key) if here else page.users
            level.written(page.key, move.copy, length=page.length, users=users)
            for rollout in page.ended if level.found(page.key) else ():
                level.ledger.end(rollout)
            page.shared |= level.shared
        self._release(page)

    def read(self, move: PageRead, *, length: int, error: Exception | None = None) -> None:
        """Note that the frame has a page of `length` bytes. 0 is a miss, or an error."""
        self._underway -= 1
        page, level = move.page, self.levels[move.depth]
        level.breaker.heard(error, write=False)
        if length == 0:
            level.counts["misses"] += 1
            if level.failed(page.key, move.copy, error):
                self._moves.append(Drop(move.depth, page.key))
            self._lose(page, move.depth + 1)
            return
        level.counts["hits"] += 1
        level.counts["bytes_read"] += length
        page.length, page.shared = length, level.shared
        first = page.waiters[0]
        users = level.ledger.rollouts(page.key) or first.users
        _, *others = self._arrive(page, users, by=first.users)
        first.tier = level.name
        self._hand_out(page, first)
        for waiter in others:
            self._serve(page, waiter)
        self._unsettled = True

    def asked(self, move: Ask, *, held: bool) -> None:
        self._underway -= 1
        self.levels[move.depth].breaker.heard(None, write=False)
        request = move.request
        if (page := self._pages.get(request.key)) is not None:
            self._serve(page, request)
        elif held and move.clears == self._clears:
            origin = move.depth, LowerCopy(here=True)
            self._expect(HostPage(request.key, origin=origin, waiters=(request,)))
        else:
            self.levels[move.depth].counts["misses"] += 1
            self._answer(request, None)  # a shared tier is the last

    # Loads.

    def _serve(self, page: HostPage, request: LoadRequest) -> None:
        if page.state is HostState.COMING:
            page.waiters += (request,)
            return
        if page.state is HostState.LEAVING:
            self._stop_leaving(page)
            self._enter(page, (*page.users, *request.users), by=request.users)
        elif not page.gone:
            self._ledger.touch(page.key, rollouts=request.users)
        self._counts["hits"] += 1
        self._counts["bytes_read"] += page.length
        self._hand_out(page, request)

    def _hand_out(self, page: HostPage, request: LoadRequest) -> None:
        page.pins += 1
        self._do(CopyOut(page, request))

    def _look_below(self, request: LoadRequest, start: int) -> None:
        for depth in range(start, len(self.levels)):
            level = self.levels[depth]
            if level.shared and not level.breaker.silent():
                level.breaker.given(write=False)
                self._do(Ask(depth, request, self._clears))
                return
            if not level.breaker.silent() and (copy := level.found(request.key)) is not None:
                level.ledger.touch(request.key, rollouts=request.users)
                self._expect(HostPage(request.key, origin=(depth, copy), waiters=(request,)))
                return
            level.counts["misses"] += 1
        self._answer(request, None)

    # Frames.

    def _expect(self, page: HostPage) -> None:
        self._pages[page.key] = page
        self._coming[page] = None
        self._waiting.append(page)
        self._unsettled = True

    def _start(self, page: HostPage, frame: int) -> None:
        page.frame = frame
        if page.request is not None:
            self._do(CopyIn(page, page.request))
        elif page.origin is not None:
            depth, copy = page.origin
            self.levels[depth].breaker.given(write=False)
            self._do(PageRead(depth, page, copy))

    def _arrive(self, page: HostPage, users: Users, *, by: Users) -> tuple[LoadRequest, ...]:
        """Enter a page, and return the loads that waited. Releases the save that it came from."""
        waiters, page.waiters, page.request = page.waiters, (), None
        del self._coming[page]
        page.state = HostState.HERE
        self._counts["stores"] += 1
        self._counts["bytes_written"] += page.length
        if not page.gone:
            self._enter(page, users, by=by)
        return waiters

    def _enter(self, page: HostPage, users: Users, *, by: Users) -> None:
        users = tuple(dict.fromkeys((*users, *by))) if users or by else ()
        self._ledger.touch(page.key, rollouts=users, by=by)
        for rollout in page.ended:  # while no `PageLedger` had the page
            self._ledger.end(rollout)
        page.ended = ()

    def _detach(self, page: HostPage) -> None:
        del self._pages[page.key]
        page.gone = True
        if page.state is HostState.HERE:
            self._ledger.remove(page.key)
        elif page.state is HostState.LEAVING:
            self._stop_leaving(page)
        elif page.request is not None and page.frame < 0 and not page.waiters:
            del self._coming[page]
            self._waiting.remove(page)  # it need not come at all
            self._answer(page.request, Saved(False, _SUPERSEDED))
        self._release(page)

    def _lose(self, page: HostPage, depth: int) -> None:
        """Give up a page that does not come. Loads that waited for it look elsewhere."""
        if not page.gone:
            del self._pages[page.key]
            page.gone = True
        del self._coming[page]
        page.state = HostState.HERE  # nothing fills its frame any more
        self._release(page)
        for waiter in page.waiters:
            if (other := self._pages.get(waiter.key)) is not None:
                self._serve(other, waiter)
            else:
                self._look_below(waiter, depth)

    def _release(self, page: HostPage) -> None:
        """Take back the frame of a page that was dropped or leaves, once it is unused."""
        self._unsettled = True
        if page.busy or page.frame < 0:
            return
        if page.gone:
            self._free.append(page.frame)
            page.frame = -1
        elif page.state is HostState.LEAVING:
            self._ready[page] = None

    def _take_frame(self) -> int | None:
        if self._free:
            return self._free.pop()
        while self._ready:
            page, _ = self._ready.popitem(last=False)
            if not page.busy:  # lost if no tier took it; a flush may write it, and release it again
                del self._leaving[page], self._pages[page.key]
                self._counts["evictions"] += 1
                return page.frame
        return None

    def _let_one_go(self) -> None:
        key, demote = self._ledger.victim(version=self.version)
        page = self._pages[key]
        page.users = self._ledger.rollouts(key)
        self._ledger.remove(key)
        page.state = HostState.LEAVING
        self._leaving[page] = None
        if demote:
            self._write(page, feed=self._feed)
        self._release(page)

    def _stop_leaving(self, page: HostPage) -> None:
        page.state = HostState.HERE
        del self._leaving[page]
        self._ready.pop(page, None)

    def _write(self, page: HostPage, *, feed: int | None) -> list[PageKey]:
        """Write a page to each tier unless one has it. Return the pages that leave for it."""
        left: list[PageKey] = []
        for depth, level in enumerate(() if is_below(page, self.levels) else self.levels):
            copy, victim = level.admit(page.key, version=self.version, feed=feed)
            if victim is not None:
                left.append(victim)
                self._moves.append(Drop(depth, victim))
            if copy is not None:
                page.writes += 1
                level.breaker.given(write=True)
                self._do(Write(depth, page, copy))
        return left

    def _do(self, move: CopyIn | CopyOut | Write | PageRead | Ask) -> None:
        self._underway += 1
        self._moves.append(move)

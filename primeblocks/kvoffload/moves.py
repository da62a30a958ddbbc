"""Moves between the tiers: requests, the pages in host memory, and one step of each.

A page in host memory is in one of three states, which the catalogue alone changes:

    COMING   It waits for a frame, or is being copied or read into its frame. Loads wait for it.
    HERE     It is in the `PageLedger` of host memory, and loads are served.
    LEAVING  The eviction policy chose it. Loads are served until its frame is taken.

    COMING -> HERE           The copy or the read is over.
    HERE -> LEAVING          Another page needs a frame, or soon will.
    LEAVING -> HERE          A load came first.
    LEAVING -> (no page)     Its frame is taken, once nothing reads the frame.

In each state a page is `gone` once its key names another page, or the page was dropped. The frame
of such a page is free once nothing fills or reads it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..errors import DeadlineError
from .page import PageKey

__all__ = [
    "Ask",
    "Clear",
    "CopyIn",
    "CopyOut",
    "Drop",
    "HostPage",
    "HostState",
    "LoadRequest",
    "LowerCopy",
    "Move",
    "PageRead",
    "Recall",
    "Recalled",
    "SaveRequest",
    "Users",
    "Write",
]

Users = tuple[Hashable, ...]  # names of rollouts


@dataclass(slots=True, eq=False)
class LowerCopy:
    """A page in a lower tier: `here` once written, `replaces` if another page left for it."""

    here: bool
    replaces: bool = False


@dataclass(slots=True, eq=False)
class SaveRequest:
    """A page that a caller saves: page `index` of a batch, which only the copier reads."""

    key: PageKey
    length: int
    users: Users = ()
    batch: Any = None
    index: int = 0


@dataclass(slots=True, eq=False)
class LoadRequest:
    """A page that a caller loads: page `index` of a batch, which only the copier reads."""

    key: PageKey
    users: Users = ()
    batch: Any = None
    index: int = 0
    tier: str = "host"  # where it was found, once it was


class HostState(Enum):
    """The head of this file explains the states."""

    COMING = auto()
    HERE = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class HostPage:
    """A page in host memory, or on its way into it.

    Args:
        frame: the number of its frame, or -1 without a frame.
        length: the bytes of the page and its attachments.
        pins: the number of running copies out of the frame.
        writes: the number of running writes to lower tiers.
        shared: whether a shared tier has the page.
        gone: whether its key now names another page, or no page. The frame is free once it is
            unused.
        users: the rollouts that used the page when it was chosen to leave.
        ended: the rollouts that ended while no `PageLedger` had the page.
        request: the save that the page comes from, until it is here.
        origin: for a page read from a lower tier, the depth of that tier and the copy there.
        waiters: the loads that asked before the page was here.
    """

    key: PageKey
    frame: int = -1
    length: int = 0
    state: HostState = HostState.COMING
    pins: int = 0
    writes: int = 0
    shared: bool = False
    gone: bool = False
    users: Users = ()
    ended: Users = ()
    request: SaveRequest | None = None
    origin: tuple[int, LowerCopy] | None = None
    waiters: tuple[LoadRequest, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether a running move still reads or fills its frame."""
        return self.pins > 0 or self.writes > 0 or self.state is HostState.COMING


@dataclass(slots=True, eq=False)
class CopyIn:
    """A copy from the caller's buffers into a frame."""

    page: HostPage
    request: SaveRequest


@dataclass(slots=True, eq=False)
class CopyOut:
    """A copy from a frame into the caller's buffers."""

    page: HostPage
    request: LoadRequest


@dataclass(slots=True, eq=False)
class Write:
    """A write from a frame into a lower tier. `copy` is the page's copy in that tier."""

    depth: int
    page: HostPage
    copy: LowerCopy


@dataclass(slots=True, eq=False)
class PageRead:
    """A read from a lower tier into a frame."""

    depth: int
    page: HostPage
    copy: LowerCopy


@dataclass(slots=True, eq=False)
class Ask:
    """A question to a shared tier about one page. `clears` counts the clears before it."""

    depth: int
    request: LoadRequest
    clears: int = 0


@dataclass(slots=True, eq=False)
class Drop:
    """An order to a lower tier to forget a page."""

    depth: int
    key: PageKey


@dataclass(frozen=True, slots=True)
class Clear:
    """An order to a lower tier to forget every page."""

    depth: int


class Recalled(DeadlineError):
    """The error of a move that a hanging tier had not begun, and that was taken back."""


@dataclass(frozen=True, slots=True)
class Recall:
    """An order to a hanging tier: return each `Write` and `PageRead` not begun, as refused."""

    depth: int


Move = CopyIn | CopyOut | Write | PageRead | Ask | Drop | Clear | Recall

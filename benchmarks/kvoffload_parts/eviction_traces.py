"""Rollouts in time: the pages that they ask for, when, and what they wait for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from primeblocks.kvoffload import PageKey

__all__ = ["TRACES", "Advance", "End", "Event", "Trace", "Use", "Wait", "read", "recorded"]

TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a rollout's pages, those of its prompt first.

    Args:
        asked: number of them saved before, by it or by another; a miss is computed again. The rest
            is new. Zero at the end of a turn, when the turn's own pages are saved.
    """

    rollout: Hashable
    pages: tuple[PageKey, ...]
    asked: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The start of a wait: no writing until `what`, a tool or the "queue", is over."""

    rollout: Hashable
    what: Hashable


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rollout: done, or dropped because it became too old."""

    rollout: Hashable


@dataclass(frozen=True, slots=True)
class Advance:
    """The policy's step to `version`."""

    version: int


Event = Use | Wait | End | Advance


@dataclass(frozen=True)
class Trace:
    """Events of a run, in order.

    Args:
        working_pages: pages of the rollouts in flight; the median over all requests.
        dropped: rollouts that became too old, of `rollouts` that began.
    """

    events: tuple[Event, ...]
    working_pages: int
    rollouts: int = 0
    dropped: int = 0


def recorded(name: str) -> Trace:
    """Read a run that `record` wrote."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as file:
        return read(map(json.loads, file))


def read(lines: Iterable[Mapping[str, Any]]) -> Trace:
    """Return what requests used and what the store was told; saves and loads are left out."""
    events: list[Event] = []
    chains: dict[str, tuple[PageKey, ...]] = {}
    known: set[PageKey] = set()
    users: Counter[PageKey] = Counter()
    queue: list[str] = []
    working: list[int] = []
    ended: set[str] = set()
    for line in lines:
        match line:
            case {"begin": name, "pages": new} | {"finish": name, "pages": new}:
                before, version = chains.get(name, ()), line["version"]
                added = [PageKey("", bytes.fromhex(page), version=version) for page in new]
                pages = chains[name] = (*before[: line["keep"]], *added)
                users.update(pages)
                users.subtract(before)
                if "begin" in line:
                    asked = [*(page in known for page in pages), False].index(False)
                    events.append(Use(name, pages, asked))
                    working.append(len(+users))
                else:
                    events.append(Use(name, tuple(added), 0))
                known.update(pages)
            case {"pause": name, "reason": reason}:
                events.append(Wait(name, reason))
            case {"queue": names}:
                events += [Wait(name, "queue") for name in names if name not in queue]
                queue = names
            case {"end": name}:
                events.append(End(name))
                users.subtract(chains.pop(name, ()))
                ended.add(name)
            case {"advance": version}:
                events.append(Advance(version))
    return Trace(tuple(events), int(median(working)), len(ended | chains.keys()))

"""The plain forms: the loop when nothing may be stale, and the ledger in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import UsageError
from ..rollout import Group, Rollout
from .ledger import (
    MOVES,
    Partial,
    Progress,
    PromptState,
    Restored,
    group_rolled_back,
    refuse,
    rolled_back,
)

__all__ = ["MemoryLedger", "synchronous_steps"]


def synchronous_steps(
    *,
    prompts: Iterable[Any],
    generate: Callable[..., Sequence[Rollout]],
    train: Callable[..., Any],
    publish: Callable[[int], Any],
    batch_size: int,
    version: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Generate a batch, train on it, publish, and repeat. Yields (version, metrics)."""
    remaining = iter(prompts)
    while len(batch := list(islice(remaining, batch_size))) == batch_size:
        groups = tuple(Group(p, tuple(generate(p, version=version)), version) for p in batch)
        metrics = train(groups, version=version)
        version += 1
        publish(version)
        yield version, metrics


@dataclass
class _Entry:
    prompt: Any
    state: PromptState = PromptState.DRAWN
    partials: dict[int, Partial | Rollout] = field(default_factory=dict)
    group: Group | None = None
    step: int | None = None


class MemoryLedger:
    """A ledger in memory. It defines the meaning of the calls, and ends with its process."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._order: list[int] = []  # prompts with groups, as they finished
        self._ended: Counter[PromptState] = Counter()
        self._progress = Progress()

    def drawn(self, ordinal: int, prompt: Any) -> None:
        if ordinal != self._cursor:
            raise UsageError(f"prompt {ordinal} is out of order: the next one is {self._cursor}")
        self._entries[ordinal] = _Entry(prompt)

    def started(self, ordinal: int, version: int) -> None:
        self._expect("started", ordinal).state = PromptState.IN_FLIGHT

    def sampled(self, ordinal: int, sample: int, partial: Partial | Rollout) -> None:
        self._expect("sampled", ordinal).partials[sample] = partial

    def finished(self, ordinal: int, group: Group) -> None:
        entry = self._expect("finished", ordinal)
        entry.state, entry.group, entry.partials = PromptState.FINISHED, group, {}
        self._order.append(ordinal)

    def dropped(self, ordinal: int) -> None:
        entry = self._expect("dropped", ordinal)
        if entry.group is not None:
            self._order.remove(ordinal)
        entry.state, entry.group, entry.partials = PromptState.DRAWN, None, {}

    def left_out(self, ordinal: int, reason: str) -> None:
        end = reason.partition(":")[0]
        if end not in {PromptState.FILTERED, PromptState.FAILED}:
            raise UsageError(f'a prompt is left out as "filtered" or "failed: ..."; got {reason!r}')
        self._expect("left_out", ordinal)
        self._end(ordinal, PromptState(end))

    def taken(self, ordinals: Sequence[int], version: int) -> None:
        self._progress.check_taken(version)
        if not ordinals or len({*ordinals}) < len(ordinals):
            raise UsageError(f"taken() needs prompts, each of them once; got {list(ordinals)}")
        for entry in [self._expect("taken", ordinal) for ordinal in ordinals]:
            entry.state, entry.step = PromptState.TAKEN, version

    def trained(self, version: int) -> None:
        taken = [entry for entry in self._entries.values() if entry.step == version]
        self._progress = self._progress.trained(version, taken=len(taken))
        for entry in taken:
            entry.state = PromptState.TRAINED

    def checkpointed(self, version: int) -> None:
        self._progress = self._progress.checkpointed(version)
        for ordinal, entry in list(self._entries.items()):
            if entry.step is not None and entry.step < version:
                self._end(ordinal, PromptState.TRAINED)

    def restore(self, version: int) -> Restored:
        taken = {
            entry.step
            for entry in self._entries.values()
            if entry.state is PromptState.TAKEN and entry.step is not None
        }
        self._progress = self._progress.restored(version, taken=taken)
        for entry in self._entries.values():
            if entry.state is PromptState.IN_FLIGHT:
                entry.state = PromptState.DRAWN
            elif entry.step is not None:
                is_done = entry.step < version
                entry.state = PromptState.TRAINED if is_done else PromptState.FINISHED
                entry.step = entry.step if is_done else None
            entry.partials = {i: rolled_back(x, version) for i, x in entry.partials.items()}
            if entry.group is not None and entry.state is PromptState.FINISHED:
                entry.group = group_rolled_back(entry.group, version)
        return Restored(
            self._cursor,
            [
                (ordinal, entry.prompt, dict(entry.partials))
                for ordinal, entry in self._entries.items()
                if entry.state is PromptState.DRAWN
            ],
            [
                (ordinal, entry.group)
                for ordinal in self._order
                if (entry := self._entries[ordinal]).state is PromptState.FINISHED
                if entry.group is not None
            ],
        )

    def counts(self) -> dict[PromptState, int]:
        """Return the number of prompts in each state. Final prompts count as trained."""
        counts = self._ended + Counter(entry.state for entry in self._entries.values())
        return {state: counts[state] for state in PromptState}

    @property
    def _cursor(self) -> int:
        return len(self._entries) + self._ended.total()

    def _expect(self, call: str, ordinal: int) -> _Entry:
        entry = self._entries.get(ordinal)
        if entry is None or entry.state not in MOVES[call]:
            refuse(call, ordinal, None if entry is None else entry.state, cursor=self._cursor)
        return entry

    def _end(self, ordinal: int, state: PromptState) -> None:
        if self._entries.pop(ordinal).group is not None:
            self._order.remove(ordinal)
        self._ended[state] += 1

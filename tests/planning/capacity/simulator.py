"""A simulation of what `plan_capacity` promises: rollouts grow in turns, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from primeblocks.errors import PlanError
from primeblocks.planning.capacity import KvGroup, Rollouts

__all__ = ["Simulator"]

Page = tuple[int, int, int, int]  # group, prompt, sample (-1: shared), position


@dataclass
class Simulator:
    """One rank that holds sets of pages, without arithmetic on their number.

    `grow` gives one rollout one more token. While that does not fit, the rollout that began last,
    the growing one aside, is evicted: it loses its pages and starts again.

    Args:
        groups: layers with equal caches.
        rollouts: shapes; rollout `i` counts through prompts and then samples.
        capacity_bytes: room for pages.
    """

    groups: Sequence[KvGroup]
    rollouts: Sequence[Rollouts]
    capacity_bytes: int
    page_tokens: int
    tensor: int = 1
    evictions: int = field(default=0, init=False)
    recomputed_tokens: int = field(default=0, init=False)
    peak_bytes: int = field(default=0, init=False)
    lengths: list[int] = field(init=False)
    owners: list[tuple[int, int, Rollouts]] = field(init=False)
    began: list[int] = field(init=False)

    def __post_init__(self) -> None:
        prompts = [kind for kind in self.rollouts for _ in range(kind.prompts)]
        self.owners = [
            (number, sample, kind)
            for number, kind in enumerate(prompts)
            for sample in range(kind.samples)
        ]
        self.lengths = [0] * len(self.owners)
        self.began = []

    def play(self, turns: Iterable[int]) -> None:
        """Grow these rollouts in this order.

        Rollouts at their end, or with a prompt that a sibling still computes, pass.
        """
        for turn in turns:
            self.grow(turn)

    def grow(self, rollout: int) -> None:
        """Grow a rollout by one token, and evict what has to make room for it.

        Raises:
            PlanError: a single rollout is larger than the capacity.
        """
        length = self._next_length(rollout)
        if length == self.lengths[rollout]:
            return
        if rollout not in self.began:
            self.began.append(rollout)
        self.lengths[rollout] = length
        while self.used_bytes() > self.capacity_bytes:
            others = [each for each in self.began if each != rollout]
            if not others:
                raise PlanError(f"{self.capacity_bytes} bytes do not hold one rollout; raise them")
            self.evictions += 1
            self.recomputed_tokens += self.lengths[others[-1]]
            self.lengths[others[-1]] = 0
            self.began.remove(others[-1])
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())

    def used_bytes(self) -> int:
        """Return the bytes of all pages and states that are held now."""
        pages = {page for rollout in self.began for page in self._pages(rollout)}
        used = sum(
            self.groups[group].page_bytes(self.page_tokens, tensor=self.tensor)
            for group, *_ in pages
        )
        states = sum(group.state_bytes(tensor=self.tensor) for group in self.groups)
        return used + states * len(self.began)

    def _next_length(self, rollout: int) -> int:
        prompt, sample, kind = self.owners[rollout]
        now = self.lengths[rollout]
        if now:
            return min(now + 1, kind.tokens)
        siblings = [
            self.lengths[each]
            for each in self.began
            if self.owners[each][0] == prompt and self.owners[each][1] != sample
        ]
        if not siblings:
            return 1
        # The prompt is in its pages, or will be soon: this sample joins at its end.
        return kind.prompt_tokens if max(siblings) >= kind.prompt_tokens else 0

    def _pages(self, rollout: int) -> Iterable[Page]:
        prompt, sample, kind = self.owners[rollout]
        length, shared = self.lengths[rollout], (kind.prompt_tokens - 1) // self.page_tokens
        for index, group in enumerate(self.groups):
            if not group.head_bytes:
                continue
            for token in range(length):
                if group.window is None or token >= length - group.window:
                    at = token // self.page_tokens
                    yield index, prompt, -1 if at < shared else sample, at

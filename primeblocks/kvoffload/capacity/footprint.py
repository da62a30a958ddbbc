"""The most pages that rollouts can hold, in closed form, and the cost of computing them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import PlanError
from .kv_shapes import KvGroup

__all__ = ["Footprint", "Rollouts", "footprint", "prefill_flops"]


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one shape, all in flight at once.

    Attributes:
        prompts: number of different prompts.
        prompt_tokens: length of each.
        completion_tokens: the most that follow the prompt in one rollout, all turns together.
        samples: rollouts of one prompt; they share its whole pages.

    Raises:
        PlanError: a number is below 1.
    """

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    samples: int = 1

    def __post_init__(self) -> None:
        numbers = (self.prompts, self.prompt_tokens, self.completion_tokens, self.samples)
        if min(numbers) < 1:
            raise PlanError(f"counts and lengths must be at least 1; got {self}")

    @property
    def tokens(self) -> int:
        """Tokens with keys and values: all but the last, which no later token attends to."""
        return self.prompt_tokens + self.completion_tokens - 1

    def shared_pages(self, page_tokens: int) -> int:
        """Count whole pages before the prompt's last token, which every sample computes itself."""
        return (self.prompt_tokens - 1) // page_tokens


@dataclass(frozen=True)
class Footprint:
    """The most that the samples of one prompt can hold on one rank.

    Attributes:
        pages: by group, when the samples hold the most bytes.
        total_bytes: those pages and all states.
    """

    pages: tuple[int, ...]
    total_bytes: int


def footprint(
    groups: Sequence[KvGroup], rollouts: Rollouts, *, page_tokens: int, tensor: int = 1
) -> Footprint:
    """Return the peak over every order in which samples can grow, token by token. Pure.

    Samples after the first begin when the prompt is in its pages; each is then at any length up to
    its end. Only lengths in the last page are tried: one page earlier, a rollout never holds more,
    since a window moves by whole pages and everything else only grows.
    """
    end = rollouts.tokens
    begin = 1 if rollouts.samples == 1 else rollouts.prompt_tokens
    lengths = range(max(begin, end - page_tokens + 1), end + 1)
    sizes = [each.page_bytes(page_tokens, tensor=tensor) for each in groups]
    states = sum(each.state_bytes(tensor=tensor) for each in groups)

    def most(shared: int) -> tuple[int, tuple[int, ...]]:
        counted = (
            tuple(_held(each, tokens, page_tokens, shared) for each in groups) for tokens in lengths
        )
        return max((sum(map(int.__mul__, pages, sizes)), pages) for pages in counted)

    first, first_pages = most(0)
    each_other, other_pages = most(rollouts.shared_pages(page_tokens))
    others = rollouts.samples - 1
    return Footprint(
        pages=tuple(a + others * b for a, b in zip(first_pages, other_pages, strict=True)),
        total_bytes=first + others * each_other + rollouts.samples * states,
    )


def _held(group: KvGroup, tokens: int, page_tokens: int, shared: int) -> int:
    """Count pages of a rollout of this length that are not among the first `shared`."""
    if not group.head_bytes:
        return 0
    seen = 0 if group.window is None else max(0, tokens - group.window) // page_tokens
    return max(0, -(-tokens // page_tokens) - max(shared, seen))


def prefill_flops(
    groups: Sequence[KvGroup], *, start: int, end: int, active_parameters: int
) -> int:
    """Count a rollout's forward FLOPs of tokens `start` to `end` (exclusive), a closed form. Pure.

    Two for each active parameter and token, and attention to the keys that each token sees.
    Recurrent states are not counted; a model with them computes from token 0.
    """
    attention = 0
    for group in groups:
        seen = min(group.window or end, group.max_keys or end)
        keys = _keys_seen(end, seen) - _keys_seen(start, seen)
        attention += group.layers * group.pair_flops * keys
    return 2 * active_parameters * (end - start) + attention


def _keys_seen(tokens: int, most: int) -> int:
    """Return the sum of min(i, most) for i from 1 to `tokens`."""
    rising = min(tokens, most)
    return rising * (rising + 1) // 2 + (tokens - rising) * most

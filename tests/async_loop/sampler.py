"""An engine of random answers, and the tokens of rollouts to compare with them."""

from collections import Counter
from typing import Any

import numpy as np

from primeblocks.async_loop import Rollout


def trained(rollouts: tuple[Rollout, ...]) -> Counter:
    """What counts in the loss: the tokens before it, the token, log-probability and version."""
    return Counter(
        (tuple(each.tokens[:at]), int(each.tokens[at]), each.logprobs[entry], each.versions[entry])
        for each in rollouts
        for entry in np.flatnonzero(each.loss_mask)
        for at in [each.prompt_length + entry]
    )


class Sampler:
    """Answers with random tokens, and remembers what it said."""

    def __init__(self, low: int, high: int, end: tuple[int, ...] = ()) -> None:
        self.random = np.random.default_rng(0)
        self.ids = (low, high)
        self.end = end
        self.said: Counter = Counter()
        self.versions: dict[tuple[float, ...], list[int]] = {}

    def __call__(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        ids = [*map(int, self.random.integers(*self.ids, self.random.integers(1, 5))), *self.end]
        logprobs = [-float(each) for each in self.random.random(len(ids))]
        # The weights change within an answer.
        versions = sorted(map(int, self.random.integers(3, 6, len(ids))))
        self.versions[tuple(logprobs)] = versions
        for at, entry in enumerate(zip(ids, logprobs, versions, strict=True)):
            self.said[(*prompt, *ids[:at]), *entry] += 1
        return ids, logprobs

    def version_of(self, node: Any) -> list[int]:
        """Versions of the answer with a node's log-probabilities."""
        return self.versions[tuple(node.logprobs)]

"""What a run knows of each prompt, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .rollout import Group

__all__ = ["Draft", "Ledger", "Partial", "Restored"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """A trajectory so far."""

    tokens: NDArray[np.int64]
    prompt_length: int
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    attachments: Mapping[str, Any]


@dataclass(frozen=True)
class Restored:
    """What a run goes on with."""

    cursor: int
    again: list[tuple[int, Any, dict[int, Partial]]]
    finished: list[tuple[int, Group]]


class Ledger(Protocol):
    """What happened to each prompt."""

    def drawn(self, ordinal: int, prompt: Any) -> None: ...
    def started(self, ordinal: int, version: int) -> None: ...
    def sampled(self, ordinal: int, sample: int, partial: Partial) -> None: ...
    def finished(self, ordinal: int, group: Group) -> None: ...
    def dropped(self, ordinal: int) -> None: ...
    def left_out(self, ordinal: int, reason: str) -> None: ...
    def taken(self, ordinals: Sequence[int], version: int) -> None: ...
    def trained(self, version: int) -> None: ...
    def checkpointed(self, version: int) -> None: ...
    def restore(self, version: int) -> Restored: ...


class Draft:
    """The trajectories of one prompt so far, for `generate` to go on with and to save."""

    def __init__(self, ordinal: int, partials: dict[int, Partial], ledger: Ledger) -> None:
        self.ordinal, self.partials, self._ledger = ordinal, partials, ledger

    def save(self, sample: int, partial: Partial) -> None:
        """Keep a trajectory as far as it is; durable when it returns."""
        self._ledger.sampled(self.ordinal, sample, partial)
        self.partials[sample] = partial

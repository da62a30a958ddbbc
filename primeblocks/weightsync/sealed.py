"""Sealed memory that a reader holds: mapped for one use at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from .lease import Hold

__all__ = ["SealedLease"]


class SealedLease:
    """A committed version in sealed memory, unchanged by its writers until closed.

    A tensor of a mapping holds the version for as long as somebody keeps it.

    Args:
        take: returns a mapping of it, in private pages: writes to them stay in this process.
        give: keeps a mapping for the next lease that needs it.
    """

    def __init__(
        self, hold: Hold, take: Callable[[], np.ndarray], give: Callable[[np.ndarray], object]
    ) -> None:
        self._take, self._state = take, _State(hold, give)
        self._mapped: UInt8[Tensor, " bytes"] | None = None
        self.close = weakref.finalize(self, self._state.close)

    def map(self) -> UInt8[Tensor, " bytes"]:
        """Return the version's bytes, as they were written, until `unmap`."""
        if self._mapped is None:
            mapping = self._take()
            whole = mapping[:]  # Ends with the last tensor.
            self._state.mapped += 1
            weakref.finalize(whole, self._state.unmapped, mapping).atexit = False
            with torch.inference_mode(False):  # Which counts no writes.
                self._mapped = torch.from_numpy(whole)
        return self._mapped

    def unmap(self, *, is_right: bool = True) -> None:
        """Forget the mapping. One that is wrong, or was written to, is never used again."""
        if self._mapped is not None:
            self._state.is_clean = is_right and self._mapped._version == 0
            self._mapped = None  # Where nobody keeps a tensor, this is its end.
            self._state.is_clean = False


class _State:
    """The state that outlives a lease while somebody keeps a tensor."""

    def __init__(self, hold: Hold, give: Callable[[np.ndarray], object]) -> None:
        self._hold, self._give = hold, give
        self.mapped, self.is_clean, self._is_closed = 0, False, False

    def unmapped(self, mapping: np.ndarray) -> None:
        self.mapped -= 1
        if self.is_clean:
            self._give(mapping)
        if self._is_closed and self.mapped == 0:
            self._hold.close()

    def close(self) -> None:
        self._is_closed = True
        if self.mapped == 0:
            self._hold.close()

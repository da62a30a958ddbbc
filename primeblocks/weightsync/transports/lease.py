"""A blob that a reader holds."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from jaxtyping import UInt8
from torch import Tensor

__all__ = ["Lease"]


class Lease:
    """A committed blob, unchanged until closed. Private pages: writing to it harms nobody.

    `release` gets the blob at the end, unless it was written to: see `own`.
    """

    def __init__(
        self,
        blob: UInt8[Tensor, " bytes"],
        fd: int,
        release: Callable[[UInt8[Tensor, " bytes"]], object],
    ) -> None:
        self.blob = blob
        self._owned: list[bool] = []
        self.close = weakref.finalize(self, _end_lease, blob, fd, release, self._owned)

    def own(self) -> None:
        """Say that the blob will be written to, so that nobody takes it for the file later."""
        self._owned.append(True)


def _end_lease(
    blob: UInt8[Tensor, " bytes"],
    fd: int,
    release: Callable[[UInt8[Tensor, " bytes"]], object],
    owned: list[bool],
) -> None:
    os.close(fd)
    if not owned:
        release(blob)

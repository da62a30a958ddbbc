"""A reader's wait until the version that it asks for is committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...errors import DeadlineError
from ..marker import Marker
from .choose import chain_to, choose
from .transport import Request

__all__ = ["await_versions"]


def await_versions(
    look: Callable[[], tuple[Marker, ...]],
    request: Request,
    *,
    every_s: float,
    hint: Callable[[], str] = str,
) -> tuple[Marker, ...]:
    """Wait for the version asked for; return it, after missing versions that it is a delta to.

    `hint` ends the message of a wait in vain.

    Raises:
        DeadlineError: it was not committed in time.
        TransferError: it was retired.
    """
    never = threading.Event()
    while True:
        markers = look()
        found = choose(markers, request.version, served=request.served)
        if found is not None:
            return chain_to(found, markers, held=request.held)
        if time.monotonic() >= request.deadline:
            wanted = f"version {request.version}"
            if request.version is None:
                wanted = "a newer version"
            raise DeadlineError(
                f"{wanted} was not committed in time; this engine holds "
                f"{request.served and request.served.version}, the transport "
                f"{[marker.version for marker in markers]}.{hint()}"
            )
        never.wait(min(every_s, max(0.0, request.deadline - time.monotonic())))

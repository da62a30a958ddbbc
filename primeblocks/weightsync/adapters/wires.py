"""`open_transport` for processes that open any wire of ours: an engine's worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..transports import open as opening
from ..transports.carriers import Wire
from ..transports.transport import Transport

__all__ = ["open_transport"]


def open_transport(spec: Mapping[str, Any]) -> Transport:
    """Open the reading end of the transport whose `spec()` this is, over any wire.

    Raises:
        MissingPackageError: the wire's package is not installed here.
        UnsupportedError: the kind is unknown here.
        TransferError: its store does not answer.
    """
    return opening.open_transport(spec, wires={"nixl": _nixl})


def _nixl(backend: str) -> Wire:
    from .nixl import NixlWire

    return NixlWire(serves=False, backend=backend)

"""`open_transport` for workers of engines. It can open every wire of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..transports import open as opening
from ..transports.carriers import Wire
from ..transports.transport import Transport

__all__ = ["open_transport"]


def open_transport(spec: Mapping[str, Any]) -> Transport:
    """Open the reading end of the transport that `spec` describes.

    The transport may use `TcpWire` or `NixlWire`, or may work without a wire.

    Raises:
        MissingPackageError: the wire's package is not installed in this process.
        UnsupportedError: this release of primeblocks does not know the kind of transport.
        TransferError: the transport's store does not answer.
    """
    return opening.open_transport(spec, wires={"nixl": _nixl})


def _nixl(backend: str) -> Wire:
    from .nixl import NixlWire

    return NixlWire(serves=False, backend=backend)

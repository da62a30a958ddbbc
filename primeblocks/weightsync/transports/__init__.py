"""Transports: how versions travel from trainer ranks to readers."""

from .carriers import Read, Wire
from .directory import FileTransport, SharedMemoryTransport
from .group import GroupTransport
from .group_wire import Estimate, estimate
from .open import IpcTransport, PullTransport, open_transport
from .packed import PackedTransport
from .tcp_wire import TcpWire
from .transport import Transport

__all__ = [
    "Estimate",
    "FileTransport",
    "GroupTransport",
    "IpcTransport",
    "PackedTransport",
    "PullTransport",
    "Read",
    "SharedMemoryTransport",
    "TcpWire",
    "Transport",
    "Wire",
    "estimate",
    "open_transport",
]

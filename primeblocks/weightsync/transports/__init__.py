"""Ways for versions to travel from trainer ranks to readers."""

from .directory import FileTransport, SharedMemoryTransport
from .doctor import Found, doctor
from .group import GroupTransport
from .ipc import IpcTransport
from .open import open_transport
from .pull import PullTransport
from .rounds import Estimate, estimate
from .transport import Transport
from .wire import Read, Wire

__all__ = [
    "Estimate",
    "FileTransport",
    "Found",
    "GroupTransport",
    "IpcTransport",
    "PullTransport",
    "Read",
    "SharedMemoryTransport",
    "Transport",
    "Wire",
    "doctor",
    "estimate",
    "open_transport",
]

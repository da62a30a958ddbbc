"""Move trained weights into running engines, all or nothing.

A plan says which trainer rank writes which box of which tensor, and which reader wants the box. A
transport carries the boxes, in full or as a delta. Each reader checks every byte before the engine
serves a version. The engine serves the old version until the new version is complete.
"""

from . import convert, delta, engines, transports
from .load import load_into
from .manifest import describe
from .plan import Plan
from .planner import plan_sync
from .publish import Publisher
from .receive import Subscriber
from .rendezvous import announce, find
from .transports import SharedMemoryTransport
from .verify import verify_engine

__all__ = [
    "Plan",
    "Publisher",
    "SharedMemoryTransport",
    "Subscriber",
    "announce",
    "convert",
    "delta",
    "describe",
    "engines",
    "find",
    "load_into",
    "plan_sync",
    "transports",
    "verify_engine",
]

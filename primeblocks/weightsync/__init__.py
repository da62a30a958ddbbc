"""Move trained weights into running engines, all or nothing.

A plan says which trainer rank writes which box of which tensor, and which reader wants it; a
transport carries it, in full or as what changed; readers check every byte before they load it, and
keep serving the old version until the new one is whole.
"""

from . import convert, delta, engines, transports
from .manifest import Manifest, describe, gather_manifests
from .plan import Plan
from .planner import plan_sync
from .proof import prove_round_trip
from .publish import Publisher
from .receive import Subscriber
from .transports import FileTransport, SharedMemoryTransport
from .verify import verify_engine

__all__ = [
    "FileTransport",
    "Manifest",
    "Plan",
    "Publisher",
    "SharedMemoryTransport",
    "Subscriber",
    "convert",
    "delta",
    "describe",
    "engines",
    "gather_manifests",
    "plan_sync",
    "prove_round_trip",
    "transports",
    "verify_engine",
]

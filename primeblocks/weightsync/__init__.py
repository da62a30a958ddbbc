"""Move trained weights into running engines, all or nothing.

Every trainer rank writes its own shards into one blob per version; engines check a digest over
every byte before they load it, and keep serving the old version until the new one is whole.
"""

from .delta import DeltaInfo, apply_delta, encode_delta, inspect_delta, merge_deltas
from .manifest import Manifest, TensorSpec, describe, gather_manifests
from .marker import Receipt
from .plan import Plan, plan_sync
from .publish import Publisher
from .receive import Subscriber
from .transport import FileTransport, SharedMemoryTransport, Transport, open_transport

__all__ = [
    "DeltaInfo",
    "FileTransport",
    "Manifest",
    "Plan",
    "Publisher",
    "Receipt",
    "SharedMemoryTransport",
    "Subscriber",
    "TensorSpec",
    "Transport",
    "apply_delta",
    "describe",
    "encode_delta",
    "gather_manifests",
    "inspect_delta",
    "merge_deltas",
    "open_transport",
    "plan_sync",
]

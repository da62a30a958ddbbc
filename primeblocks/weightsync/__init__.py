"""Move trained weights into running engines, all or nothing.

A plan says which trainer rank writes which box of which tensor, and which reader wants it; a
transport carries it, in full or as what changed; readers check every byte before they load it, and
keep serving the old version until the new one is whole.
"""

from .conversion import rules
from .conversion.conversion import Conversion, Wiring
from .conversion.families import checkpoint_to_vllm, transformers_to_checkpoint
from .conversion.pieces import Piece
from .conversion.quantise import Quantise
from .delta.tensors import DeltaInfo, apply_delta, encode_delta, inspect_delta, merge_deltas
from .engines.colocated import Colocated, ColocatedEngine, Memory, Turn
from .engines.lora import AdapterSpec, adapter_parameters
from .engines.model_folder import ModelFolder, ModelFolders
from .manifest import Manifest, TensorSpec, describe, gather_manifests
from .marker import Receipt
from .plan import Bucket, Plan
from .planner import plan_sync
from .proof import RoundTrip, digest_tensors, prove_round_trip
from .publish import Publisher
from .receive import Subscriber
from .transports.directory import FileTransport, SharedMemoryTransport
from .transports.group import GroupTransport
from .transports.ipc import IpcTransport
from .transports.open import open_transport
from .transports.pull import PullTransport
from .transports.rounds import Estimate, estimate
from .transports.transport import Transport
from .transports.wire import Read, Wire

__all__ = [
    "AdapterSpec",
    "Bucket",
    "Colocated",
    "ColocatedEngine",
    "Conversion",
    "DeltaInfo",
    "Estimate",
    "FileTransport",
    "GroupTransport",
    "IpcTransport",
    "Manifest",
    "Memory",
    "ModelFolder",
    "ModelFolders",
    "Piece",
    "Plan",
    "Publisher",
    "PullTransport",
    "Quantise",
    "Read",
    "Receipt",
    "RoundTrip",
    "SharedMemoryTransport",
    "Subscriber",
    "TensorSpec",
    "Transport",
    "Turn",
    "Wire",
    "Wiring",
    "adapter_parameters",
    "apply_delta",
    "checkpoint_to_vllm",
    "describe",
    "digest_tensors",
    "encode_delta",
    "estimate",
    "gather_manifests",
    "inspect_delta",
    "merge_deltas",
    "open_transport",
    "plan_sync",
    "prove_round_trip",
    "rules",
    "transformers_to_checkpoint",
]

"""Move trained weights into running engines, all or nothing.

Every trainer rank writes its own shards into one blob per version; engines check a digest over
every byte before they load it, and keep serving the old version until the new one is whole.
"""

from . import convert_rules as rules
from .colocated import Colocated, ColocatedEngine, Turn
from .convert import Conversion, Wiring
from .convert_quantise import Quantise
from .delta import DeltaInfo, apply_delta, encode_delta, inspect_delta, merge_deltas
from .directory import FileTransport, SharedMemoryTransport
from .families import checkpoint_to_vllm, transformers_to_checkpoint
from .group import GroupTransport
from .lora import AdapterSpec, adapter_parameters
from .manifest import Manifest, TensorSpec, describe, gather_manifests
from .marker import Receipt
from .model_folder import ModelFolder, ModelFolders
from .open import open_transport
from .pieces import Piece
from .plan import Bucket, Plan
from .planner import plan_sync
from .proof import RoundTrip, digest_tensors, prove_round_trip
from .publish import Publisher
from .receive import Subscriber
from .rounds import Estimate, estimate
from .transport import Transport

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
    "Manifest",
    "ModelFolder",
    "ModelFolders",
    "Piece",
    "Plan",
    "Publisher",
    "Quantise",
    "Receipt",
    "RoundTrip",
    "SharedMemoryTransport",
    "Subscriber",
    "TensorSpec",
    "Transport",
    "Turn",
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

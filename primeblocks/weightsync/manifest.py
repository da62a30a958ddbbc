"""The tensors that a rank holds: name -> dtype, global shape and this rank's box."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import PlanError, PrimeblocksError, shown
from ..layout import Layout, Shard, layout_of
from .marker import UNREADABLE, is_count

__all__ = [
    "FLOATS",
    "NEVER_ROUNDED",
    "Manifest",
    "NamedTensors",
    "TensorSpec",
    "as_plan_error",
    "box_of",
    "converts",
    "describe",
    "gather_manifests",
    "named_tensors",
    "unwrapped",
]

# Names that torch.compile, FSDP1, and checkpoint or offload wrappers add. `unwrapped` handles DDP.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# The sender converts these dtypes into each other. Any other dtype must be equal on both sides.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Routers add these biases to their scores, and a rounded bias chooses other experts. vLLM stores
# them in float32, and so do the files of the models. The names from `ffn` on are those in files of
# DeepSeek-V4, Inkling and Step 3.7. The names from `mlp.gate.weight` on are weights of routers,
# which some models of vLLM store in float32. Mixed precision leaves routers in float32, and small
# updates of rounded routers would not arrive. Other weights, such as `A_log` of recurrent layers,
# are rounded, because FSDP2 computes with rounded ones in mixed precision.
NEVER_ROUNDED = (
    "e_score_correction_bias",
    "expert_bias",
    "expert_bias_E",
    "balancing_biases",
    "ffn.gate.bias",
    "ffn.gate.bias_vl",
    "mlp.gate.bias",
    "router_bias",
    "mlp.gate.weight",
    "mlp.gate.weight_1",
    "mlp.gate.wg.weight",
    "moe.gate.weight",
    "mixer.gate.weight",
    "router.gate.weight",
    "router.classifier.weight",
)

NamedTensors = nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the layout of one tensor."""

    dtype: torch.dtype
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> TensorSpec:
        """Return the spec of the same tensor held in full."""
        return TensorSpec(self.dtype, Layout.whole(self.shape))


@dataclass(frozen=True)
class Manifest(Mapping[str, TensorSpec]):
    """The tensors of one rank by name, in order. An immutable mapping.

    Attributes:
        recipe: the fingerprint of the recipe that encoded the tensors, or "". Trainer and readers
            must have the same fingerprint.
    """

    tensors: tuple[tuple[str, TensorSpec], ...]
    recipe: str = ""

    def __post_init__(self) -> None:
        index = dict(self.tensors)
        if len(index) != len(self.tensors):
            raise PlanError(
                f"{len(self.tensors) - len(index)} of {len(self.tensors)} names occur twice in a "
                "manifest. Rename those tensors."
            )
        object.__setattr__(self, "_index", index)

    def __getitem__(self, name: str) -> TensorSpec:
        return self._index[name]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def whole(self, *, dtype: torch.dtype | None = None) -> Manifest:
        """Return the same tensors held in full, with floats in `dtype` as in `describe`."""
        rows = [
            (name, TensorSpec(_cast(name, spec.dtype, dtype), Layout.whole(spec.shape)))
            for name, spec in self.tensors
        ]
        return Manifest(tuple(rows), self.recipe)

    def to_json(self) -> str:
        """Return a text that `from_json` turns into an equal manifest."""
        rows = []
        for name, spec in self.tensors:
            dtype, box = str(spec.dtype).removeprefix("torch."), spec.layout.shard
            rows.append([name, dtype, spec.shape, box.offsets, box.sizes])
        return json.dumps([self.recipe, rows], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that `to_json` wrote.

        Raises:
            PlanError: `to_json` did not write this text.
        """
        with as_plan_error("a manifest"):
            recipe, rows = json.loads(text)
            tensors = []
            for name, dtype, shape, at, size in rows:
                layout = Layout(box_of(shape, shape).sizes, box_of(at, size))
                tensors.append((str(name), TensorSpec(_dtype(dtype), layout)))
            return cls(tuple(tensors), str(recipe))


@contextmanager
def as_plan_error(what: str) -> Iterator[None]:
    """Raise PlanError for a text that `to_json` did not write."""
    try:
        yield
    except PrimeblocksError:
        raise
    except UNREADABLE as error:
        raise PlanError(
            f"this text does not describe {what}: {type(error).__name__}: {str(error)[:200]}. "
            "Pass on what to_json() returned."
        ) from error


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Shard:
    """Return a box that another process has written, or raise PlanError."""
    if not all(map(is_count, (*offsets, *sizes))):
        raise PlanError(
            f"a box cannot have offsets {str(offsets)[:99]} and sizes {str(sizes)[:99]}. Pass on "
            "what to_json() returned."
        )
    return Shard(tuple(offsets), tuple(sizes))


def named_tensors(source: NamedTensors) -> dict[str, torch.Tensor]:
    """Return the given tensors by name, or a module's parameters and persistent buffers. Local.

    Names come without the parts that torch.compile, DDP, FSDP1 and activation checkpoints add. If
    FSDP2 left parameters gathered, the module is resharded.

    Raises:
        PlanError: a name occurs twice, FSDP1 has flattened the parameters, or a value is not a
            dense tensor. A negated or conjugated view is refused too. Also raised if FSDP2 is
            inside a forward or a backward.
    """
    rows = list(_of_module(source)) if isinstance(source, nn.Module) else source
    try:
        pairs = list(rows.items() if isinstance(rows, Mapping) else rows)
        tensors = dict(pairs)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"expected a module or a dict of tensors by name; got {shown(source)}."
        ) from error
    if len(tensors) != len(pairs):
        raise PlanError(
            f"{len(pairs) - len(tensors)} names occur twice among {len(pairs)} tensors. Give each "
            "tensor its own name."
        )
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise PlanError(f"{name!r} has no shape yet. Run the module once.")
        if (
            not isinstance(name, str)
            or not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
        ):
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise PlanError(f"{name!r} is {kind}. Pass dense tensors by name.")
        if tensor.is_neg() or tensor.is_conj():
            raise PlanError(
                f"{name!r} is a negated or conjugated view, and torch does not store its bits. "
                "Give the result of resolve_neg() or resolve_conj()."
            )
    return tensors


def describe(source: NamedTensors, *, dtype: torch.dtype | None = None) -> Manifest:
    """Describe the tensors that this rank holds. Local. Moves no data.

    A tied parameter appears once, under its first name.

    Args:
        source: a module, for its parameters and persistent buffers, or tensors by name. A DTensor
            is described by its global shape and this rank's box, also for FSDP2 over expert shards.
        dtype: the dtype with which tensors of the dtypes in `FLOATS` are described, one of
            `FLOATS`. Tensors of other dtypes keep their dtype. Weights and biases of routers are
            not rounded to 16 bits if vLLM may store them in float32: they are described in float32.
            With None, all tensors keep their dtype.

    Raises:
        PlanError: as for `layout_of`, or a name occurs twice, or a value is not a dense tensor.
    """
    rows = [
        (name, TensorSpec(_cast(name, tensor.dtype, dtype), layout_of(tensor)))
        for name, tensor in named_tensors(source).items()
    ]
    return Manifest(tuple(rows))


def gather_manifests(
    manifest: Manifest, *, group: torch.distributed.ProcessGroup | None = None
) -> list[Manifest]:
    """Return every rank's manifest, by rank. Collective: about 100 bytes per tensor and rank."""
    world_size = torch.distributed.get_world_size(group)
    texts: list[str] = [""] * world_size
    torch.distributed.all_gather_object(texts, manifest.to_json(), group=group)
    return [Manifest.from_json(text) for text in texts]


def converts(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether a sender can turn one dtype into the other: equal, or both in `FLOATS`."""
    return have == want or {have, want} <= set(FLOATS)


def _of_module(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Not state_dict(): its hooks may gather, and it lists tied tensors twice.
    owners = dict(module.named_modules())
    states: list[Any] = []
    for owner in owners.values():
        if isinstance(owner, FullyShardedDataParallel) and (
            owner.sharding_strategy != ShardingStrategy.NO_SHARD
        ):
            raise PlanError("FSDP1 has flattened the parameters. Use torch's fully_shard (FSDP2).")
        if isinstance(owner, FSDPModule):
            before, states = states, owner._get_fsdp_state()._state_ctx.all_states
            running = (each._training_state.name != "IDLE" for each in states)
            if states is not before and any(running):  # All units of a model share the list.
                raise PlanError(
                    "FSDP2 is inside a forward or a backward, or an error ended one. Wait for its "
                    "end, or call model.reset_iter_state() between two model.zero_grad()."
                )
            # A forward without a backward leaves gathered copies, which no optimizer updates.
            owner.reshard()
    for name, parameter in module.named_parameters():
        yield unwrapped(name, owners), parameter
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in owners.items()
        for name in child._buffers
        if name not in child._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield unwrapped(name, owners), buffer


def unwrapped(name: str, owners: Mapping[str, nn.Module]) -> str:
    parts, kept = name.split("."), list[str]()
    for at, part in enumerate(parts):
        owner = owners.get(".".join(parts[:at]))
        is_ddp = part == "module" and isinstance(owner, DistributedDataParallel)
        if part not in _WRAPPERS and not is_ddp:
            kept.append(part)
    return ".".join(kept)


def _cast(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is not None and wanted not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise PlanError(f"dtype must be one of {names}, or None; got {wanted!r}.")
    if wanted is None or dtype not in FLOATS:
        return dtype
    is_rounded = wanted.itemsize < torch.float32.itemsize <= dtype.itemsize
    return torch.float32 if is_rounded and name.endswith(NEVER_ROUNDED) else wanted


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"torch has no dtype named {name!r}. Pass on what to_json() returned.")
    return dtype

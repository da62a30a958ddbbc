"""Bytes that a plan sends against the least possible, and a sync of 1T parameters on paper.

The least is counted here from the layouts: every engine rank has to receive its own boxes once.
What is sent is every bucket to each of its readers, as in a process group, and 16 bytes of digest
with it.

On paper: Kimi-K2's shapes, 256 trainer GPUs (experts in 64 groups by 4 rows of FSDP, the rest FSDP
over all), 128 engine GPUs with attention data-parallel and experts dealt over each engine. One
layer of each kind is planned and taken as often as the model has it. Seconds are those of the
busiest GPU at line rate: no latency, no congestion, no packing, no digest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import Plan, plan_sync
from primeblocks.weightsync.manifest import Manifest, TensorSpec

from .shared_memory import Figures

__all__ = ["figures", "paper"]

DIGEST_BYTES = 16
TRAINERS, ENGINES = 256, 128
# GPUs of an engine; in bf16 sixteen do not hold the model.
PAPER_ENGINES = {"fp8": (16, 32, 128), "bf16": (32, 128)}
LINE_BYTES_PER_S = 400e9 / 8
DELTA = 0.013
PUBLISHED = (
    "published: checkpoint-engine 16.0 s (256 H20), miles 7.2 s (256 to 256), Perplexity 1.3 s"
)

Shapes = Mapping[str, tuple[int, ...]]
QWEN3_30B_A3B: Shapes = {
    "q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096), "norm": (2048,),
    "router": (128, 2048), "w13": (128, 1536, 2048), "w2": (128, 2048, 768),
}  # fmt: skip
ATTENTION: Shapes = {
    "q_a": (1536, 7168), "q_a_norm": (1536,), "q_b": (12288, 1536), "kv_a": (576, 7168),
    "kv_a_norm": (512,), "kv_b": (16384, 512), "o": (7168, 8192), "norm": (7168,), "norm2": (7168,),
}  # fmt: skip
# Kimi-K2: what a layer of each kind holds, and how many there are.
KIMI_K2: dict[str, tuple[int, Shapes]] = {
    "ends": (1, {"embed": (163840, 7168), "head": (163840, 7168), "norm": (7168,)}),
    "dense": (1, {**ATTENTION, "w13": (2 * 18432, 7168), "w2": (7168, 18432)}),
    "moe": (60, {
        **ATTENTION, "router": (384, 7168), "bias": (384,),
        "shared13": (2 * 2048, 7168), "shared2": (7168, 2048),
        "w13": (384, 2 * 2048, 7168), "w2": (384, 7168, 2048),
    }),
}  # fmt: skip


def figures() -> Figures:
    """16 trainer ranks, experts 4 x FSDP 4, to two engines of 4 ranks, TP attention and EP."""
    sources = [_trainer(QWEN3_30B_A3B, rank, 16, 4, torch.float32) for rank in range(16)]
    targets = [_tensor_parallel(QWEN3_30B_A3B, rank, 4) for _ in range(2) for rank in range(4)]
    plan = plan_sync(sources, targets, bucket_bytes=16 << 20)
    return {
        "weightsync.plan.bytes_over_bound": (
            _sent(plan) / sum(map(_held, targets)), "ratio", "each engine rank's boxes once",
        ),
        "weightsync.plan.busiest_sender_over_mean": (
            max(_sent_by_rank(plan)) * len(sources) / sum(_sent_by_rank(plan)),
            "ratio", "mean of the trainers",
        ),
    }  # fmt: skip


def paper() -> Figures:
    """By size of an engine, in FP8 and in bf16, in full and as a delta."""
    found: Figures = {}
    for dtype, label in ((torch.float8_e4m3fn, "fp8"), (torch.bfloat16, "bf16")):
        for size in PAPER_ENGINES[label]:
            at = f"weightsync.paper.1t.{label}.{ENGINES // size}x{size}_gpus"
            start = time.perf_counter()
            moved, sent, least = _kimi(size, dtype)
            found |= {
                f"{at}.bytes": (float(sent), "B", ""),
                f"{at}.bytes_over_bound": (sent / least, "ratio", "each engine rank's boxes once"),
                f"{at}.most_sent": (float(max(moved[:TRAINERS])), "B", ""),
                f"{at}.most_received": (float(max(moved[TRAINERS:])), "B", ""),
                f"{at}.seconds": (max(moved) / LINE_BYTES_PER_S, "s", PUBLISHED),
                f"{at}.delta.seconds": (DELTA * max(moved) / LINE_BYTES_PER_S, "s", PUBLISHED),
                f"{at}.planning": (time.perf_counter() - start, "s", ""),
            }
    return found


def _kimi(size: int, dtype: torch.dtype) -> tuple[list[int], int, int]:
    """What each rank sends or receives, what is sent in all, and the least."""
    moved, sent, least = [0] * (TRAINERS + ENGINES), 0, 0
    for count, shapes in KIMI_K2.values():
        sources = [_trainer(shapes, rank, TRAINERS, 64, dtype) for rank in range(TRAINERS)]
        one = [_expert_parallel(shapes, rank, size, dtype) for rank in range(size)]
        targets = one * (ENGINES // size)
        plan = plan_sync(sources, targets, bucket_bytes=64 << 20)
        moved = [a + count * b for a, b in zip(moved, _moved(plan), strict=True)]
        sent += count * _sent(plan)
        least += count * sum(map(_held, targets))
    return moved, sent, least


def _sent(plan: Plan) -> int:
    return sum((bucket.bytes + DIGEST_BYTES) * len(bucket.readers) for bucket in plan.buckets)


def _sent_by_rank(plan: Plan) -> list[int]:
    sent = [0] * plan.world_size
    for bucket in plan.buckets:
        sent[bucket.rank] += bucket.bytes * len(bucket.readers)
    return sent


def _moved(plan: Plan) -> list[int]:
    """What each trainer rank sends, then what each engine rank receives."""
    return _sent_by_rank(plan) + [plan.read_bytes(reader) for reader in range(len(plan.wants))]


def _held(manifest: Manifest) -> int:
    return sum(spec.layout.shard.numel * spec.dtype.itemsize for spec in manifest.values())


def _trainer(
    shapes: Shapes, rank: int, ranks: int, expert_groups: int, dtype: torch.dtype
) -> Manifest:
    """Experts dealt over groups, the rows of each over the ranks of a group; the rest by rows."""
    group, member = rank % expert_groups, rank // expert_groups
    members = ranks // expert_groups
    return _manifest({
        name: (dtype, shape, _cut(shape, {0: (group, expert_groups), 1: (member, members)})
               if len(shape) == 3 else _cut(shape, {0: (rank, ranks)}))
        for name, shape in shapes.items()
    })  # fmt: skip


def _tensor_parallel(shapes: Shapes, rank: int, ranks: int) -> Manifest:
    """vLLM's layout: columns of what goes in, rows of what comes out, experts dealt, rest whole."""
    dims = {"q": 0, "k": 0, "v": 0, "o": 1, "w13": 0, "w2": 0}
    parts = {name: {dims[name]: (rank, ranks)} if name in dims else {} for name in shapes}
    return _manifest({
        name: (torch.bfloat16, shape, _cut(shape, parts[name])) for name, shape in shapes.items()
    })  # fmt: skip


def _expert_parallel(shapes: Shapes, rank: int, ranks: int, dtype: torch.dtype) -> Manifest:
    """Attention whole on every rank, experts dealt."""
    return _manifest({
        name: (dtype, shape, _cut(shape, {0: (rank, ranks)} if len(shape) == 3 else {}))
        for name, shape in shapes.items()
    })  # fmt: skip


def _cut(shape: tuple[int, ...], parts: Mapping[int, tuple[int, int]]) -> Shard:
    """Part i of n along some dims; what does not divide is dealt as evenly as it goes."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, (index, count) in parts.items():
        offsets[dim] = index * shape[dim] // count
        sizes[dim] = (index + 1) * shape[dim] // count - offsets[dim]
    return Shard(tuple(offsets), tuple(sizes))


def _manifest(boxes: Mapping[str, tuple[torch.dtype, tuple[int, ...], Shard]]) -> Manifest:
    return Manifest(
        tuple(
            (name, TensorSpec(dtype, Layout(shape, box)))
            for name, (dtype, shape, box) in boxes.items()
        )
    )

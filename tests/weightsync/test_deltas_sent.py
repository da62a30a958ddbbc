"""What is sent as deltas arrives as if it was sent in full, over every transport."""

import random

import pytest
import torch
import torch.distributed as dist

from primeblocks.layout import Layout, Shard
from primeblocks.testing import ranks
from primeblocks.weightsync import plan_sync
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from tests.deadlines import HANG_S
from tests.weightsync.contents import KINDS, Side, random_tensor, same_bytes, transport_of
from tests.weightsync.reference import slice_again
from tests.weightsync.small_sync import PULL, RANKS

ranks.preload(__name__)  # With all that it imports.

SHAPES = {  # As they travel; "cast" is float32 in the trainer.
    "bf16": (torch.bfloat16, (32, 48)),
    "float32": (torch.float32, (24, 40)),
    "float8": (torch.float8_e4m3fn, (64, 64)),
    "int64": (torch.int64, (300,)),
    "cast": (torch.bfloat16, (16, 8, 12)),
}
FULL_EVERY, VERSIONS = 6, 18


def part(name, rank, *, trainer):
    """Rows of a trainer rank, or the last dim of a reader; a vector is cut in both."""
    dtype, shape = SHAPES[name]
    dim = 0 if trainer else len(shape) - 1
    sizes, offsets = list(shape), [0] * len(shape)
    sizes[dim] //= 2
    offsets[dim] = rank * sizes[dim]
    dtype = torch.float32 if trainer and name == "cast" else dtype
    return TensorSpec(dtype, Layout(shape, Shard(tuple(offsets), tuple(sizes))))


def side_of(rank, *, trainer):
    return Manifest(tuple((name, part(name, rank, trainer=trainer)) for name in SHAPES))


def updated(whole, step):
    """Change a few elements of each tensor, or none, or all. Equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    for name, tensor in whole.items():
        share = random.Random(f"{name}{step}").choice([0.0, 0.001, 0.02, 0.02, 1.0])
        fresh = random_tensor(tensor.dtype, tensor.shape, generator)
        chosen = torch.rand(tensor.shape, generator=generator) < share
        words = {1: torch.uint8, 4: torch.int32}.get(tensor.itemsize, tensor.dtype)
        tensor.view(words)[chosen] = fresh.view(words)[chosen]


def random_body(kind, where, seed):
    rank, rng = dist.get_rank(), random.Random(f"{seed}{dist.get_rank()}")
    sources = [side_of(r, trainer=True) for r in range(2)]
    targets = [side_of(r, trainer=False) for r in range(2)]
    plan = plan_sync(sources, targets, bucket_bytes=700)
    whole = {
        name: random_tensor(sources[0][name].dtype, shape, torch.Generator().manual_seed(seed))
        for name, (_, shape) in SHAPES.items()
    }
    mine = slice_again(whole, sources[rank]) if rank < 2 else None
    options = {"source": sources[rank], "full_every": FULL_EVERY} if rank < 2 else {}
    transport = transport_of(kind, where, plan)
    side = Side(plan, transport, mine, **options)
    sent = []
    for version in range(VERSIONS):
        updated(whole, 1000 * seed + version)
        if rank < 2:
            for name, tensor in slice_again(whole, sources[rank]).items():
                mine[name].copy_(tensor)
            receipt = side.sync(version)
            marker = transport.markers()[-1] if rank == 0 else None
            sent.append((receipt.bytes, marker))
            assert marker is None or receipt.base == marker.base
        elif kind not in PULL:
            receipt = side.sync(version)
        dist.barrier()
        if rank >= 2:
            if kind in PULL and rng.random() < 0.6:  # Else it skips this version.
                side.subscriber.receive(timeout_s=HANG_S)
            if side.subscriber.version == version:
                assert same_bytes(side.engine.tensors, slice_again(whole, targets[rank - 2]))
        dist.barrier()
    transport.close()
    if rank == 0:
        check_chain(plan, sent)
    return side.engine.loads, len(plan.buckets)


def check_chain(plan, sent):
    since, small = [], 0
    for version, (size, marker) in enumerate(sent):
        assert (size, marker.version) == (marker.size_bytes, version)
        if marker.base is None:
            # It was time, or as many bytes had been sent; nobody failed.
            cut = not since or len(since) == FULL_EVERY or sum(since[1:]) >= plan.bytes_total
            assert cut, since
            since = [size]
            assert size == plan.bytes_total
        else:
            assert marker.base == version - 1
            assert len(since) < FULL_EVERY
            assert sum(since[1:]) < plan.bytes_total
            since.append(size)
            assert size <= plan.bytes_total
            full = [m == b.bytes for m, b in zip(marker.sizes, plan.buckets, strict=True)]
            small += any(full) and not all(full)
    assert small > 3  # Often some buckets went in full and others did not.


@pytest.mark.parametrize("kind", KINDS)
def test_every_version_has_the_bytes_of_a_full_sync(kind, full, tmp_path):
    for seed in range(10 if full else 1):
        path = tmp_path / str(seed)
        path.mkdir()
        results = ranks.run(random_body, kind, str(path), seed, world_size=RANKS)
        loads = [loads for loads, _ in results[2:]]
        assert all(8 < n < VERSIONS for n in loads) if kind in PULL else loads == [VERSIONS] * 2

"""Random layouts of a trainer and of engines that want parts of what it holds."""

import random

import torch
from hypothesis import strategies as st

from primeblocks.layout import Layout, Shard
from primeblocks.weightsync.manifest import Manifest, TensorSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
OTHERS = (torch.int64, torch.uint8, torch.float8_e4m3fn)


def manifest(boxes):
    """name -> (dtype, global shape, offsets, sizes)."""
    return Manifest(
        tuple(
            (name, TensorSpec(dtype, Layout(shape, Shard(offsets, sizes))))
            for name, (dtype, shape, offsets, sizes) in boxes.items()
        )
    )


def elements(held):
    return sum(spec.layout.shard.numel for spec in held.values())


def random_boxes(rng, shape, ranks):
    """Boxes of `ranks` ranks that cover `shape`: a grid over two dims, in copies, one whole."""
    if not shape:
        return [((), ())] * ranks
    parts = ranks // rng.choice(divisors(ranks))
    dims = rng.sample(range(len(shape)), min(2, len(shape)))
    inner = rng.choice(divisors(parts)) if len(dims) > 1 else 1
    counts = [parts // inner, inner][: len(dims)]
    spans = [cut_at(rng, shape[dim], count) for dim, count in zip(dims, counts, strict=True)]
    boxes = []
    for rank in range(ranks):
        offsets, sizes = [0] * len(shape), list(shape)
        place = divmod(rank % parts, inner)
        for dim, edges, index in zip(dims, spans, place[: len(dims)], strict=True):
            offsets[dim], sizes[dim] = edges[index][0], edges[index][1] - edges[index][0]
        boxes.append((tuple(offsets), tuple(sizes)))
    if rng.random() < 0.3:
        boxes[0] = ((0,) * len(shape), shape)  # Holds what the others hold too.
    return boxes


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def cut_at(rng, size, parts):
    inner = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return list(zip([0, *inner], [*inner, size], strict=True))


def random_layouts(seed, *, senders, receivers):
    """Manifests of both sides. Floats may be converted; an engine may lack some tensors."""
    rng = random.Random(seed)
    sources = [{} for _ in range(senders)]
    targets = [{} for _ in range(receivers)]
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 7]) for _ in range(rng.randint(0, 3)))
        have = rng.choice(FLOATS + OTHERS)
        want = rng.choice(FLOATS) if have in FLOATS else have
        for held, box in zip(sources, random_boxes(rng, shape, senders), strict=True):
            held[f"t{i}"] = (have, shape, *box)
        for wanted, box in zip(targets, random_boxes(rng, shape, receivers), strict=True):
            if rng.random() < 0.9:
                wanted[f"t{i}"] = (want, shape, *box)
    return [manifest(held) for held in sources], [manifest(wanted) for wanted in targets]


@st.composite
def layouts(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    senders, receivers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return random_layouts(seed, senders=senders, receivers=receivers)

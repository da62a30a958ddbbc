"""Recorded reads of loaders, by an oracle that loads the ids of elements."""

from functools import reduce
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from primeblocks.weightsync import describe
from primeblocks.weightsync.convert.recorded import record_reads


def ids_of(boxes, shape):
    grid = torch.arange(prod(shape)).reshape(shape)
    return [number for box in boxes for number in grid[box.slices].flatten().tolist()]


def step_of(draw, shape):
    """A random step of a loader: what it does, and the shape that it leaves."""
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    kinds = ["transpose", "clone", "cast", "reverse_view", "unsqueeze", "stack", "cat"]
    kinds += ["narrow", "chunk", "every_second", "unflatten"] if size > 1 else []
    kinds += ["select", "unbind_stack"] if len(shape) > 1 else []
    kinds += ["flatten"] if len(shape) > 1 else []
    kind = draw(st.sampled_from(kinds))
    if kind == "narrow":
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        return lambda t: t.narrow(dim, start, length)
    if kind == "chunk":
        parts = t_chunks(size, draw(st.integers(2, 3)))
        at = draw(st.integers(0, parts[1] - 1))
        return lambda t: t.chunk(parts[0], dim)[at]
    if kind == "every_second":
        first = draw(st.integers(0, 1))
        return lambda t: t[(slice(None),) * dim + (slice(first, None, 2),)]
    if kind == "unflatten":
        inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return lambda t: t.unflatten(dim, (size // inner, inner))
    if kind == "select":
        at = draw(st.integers(0, size - 1))
        return lambda t: t.select(dim, at)
    other = draw(st.integers(0, len(shape) - 1))
    return {
        "transpose": lambda t: t.transpose(dim, other),
        "clone": lambda t: t.contiguous().clone(),
        "cast": lambda t: t.to(torch.float64).to(torch.int64),
        "reverse_view": lambda t: t.permute(*reversed(range(t.ndim))),
        "unsqueeze": lambda t: t.unsqueeze(dim),
        "stack": lambda t: torch.stack([t, torch.full_like(t, -1), t], dim),
        "cat": lambda t: torch.cat([t, torch.full_like(t, -1)], dim),
        "unbind_stack": lambda t: torch.stack(t.unbind(dim)[: max(1, size // 2)], other - 1),
        "flatten": lambda t: t.reshape(-1),
    }[kind]


def t_chunks(size, parts):
    return parts, len(torch.empty(size).chunk(parts))


class Loader(nn.Module):
    """Copies what its steps make of each source into a parameter, all but a part that it drops."""

    def __init__(self, steps, made):
        super().__init__()
        self.steps = steps
        self.params = nn.ParameterDict(
            {name: nn.Parameter(torch.full(shape, -7), requires_grad=False) for name, shape in made}
        )

    def load(self, tensors):
        for name, tensor in tensors:
            made = reduce(lambda made, step: step(made), self.steps[name], tensor)
            if name in self.params:
                self.params[name].data.copy_(made)


@st.composite
def loads(draw):
    sources, steps, made = {}, {}, []
    for name in ("a", "b"):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        sources[name] = tensor = torch.arange(prod(shape)).reshape(shape)
        steps[name] = []
        for _ in range(draw(st.integers(0, 5))):
            if tensor.ndim > 5 or tensor.numel() > 3000:
                break
            step = step_of(draw, tuple(tensor.shape))
            steps[name].append(step)
            tensor = step(tensor)
            if tensor.numel() == 0:
                break
        if draw(st.booleans()) or name == "a":
            made.append((name, tuple(tensor.shape)))
    return sources, Loader(steps, made)


@given(loads())
def test_the_boxes_hold_exactly_what_reaches_a_parameter(case):
    sources, loader = case
    reads = record_reads(loader.load, describe(sources))
    assert all((p == -7).all() for p in loader.params.values())
    loader.load(sources.items())
    for name, tensor in sources.items():
        ids = ids_of(reads.boxes.get(name, ()), tensor.shape)
        arrived = (
            set(loader.params[name].flatten().tolist()) - {-1} if name in loader.params else set()
        )
        assert len(ids) == len(set(ids))
        assert arrived <= set(ids)
        if name not in reads.inexact:
            assert arrived == set(ids)


@given(loads())
def test_a_load_of_these_boxes_alone_is_the_load_of_all(case):
    sources, loader = case
    reads = record_reads(loader.load, describe(sources))
    loader.load(sources.items())
    whole = {name: param.clone() for name, param in loader.params.items()}
    loader.load(reads.wiring.move({n: sources[n] for n in reads.boxes}).items())
    assert all(torch.equal(param, whole[name]) for name, param in loader.params.items())

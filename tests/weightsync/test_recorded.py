"""Recorded reads of loaders, by an oracle that loads the ids of elements."""

from functools import reduce
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from primeblocks.errors import PlanError
from primeblocks.layout import Shard
from primeblocks.weightsync import describe, plan_sync, verify_engine
from primeblocks.weightsync.adapters.vllm.loads import to_fill, unfilled
from primeblocks.weightsync.convert.conversion import Reads, filling, record_reads, record_wiring
from primeblocks.weightsync.observed import observe
from tests.weightsync.toy_engine import moved


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
def test_the_boxes_hold_exactly_what_reaches_a_parameter_and_are_enough_for_a_load(case):
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
    whole = {name: param.clone() for name, param in loader.params.items()}
    read = {name: sources[name] for name in reads.boxes}
    loader.load(moved(filling(reads.sources, reads.boxes), read).items())
    assert all(torch.equal(param, whole[name]) for name, param in loader.params.items())


@given(loads())
def test_elements_are_recorded_where_the_loader_writes_them(case):
    sources, loader = case
    reads = record_reads(loader.load, describe(sources), into=dict(loader.params))
    loader.load(sources.items())
    made = moved(reads.into, sources)
    assert set(made) == set(loader.params)
    assert reads.written == {name: int((p != -7).sum()) for name, p in loader.params.items()}
    for name, param in loader.params.items():
        if name in reads.lost:
            assert not reads.into.by_target[name]
        else:
            assert torch.equal(made[name].masked_fill(param == -1, -1), param)


def test_elements_that_nothing_writes_are_not_counted():
    fused, padded, whole = torch.zeros(6, 4), torch.zeros(5, 4), torch.zeros(3, 4)

    def load(tensors):
        for name, tensor in tensors:
            if name == "b":
                padded[:3].copy_(tensor)
                padded[3:4].fill_(0)
                whole.copy_(tensor * 2)
            else:
                fused["ac".index(name) * 3 :][: len(tensor)].copy_(tensor)

    sources = {name: torch.ones(3, 4) for name in "abc"}
    into = {"fused": fused, "padded": padded, "whole": whole}
    assert record_reads(load, describe(sources), into=into).written == {
        "fused": 24,
        "padded": 16,
        "whole": 12,
    }
    del sources["c"]
    assert record_reads(load, describe(sources), into=into).written["fused"] == 12


def test_a_load_must_fill_parameters_and_the_corrections_of_routers():
    model = nn.Module()
    model.weight, model.input_scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    for name in ("e_score_correction_bias", "inv_freq"):
        model.register_buffer(name, torch.zeros(2))
    plain, fp8 = (
        SimpleNamespace(model_config=SimpleNamespace(quantization=q)) for q in (None, "fp8")
    )
    expected = to_fill(model)
    assert unfilled(expected, None, plain) == []
    every = ["e_score_correction_bias", "input_scale", "weight"]
    assert unfilled(expected, (), plain) == every
    assert unfilled(expected, every[1:], plain) == every[:1]
    assert unfilled(expected, (), fp8) == ["e_score_correction_bias", "weight"]


PADDED = {
    "zeros": (lambda t: torch.zeros(2, 3), True),
    "zeros without memory": (lambda t: torch.zeros(2, 3, device=t.device), True),
    "zeros like": (lambda t: torch.zeros_like(t)[:2], True),
    "new zeros": (lambda t: t.new_zeros(2, 3).clone(), True),
    "ones": (lambda t: torch.ones(2, 3), False),
    "ones without memory": (lambda t: torch.ones(2, 3, device=t.device), False),
    "of them": (lambda t: torch.ones(2, 3, device=t.device) * 2, False),
    "ones like": (lambda t: torch.ones_like(t)[:2], False),
    "new, filled": (lambda t: t.new_full((2, 3), 4.0), False),
    "zeros, filled": (lambda t: torch.zeros(2, 3, device=t.device).fill_(1), False),
    "new zeros, filled": (lambda t: t.new_zeros(2, 3).fill_(1), False),
    "zeros and one": (lambda t: torch.zeros(2, 3, device=t.device) + 1, False),
    "a range": (lambda t: torch.arange(6.0, device=t.device).view(2, 3), False),
}


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("joins", [True, False])
def test_a_conversion_creates_zeros_alone(kind, joins):
    make, is_zero = PADDED[kind]

    def convert(tensors):
        made = make(tensors["w"])
        return {"w": torch.cat([tensors["w"], made])} if joins else tensors | {"more": made}

    held = describe({"w": torch.zeros(4, 3)})
    if is_zero:
        assert len(record_wiring(convert, held).pieces) == 1
    else:
        with pytest.raises(PlanError, match="creates values other than 0"):
            record_wiring(convert, held)


@pytest.mark.parametrize(
    ("write", "lost"),
    [
        (lambda p, a, b: (p.copy_(a), p[1:3].copy_(b[1:3])), "a"),
        (lambda p, a, b: (p.copy_(a), p.copy_(b)), "a"),
        (lambda p, a, b: (p[1:3].copy_(b[1:3]), p.copy_(a)), "b"),
        (lambda p, a, b: (p.copy_(a), p[:, 2:].copy_(b[:, 2:]), p[2].copy_(a[2])), "ab"),
        (lambda p, a, b: (p[:2].copy_(a[:2]), p[2:].copy_(b[2:]), p[1:3].copy_(b[1:3])), "a"),
        (lambda p, a, b: (p.copy_(a), p[1:3].copy_(a[1:3]), p.copy_(a)), ""),
        (lambda p, a, b: (p.copy_(a), p[1:3].copy_(a[:2])), "a"),
        (lambda p, a, b: (p.copy_(a), p.view(-1)[1:6].copy_(b.view(-1)[3:8])), "ab"),
        (lambda p, a, b: (p.copy_(a), p[1:3].copy_(b[:1])), "ab"),
    ],
)
def test_the_last_write_wins_and_what_is_written_over_is_lost(write, lost):
    params, seen = {"p": torch.zeros(4, 6)}, {"a": torch.rand(4, 6), "b": torch.rand(4, 6)}

    def load(tensors):
        write(params["p"], *dict(tensors).values())

    reads = record_reads(load, describe(seen), into=params)
    load(seen.items())
    assert "".join(sorted(reads.lost)) == lost
    plan = plan_sync([describe(seen)], [reads], bucket_bytes=1 << 10)
    observed = observe(plan, params, convert=reads.into, lost=reads.lost)
    found = verify_engine(seen, observed, plan=plan)
    assert "".join(found.unobservable) == lost == "".join(found.wrong)
    changed = {name: one + 1 for name, one in seen.items()}
    held = set(reads.sources) - set(lost)
    assert set(verify_engine(changed, observed, plan=plan).differing) == held


# --- What loaders do besides ---------------------------------------------------------------------


def reads_of(step, *, shape=(4, 6), dtype=torch.float32):
    """What a loader reads that copies `step(tensor)` into a parameter."""

    def load(tensors):
        ((_, tensor),) = tensors
        made = step(tensor)
        nn.Parameter(torch.empty(made.shape)).data.copy_(made)

    reads = record_reads(load, describe({"w": torch.empty(shape, dtype=dtype)}))
    return [(box.offsets, box.sizes) for box in reads.boxes["w"]], reads.inexact


def test_arithmetic_is_followed_element_by_element():
    assert reads_of(lambda t: (t.float() * 2 + t)[1:3]) == ([((1, 0), (2, 6))], {})
    assert reads_of(lambda t: (t * torch.ones(6))[:, 2]) == ([((0, 2), (4, 1))], {})
    assert reads_of(lambda t: t.to("cpu", torch.bfloat16).cpu()[3]) == ([((3, 0), (1, 6))], {})


def test_views_of_another_dtype_are_followed():
    def halves(t):
        return t.view(torch.uint8)[:, 4:12].view(torch.float32)

    def wider(t):
        return t.view(torch.float32).unsqueeze(-1).clone()[:, 2:4]

    assert reads_of(wider, shape=(4, 24), dtype=torch.uint8) == ([((0, 8), (4, 8))], {})
    assert reads_of(halves) == ([((0, 1), (4, 2))], {})
    assert reads_of(lambda t: t.view(torch.uint8)[0, 5:7]) == ([((0, 1), (1, 1))], {})


def test_the_parts_of_a_fused_tensor_are_boxes_of_it():
    def share(t):
        gate, up = t.unflatten(0, (2, 4)).unbind(0)
        return torch.cat([gate[2:], up[2:]])

    assert reads_of(share, shape=(8, 3)) == ([((2, 0), (2, 3)), ((6, 0), (2, 3))], {})


def test_what_is_no_box_reads_the_tensor_whole():
    boxes, inexact = reads_of(lambda t: t.flatten()[9:14])
    assert boxes == [((0, 0), (4, 6))]
    assert inexact == {"w": "its elements are not read in boxes"}


def test_an_operation_that_mixes_elements_reads_all_that_it_got():
    boxes, inexact = reads_of(lambda t: t[1:, :2][torch.tensor([2, 0])][0])
    assert boxes == [((1, 0), (3, 2))]
    assert inexact == {"w": "its elements are mixed before some are read"}


def test_a_buffer_between_reads_all_that_was_put_into_it():
    def staged(t):
        buffer = torch.zeros(4, 2)
        buffer.copy_(t[:, :2])
        return buffer[:1]

    assert reads_of(staged)[0] == [((0, 0), (4, 2))]


def test_a_loader_that_asks_for_a_value_reads_the_tensor_whole():
    boxes, inexact = reads_of(lambda t: t[2:] if t[0, 0].item() < 0 else t[:2])
    assert boxes == [((0, 0), (4, 6))]
    assert inexact == {"w": "its values are asked for"}
    scale = reads_of(lambda t: torch.empty(1).fill_(t.item()), shape=(1,))
    assert scale == ([((0,), (1,))], {})


def test_a_loader_that_fails_without_values_reads_all_whole():
    def load(tensors):
        for _, tensor in tensors:
            tensor.numpy()

    sources = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    reads = record_reads(load, describe(sources))
    assert reads.sources == describe(sources)
    assert reads.inexact.keys() == sources.keys()
    assert reads.inexact["b"].startswith("the loader fails without values, at 'a': ")


def test_reads_travel_as_text_and_know_what_a_plan_lacks():
    checkpoint = describe({"w": torch.zeros(4, 6), "unread": torch.zeros(2)})

    def load(tensors):
        parameter = torch.zeros(2, 6)
        for name, tensor in tensors:
            if name == "w":
                parameter.copy_(tensor[::3])

    reads = record_reads(load, checkpoint)
    assert Reads.from_json(reads.to_json(), checkpoint) == reads
    plan = plan_sync([checkpoint], [reads, checkpoint], bucket_bytes=64)
    assert plan.read_bytes(0) == 48
    assert not reads.lacking(plan.wants[0])
    assert not reads.lacking(plan.wants[1])
    assert reads.lacking({"w": (Shard((0, 0), (2, 6)),)}) == ["w"]
    with pytest.raises(PlanError, match="does not describe reads"):
        Reads.from_json("[]", checkpoint)
    for changed in ('[{"v": [[[0, 0], [2, 6]]]}, {}]', '[{"w": [[[9, 9], [2, 6]]]}, {}]'):
        with pytest.raises(PlanError):  # Of no such tensor, or outside of it.
            Reads.from_json(changed, checkpoint)


def swapped(param, tensor):
    param[torch.tensor([1, 0, 2, 3])] = tensor


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda p, t: p.copy_(t.T.contiguous().T), None),
        (lambda p, t: (p[:2].copy_(t[:2]), p[2:].fill_(0)), None),
        (lambda p, t: p.T.unsqueeze(0).copy_(t.T), None),
        (lambda p, t: (p.copy_(t), p[3].mul_(2)), "it is written over"),
        (lambda p, t: (p.copy_(t), p.add_(t)), "it is computed with"),
        (lambda p, t: p.copy_(t * 2), "it is computed with"),
        (lambda p, t: p.add_(t), "it is computed with"),
        (swapped, "it is computed with"),
        (lambda p, t: torch.zeros(4, 6).copy_(t), "it is copied to no parameter"),
        (lambda p, t: p.copy_(t[:1]), "it is repeated, or cut into parts that are not boxes"),
        (lambda p, t: p.view(-1)[7:12].copy_(t.view(-1)[:5]), None),
        (lambda p, t: p.view(-1)[1:6].copy_(t.view(-1)[3:8]), "its elements are not read in boxes"),
        (lambda p, t: p[:, :2].copy_(t.unfold(1, 2, 1)[:, 3]), None),
        (
            lambda p, t: p[:3, :2].copy_(t.unfold(1, 2, 1)[0, :3]),
            "its elements are not read in boxes",
        ),
    ],
)
def test_what_is_not_where_it_was_written_is_lost(write, why):
    param, tensor = torch.zeros(4, 6), torch.arange(24.0).reshape(4, 6)

    def load(tensors):
        for _, each in tensors:
            write(param, each)

    reads = record_reads(load, describe({"w": tensor}), into={"p": param})
    assert reads.lost == ({} if why is None else {"w": why})
    assert not param.any()
    if why is None:
        load([("w", tensor)])
        assert torch.equal(moved(reads.into, {"w": tensor})["p"], param)
    else:
        assert not reads.into.pieces

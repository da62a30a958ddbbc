import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardedAlong
from torch.distributed.tensor.placement_types import _StridedShard

from primeblocks import Layout, Shard
from primeblocks.errors import PlanError
from primeblocks.layout import layout_of, local_part
from primeblocks.testing import ranks

SIDES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@st.composite
def _shards(draw, shape):
    starts = [draw(st.integers(0, side)) for side in shape]
    sizes = [draw(st.integers(0, side - start)) for start, side in zip(starts, shape, strict=True)]
    return Shard(tuple(starts), tuple(sizes))


def _mask(shape, shard):
    mask = torch.zeros(shape, dtype=torch.bool)
    if shard is not None:
        mask[shard.slices] = True
    return mask


@given(st.data())
def test_intersect_is_the_common_elements(data):
    shape = data.draw(SIDES)
    a, b = data.draw(_shards(shape)), data.draw(_shards(shape))
    common = a.intersect(b)
    assert torch.equal(_mask(shape, common), _mask(shape, a) & _mask(shape, b))
    assert common == b.intersect(a)
    assert _mask(shape, a).sum() == a.numel


@given(st.data())
def test_within_names_the_same_elements_from_the_corner(data):
    shape = data.draw(SIDES)
    outer = data.draw(_shards(shape))
    inner = data.draw(_shards(outer.sizes))
    moved = Shard(
        tuple(o + i for o, i in zip(outer.offsets, inner.offsets, strict=True)), inner.sizes
    )
    assert moved.within(outer) == inner


def test_boxes_that_make_no_sense_are_refused():
    with pytest.raises(PlanError, match="got 1 offsets and 2 sizes"):
        Shard((0,), (1, 1))
    with pytest.raises(PlanError, match="negative"):
        Shard((0,), (-1,))
    with pytest.raises(PlanError, match="is not inside"):
        Layout((4,), Shard((2,), (3,)))
    with pytest.raises(PlanError, match="is not inside"):
        Layout((4, 4), Shard((2,), (2,)))
    with pytest.raises(PlanError, match="different numbers of dims"):
        Shard((0,), (2,)).intersect(Shard((0, 0), (2, 2)))


def test_a_plain_tensor_is_whole():
    plain = torch.zeros(2, 3)
    assert local_part(plain) is plain
    layout = layout_of(plain)
    assert layout == Layout.whole((2, 3))
    assert layout.is_whole
    assert layout_of(torch.tensor(1.0)).shard.numel == 1


def _global(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _pieces(tensor):
    layout = layout_of(tensor)
    return layout.shape, layout.shard, local_part(tensor)


def _distribute(shape, mesh_shape, placements):
    mesh = init_device_mesh("cpu", mesh_shape)
    return _pieces(distribute_tensor(_global(shape), mesh, placements))


def _fsdp_over_experts(num_experts):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "expert"))
    whole = _global((num_experts, 3))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["expert"], [ShardedAlong(0)]))
    fully_shard(module, mesh=mesh["fsdp"])
    return _pieces(module.weight.data)


def _assert_tiles(shape, pieces, copies=1):
    """Every element is held `copies` times, and holds what it should."""
    held, whole = torch.zeros(shape), _global(shape)
    for global_shape, shard, local in pieces:
        assert global_shape == tuple(shape)
        assert torch.equal(whole[shard.slices], local)
        held[shard.slices] += 1
    assert (held == copies).all()


def _partial():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))


def _strided(rows, split_factor, mesh_shape, behind):
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [_StridedShard(0, split_factor=split_factor), *behind]
    return _pieces(distribute_tensor(_global((rows, 3)), mesh, placements, src_data_rank=None))


def _told_otherwise():
    """A local part of another shape than its placements say."""
    mesh = init_device_mesh("cpu", (2,))
    rows = 5 if dist.get_rank() == 0 else 3
    local = torch.ones(rows, 2)
    layout_of(DTensor.from_local(local, mesh, [ShardedAlong(0)], shape=(8, 2), stride=(2, 1)))


def _off_the_mesh():
    mesh = DeviceMesh("cpu", [0])
    return layout_of(DTensor.from_local(torch.ones(4, 2), mesh, [ShardedAlong(0)], run_check=False))


def _random_fsdp_over_tensor_parallel(seed, cases):
    """Real FSDP2 over real tensor parallelism, of random shapes: where `layout_of` is wrong."""
    rng, wrong, boxes = random.Random(seed), [], 0
    size = dist.get_world_size()
    meshes = {
        inner: init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("fsdp", "tensor"))
        for inner in range(1, size + 1)
        if size % inner == 0
    }
    for _ in range(cases):
        mesh = meshes[rng.choice(list(meshes))]
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        dim = rng.randrange(len(shape))
        placement = rng.choice([ShardedAlong(dim), ShardedAlong(0), Replicate()])
        whole, module = _global(shape), nn.Module()
        inner = distribute_tensor(whole, mesh["tensor"], [placement], src_data_rank=None)
        module.weight = nn.Parameter(inner)
        fully_shard(module, mesh=mesh["fsdp"])
        weight = module.weight.data
        try:
            layout = layout_of(weight)
        except PlanError:
            continue
        boxes += 1
        held, said = weight.to_local(), whole[layout.shard.slices]
        if not torch.equal(said, held) and (said.numel() or held.numel()):
            wrong.append((shape, placement, mesh.shape, layout, weight.placements))
    return wrong, boxes


ROWS = (1, 5, 8)
MIXES = [
    ([ShardedAlong(0), ShardedAlong(1)], 1),
    ([ShardedAlong(0), ShardedAlong(0)], 1),
    ([Replicate(), ShardedAlong(1)], 2),
    ([Replicate(), Replicate()], 4),
]
# By world size: names of calls, each with its arguments.
CALLS = {
    2: {
        "no box": (_strided, 8, 2, (2,), []),
        "a box and nothing": (_strided, 2, 2, (2,), []),  # Rows 0 and 1, and none.
        "partial sums": (_partial,),
        "told otherwise": (_told_otherwise,),
        "off the mesh": (_off_the_mesh,),
    },
    4: {
        "a strided box": (_strided, 8, 2, (2, 2), [ShardedAlong(0)]),
        **{f"mix {i}": (_distribute, (5, 7), (2, 2), mix) for i, (mix, _) in enumerate(MIXES)},
        **{f"{count} experts": (_fsdp_over_experts, count) for count in (4, 8)},
    },
}


def _every_call(cases):
    size, found = dist.get_world_size(), {}
    calls = {f"{rows} rows": (_distribute, (rows, 3), (size,), [ShardedAlong(0)]) for rows in ROWS}
    if size > 2:
        calls["random shapes"] = (_random_fsdp_over_tensor_parallel, size, cases)
    for name, (call, *args) in (calls | CALLS.get(size, {})).items():
        try:
            found[name] = call(*args)
        except PlanError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found(request):
    """What a call gave on each of so many ranks. One gang of each size makes all calls."""
    cases = 200 if request.config.getoption("--full") else 40
    gangs = {}

    def by_rank(size, name):
        if size not in gangs:
            gangs[size] = ranks.run(_every_call, cases, world_size=size)
        return [told[name] for told in gangs[size]]

    return by_rank


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_of_a_dtensor_tile_it(found, world_size):
    for rows in ROWS:
        _assert_tiles((rows, 3), found(world_size, f"{rows} rows"))


def test_any_mix_of_axes(found):
    for i, (_, copies) in enumerate(MIXES):
        _assert_tiles((5, 7), found(4, f"mix {i}"), copies)
    for count in (4, 8):
        _assert_tiles((count, 3), found(4, f"{count} experts"))


def test_strided_rows_that_are_a_box_have_a_layout_and_others_are_refused(found):
    _assert_tiles((8, 3), found(4, "a strided box"))
    _assert_tiles((2, 3), found(2, "a box and nothing"))
    # Rank 0 has rows 0, 1, 4, 5; rank 1 has 2, 3, 6, 7, which are not rows 2 to 5.
    for said in found(2, "no box"):
        assert "are not one box" in said
        assert "Redistribute the tensor" in said


def test_what_has_no_layout_is_refused(found):
    """Partial sums, and a local part that its placements do not explain."""
    assert all("has no layout. Redistribute it" in said for said in found(2, "partial sums"))
    first, second = found(2, "told otherwise")
    assert "holds (5, 2)" in first
    assert "give (4, 2)" in first
    assert "holds (3, 2)" in second


def test_a_rank_off_the_mesh_holds_nothing(found):
    whole, nothing = found(2, "off the mesh")
    assert whole.is_whole
    assert nothing.shard == Shard((0, 0), (0, 0))


@pytest.mark.parametrize("world_size", [3, 4, 6])
def test_fsdp_over_tensor_parallel_shards_of_random_shapes(found, world_size, full):
    for wrong, boxes in found(world_size, "random shapes"):
        assert wrong == []
        assert boxes > (200 if full else 40) // 2  # Most are boxes.

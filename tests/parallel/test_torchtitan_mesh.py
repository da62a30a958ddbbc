"""Meshes from torchtitan's degrees, on 1, 2, 4 and 8 ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.parallel import plan_mesh
from primeblocks.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    try:
        from tests.parallel.torchtitan_on_cpu import ParallelDims, parallel_dims
    except ImportError as error:
        pytest.skip(f"torchtitan cannot be imported ({error})", allow_module_level=True)
    from primeblocks.parallel.adapters.torchtitan import meshes_from

AXES = ("fsdp", "expert_fsdp", "expert", "context", "batch", "loss")
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
DEGREES = {
    1: [{}],
    2: [{"expert": 2}, {"context": 2}],
    4: [
        {"expert": 2},
        {"replicate": 2, "expert": 2},
        {"replicate": 2, "context": 2},
        {"context": 2, "expert": 2},
    ],
}


def _count_new_groups(call):
    """The sizes of the groups that `call` makes, and what it returns."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **options: made.append(len(ranks)) or new_group(ranks, **options)
    try:
        return call(), made
    finally:
        dist.new_group = new_group


def _sums(mesh):
    """The sum of rank + 1 over each axis: its group is the right one, and it communicates."""
    own = [torch.tensor(dist.get_rank() + 1.0) for _ in range(mesh.ndim)]
    for axis, tensor in enumerate(own):
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    return [float(tensor) for tensor in own]


def _described():
    return [_describe(degrees) for degrees in DEGREES[dist.get_world_size()]]


def _describe(degrees):
    ours = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    axes = [getattr(ours, name) for name in AXES]
    want = [(mesh.mesh.tolist(), mesh.mesh_dim_names, _sums(mesh)) for mesh in axes]
    made = {}
    for backend in BACKENDS:
        dims = parallel_dims(dist.get_world_size(), **degrees, backend=backend)
        theirs, made[backend] = _count_new_groups(lambda dims=dims: meshes_from(dims))
        assert theirs.plan == ours.plan
        axes = [getattr(theirs, name) for name in AXES]
        assert [(mesh.mesh.tolist(), mesh.mesh_dim_names, _sums(mesh)) for mesh in axes] == want
    return made


@pytest.mark.parametrize("world_size", DEGREES)
def test_every_axis_has_the_ranks_of_our_own_plan_and_communicates(world_size):
    for found in ranks.run(_described, world_size=world_size):
        for made in found:
            assert made == {backend: [1] for backend in BACKENDS}


def test_fsdp_gets_a_group_where_torchtitan_has_none():
    for made in ranks.run(_describe, {"replicate": 2, "context": 2}, world_size=8):
        assert made == {"partial_dtensor": [1], "full_dtensor": [4, 1], "spmd_types": [4, 1]}


def _refusals():
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    for name in ("tp", "pp"):
        dims = ParallelDims(**{**degrees, name: 2}, world_size=2)
        with pytest.raises(
            UnsupportedError, match=rf"{name}=2, but .* Use {name}=1 and raise ep, cp"
        ):
            meshes_from(dims)
    dims = ParallelDims(**{**degrees, "dp_shard": 2, "ep": 3}, world_size=2)
    with pytest.raises(PlanError, match="expert=3 does not divide"):
        meshes_from(dims)


def test_tensor_and_pipeline_parallel_are_refused_before_anything_is_built():
    ranks.run(_refusals, world_size=2)

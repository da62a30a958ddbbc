"""Copies of hot experts in a model of transformers: the same loss and gradients as one rank's."""

import pytest
import torch
import torch.distributed as dist

from primeblocks.contrib.redundant_experts import plan_placement
from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.testing import ranks
from tests.parallel.test_transformers import EXPERTS, _batch, _error, _model, _run, _whole


def _plans(size, seed):
    g = torch.Generator().manual_seed(seed)
    loads = torch.rand(2, EXPERTS, generator=g) ** 4
    return [plan_placement(each, ranks=size, redundant=size * 2) for each in loads]


def _placed(family, degrees, checkpointing):
    from primeblocks.contrib.adapters.transformers import place_experts
    from primeblocks.parallel import global_token_count, plan_mesh
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    model, rank = _model(family).double(), dist.get_rank()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    count = global_token_count(_batch(rank)[1].sum(), meshes)
    size = degrees["expert"]
    parallelize(model, meshes)
    place_experts(model, _plans(size, 0), meshes=meshes)
    seen = _spied(model)
    impose = family == "qwen3_moe"
    loss = 0.0
    for plans in (_plans(size, 0), _plans(size, 1), [None, None]):
        place_experts(model, plans, meshes=meshes)
        loss = loss + _run(model, rank, count, impose=impose)
    assert set(seen) == {EXPERTS + 2 * size, EXPERTS}
    dist.all_reduce(loss)
    whole, want = _whole(family, torch.float64, count, impose=impose)
    for parameter in whole.parameters():
        parameter.grad *= 3
    return abs(float(loss / want) / 3 - 1), _error(model, whole, lambda p: p.grad)


def _spied(model):
    """How many experts each dispatch is asked for."""
    dispatcher = model.model.layers[0].mlp.experts.dispatcher
    dispatch, seen = dispatcher.dispatch, []

    def spied(*args, num_experts):
        seen.append(num_experts)
        return dispatch(*args, num_experts=num_experts)

    dispatcher.dispatch = spied
    return seen


@pytest.mark.parametrize(
    ("family", "world_size", "degrees", "checkpointing"),
    [
        ("qwen3_moe", 2, {"expert": 2}, False),
        ("qwen3_moe", 3, {"expert": 3}, True),
        ("qwen3_moe", 4, {"expert": 2}, False),
        ("gpt_oss", 2, {"expert": 2}, False),
    ],
    ids=str,
)
def test_copies_change_no_gradient(family, world_size, degrees, checkpointing):
    """With one plan, with another, and with none."""
    results = ranks.run(_placed, family, degrees, checkpointing, world_size=world_size)
    assert max(max(errors) for errors in results) < 1e-12, results


def _refused():
    from primeblocks.contrib.adapters.transformers import place_experts
    from primeblocks.parallel import plan_mesh
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes, model = plan_mesh(world_size=2, expert=2).build("cpu"), _model("qwen3_moe")
    parallelize(model, meshes)
    first, wrong = _plans(2, 0), dist.get_rank() == 1
    for plans, said in (
        (first[:1], "1 placements for 2 layers"),
        ([None, plan_placement([1.0] * 4, ranks=2, redundant=0)], "layer 1 is for 4 experts on 2"),
        (
            [plan_placement([1.0] * EXPERTS, ranks=3, redundant=0), None],
            "12 experts on 3 ranks; it",
        ),
    ):
        with pytest.raises(PlanError if wrong else RankError, match=said):
            place_experts(model, plans if wrong else first, meshes=meshes)
    with pytest.raises(PlanError, match="placements must be equal on all ranks"):
        place_experts(model, _plans(2, dist.get_rank()), meshes=meshes)
    place_experts(model, first, meshes=meshes)
    model.model.layers[0].mlp.experts.grouped_mm = torch.matmul
    with pytest.raises(UnsupportedError, match="Leave out the placement"):
        model(input_ids=_batch(0)[0], use_cache=False)


def test_what_does_not_fit_is_refused():
    ranks.run(_refused)

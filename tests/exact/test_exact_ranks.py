"""A trainer of several ranks computes the bits of one."""

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import UnsupportedError
from primeblocks.exact import batch_invariant
from primeblocks.parallel import plan_mesh
from primeblocks.parallel.adapters.transformers import parallelize
from primeblocks.parallel.experts import AllToAllDispatcher, OncePerRankDispatcher
from primeblocks.testing import ranks
from tests.exact.test_models import logits, model_of, tokens

LENGTHS = [45, 3, 33, 1]  # Packed on each rank.


def _split(family, dtype, expert):
    """Whether the rows of this rank have the bits of one rank's, and whether gradients arrived."""
    ids, whole = tokens(dist.get_world_size(), sum(LENGTHS)), model_of(family, dtype)
    mine = ids[dist.get_rank()]
    want = [logits(whole, each[None])[0] for each in mine.split(LENGTHS)]
    model = model_of(family, dtype)
    meshes = plan_mesh(world_size=dist.get_world_size(), expert=expert).build("cpu")
    parallelize(model, meshes)
    at = torch.cat([torch.arange(length) for length in LENGTHS])
    with batch_invariant():
        found = model(input_ids=mine[None], position_ids=at[None], use_cache=False).logits
    found.float().square().mean().backward()
    trained = all(each.grad is not None for each in model.parameters() if each.requires_grad)
    return torch.equal(found[0], torch.cat(want)), trained


def _every(cases):
    return {case: _split(*case) for case in cases}


def test_sharded_weights_and_experts_on_other_ranks_change_no_bit():
    cases = [
        (family, dtype, expert)
        for family, expert in (("qwen3_moe", 2), ("qwen3", 1))
        for dtype in ("float32", "bfloat16")
    ]
    assert ranks.run(_every, cases, world_size=4) == [dict.fromkeys(cases, (True, True))] * 4


def _refused(dispatcher, family, dtype):
    model = model_of(family, dtype)
    meshes = plan_mesh(world_size=2, expert=2).build("cpu")
    parallelize(model, meshes, dispatcher=dispatcher(meshes.expert.get_group()))
    with pytest.raises(UnsupportedError, match="default dispatcher"):
        logits(model, tokens(1, 40 + dist.get_rank()))
    dist.barrier()


def _on_two(cases):
    _refused(AllToAllDispatcher, "deepseek_v3", "bfloat16")
    _refused(OncePerRankDispatcher, "qwen3_moe", "float32")
    return _every(cases)


def test_routers_in_float32_and_experts_that_are_added_in_another_order_are_refused():
    cases = [(name, "float32", 2) for name in ("mixtral", "glm4_moe", "deepseek_v3", "minimax_m2")]
    assert ranks.run(_on_two, cases) == [dict.fromkeys(cases, (True, True))] * 2

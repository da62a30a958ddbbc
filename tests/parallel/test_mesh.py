import copy
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule

from primeblocks.errors import PlanError
from primeblocks.parallel import (
    clip_grad_norm_,
    fully_shard_moe,
    global_token_count,
    plan_mesh,
)
from primeblocks.parallel.mesh import on_device
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter
from tests.deadlines import HANG_S
from tests.parallel.bodies import meshes_of


@given(
    replicate=st.integers(1, 4),
    context=st.integers(1, 4),
    expert=st.integers(1, 8),
    rest=st.integers(1, 6),
)
def test_every_axis_divides_the_world(replicate, context, expert, rest):
    world = replicate * context * expert * rest
    plan = plan_mesh(world_size=world, replicate=replicate, context=context, expert=expert)
    assert plan.replicate * plan.fsdp == world
    assert plan.replicate * plan.expert_fsdp * plan.expert == world
    assert plan.batch * plan.context == world


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"replicate": 3}, r"replicate=3 does not divide world_size = 8. Use one of \[1, 2, 4, 8]"),
        ({"expert": 3}, r"expert=3 does not divide world_size / replicate = 8"),
        ({"replicate": 4, "expert": 4}, r"replicate = 2. Use one of \[1, 2]"),
        ({"context": 3}, r"context=3 does not divide world_size / replicate = 8"),
        ({"replicate": 8, "context": 2}, r"context=2 .* = 1. Use one of \[1]"),
        ({"expert": 0}, "expert must be at least 1; got 0"),
        ({"context": -1}, "context must be at least 1; got -1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, said):
    with pytest.raises(PlanError, match=said):
        plan_mesh(world_size=8, **degrees)


def test_the_table_shows_sizes_and_neighbours():
    table = plan_mesh(world_size=64, replicate=2, context=2, expert=8).table()
    rows = {line.split()[0]: line.split()[1:3] for line in table.splitlines()}
    assert rows["replicate"] == ["2", "0,32"]
    assert rows["fsdp"] == ["32", "0,1,...,31"]
    assert rows["expert_fsdp"] == ["4", "0,8,16,24"]
    assert rows["expert"] == ["8", "0,1,...,7"]
    assert rows["context"] == ["2", "0,1"]
    assert rows["batch"] == ["32", "0,2,...,62"]


def _groups(**degrees):
    meshes = meshes_of(**degrees)
    names = ("fsdp", "expert_fsdp", "expert", "context", "batch", "loss")
    return {name: getattr(meshes, name).mesh.tolist() for name in names}


def _groups_of_four():
    return _groups(expert=2), _groups(replicate=2, expert=2, context=2)


def test_ranks_of_one_and_of_two_copies():
    by_rank = ranks.run(_groups_of_four, world_size=4)
    (first, second, third, last), two = zip(*by_rank, strict=True)
    assert first["expert"] == second["expert"] == [0, 1]
    assert third["expert"] == last["expert"] == [2, 3]
    assert first["expert_fsdp"] == third["expert_fsdp"] == [0, 2]
    assert second["expert_fsdp"] == last["expert_fsdp"] == [1, 3]
    for rank, groups in enumerate((first, second, third, last)):
        assert groups["fsdp"] == groups["loss"] == groups["batch"] == [0, 1, 2, 3]
        assert groups["context"] == [rank]
    first, second, third, last = two
    for groups in two:
        assert groups["fsdp"] == [[0, 1], [2, 3]]
        assert groups["loss"] == [0, 1, 2, 3]
    assert first["expert"] == first["context"] == [0, 1]
    assert last["expert"] == last["context"] == [2, 3]
    assert first["expert_fsdp"] == third["expert_fsdp"] == [[0], [2]]
    assert second["batch"] == last["batch"] == [1, 3]


def _timeouts():
    meshes = meshes_of(replicate=2, expert=2, context=2)
    names = ("fsdp", "expert_fsdp", "expert", "context", "batch", "loss")
    groups = [group for name in names for group in getattr(meshes, name).get_all_groups()]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_every_group_has_the_timeout_of_the_world():
    found = ranks.run(_timeouts, world_size=4, timeout_s=HANG_S)
    assert found == [{timedelta(seconds=HANG_S)}] * 4


def _on_its_device():
    """Host reads of calls whose tensors do not come from the caller."""
    from tests.pretend import Device

    meshes = meshes_of()
    assert meshes.device == torch.device("cpu")
    meshes = replace(meshes, device=torch.device("pretend", 0))
    with Device(), StepCounter(device="pretend") as step:
        assert global_token_count(3, meshes) == 6
        assert clip_grad_norm_([], 1.0, meshes=meshes).device == meshes.device
    return step.host_reads.total()


def test_counts_and_norms_are_on_the_device_of_the_mesh():
    """In a new thread, "cuda" without a number would be the first GPU."""
    assert ranks.run(_on_its_device) == [3, 3]


def _build_for_four():
    with pytest.raises(PlanError, match="device='cpu:0' cannot be used here: each rank chooses"):
        plan_mesh(world_size=2).build("cpu:0")
    with pytest.raises(PlanError, match="planned for 4 ranks, but 2 ranks are running") as caught:
        plan_mesh(world_size=4).build("cpu")
    return str(caught.value)


def test_another_number_of_ranks_is_refused():
    assert "world_size=2" in ranks.run(_build_for_four, world_size=2)[0]


def test_no_process_group_is_refused():
    with pytest.raises(PlanError, match="init_process_group"):
        plan_mesh(world_size=1).build("cpu")


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_takes_its_own_device_before_it_asks_others(launched, monkeypatch):
    """Two ranks whose first tensor lies on the same device are refused by NCCL."""
    chosen, tensor = [], torch.zeros(0)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "3")
    else:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 11)
    for name, found in (("is_available", True), ("is_initialized", False), ("device_count", 8)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: chosen.append(device) or tensor)
    on_device("cuda")
    assert chosen == [3, "cuda"]


class _Sees(nn.Module):
    """A layer, and a part of the root that only images use."""

    def __init__(self):
        super().__init__()
        self.embed, self.tower, self.layer = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, *, has_image):
        hidden = self.embed(x)
        return self.layer(hidden + self.tower(x) if has_image else hidden)


def _without_an_image():
    torch.manual_seed(0)
    whole, x = _Sees(), torch.randn(2, 3, 4)
    model, rank = copy.deepcopy(whole), dist.get_rank()
    fully_shard_moe(model, meshes_of(), layers=[model.layer], experts=[])
    model.set_reduce_scatter_unused_params(True, recurse=False)
    sum(whole(x[i], has_image=i == 0).sum() for i in range(2)).backward()
    model(x[rank], has_image=rank == 0).sum().backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad.full_tensor(), whole.get_parameter(name).grad)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 has it"
)
def test_a_rank_without_an_image_sends_the_gradients_of_the_tower():
    ranks.run(_without_an_image, world_size=2)

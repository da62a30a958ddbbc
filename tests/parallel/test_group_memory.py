"""GroupMemory on gloo, where nothing is freed, and on fake backends that record their calls.

No NCCL runs here: `FakeNccl` is ours, and has the three calls of torch's backend that we use.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from primeblocks.errors import UnsupportedError, UsageError
from primeblocks.parallel.memory import GroupMemory, HostMemory
from primeblocks.testing import ranks
from tests.parallel.bodies import each, meshes_of


class FakeNccl:
    """Stands for a backend of torch's NCCL. Faults are raised once by the call of their name."""

    def __init__(self, label, calls, num_bytes):
        self._label, self._calls, self._num_bytes = label, calls, num_bytes
        self.faults, self.suspended = {}, 0

    def name(self):
        return "nccl"

    def memory_stats(self):
        self._meet("memory_stats")
        return {"suspend": self._num_bytes, "suspended": self.suspended}

    def suspend(self):
        self._meet("suspend")
        assert not self.suspended
        self.suspended = 1
        self._calls.append(f"suspend {self._label}")

    def resume(self):
        self._meet("resume")
        assert self.suspended
        self.suspended = 0
        self._calls.append(f"resume {self._label}")

    def _meet(self, call):
        if fault := self.faults.pop(call, None):
            raise fault


class FakeGroup(dist.ProcessGroup):
    """A group of torch with a fake backend for CUDA, and none for CPUs."""

    def __init__(self, name, backend):
        super().__init__(0, 2)
        self._name, self.backend = name, backend

    @property
    def group_name(self):
        return self._name

    @property
    def _device_types(self):
        return [torch.device("cuda")]

    def _get_backend(self, device):
        assert device.type == "cuda"
        return self.backend


@pytest.fixture
def calls():
    return []


@pytest.fixture
def groups(calls):
    sizes = {"0": 100, "mesh_expert": 20, "mesh_fsdp": 3}
    return [FakeGroup(name, FakeNccl(name, calls, size)) for name, size in sizes.items()]


SUSPENDED = ["suspend 0", "suspend mesh_expert", "suspend mesh_fsdp"]
RESUMED = ["resume 0", "resume mesh_expert", "resume mesh_fsdp"]


def test_groups_are_suspended_once_in_one_order(groups, calls):
    for order in itertools.permutations(groups):
        memory = GroupMemory(*order, order[0])
        for _ in range(2):
            calls.clear()
            with memory.released() as moved:
                assert calls == SUSPENDED
                assert moved.num_bytes == {"groups": 123}
            assert calls == SUSPENDED + RESUMED


def test_release_and_restore_count_the_same_bytes(groups):
    memory = GroupMemory(*groups)
    assert memory.release() == memory.restore()
    with pytest.raises(UsageError, match="not released. Call release"):
        memory.restore()
    memory.release()
    with pytest.raises(UsageError, match="released already. Call restore"):
        memory.release()
    memory.restore()


def test_a_with_restores_after_an_error_and_only_once(groups, calls):
    memory = GroupMemory(*groups)
    with pytest.raises(ZeroDivisionError), memory.released():
        1 / 0  # noqa: B018
    with memory.released():
        memory.restore()
    assert calls == 2 * (SUSPENDED + RESUMED)


def test_a_group_without_a_communicator_is_skipped(groups, calls):
    groups[1].backend.faults["memory_stats"] = RuntimeError("NCCL communicator not initialized.")
    memory = GroupMemory(*groups)
    with memory.released() as moved:
        assert moved.total_bytes == 103
    assert calls == [*SUSPENDED[::2], *RESUMED[::2]]


def _unable(groups):
    groups[2].backend.faults["memory_stats"] = RuntimeError("requires NCCL 2.29.7 or later")


def _old(groups):
    # torch before 2.12 has a backend without the calls.
    groups[2].backend = type("Backend", (), {"name": lambda self: "nccl"})()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(_unable, "backend nccl: requires NCCL 2.29.7"), (_old, "has no attribute 'memory_stats'")],
)
def test_a_backend_that_cannot_suspend_is_refused_before_anything_is(
    groups, calls, damage, message
):
    damage(groups)
    memory = GroupMemory(*groups)
    with pytest.raises(UnsupportedError, match=message):
        memory.release()
    assert calls == []
    with pytest.raises(UsageError, match="not released"):
        memory.restore()


def test_a_group_that_other_code_suspended_is_refused(groups, calls):
    groups[1].backend.suspended = 1
    memory = GroupMemory(*groups)
    with pytest.raises(UsageError, match="suspended already, by other code"):
        memory.release()
    assert calls == []
    groups[1].backend.suspended = 0
    with memory.released():
        assert calls == SUSPENDED


def test_after_a_failure_restore_resumes_what_is_suspended(groups, calls):
    groups[1].backend.faults["suspend"] = RuntimeError("split_share")
    memory = GroupMemory(*groups)
    with pytest.raises(RuntimeError, match="split_share"):
        memory.release()
    assert memory.restore().total_bytes == 100
    assert calls == [SUSPENDED[0], RESUMED[0]]
    calls.clear()
    memory.release()
    groups[1].backend.faults["resume"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.restore()
    assert memory.restore().total_bytes == 23
    assert calls == SUSPENDED + RESUMED


def test_no_groups_are_refused():
    with pytest.raises(UsageError, match="at least one group"):
        GroupMemory()


def test_torchs_backends_without_the_calls_are_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        memory = GroupMemory(dist.group.WORLD)
        with pytest.raises(UnsupportedError, match="with the backend fake: .*Leave the group out"):
            memory.release()
    finally:
        dist.destroy_process_group()


def _trained(phases):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    meshes = meshes_of()
    fully_shard(model, mesh=meshes.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    memory = HostMemory(model, optimizer)
    groups = GroupMemory(meshes.fsdp, dist.group.WORLD, meshes.expert, meshes.loss)
    freed = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6) * (1 + dist.get_rank())).square().sum().backward()
        optimizer.step()
        if phases:
            with groups.released() as moved, memory.released():
                freed.append(moved.num_bytes)
    return freed, model.weight.full_tensor().tolist()


def test_on_gloo_nothing_is_freed_and_training_goes_on():
    for (freed, weight), (_, same) in ranks.run(each, _trained, [(True,), (False,)]):
        assert freed == 3 * [{"groups": 0}]
        assert weight == same

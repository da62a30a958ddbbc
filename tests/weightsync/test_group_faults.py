"""A sync that meets damage, delay, a lost store or a wrong call: one version, and in time."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from primeblocks.errors import EngineError, PlanError, TransferError, UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import describe, gather_manifests
from primeblocks.weightsync.group import GroupSync
from primeblocks.weightsync.link_wire import Wire
from primeblocks.weightsync.links import plan_links
from primeblocks.weightsync.reference import slice_again
from tests.weightsync.link_layouts import manifest
from tests.weightsync.test_group_sync import Engine, Small, same_bytes, sync_of

ranks.preload(__name__)  # With all that it imports.


def fault_body(where, fault, culprit):
    member = Small(dist.TCPStore(*where))
    member.sync(1)
    if member.rank == culprit:
        FAULTS[fault]()
    text = member.attempt(2, timeout_s=0.8)
    assert member.is_refused()
    assert not member.is_engine or (member.holds(1) and member.engine.loads == 1)
    return text


def flip(position):
    """Flip one bit of the second message."""
    inner, calls = dist.isend, itertools.count()

    def isend(message, **where):
        message = message.clone()
        if next(calls) == 1:
            message[position] ^= 4
        return inner(message, **where)

    dist.isend = isend


def replay():
    """Send each message as it was in the transaction before."""
    inner = Wire._seal

    def seal(wire, message, bucket):
        wire._transaction = "weightsync/1/1"
        return inner(wire, message, bucket)

    Wire._seal = seal


def duplicate():
    """Send the first message of the second's size twice."""
    inner, first = dist.isend, {}

    def isend(message, **where):
        link = (where["group_dst"], len(message))
        return inner(first.setdefault(link, message.clone()), **where)

    dist.isend = isend


FAULTS = {
    "first byte": lambda: flip(0),
    "last byte of the digest": lambda: flip(-1),
    "replay": replay,
    "duplicate": duplicate,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bytes_that_are_not_what_was_sent_are_refused_by_all(fault, host):
    texts = ranks.run(fault_body, host, fault, 1, world_size=4)
    assert any("from rank 1 to rank" in text and "fail their digest" in text for text in texts)
    assert "Make a new group and sync the same version again" in texts[0]
    assert len(set(texts)) == 1  # All give the reason that was decided.


def late_body(where):
    member = Small(dist.TCPStore(*where))
    member.sync(1)
    if member.rank == 1:
        return ""  # It never comes.
    text = member.attempt(2, timeout_s=0.5)
    assert member.is_refused()
    assert not member.is_engine or member.holds(1)
    return text


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(host):
    texts = ranks.run(late_body, host, world_size=4)
    assert all("the deadline passed" in texts[rank] for rank in (0, 2, 3))


class Script(dist.Store):
    """A store with a fault in one place."""

    def __init__(self, inner, fault=None):
        super().__init__()
        self.inner, self.fault = inner, fault

    def add(self, key, amount):
        if self.fault == "votes late" and key.endswith("votes"):
            self.inner.wait([key.replace("votes", "decision")], timedelta(seconds=20))
        if self.fault == "attempt lost":
            raise RuntimeError("connection refused")
        total = self.inner.add(key, amount)
        if self.fault == "vote unknown":
            # Long enough for the others to decide, unless this was the last vote.
            self.inner.wait([key.replace("votes", "decision")], timedelta(seconds=0.3))
            raise RuntimeError("connection reset after the vote")
        return total

    def wait(self, keys, timeout):
        self.inner.wait(keys, timedelta(seconds=20) if self.fault == "wait ends late" else timeout)
        if self.fault == "wait ends late":
            raise RuntimeError("timed out, just as the decision came")

    def compare_set(self, key, expected, desired):
        if self.fault == "lost":
            raise RuntimeError("connection reset")
        return self.inner.compare_set(key, expected, desired)


def store_body(where, fault, culprit=3):
    store = Script(dist.TCPStore(*where))
    member = Small(store)
    member.sync(1)
    if member.rank == culprit:
        store.fault = fault
    text = member.attempt(2, timeout_s=20.0 if fault == "wait ends late" else 0.8)
    if member.is_engine:
        assert member.holds(1) is bool(text)
        assert member.holds(2) is not bool(text)
    return text


def test_a_rank_that_votes_after_the_others_gave_up_follows_them(host):
    texts = ranks.run(store_body, host, "votes late", world_size=4)
    assert len(set(texts)) == 1
    assert "waited for the votes of the others in vain" in texts[0]


def test_a_rank_whose_wait_fails_commits_if_that_was_decided(host):
    assert ranks.run(store_body, host, "wait ends late", world_size=4) == [""] * 4


def test_a_rank_that_lost_the_store_keeps_its_version_and_says_what_it_cannot_know(host):
    texts = ranks.run(store_body, host, "lost", world_size=4)
    assert "the store does not answer: connection reset" in texts[3]
    assert "others may have committed" in texts[3]


def test_a_vote_of_which_only_the_answer_was_lost_splits_nobody(host):
    for culprit in (0, 2):
        texts = ranks.run(store_body, host, "vote unknown", culprit, world_size=4)
        assert len({bool(text) for text in texts}) == 1, texts


def test_a_store_that_is_gone_at_the_start_is_told_to_all(host):
    texts = ranks.run(store_body, host, "attempt lost", 0, world_size=4)
    assert all("nothing was sent. the store does not answer: conn" in text for text in texts)


def refusal_body(where):
    store, rank = dist.TCPStore(*where), dist.get_rank()
    member = Small(store)
    with pytest.raises(UsageError, match=r"disagree about the version: \[1, 1, 1, 2\]"):
        member.sync(2 if rank == 3 else 1)
    if rank == 1:
        kept = member.parameters["w"]
        member.sync_._parameters["w"] = torch.zeros(3)
    with pytest.raises(PlanError, match=r"nothing was sent. 'w' is \(3,\) torch.float32 on rank 1"):
        member.sync(1)
    if rank == 1:
        del member.sync_._parameters["w"]
    with pytest.raises(PlanError, match="rank 1 shall send 'w' and has no such tensor"):
        member.sync(1)
    if rank == 1:
        member.sync_._parameters["w"] = kept
    receipts = [member.sync(1), member.sync(1), member.sync(2)]  # The group is as good as before.
    assert receipts[0].digest == receipts[1].digest != receipts[2].digest
    assert not member.is_engine or (member.engine.loads == 3 and member.holds(2))
    wanted = {"parameters": {}} if member.is_engine else {"load": member.engine}
    for wrong in (wanted, {}):
        side = "an engine" if member.is_engine else "a trainer"
        with pytest.raises(UsageError, match=f"rank {rank} is {side} rank of 2 . 2; it needs"):
            GroupSync(member.plan, store=store, **wrong)
    other = plan_links(member.plan.sources, member.plan.targets, bucket_bytes=128)
    plan = other if rank == 2 else member.plan
    fresh = sync_of(plan, store, parts=[member.parameters] * 2, engine=member.engine)
    with pytest.raises(UsageError, match="disagree about the plan"):
        fresh.sync(3, timeout_s=20)
    three = plan_links(member.plan.sources, member.plan.targets[:1], bucket_bytes=64)
    with pytest.raises(UsageError, match="the plan is for 3 ranks, the group has 4"):
        GroupSync(three, store=store, load=member.engine)


def test_what_does_not_fit_is_refused_on_all_ranks_and_costs_nothing(host):
    ranks.run(refusal_body, host, world_size=4)


def load_body(where, loads):
    def broken(tensors):
        if loads == "raises":
            raise KeyError("no such parameter")

    member = Small(dist.TCPStore(*where), load=broken if dist.get_rank() == 3 else None)
    if member.rank != 3:
        member.sync(1)
        return not member.is_engine or member.holds(1)
    with pytest.raises(EngineError) as caught:
        member.sync(1)
    with pytest.raises(TransferError, match="did not end. Make a new group"):
        member.sync(1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("loads", "said"),
    [("raises", "KeyError: 'no such parameter'"), ("nothing", "load left 2 of 2 tensors untaken")],
)
def test_an_engine_that_cannot_load_says_so_and_is_to_be_restarted(loads, said, host):
    results = ranks.run(load_body, host, loads, world_size=4)
    assert results[:3] == [True] * 3
    assert said in results[3]
    assert "Restart this engine" in results[3]


def moe_body(path):
    """FSDP2 over expert shards on ranks 0-3; two engine ranks with experts and columns."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "expert"))
    generator = torch.Generator().manual_seed(0)
    whole = {
        "experts": torch.randn(8, 3, 6, generator=generator),
        "qkv": torch.randn(6, 10, generator=generator),
        "norm": torch.randn(7, generator=generator),
    }
    rank, model = dist.get_rank(), nn.Module()
    if rank < 4:
        for name, tensor in whole.items():
            placement = Shard(0) if name == "experts" else Replicate()
            part = distribute_tensor(tensor.clone(), mesh["expert"], [placement])
            model.register_parameter(name, nn.Parameter(part))
        fully_shard(model, mesh=mesh["fsdp"])
        mine = describe(model)
        kinds = {type(p).__name__ for t in model.parameters() for p in t.placements}
        assert "_StridedShard" in kinds
    else:
        half = rank - 4
        bf16 = torch.bfloat16
        mine = manifest(
            {
                "norm": (bf16, (7,), (0,), (7,)),
                "experts": (bf16, (8, 3, 6), (4 * half, 0, 0), (4, 3, 6)),
                "qkv": (bf16, (6, 10), (0, 5 * half), (6, 5)),
            }
        )
    manifests, engine = gather_manifests(mine), Engine()
    plan = plan_links(manifests[:4], manifests[4:], bucket_bytes=128)
    side = {"parameters": model} if rank < 4 else {"load": engine}
    sync = GroupSync(plan, store=dist.FileStore(path), **side)
    sync.sync(1, timeout_s=30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    sync.sync(2, timeout_s=30)
    if rank >= 4:
        wanted = slice_again({n: (t * -3).bfloat16() for n, t in whole.items()}, mine)
        assert same_bytes(engine.tensors, wanted)
    return plan.bytes_by_rank


def test_fsdp_over_experts_becomes_tensor_and_expert_parallel_shards(tmp_path):
    moved = ranks.run(moe_body, str(tmp_path / "store"), world_size=6)
    assert moved[0][4:] == (2 * (7 + 72 + 30),) * 2
    assert max(moved[0][:4]) <= 1.1 * sum(moved[0][:4]) / 4

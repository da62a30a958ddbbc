"""A sync over a group that meets delay or a bad store: one version, a typed error, in time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from primeblocks.errors import DeadlineError, TransferError, UsageError
from primeblocks.testing import ranks
from primeblocks.weightsync import Publisher, Subscriber, describe, fetched, plan_sync, publish
from primeblocks.weightsync.manifest import gather_manifests
from primeblocks.weightsync.transports import GroupTransport, board, group, open_transport
from tests.deadlines import HANG_S
from tests.weightsync.contents import Side, joined, same_bytes
from tests.weightsync.link_layouts import manifest
from tests.weightsync.reference import slice_again
from tests.weightsync.small_sync import RANKS, Small, expiring

ranks.preload(__name__)  # With all that it imports.


class Script(dist.Store):
    """A store with a fault in one place."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.fault, self.done = inner, "", False

    def add(self, key, amount):
        self._meet("add", key)
        self.done = True
        if self.fault == "votes late":
            self.inner.wait([key.replace("votes", "decision")], timedelta(seconds=HANG_S))
        total = self.inner.add(key, amount)
        if self.fault == "vote unknown":
            raise RuntimeError("connection reset after the vote")
        return total

    def clone(self):
        return self.inner.clone()

    def check(self, keys):
        self._meet("check", keys[0])
        if self.fault == "wait fails" and self.done and keys[0].endswith("decision"):
            self.inner.wait(keys, timedelta(seconds=HANG_S))
            raise RuntimeError("reset, just as the decision came")
        return self.inner.check(keys)

    def get(self, key):
        self._meet("get", key)
        return self.inner.get(key)

    def set(self, key, value):
        self._meet("set", key)
        self.done = key.endswith("marker")
        self.inner.set(key, value)
        if self.fault == "marker unknown" and key.endswith("marker"):
            raise RuntimeError("connection reset after the marker")

    def compare_set(self, key, expected, desired):
        self._meet("compare_set", key)
        return self.inner.compare_set(key, expected, desired)

    def _meet(self, method, key):
        if self.fault in ("lost", f"lost in {method}"):
            raise RuntimeError("connection reset")
        if self.fault == f"hangs in {method}":
            threading.Event().wait()  # For ever.


class Scripted(Small):
    """A small sync over a group, with a store that can fail on this rank."""

    def renew(self, wrap=None):
        self.store = Script(dist.TCPStore(*self.where))
        counts = {"trainers": 2, "readers": 2}
        generation = [None]
        if not self.is_engine:
            self.transport = GroupTransport(store=self.store, rank=self.rank, **counts)
        if self.rank == 0:
            generation = [self.transport._generation]
        dist.broadcast_object_list(generation, 0)
        if self.is_engine:
            made = GroupTransport(store=self.store, generation=generation[0], **counts)
            self.transport = made
        self.join(wrap)


def store_bodies(where, cases):
    publish._GRACE_S = board._GRACE_S = 0.2  # Most cases wait them out.
    return [store_body(where, *case) for case in cases]


def store_body(where, fault, culprit, timeout_s):
    small = Scripted("group", where)
    small.sync(1)
    if small.rank == culprit:
        small.store.fault = fault
    waits = fault == "votes late" and small.rank == culprit  # For the others' decision.
    text = small.attempt(2, timeout_s=HANG_S if waits else timeout_s)
    assert small.holds(1 if text else 2)
    small.store.fault = ""
    small.renew()
    small.sync(2)
    assert small.holds(2)
    return text


METHODS = ("add", "check", "get", "set", "compare_set")
LOST = (("wait fails", 0), ("marker unknown", 0), ("wait fails", 3), ("vote unknown", 3))
HANGS = [(f"hangs in {method}", culprit) for culprit in (0, 3) for method in METHODS]
CASES = {
    ("votes late", 3): 5.0,
    **dict.fromkeys(LOST, HANG_S),
    ("lost in compare_set", 3): 5.0,
    **dict.fromkeys([("lost", 3), *HANGS], 0.7),
}


def test_a_store_with_a_fault_in_one_place_splits_nobody(host):
    cases = [(*case, timeout_s) for case, timeout_s in CASES.items()]
    told = ranks.run(store_bodies, host, cases, world_size=RANKS)
    said = dict(zip(CASES, zip(*told, strict=True), strict=True))
    late = said["votes late", 3]
    assert all("until the deadline" in text for text in late), late
    for case in LOST:
        assert len({bool(text) for text in said[case]}) == 1, said[case]
        if case[0] == "wait fails":
            assert said[case] == ("",) * RANKS
    # It keeps its version, and says what it cannot know.
    unsure = said["lost in compare_set", 3][3]
    assert unsure == "" or "Other ranks may have committed" in unsure
    lost = said["lost", 3]
    assert "the store does not answer: connection reset" in lost[3]
    assert all(lost)  # Without it nobody has the version.
    # A store that hangs is given up by the deadline: Small.attempt has a watch.
    ends = ("does not answer in time", "the deadline passed", "until the deadline")
    ends += ("did not ask", "did not arrive", "was published in time", "begin a sync in time")
    ends += ("a message came too late", "imed out")  # Of a slow peer.
    for fault, culprit in HANGS:
        text = said[fault, culprit][culprit]
        assert not text or any(words in text for words in ends), text


def test_a_store_that_is_gone_at_the_start_is_a_typed_error(host):
    store = Script(dist.TCPStore(*host))
    store.fault = "lost"
    with pytest.raises(TransferError, match="the store does not answer: connection reset"):
        GroupTransport(store=store, trainers=2, readers=2, rank=0)


def test_the_long_notes_of_a_sync_are_emptied(host):
    store, weights = dist.TCPStore(*host), {"w": torch.zeros(1 << 14)}
    plan = plan_sync([describe(weights)], describe(weights))
    trainer = GroupTransport(store=store, trainers=1, readers=1, rank=0)
    publisher = Publisher(plan, weights, trainer, full_every=2, link_bytes_per_s=1.0)
    subscriber = Subscriber(plan, list, open_transport(trainer.spec()))
    for version, base in ((1, None), (2, 1)):
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(subscriber.receive, timeout_s=HANG_S)
            assert publisher.publish(version, timeout_s=HANG_S).base == base
            received.result(HANG_S)
        notes = ("begun", "go", "marker", "sizes/0")
        key = f"weightsync/1/{version}/"
        stay = [note for note in notes if store.check([key + note]) and store.get(key + note)]
        assert stay == ["begun", "go"]  # Late readers skip this sync because of them.


def late_body(where):
    small = Small("group", where)
    small.sync(1)
    if small.rank == 1:
        small.side.publisher.close()
        dist.barrier()
        return ""  # It never comes.
    text = small.attempt(2, timeout_s=0.5)
    assert small.holds(1)
    dist.barrier()
    return text


def impatient_body(where):
    """Reader 0 gives up while reader 1 has not come. Then both sides go on as if nothing was."""
    small = Small("group", where)
    if small.rank == 2:
        group.time = SimpleNamespace(monotonic=lambda: time.monotonic() + HANG_S)
        with (
            expiring(board.Transaction, "read_go"),
            pytest.raises(
                DeadlineError, match="reader 0 waited for the other ranks until the deadline"
            ),
        ):
            small.sync(1)
        group.time = time
    elif small.rank < 2:
        with pytest.raises(
            TransferError, match="reader 0 waited for the other ranks until the deadline"
        ):
            small.sync(1, timeout_s=HANG_S)
    dist.barrier()
    for version in (4, 5):  # The one that comes late does not take the old call for these.
        small.sync(version)
        assert small.holds(version)


def wrong_call_body(where):
    store = dist.TCPStore(*where)
    for counts in ((0, 4), (4, 0)):
        with pytest.raises(UsageError, match="got {} trainers and {} readers".format(*counts)):
            GroupTransport(store=store, trainers=counts[0], readers=counts[1])
    for rank in (None, 2, -1):
        with pytest.raises(UsageError, match=f"got rank {rank}, of 2 trainers. A reader opens"):
            GroupTransport(store=store, trainers=2, readers=2, rank=rank)
    small = Small("group", where)
    small.sync(1)
    if small.is_engine:
        with pytest.raises(UsageError, match=r"rank . is a reader. Of 4 ranks, the first 2"):
            small.transport.begin(2, plan=small.plan, base=None, deadline=time.monotonic() + 1)
        request = type("Request", (), {"plan": small.plan, "reader": 7, "deadline": 0.0})()
        with pytest.raises(UsageError, match=r"is reader ., not reader 7"):
            small.transport.receive(request)
    other = plan_sync(small.sources, small.targets[:1], bucket_bytes=64)
    with pytest.raises(
        UsageError, match="2 trainer ranks and 1 readers, but the group has 2 and 2"
    ):
        small.transport._check(other, trainer=not small.is_engine)
    small.sync(2)
    assert small.holds(2)


def load_body(where, full_every):
    """The load of reader 1 fails once: in the second sync, which is a delta if there are any."""
    small = Small("group", where, full_every=full_every, bucket_bytes=4096)
    small.sync(1)
    if small.rank < 2:
        for value in small.parameters.values():
            value.view(-1)[:1] += 1
        small.side.publisher.publish(2, timeout_s=HANG_S)
        return None
    before = {name: tensor.clone() for name, tensor in small.engine.tensors.items()}
    whole = small.side.subscriber._load

    def broken(tensors):
        small.side.subscriber._load = whole
        next(iter(tensors))
        raise KeyError("no such parameter")

    if small.rank == 3:
        small.side.subscriber._load = broken
        with pytest.raises(TransferError, match="Version 1 was loaded again"):
            small.side.subscriber.receive(2, timeout_s=HANG_S)
        assert same_bytes(small.engine.tensors, before)
        return small.side.subscriber.version
    receipt = small.side.subscriber.receive(2, timeout_s=HANG_S)
    assert not same_bytes(small.engine.tensors, before)
    return receipt.bytes / small.plan.read_bytes(0)


def memory_body(where):
    """Not an error of ours, and in a place where others wait for this rank's vote."""
    small = Small("group", where)
    small.sync(1)
    digest = fetched.bucket_digest
    if small.rank == 3:
        fetched.bucket_digest = fail
    if small.rank == 3:
        with pytest.raises(MemoryError):
            small.sync(2)
    else:
        said = small.attempt(2, timeout_s=HANG_S)
        assert "abort: rank 3 met MemoryError: no room" in said
    assert small.holds(1)
    fetched.bucket_digest = digest
    assert small.is_refused() or small.rank == 1  # It hears of it from rank 0.


def fail(pieces):
    raise MemoryError("no room")


def ranks_body(where):
    """New transports work after each failure."""
    found = []
    for body, *args in BODIES:
        found.append(body(where, *args))
        dist.barrier()
    return found


BODIES = (
    (late_body,),
    (impatient_body,),
    (wrong_call_body,),
    (load_body, 1),
    (load_body, 4),
    (memory_body,),
)


def test_ranks_that_do_not_come_give_up_call_wrongly_or_fail_break_nothing(host):
    late, _, _, full, delta, _ = zip(*ranks.run(ranks_body, host, world_size=RANKS), strict=True)
    assert "lost its peers, or the deadline passed" in late[0]
    assert all("no version was published in time. This engine has" in text for text in late[2:])
    assert full[3] == delta[3] == 1
    assert delta[2] < 1 <= full[2]


def moe_body(path):
    """FSDP2 over expert shards on ranks 0-3, and two engine ranks with experts and columns."""
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
        half, bf16 = rank - 4, torch.bfloat16
        mine = manifest(
            {
                "norm": (bf16, (7,), (0,), (7,)),
                "experts": (bf16, (8, 3, 6), (4 * half, 0, 0), (4, 3, 6)),
                "qkv": (bf16, (6, 10), (0, 5 * half), (6, 5)),
            }
        )
    manifests = gather_manifests(mine)
    plan = plan_sync(manifests[:4], manifests[4:], bucket_bytes=128)
    side = Side(plan, joined(dist.FileStore(path), plan), model)
    side.sync(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    side.sync(2)
    if rank >= 4:
        wanted = slice_again({n: (t * -3).bfloat16() for n, t in whole.items()}, mine)
        assert same_bytes(side.engine.tensors, wanted)
    sent = [sum(plan.buckets[i].bytes * len(plan.buckets[i].readers) for i in plan.of_rank(r))
            for r in range(4)]  # fmt: skip
    return sent, [plan.read_bytes(reader) for reader in range(2)]


def test_fsdp_over_experts_becomes_tensor_and_expert_parallel_shards(tmp_path):
    sent, read = ranks.run(moe_body, str(tmp_path / "store"), world_size=6)[0]
    assert read == [2 * (7 + 72 + 30)] * 2
    assert max(sent) <= 1.1 * sum(sent) / 4

"""What engines read out of trainer ranks' memory: over IPC, a stand-in for RDMA, and NIXL."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import CorruptionError, DeadlineError, PlanError, TransferError
from primeblocks.layout import Layout, Shard
from primeblocks.testing import ranks
from primeblocks.weightsync import Manifest, Publisher, Subscriber, TensorSpec, describe, plan_sync
from primeblocks.weightsync.ipc import IpcTransport
from primeblocks.weightsync.packed import Packed, Pool, places
from primeblocks.weightsync.pull import PullTransport
from tests.weightsync.contents import Engine, same_bytes
from tests.weightsync.process_wire import ProcessWire

ranks.preload(__name__)

TIMEOUT_S = 10.0
NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed; scripts/peers does"
)
KINDS = ["ipc", "process", pytest.param("nixl", marks=NEEDS_NIXL)]


def wire(kind, *, serves):
    if kind == "process":
        return ProcessWire()
    from primeblocks.weightsync.adapters.nixl import NixlWire

    return NixlWire(serves=serves)


def end(kind, path, **options):
    """One process's end of a transport at a folder."""
    if kind == "ipc":
        return IpcTransport("policy", root=str(path), **options)
    store = dist.FileStore(f"{path}/store")
    return PullTransport(store, wire(kind, serves="owner" in options), **options)


def parameters(value):
    generator = torch.Generator().manual_seed(value)
    return {
        "a": torch.randn(400, 3, generator=generator).bfloat16(),
        "b": torch.randint(0, 99, (5,), generator=generator),
        "c": torch.randn(7, generator=generator),
    }


class Site:
    """A trainer of one rank and an engine in this process."""

    def __init__(self, kind, path, *, keep=False, full_every=1):
        self.kind, self.path, self.weights = kind, path, parameters(0)
        manifest = describe(self.weights)
        self.plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1000)
        self.full_every, self.reading = full_every, lambda: None
        self.owner, self.publisher = self.trainer()
        self.reader = end(kind, path, keep=keep)
        self.engine = Engine()
        self.subscriber = Subscriber(self.plan, self.load, self.reader)
        if kind != "ipc":
            read, self.reader._wire.read = self.reader._wire.read, self.read
            self.inner_read = read

    def trainer(self):
        owner = end(self.kind, self.path, owner=True)
        publisher = Publisher(self.plan, self.weights, owner, full_every=self.full_every)
        return owner, publisher

    def publish(self, version, timeout_s=TIMEOUT_S):
        for name, tensor in parameters(version).items():
            self.weights[name].copy_(tensor)
        return self.publisher.publish(version, timeout_s=timeout_s)

    def receive(self, version=None, timeout_s=TIMEOUT_S):
        return self.subscriber.receive(version, timeout_s=timeout_s)

    def load(self, tensors):
        if self.kind == "ipc":  # Here it holds the version: it is read in place.
            self.reading()
        self.engine(tensors)

    def read(self, reads, *, deadline):
        self.reading()
        self.inner_read(reads, deadline=deadline)

    def has(self, version):
        return same_bytes(self.engine.tensors, parameters(version))

    def buffer(self, version):
        """The trainer's own, of a version."""
        if self.kind == "ipc":
            return self.owner._pool.by_version()[version].buffer
        return self.owner._full.by_version()[version][0]

    def close(self):
        for one in (self.subscriber, self.publisher, self.reader, self.owner):
            one.close()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def site(kind, tmp_path):
    made = Site(kind, tmp_path)
    yield made
    made.close()


def test_versions_arrive_and_two_buffers_take_turns(site):
    used = []
    for version in range(1, 7):
        site.publish(version)
        assert site.receive().version == version
        assert site.has(version)
        used.append(site.buffer(version).data_ptr())
    assert used[0] == used[2] == used[4] != used[1] == used[3] == used[5]
    assert [marker.version for marker in site.reader.markers()] == [5, 6]


def test_the_old_version_is_read_while_the_next_is_written(site, monkeypatch):
    site.publish(1)
    site.publish(2)
    commit, seen = site.owner.commit, []

    def look_and_commit(marker, *, deadline):
        seen.append(site.receive(2).version)
        assert site.has(2)
        commit(marker, deadline=deadline)

    monkeypatch.setattr(site.owner, "commit", look_and_commit)
    site.publish(3)
    assert seen == [2]
    assert site.receive().version == 3
    assert site.has(3)


def test_what_an_engine_reads_is_not_written_to(site):
    tried = []

    def publish_two_more():
        if not tried:
            tried.append(True)
            site.publish(2)
            with pytest.raises(TransferError, match="version 1 is still being"):
                site.publish(3, timeout_s=0.4)

    site.reading = publish_two_more
    site.publish(1)
    assert site.receive().version == 1
    assert site.has(1)
    site.publish(3)  # The retry.
    assert site.receive().version == 3
    assert site.has(3)


def test_a_version_retired_meanwhile_is_a_typed_error(site):
    site.publish(1)
    receive, raced = site.reader.receive, []

    def receive_slowly(request):
        found = receive(request)
        if not raced:
            raced.extend([site.publish(2), site.publish(3)])
        return found

    site.reader.receive = receive_slowly
    with pytest.raises(TransferError, match="version 1 was retired"):
        site.receive()
    assert site.engine.loads == 0
    assert site.receive().version == 3
    assert site.has(3)


def test_corrupt_bytes_are_refused_and_the_old_version_stays(site):
    site.publish(1)
    site.receive()
    site.publish(2)
    site.buffer(2)[3] ^= 4
    with pytest.raises(CorruptionError, match="bucket 0 of version 2 fails its digest"):
        site.receive()
    assert site.has(1)
    site.publish(3)
    assert site.receive().version == 3
    assert site.has(3)


def test_a_failed_publish_is_dropped_and_tried_again(site, monkeypatch):
    site.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(site.owner, "commit", lambda marker, deadline: 1 / 0)
        with pytest.raises(TransferError, match="ZeroDivisionError"):
            site.publish(2)
    assert site.receive().version == 1
    site.publish(2)
    assert site.receive().version == 2
    assert site.has(2)


def test_a_load_that_fails_goes_back(site, monkeypatch):
    site.publish(1)
    site.receive()
    site.publish(2)
    engine, failed = site.engine, []

    def fail_once(tensors):
        if not failed:
            failed.append(True)
            raise RuntimeError("out of memory")
        engine(tensors)

    site.engine = fail_once
    with pytest.raises(TransferError, match="Version 1 was loaded again"):
        site.receive()
    site.engine = engine
    assert site.has(1)
    assert site.receive().version == 2
    assert site.has(2)


@pytest.mark.parametrize("keep", [False, True])
def test_deltas_and_an_engine_that_joins_late(kind, keep, tmp_path):
    site = Site(kind, tmp_path, keep=keep, full_every=4)
    late = Engine()
    sizes = []
    for version in range(1, 10):
        site.weights["a"][version % 40] = version
        sizes.append(site.publisher.publish(version, timeout_s=TIMEOUT_S).bytes)
        site.receive()
        assert same_bytes(site.engine.tensors, site.weights)
        with Subscriber(site.plan, late, site.reader) as joined:
            assert joined.receive(timeout_s=TIMEOUT_S).version == version
        assert same_bytes(late.tensors, site.weights)
    full = site.plan.bytes_total
    assert [size == full for size in sizes] == [version % 4 == 1 for version in range(1, 10)]
    site.close()


def test_a_base_that_another_publisher_replaced_is_not_used(kind, tmp_path):
    site = Site(kind, tmp_path, full_every=4)
    site.publish(1)
    with Publisher(site.plan, parameters(2), site.owner) as other:
        other.publish(2, timeout_s=TIMEOUT_S)
    site.publish(3)
    assert site.receive().version == 3
    assert site.has(3)
    site.close()


def test_a_restarted_trainer_is_followed(site):
    site.publish(5)
    site.receive()
    site.publisher.close()
    site.owner.close()
    with pytest.raises(DeadlineError):
        site.receive(timeout_s=0.05)
    site.owner, site.publisher = site.trainer()
    site.publish(1)
    assert site.receive().version == 1
    assert site.has(1)


def test_close_is_final_and_twice_is_fine(site):
    site.publish(1)
    for one in (site.owner, site.reader):
        one.close()
        one.close()
        with pytest.raises(Exception, match="was closed"):
            one.markers()


# --- processes that die ------------------------------------------------------------------------


def await_death(pid):
    """Until it has let go of everything: a dead one with threads may still hold locks."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "XZ" and len(os.listdir(f"/proc/{pid}/task")) == 1:
                return
        except (FileNotFoundError, ProcessLookupError):
            return
    raise AssertionError(f"{pid} lives")


def both(body, *args):
    """Rank 0 is the trainer, rank 1 the engine; each knows the other's process."""
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    weights = parameters(1)
    manifest = describe(weights)
    plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1000)
    groups = [dist.new_group([rank], backend="gloo") for rank in (0, 1)]
    return body(*args, plan, weights, groups[dist.get_rank()], pids[1 - dist.get_rank()])


def trainer_dies(kind, path, plan, weights, group, other):
    if dist.get_rank() == 0:
        publisher = Publisher(plan, weights, end(kind, path, owner=True), group=group)
        publisher.publish(1, timeout_s=TIMEOUT_S)
        dist.barrier()
        dist.barrier()
        publisher.publish(2, timeout_s=TIMEOUT_S)
        dist.barrier()
        time.sleep(60)
    dist.barrier()
    engine, transport = Engine(), end(kind, path)
    subscriber = Subscriber(plan, engine, transport)
    assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    dist.barrier()
    dist.barrier()
    ranks.tell("loaded")
    await_death(other)
    start = time.monotonic()
    with pytest.raises(TransferError):
        subscriber.receive(timeout_s=TIMEOUT_S)
    took_s = time.monotonic() - start
    assert same_bytes(engine.tensors, parameters(1))
    return took_s, engine.loads, restart(kind, path, plan, subscriber, engine, group)


def restart(kind, path, plan, subscriber, engine, alone):
    """A new trainer under the same name, whom the engine follows."""
    with end(kind, path, owner=True) as owner:
        publisher = Publisher(plan, parameters(7), owner, group=alone)
        publisher.publish(1, timeout_s=TIMEOUT_S)
        subscriber.receive(timeout_s=TIMEOUT_S)
    return same_bytes(engine.tensors, parameters(7))


def test_a_trainer_dies_and_another_takes_over(kind, tmp_path):
    with ranks.gang(both, trainer_dies, kind, str(tmp_path), world_size=2) as members:
        members.hear(1)
        members.kill(0)
        took_s, loads, followed = members.wait()[1]
    assert took_s < TIMEOUT_S
    assert loads == 1
    assert followed


def engine_dies(kind, path, plan, weights, group, other):
    lease = {} if kind == "ipc" else {"lease_s": 1.5}
    if dist.get_rank() == 1:
        dist.barrier()
        transport = end(kind, path)

        def hang(*args, **kwargs):
            ranks.tell("reading")
            time.sleep(60)

        if kind != "ipc":
            transport._wire.read = hang
        Subscriber(plan, hang, transport).receive(timeout_s=TIMEOUT_S)
    transport = end(kind, path, owner=True, **lease)
    publisher = Publisher(plan, weights, transport, group=group)
    publisher.publish(1, timeout_s=TIMEOUT_S)
    dist.barrier()
    await_death(other)
    start = time.monotonic()
    for version in (2, 3, 4):
        publisher.publish(version, timeout_s=TIMEOUT_S)
    took_s = time.monotonic() - start
    engine = Engine()
    with Subscriber(plan, engine, end(kind, path)) as subscriber:
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 4
    transport.close()
    return took_s


def test_an_engine_dies_while_it_reads(kind, tmp_path):
    with ranks.gang(both, engine_dies, kind, str(tmp_path), world_size=2) as members:
        members.hear(1)
        members.kill(1)
        took_s = members.wait()[0]
    assert took_s < (1.0 if kind == "ipc" else 3.0)


# --- the parts ---------------------------------------------------------------------------------


def test_buckets_lie_one_behind_the_other():
    assert places({3: 10, 1: 256, 2: 0, 7: 257}, align_bytes=256) == (
        {3: 0, 1: 256, 2: 512, 7: 512},
        1024,
    )
    assert places({3: 10, 1: 256}, align_bytes=1) == ({3: 0, 1: 10}, 266)
    assert places({}, align_bytes=256) == ({}, 0)


def test_a_box_is_a_view_where_it_can_be():
    spec = TensorSpec(torch.float32, Layout.whole((4, 6)))
    halves = [
        Manifest((("w", TensorSpec(torch.float32, Layout((4, 6), Shard((row, 0), (2, 6))))),))
        for row in (0, 2)
    ]
    plan = plan_sync(halves, Manifest((("w", spec),)), bucket_bytes=4096)
    whole = torch.arange(24.0).view(4, 6)
    buckets = {index: torch.zeros(48, dtype=torch.uint8) for index in (0, 1)}
    closed = []
    held = Packed(plan, buckets, stays=False, close=lambda: closed.append(1))
    for index in (0, 1):
        (view,) = held.views(index)
        view.copy_(whole[2 * index : 2 * index + 2])
    part = held.box("w", Shard((2, 1), (1, 3)))
    assert part.equal(whole[2:3, 1:4])
    assert part.untyped_storage().data_ptr() == buckets[1].data_ptr()
    assert held.box("w", Shard((1, 0), (2, 6))).equal(whole[1:3])
    assert held.box("w", Shard((0, 0), (4, 6))).equal(whole)
    assert held.box("w", Shard((1, 0), (0, 6))).shape == (0, 6)
    with pytest.raises(PlanError, match="12 of the 24 elements"):
        Packed(plan, {0: buckets[0]}, stays=False, close=list).box("w", Shard((0, 0), (4, 6)))
    held.close()
    held.close()
    assert closed == [1]


def test_a_pool_uses_buffers_again():
    made, dropped = [], []

    def make(size_bytes):
        made.append([size_bytes])
        return made[-1]

    pool = Pool(make, dropped.append, spares=1)
    first, second = pool.take(1, 10), pool.take(2, 10)
    pool.keep([2])
    assert pool.take(3, 10) is first
    assert pool.by_version() == {2: second, 3: first}
    pool.keep([])
    assert dropped == [second]  # One spare is enough.
    assert pool.take(4, 11) == [11]
    assert dropped == [second, first]  # Its room is needed.
    pool.close()
    assert len(dropped) == len(made) == 3

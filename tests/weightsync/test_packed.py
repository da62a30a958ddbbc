"""What engines fetch from trainer ranks' memory, over all kinds of commits and carriers."""

from itertools import groupby

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import CorruptionError, DeadlineError, PlanError, TransferError
from primeblocks.layout import Layout, Shard
from primeblocks.testing import ranks
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.manifest import Manifest, TensorSpec, gather_manifests
from primeblocks.weightsync.transports.carriers import Span, WireCarrier
from primeblocks.weightsync.transports.packed import Packed, Pool, starts_of_version
from tests.weightsync.contents import Engine, same_bytes
from tests.weightsync.packed_site import KINDS, TIMEOUT_S, Site, end, parameters
from tests.weightsync.test_store import LocalWire, soon

ranks.preload(__name__)  # With all that it imports.


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


@pytest.mark.parametrize("both", [True, False])
def test_buckets_in_the_place_of_each_other_are_refused(site, both):
    site.publish(1)
    site.receive()
    site.publish(2)
    starts, _ = starts_of_version(site.plan, site.owner.markers()[-1], 0)
    sizes = [bucket.bytes for bucket in site.plan.buckets]
    first, second = next((i, j) for i in starts for j in range(i) if sizes[i] == sizes[j])
    parts = [site.buffer(2)[starts[i] : starts[i] + sizes[i]] for i in (first, second)]
    before = parts[0].clone()
    parts[0].copy_(parts[1])
    if both:
        parts[1].copy_(before)
    with pytest.raises(CorruptionError, match="of version 2 fails its digest"):
        site.receive()
    assert site.has(1)


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
    for version in range(1, 6):
        site.weights["a"][version % 40] = version
        sizes.append(site.publisher.publish(version, timeout_s=TIMEOUT_S).bytes)
        site.receive()
        assert same_bytes(site.engine.tensors, site.weights)
        with Subscriber(site.plan, late, site.reader) as joined:
            assert joined.receive(timeout_s=TIMEOUT_S).version == version
        assert same_bytes(late.tensors, site.weights)
    full = site.plan.bytes_total
    assert [size == full for size in sizes] == [version % 4 == 1 for version in range(1, 6)]
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


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_verify_finds_the_version_of_a_restarted_trainer(kind, keep, tmp_path):
    site = Site(kind, tmp_path, keep=keep)
    first = site.publish(5).digest
    for _ in range(2):
        assert site.subscriber.verify(5, timeout_s=TIMEOUT_S).digest == first
    site.publisher.close()
    site.owner.close()
    site.owner, site.publisher = site.trainer()
    for tensor in site.weights.values():
        tensor.fill_(7)
    second = site.publisher.publish(5, timeout_s=TIMEOUT_S).digest
    assert site.subscriber.verify(5, timeout_s=TIMEOUT_S).digest == second != first
    assert site.receive(5).digest == second
    assert same_bytes(site.engine.tensors, site.weights)
    site.close()


def fetched_ranks(path):
    """Rank 0 fetches a version of three trainer ranks, 40 times. Return each order of the ranks."""
    kind, rank = "directory-handles", dist.get_rank()
    weights = {f"{rank}.{i}": torch.full((300,), float(rank)) for i in range(3)}
    manifests = gather_manifests(describe(weights))
    target = Manifest(tuple(row for manifest in manifests for row in manifest.tensors))
    plan, orders = plan_sync(manifests, target, bucket_bytes=1000), []
    owner = end(kind, path, owner=True) if rank == 0 else None
    dist.barrier()
    with Publisher(plan, weights, owner or end(kind, path)) as publisher:
        publisher.publish(1, timeout_s=TIMEOUT_S)
        if rank == 0:
            reader = end(kind, path)
            fetch = reader._carrier.fetch

            def note(spans, **how):
                orders.append([token for token, _ in groupby(span.note["token"] for span in spans)])
                return fetch(spans, **how)

            reader._carrier.fetch, engine = note, Engine()
            for _ in range(40):
                with Subscriber(plan, engine, reader) as subscriber:
                    subscriber.receive(timeout_s=TIMEOUT_S)
                assert engine.tensors["2.1"].eq(2).all()
            reader.close()
        dist.barrier()
    return orders


def test_each_fetch_starts_at_a_random_rank(tmp_path):
    orders, *_ = ranks.run(fetched_ranks, str(tmp_path), world_size=3)
    assert len(orders) == 40
    a, b, c = orders[0]
    turns = ([a, b, c], [b, c, a], [c, a, b])
    assert all(order in turns for order in orders)
    assert len({order[0] for order in orders}) > 1


# --- the parts ---------------------------------------------------------------------------------


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


def test_only_fetches_of_full_versions_use_a_spare_buffer():
    carrier = WireCarrier(LocalWire())
    spans = [Span(carrier.make(500).note, 0, 500)]

    def fetch(*, again):
        return carrier.fetch(spans, again=again, deadline=soon())

    def place(opened):
        return opened.parts[0].data_ptr()

    full = fetch(again=True)
    full.close()
    deltas = [fetch(again=False), fetch(again=False)]
    assert len({place(full), *map(place, deltas)}) == 3
    for delta in deltas:
        delta.close()
    assert place(fetch(again=True)) == place(full)


def test_deltas_go_from_host_memory_to_host_memory():
    wire = LocalWire()
    wire.share, wire.read = (lambda buffer: {}), (lambda reads, *, deadline: None)
    carrier = WireCarrier(wire, device="meta")
    assert Pool(carrier).take(1, 10).is_meta
    assert not Pool(carrier, device="cpu").take(1, 10).is_meta
    for again in (True, False):
        opened = carrier.fetch([Span({}, 0, 10)], again=again, deadline=soon())
        assert opened.parts[0].is_meta is again


def test_a_pool_uses_buffers_again():
    made, dropped, wire = [], [], LocalWire()
    wire.share = lambda buffer: made.append(buffer) or {}
    wire.unshare = lambda buffer: dropped.append(id(buffer))
    pool = Pool(WireCarrier(wire))
    first, second = pool.take(1, 10), pool.take(2, 10)
    pool.keep([2])
    assert pool.take(3, 10) is first
    assert [(v, id(shared.buffer)) for v, shared in pool.used.items()] == [
        (2, id(second)),
        (3, id(first)),
    ]
    pool.keep([])
    assert dropped == [id(second)]  # One spare is enough.
    assert len(pool.take(4, 11)) == 11
    assert dropped == [id(second), id(first)]  # Its room is needed.
    pool.close()
    assert len(dropped) == len(made) == 3

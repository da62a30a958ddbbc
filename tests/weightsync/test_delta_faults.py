"""Deltas that are lost, damaged, interrupted or not loaded: never wrong bytes, and a way on."""

import time
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import CapacityError, CorruptionError, EngineError, PlanError, TransferError
from primeblocks.testing.faults import FaultyTransport, ManualClock, flip_byte, truncate
from primeblocks.weightsync import Publisher, Subscriber, describe, outgoing, plan_sync, publish
from primeblocks.weightsync import held as held_module
from primeblocks.weightsync.delta.deltas import apply_payloads
from primeblocks.weightsync.held import packed_views
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine, directory, flip_sent, same_bytes
from tests.weightsync.test_payload import encoded


class Setup:
    """A trainer and an engine in one process; each version changes a few elements."""

    def __init__(self, kind, path, *, full_every=4):
        self.kind, self.path = kind, path
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            "a": torch.randn(50, 40, generator=generator).bfloat16(),
            "b": torch.randn(600, generator=generator),
            "n": torch.arange(100),
        }
        manifest = describe(self.weights)
        self.plan = plan_sync([manifest], manifest.whole(), bucket_bytes=2400)
        self.transport = directory(kind, path, owner=True)
        self.publisher = self.publish_with(full_every=full_every)
        self.engine = Engine()
        self.subscriber = Subscriber(self.plan, self.load, self.transport)
        self.fail_at, self.versions = {}, {}

    def publish_with(self, transport=None, **options):
        return Publisher(self.plan, self.weights, transport or self.transport, **options)

    def load(self, tensors):
        if self.fail_at.pop(len(self.versions), 0):
            next(tensors)
            raise RuntimeError("out of memory")
        self.engine(tensors)

    def publish(self, version, publisher=None):
        for tensor in self.weights.values():
            tensor.view(-1)[version::200] = version
        receipt = (publisher or self.publisher).publish(version, timeout_s=TIMEOUT_S)
        self.versions[version] = {name: t.clone() for name, t in self.weights.items()}
        return receipt

    def receive(self, version=None):
        return self.subscriber.receive(version, timeout_s=TIMEOUT_S)

    def serves(self, version):
        return self.subscriber.version == version and same_bytes(
            self.engine.tensors, self.versions[version]
        )

    def late(self):
        """What a reader has that joins now."""
        engine = Engine()
        with Subscriber(self.plan, engine, self.transport) as subscriber:
            return subscriber.receive(timeout_s=TIMEOUT_S), engine.tensors

    def bases(self):
        return [marker.base for marker in self.transport.markers()]

    def delta(self, version):
        return next(self.path.rglob(f"version-{version}.0.delta"))


@pytest.fixture
def setup(tmp_path):
    setup = Setup("shared_memory", tmp_path)
    with setup.transport, setup.subscriber:
        yield setup


def test_one_version_of_so_many_is_sent_in_full(setup):
    bases, sizes = [], []
    for version in range(9):
        sizes.append(setup.publish(version).bytes)
        bases.append(setup.bases()[-1])
        received = setup.receive()
        assert (received.bytes, received.base) == (sizes[-1], bases[-1])
        assert setup.serves(version)
        assert same_bytes(setup.late()[1], setup.versions[version])
    assert bases == [None, 0, 1, 2, None, 4, 5, 6, None]
    full = setup.plan.bytes_total
    assert [size == full for size in sizes] == [base is None for base in bases]
    assert max(size for size in sizes if size < full) < 0.3 * full


def test_a_full_version_is_sent_when_deltas_have_become_as_many_bytes(tmp_path):
    setup = Setup("shared_memory", tmp_path, full_every=1000)
    with setup.transport:
        deltas, last, cut = 0, 0, 0
        for version in range(30):
            size = setup.publish(version).bytes
            if setup.bases()[-1] is None and version:
                assert deltas >= setup.plan.bytes_total > deltas - last
                deltas, cut = 0, cut + 1
            elif version:
                deltas, last = deltas + size, size
            setup.receive()
            assert setup.serves(version)
        assert cut >= 1


def test_buckets_of_which_all_changed_go_in_full(setup):
    setup.publish(0)
    setup.weights["b"].mul_(-3.7)
    setup.publish(1)
    marker = setup.transport.markers()[-1]
    rows = zip(setup.plan.buckets, marker.sizes, strict=True)
    whole = {b.copies[0].name for b, size in rows if size == b.bytes}
    assert marker.base == 0
    assert whole == {"b"}
    assert setup.receive().version == 1
    assert setup.serves(1)


def test_a_reader_that_skips_versions_catches_up(setup):
    for version, received in enumerate([True, False, False, True, False, False, True]):
        setup.publish(version)
        if received:
            setup.receive()
            assert setup.serves(version)
    # From version 3, the last that it has, over 4, which is full.
    assert [marker.version for marker in setup.transport.markers()] == [4, 5, 6]


def test_deltas_in_a_row_cost_their_bytes(setup):
    sizes = [setup.publish(0).bytes]
    setup.receive()
    sizes += [setup.publish(version).bytes for version in (1, 2, 3)]
    assert setup.receive().bytes == sum(sizes[1:])
    assert setup.late()[0].bytes == sum(sizes)


def test_a_damaged_delta_is_refused_and_a_full_version_mends_it(setup):
    for version in (0, 1):
        setup.publish(version)
        setup.receive()
    setup.publish(2)
    size = setup.delta(2).stat().st_size
    for offset in range(0, size, 37):
        flip_byte(setup.delta(2), offset)
        with pytest.raises(CorruptionError):
            setup.receive()
        assert setup.serves(1)
        with pytest.raises(CorruptionError):
            setup.late()
        flip_byte(setup.delta(2), offset)
    truncate(setup.delta(2), size_bytes=size - 1)
    with pytest.raises(
        CorruptionError, match=f"ends at {size - 1} bytes; it must have at least {size}"
    ):
        setup.receive()
    setup.publish(3)
    with pytest.raises(CorruptionError):
        setup.receive()
    assert setup.serves(1)
    setup.publish(4)
    assert setup.receive().version == 4
    assert setup.serves(4)


def test_a_delta_of_another_bucket_is_refused(setup):
    plan, places = setup.plan, {b.copies[0].name: i for i, b in enumerate(setup.plan.buckets)}
    old = torch.zeros(plan.buckets[places["n"]].bytes, dtype=torch.uint8)
    new = old.clone()
    new[8] = 1
    payload = encoded(plan, places["n"], new, old)
    apply_payloads(plan, places["n"], packed_views(plan, places["n"], old), [memoryview(payload)])
    assert old.equal(new)
    target = torch.zeros(plan.buckets[places["a"]].bytes, dtype=torch.uint8)
    pieces = packed_views(plan, places["a"], target)
    with pytest.raises(CorruptionError, match="does not belong to bucket"):
        apply_payloads(plan, places["a"], pieces, [memoryview(payload)])
    assert not target.any()


def test_what_goes_forth_and_back_arrives(setup):
    setup.publish(0)
    setup.receive()
    values = [setup.weights["a"][0, 1].item(), 7.0]
    for version in range(1, 4):
        setup.weights["a"][0, 1] = values[version % 2]
        setup.publisher.publish(version, timeout_s=TIMEOUT_S)
        size = setup.receive().bytes
        assert setup.engine.tensors["a"][0, 1] == values[version % 2]
        assert size < 500  # Of what changed since the version before, and no more.


def test_a_reader_whose_own_bytes_are_damaged_catches_up_from_the_full_version(setup):
    setup.publish(0)
    setup.receive()
    size = setup.publish(1).bytes
    setup.receive()
    setup.subscriber._last.held.views(0)[0].zero_()  # Its own since there are deltas in it.
    size += setup.publish(2).bytes
    assert setup.receive().bytes == setup.plan.bytes_total + size
    assert setup.serves(2)


@pytest.mark.parametrize("missed", [0, 2])
def test_a_load_that_fails_after_a_delta_goes_back(setup, missed):
    """Also to a version that is a delta itself, and over deltas that were not loaded."""
    for version in (0, 1):
        setup.publish(version)
        setup.receive()
    sizes = [setup.publish(version).bytes for version in range(2, 3 + missed)]
    setup.fail_at[len(setup.versions)] = True
    with pytest.raises(TransferError, match="out of memory. Version 1 was loaded again"):
        setup.receive()
    assert setup.serves(1)
    last = 2 + missed
    received = setup.receive()
    assert setup.serves(last)
    if not missed:
        assert received.bytes == sizes[0]  # The same base is used.
    setup.publish(last + 1)
    setup.receive()
    assert setup.serves(last + 1)


def test_a_version_that_was_retired_is_gone_back_to_all_the_same(setup, monkeypatch):
    """As over a group, where nothing can be read twice."""
    setup.publish(0)
    setup.receive()
    setup.publish(1)
    monkeypatch.setattr(setup.transport, "markers", lambda: ())
    found, inner = setup.transport.commits.markers, setup.transport.receive

    def receive(request):
        setup.transport.markers = found
        try:
            return inner(request)
        finally:
            setup.transport.markers = lambda: ()

    monkeypatch.setattr(setup.transport, "receive", receive)
    setup.fail_at[2] = True
    with pytest.raises(TransferError, match="Version 0 was loaded again"):
        setup.receive()
    assert setup.serves(0)
    assert setup.receive().version == 1
    assert setup.serves(1)


def test_what_is_gone_back_to_is_checked_first(setup):
    publisher = setup.publish_with()
    for version in (0, 1):
        setup.publish(version, publisher)
        if version == 0:
            setup.receive()
    flip_sent(setup.transport, setup.path, 0, -1)
    setup.fail_at[2] = True
    with pytest.raises(EngineError, match="Going back to version 0 failed too: CorruptionError"):
        setup.receive()
    assert setup.subscriber.version is None
    assert setup.receive().version == 1
    assert setup.serves(1)


def test_a_load_that_is_interrupted_is_no_version(setup):
    setup.publish(0)
    setup.receive()
    setup.publish(1)

    def interrupted(tensors):
        next(tensors)
        raise KeyboardInterrupt

    setup.subscriber._load = interrupted
    with pytest.raises(KeyboardInterrupt):
        setup.receive()
    assert setup.subscriber.version is None
    setup.subscriber._load = setup.load
    assert setup.receive().version == 1
    assert setup.serves(1)


def test_what_was_verified_is_loaded_without_another_look(setup):
    setup.publish(0)
    setup.receive()
    setup.publish(1)
    size = setup.subscriber.verify(1, timeout_s=TIMEOUT_S).bytes
    assert setup.serves(0)
    setup.delta(1).unlink()
    assert setup.receive(1).bytes == size
    assert setup.serves(1)
    setup.publish(2)
    setup.subscriber.verify(timeout_s=TIMEOUT_S)
    setup.publish(3)
    setup.receive(3)  # What was verified is let go; what was loaded is the base of both deltas.
    assert setup.serves(3)


@pytest.mark.parametrize("method", ["begin", "send", "commit"])
def test_after_a_failure_a_full_version_is_sent(setup, method):
    for version in (0, 1):
        setup.publish(version)
        setup.receive()
    fault = {method: [CapacityError("disk full")]}
    setup.publisher._transport = FaultyTransport(setup.transport, fault)
    with pytest.raises(TransferError, match="CapacityError: disk full"):
        setup.publish(2)
    assert not list(setup.path.rglob("version-2*"))
    assert setup.subscriber.version == 1
    setup.publish(2)
    assert setup.bases()[-1] is None
    setup.receive()
    assert setup.serves(2)
    setup.publish(3)
    assert setup.bases()[-1] == 2


@pytest.mark.parametrize("base", [None, 1])
def test_a_publish_ends_at_the_first_bucket_after_its_deadline(base, setup, monkeypatch):
    for version in (0, 1):
        setup.publish(version)
        setup.receive()
    if base is None:
        setup.publisher = setup.publish_with(full_every=4)
    clock, parts = ManualClock(time.monotonic()), setup.publisher._parts
    views = parts.views

    def slow(*args, **kwargs):
        clock.advance(0.4 * TIMEOUT_S)
        return views(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "views", slow)
        for module in (held_module, outgoing, publish):
            patch.setattr(module, "time", SimpleNamespace(monotonic=clock.now))
        with pytest.raises(TransferError, match="read 3 of 4 buckets before the deadline"):
            setup.publish(2)
    assert (setup.late()[0].version, setup.bases()[-1]) == (1, 0)
    assert setup.publish(2).version == 2
    setup.receive()
    assert setup.serves(2)


def test_a_version_of_another_publisher_is_no_base(setup):
    setup.publish(0)
    other = setup.publish_with(full_every=4)
    setup.publish(1, other)
    setup.publish(2)  # Made from version 0, which is not the last any more.
    assert setup.bases()[-1] is None
    assert same_bytes(setup.late()[1], setup.versions[2])


def test_a_reader_of_several_boxes_needs_its_wiring(setup):
    plan = setup.plan
    (whole,) = plan.wants[0]["b"]
    halves = tuple(type(whole)((at,), (300,)) for at in (0, 300))
    torn = plan.__class__(
        plan.target, 1, ({**plan.wants[0], "b": halves},), plan.bucket_bytes, plan.buckets
    )
    with pytest.raises(PlanError, match="wants several boxes of 1 tensors, such as 'b'"):
        Subscriber(torn, setup.load, setup.transport)

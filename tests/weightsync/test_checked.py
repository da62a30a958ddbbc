"""What is loaded is what was checked: bytes that change after their check, and before their use."""

import itertools
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from primeblocks.errors import (
    CorruptionError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    TransferError,
)
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
from primeblocks.weightsync import held as held_module
from primeblocks.weightsync.convert.conversion import filling
from primeblocks.weightsync.held import Boxes, CachingAllocator, copied
from primeblocks.weightsync.transports import FileTransport, IpcTransport
from primeblocks.weightsync.transports.packed import starts_of_version
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine
from tests.weightsync.one_pair import Setup

KINDS = ("shared_memory", "file", "ipc")
LENT = ("file", "ipc")  # Sealed memory has tests of its own.


def transport_at(kind, root):
    if kind == "file":
        return FileTransport(root / "blobs", owner=True)
    if kind == "ipc":
        return IpcTransport("policy", owner=True, root=str(root))
    return SharedMemoryTransport("policy", owner=True, root=str(root))


class Site(Setup):
    """A trainer and an engine of this process, and the bytes between them to be spoilt."""

    def __init__(self, kind, root, *, weights=None, **options):
        self.kind, self.spoil = kind, lambda taken: None
        weights = weights or {f"t{i}": torch.zeros(5, 3) for i in range(12)}
        options |= {"weights": weights, "load": self.load}
        super().__init__(transport_at(kind, root), root, **options)

    def load(self, tensors):
        for taken, (name, tensor) in enumerate(tensors):
            self.engine.serves[name] = tensor.clone()
            self.spoil(taken)

    def flip(self, version, at):
        """Change a byte of the weights where they lie; `at` counts from the end."""
        if self.kind == "ipc":
            buffer = self.transport._full.used[version].buffer
            (marker,) = [m for m in self.transport.markers() if m.version == version]
            starts, _ = starts_of_version(self.plan, marker, 0)
            # Not what is between buckets.
            byte = [i for start, n in zip(starts.values(), marker.sizes, strict=True)
                    for i in range(start, start + n)][-at - 1]  # fmt: skip
            buffer[byte] ^= 0xFF
            return
        with self.blob(version).open("r+b") as file:
            file.seek(-at - 1, 2)
            byte = file.read(1)[0]
            file.seek(-at - 1, 2)
            file.write(bytes([byte ^ 0xFF]))

    def cut(self, version, size_bytes):
        with self.blob(version).open("r+b") as file:
            file.truncate(size_bytes)


WAYS = list(itertools.product(LENT, ("before", "ahead")))


@pytest.fixture(params=WAYS, ids="-".join)
def site(request, tmp_path):
    kind, check = request.param
    site = Site(kind, tmp_path, check=check)
    site.publish(1)
    site.receive()
    site.publish(2)
    yield site
    site.subscriber.close()
    site.transport.close()


def assert_refused(site):
    """The old version is served, by its label, and a good one arrives afterwards."""
    assert (site.served(), site.subscriber.version) == (1, 1)
    site.spoil = lambda taken: None
    site.publish(3)
    assert site.receive().version == 3
    assert site.served() == 3


def test_bytes_that_change_between_check_and_load_are_not_loaded(site):
    site.subscriber.verify(timeout_s=TIMEOUT_S)
    site.flip(2, 100)
    with pytest.raises(TransferError, match="fails its digest.*Version 1 was loaded again"):
        site.receive()
    if site.kind == "ipc":  # Nothing was kept to go back to; what was verified is checked again.
        site.spoil = Mock()
        with pytest.raises(CorruptionError, match="fails its digest"):
            site.receive()
        assert not site.spoil.called
    assert_refused(site)


def test_bytes_that_change_during_the_load_are_not_loaded(site):
    site.spoil = lambda taken: site.flip(2, 0) if taken == 0 else None
    with pytest.raises(TransferError, match="fails its digest.*Version 1 was loaded again"):
        site.receive()
    assert_refused(site)


def test_bytes_that_change_once_they_were_copied_do_no_harm(site):
    site.spoil = lambda taken: site.flip(2, 700) if taken == 0 else None  # In the first tensor.
    assert site.receive().version == 2
    assert site.served() == 2


def test_a_file_that_is_cut_short_is_an_error_not_a_signal(site):
    if site.kind == "ipc":
        pytest.skip("anonymous memory is sealed against it")
    site.subscriber.verify(timeout_s=TIMEOUT_S)
    site.cut(2, site.blob(2).stat().st_size - 700)
    with pytest.raises(TransferError, match=r"ends at \d+ bytes.*Version 1 was loaded again"):
        site.receive()
    assert_refused(site)


def test_a_version_to_go_back_to_that_changed_is_not_served(site):
    site.subscriber.verify(timeout_s=TIMEOUT_S)
    for version in (1, 2):
        site.flip(version, 0)
    with pytest.raises(EngineError, match="Going back to version 1 failed too: CorruptionError"):
        site.receive()
    assert site.subscriber.version is None


@pytest.mark.parametrize("way_out", ["load fails", "others refuse", "closed after verify"])
def test_no_way_out_leaves_a_version_open(way_out, tmp_path, monkeypatch):
    site = Site("file", tmp_path)
    site.publish(1)
    if way_out == "closed after verify":
        site.subscriber.verify(timeout_s=TIMEOUT_S)
        assert opened(tmp_path) == ["version-1.safetensors"]
        site.subscriber.close()
    else:
        if way_out == "load fails":
            site.spoil = Mock(side_effect=RuntimeError("out of memory"))
        else:
            receive = site.transport.receive

            def refused(request):
                found = receive(request)
                found[-1].settle = Mock(side_effect=TransferError("reader 1 died"))
                return found

            monkeypatch.setattr(site.transport, "receive", refused)
        with pytest.raises((EngineError, TransferError)) as caught:
            site.receive()
        assert caught.tb  # Which keeps everything that nobody has let go of.
    assert opened(tmp_path) == []
    site.transport.close()


def opened(path):
    """The versions that this process has open."""
    names = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [name.name for name in names if path in name.parents and name.suffix == ".safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_load_writes_into_its_tensors_harms_nobody(kind, tmp_path):
    site = Site(kind, tmp_path)

    def load(tensors):
        for name, tensor in tensors:
            site.engine.serves[name] = tensor.clone()
            tensor.fill_(66)

    site.subscriber._load = load
    for version in range(3, 7):
        site.publish(version)
        assert site.receive().version == version
        assert site.served() == version
    other = Engine()
    with Subscriber(site.plan, other, site.transport) as subscriber:
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 6
    assert all(tensor.eq(6).all() for tensor in other.tensors.values())
    site.subscriber.close()
    site.transport.close()


def test_random_damage_at_random_times_is_never_served(full, tmp_path):
    for seed in range(20 if full else 4):
        (tmp_path / str(seed)).mkdir()
        damage_at_random(seed, tmp_path / str(seed))


def damage_at_random(seed, tmp_path):
    """Every label is true, whatever changes when; only what was told to be torn may be."""
    rng = random.Random(seed)
    kind, check = WAYS[seed % len(WAYS)]
    shapes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(2, 10))]
    weights = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    sizes = {"weights": weights, "bucket_bytes": rng.choice([64, 128, 512])}
    site = Site(kind, tmp_path, check=check, **sizes)
    size = sum(tensor.nbytes for tensor in weights.values())

    def spoil(version):
        if kind != "ipc" and rng.random() < 0.2:
            site.cut(version, site.blob(version).stat().st_size - rng.randint(1, size))
        else:
            site.flip(version, rng.randrange(size))

    for version in range(1, 13):
        site.publish(version)
        early, late = rng.random() < 0.3, rng.randrange(2 * len(shapes))
        if rng.random() < 0.5:
            site.subscriber.verify(version, timeout_s=TIMEOUT_S)
        if early:
            spoil(version)
        spoilt = []

        def during(taken, version=version, late=late, spoilt=spoilt):
            if taken == late and not spoilt:
                spoilt.append(spoil(version))

        site.spoil = during
        try:
            site.receive(version)
        except EngineError:
            assert site.subscriber.version is None
            site.engine.serves = {}
        except PrimeblocksError:
            if site.subscriber.version is None:
                assert not site.engine.serves
            else:
                assert site.served() == site.subscriber.version
        else:
            assert site.served() == site.subscriber.version == version
    site.subscriber.close()
    site.transport.close()


@pytest.mark.parametrize("kind", LENT)
def test_a_load_has_a_few_buckets_of_copies_at_a_time(kind, tmp_path, monkeypatch):
    weights = {f"t{i}": torch.zeros(16) for i in range(40)}  # A bucket each.
    site, held = Site(kind, tmp_path, weights=weights), counts_of_copies(monkeypatch)
    site.publish(1)
    site.receive()
    assert site.served() == 1
    assert len(held) >= 40
    assert max(held) <= 3  # What is loaded, and two ahead.
    site.subscriber.close()
    site.transport.close()


def test_a_wiring_has_a_few_buckets_of_copies_at_a_time(tmp_path, monkeypatch):
    """Its tensors come in the target's order: all of the first reader's, then the others."""
    weights = {f"{part}{i}": torch.zeros(16) for i in range(20) for part in "abc"}
    wanted = [describe({n: x for n, x in weights.items() if n[0] != no}) for no in "cb"]
    plan = plan_sync([describe(weights)], wanted, bucket_bytes=64)
    held, got = counts_of_copies(monkeypatch), []
    with FileTransport(tmp_path / "blobs", owner=True) as transport:
        Publisher(plan, weights, transport).publish(1, timeout_s=TIMEOUT_S)
        wiring = filling(plan.target, plan.wants[1])
        load = lambda tensors: got.extend(name for name, _ in tensors)  # noqa: E731
        with Subscriber(plan, load, transport, reader=1, convert=wiring) as subscriber:
            subscriber.receive(timeout_s=TIMEOUT_S)
    assert set(plan.wants[1]) <= set(got)
    assert len(held) >= 40
    assert max(held) <= 3


def counts_of_copies(monkeypatch):
    """How many tensors have copies at each look for one."""
    held, inner = [], Boxes._of

    def of(self, name):
        held.append(len(self._boxes))
        return inner(self, name)

    monkeypatch.setattr(Boxes, "_of", of)
    return held


def test_a_copy_that_ends_after_the_deadline_is_not_loaded(monkeypatch):
    manifest, clock = describe({"a": torch.zeros(4)}), ManualClock()
    plan = plan_sync([manifest], manifest.whole(), bucket_bytes=64)
    monkeypatch.setattr(held_module, "time", SimpleNamespace(monotonic=clock.now))

    def chunks(index, copy, into):
        clock.advance(1.0)
        yield into

    lent = SimpleNamespace(stays=True, device=torch.device("cpu"), chunks=chunks, close=list)
    with pytest.raises(DeadlineError, match="copied all 1 buckets, but after the deadline"):
        copied(plan, 0, lent, stays=True, deadline=clock.now() + 0.5)
    copied(plan, 0, lent, stays=True, deadline=clock.now() + 1.5)


def test_memory_is_used_again_once_nobody_has_it():
    allocator = CachingAllocator()
    first, second = allocator.take(64), allocator.take(64)
    place, part = first.data_ptr(), first.view(torch.float32)[2:]
    assert second.data_ptr() != place
    del first
    third = allocator.take(64)
    assert third.data_ptr() not in (place, second.data_ptr())  # A view of it lives.
    del part
    assert allocator.take(32).data_ptr() != place
    assert allocator.take(64).data_ptr() == place


def test_a_take_looks_at_no_other_tensor():
    allocator = CachingAllocator()
    alive, calls = [allocator.take(64) for _ in range(500)], Counter()
    sys.setprofile(lambda frame, event, what: calls.update([event]))
    try:
        alive.append(allocator.take(64))
    finally:
        sys.setprofile(None)
    assert calls.total() < len(alive)


def test_an_allocator_that_is_dropped_keeps_no_memory():
    tracemalloc.start()
    try:
        before, allocator = tracemalloc.get_traced_memory()[0], CachingAllocator()
        kept = [allocator.take(1 << 20), allocator.take(1 << 20)].pop()
        assert tracemalloc.get_traced_memory()[0] - before >= 2 << 20
        del allocator
        assert kept.nbytes <= tracemalloc.get_traced_memory()[0] - before < 2 << 20
    finally:
        tracemalloc.stop()


def test_tensors_that_a_load_holds_until_its_end_are_not_written_to(tmp_path):
    weights = {f"t{i}": torch.full((16,), float(i)) for i in range(40)}
    site = Site("shared_memory", tmp_path, weights=weights)
    site.publisher.publish(1, timeout_s=TIMEOUT_S)

    def load(tensors):
        for place, (_, tensor) in enumerate(list(tensors)):
            assert tensor.eq(place).all()

    site.subscriber._load = load
    assert site.receive().version == 1
    site.subscriber.close()
    site.transport.close()

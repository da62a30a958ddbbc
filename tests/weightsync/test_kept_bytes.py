"""What a reader kept is right when it is a base or is loaded again, whatever loads wrote to it."""

import gc
from collections import defaultdict

import pytest
import torch

from primeblocks.errors import CorruptionError, EngineError, TransferError
from primeblocks.layout import Layout
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    fetched,
    plan_sync,
)
from primeblocks.weightsync.convert.conversion import filling
from primeblocks.weightsync.held import CachingAllocator
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from primeblocks.weightsync.transports import FileTransport, IpcTransport
from tests.deadlines import HANG_S
from tests.weightsync.contents import flip_sent

WEIGHTS = {"a": 200_000, "b": 4000}


class Pair:
    """A trainer and a reader whose load writes to what it is given."""

    def __init__(self, transport, writes=None, *, converts=False, **options):
        self.weights = {name: torch.randn(size) for name, size in WEIGHTS.items()}
        self.writes, self.failures, self.got = writes, 0, {}
        source = describe(self.weights)
        self.plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
        self.publisher = Publisher(self.plan, self.weights, transport, full_every=20)
        wiring = filling(self.plan.target, self.plan.wants[0]) if converts else None
        self.reader = Subscriber(self.plan, self.load, transport, convert=wiring, **options)

    def load(self, tensors):
        for name, tensor in tensors:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("no memory")
            self.got[name] = tensor.clone()
            if self.writes is not None:
                self.writes(tensor)

    def publish(self, version):
        self.weights["a"][version] += 1
        return self.publisher.publish(version, timeout_s=HANG_S)

    def receive(self, version=None):
        return self.reader.receive(version, timeout_s=HANG_S)

    def holds(self):
        return all(torch.equal(self.got[name], x) for name, x in self.weights.items())


@pytest.fixture
def shared(tmp_path):
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        yield transport


def through_numpy(tensor):
    tensor.numpy()[:] = 66  # torch counts no such write.


@pytest.mark.parametrize("writes", [lambda x: x.mul_(2), lambda x: x.data.mul_(2), through_numpy])
def test_a_load_that_writes_spoils_no_base_of_a_delta(shared, writes):
    pair = Pair(shared, writes)
    for version in range(1, 9):
        pair.publish(version)
        pair.receive()
        assert pair.holds()
    assert shared.markers()[-1].base == 7


def test_what_a_load_wrote_to_once_is_lent_as_a_copy(shared):
    pair = Pair(shared, torch.Tensor.zero_)
    for version in range(1, 5):
        size = pair.publish(version).bytes
        assert pair.receive().bytes == size
        assert pair.holds()
    last = dict(pair.got)
    pair.publish(5)
    pair.failures = 1
    with pytest.raises(TransferError, match="Version 4 was loaded again"):
        pair.receive()
    assert all(torch.equal(pair.got[name], tensor) for name, tensor in last.items())


def test_tensors_that_were_made_for_a_load_may_be_written_to(shared):
    pair = Pair(shared, torch.Tensor.zero_, converts=True)
    pair.publish(1)
    pair.publish(2)
    pair.receive()  # A full version and a delta.
    size = pair.publish(3).bytes
    assert pair.receive().bytes == size
    assert pair.holds()


def test_bytes_that_the_first_load_wrote_to_are_not_kept(shared):
    pair = Pair(shared, torch.Tensor.zero_)
    pair.publish(1)
    pair.publish(2)
    pair.receive()  # A full version and a delta.
    right = dict(pair.got)
    Publisher(pair.plan, pair.weights, shared).publish(3, timeout_s=HANG_S)  # In full.
    pair.failures = 1
    with pytest.raises(TransferError, match="Version 2 was loaded again"):
        pair.receive()
    assert all(torch.equal(pair.got[name], tensor) for name, tensor in right.items())


@pytest.mark.parametrize("verifies", [False, True])
def test_what_is_loaded_again_is_checked_again(shared, verifies):
    pair = Pair(shared, lambda x: x.mul_(2))
    for version in (1, 2):
        pair.publish(version)
        pair.receive()
    right = pair.weights["a"].clone()
    Publisher(pair.plan, pair.weights, shared).publish(3, timeout_s=HANG_S)  # In full.
    pair.failures = 1
    with pytest.raises(TransferError, match="Version 2 was loaded again"):
        pair.receive(3)
    assert torch.equal(pair.got["a"], right)
    pair.failures = 2  # On the way to a version and back: the engine is torn.
    with pytest.raises(EngineError, match="Going back to version 2 failed too"):
        pair.receive(3)
    if verifies:
        pair.reader.verify(2, timeout_s=HANG_S)
    assert pair.receive(2).version == 2
    assert torch.equal(pair.got["a"], right)


def test_a_torn_engine_does_not_get_what_its_load_wrote_to(shared):
    pair = Pair(shared, through_numpy)
    for version in (1, 2):
        pair.publish(version)
        pair.receive()
    right = pair.weights["a"].clone()
    Publisher(pair.plan, pair.weights, shared).publish(3, timeout_s=HANG_S)  # In full.
    pair.failures = 1
    with pytest.raises(EngineError, match="Going back to version 2 failed too: CorruptionError"):
        pair.receive(3)
    assert pair.receive(2).version == 2
    assert torch.equal(pair.got["a"], right)


def test_a_torn_engine_gets_nothing_before_all_is_checked(tmp_path):
    with FileTransport(str(tmp_path / "files"), owner=True) as files:
        pair = Pair(files, check="ahead")
        pair.publish(1)
        pair.receive()
        pair.publish(2)
        pair.failures = 2  # On the way to a version and back.
        with pytest.raises(EngineError, match="Going back to version 1 failed too"):
            pair.receive(2)
        Publisher(pair.plan, pair.weights, files).publish(3, timeout_s=HANG_S)
        flip_sent(files, tmp_path, 3, -1)
        pair.got.clear()
        with pytest.raises(CorruptionError):
            pair.receive(3)
        assert pair.got == {}


def test_a_mapping_that_was_written_to_in_this_process_is_not_used(shared):
    pair = Pair(shared)
    pair.publisher = Publisher(pair.plan, pair.weights, shared)
    for version in (1, 2, 3):
        pair.publish(version)
        pair.receive()
    mappings = shared._memory._read.values()
    assert mappings
    for mapping in mappings:
        mapping[-520:] ^= 0xFF  # Private pages: nobody else sees it.
    pair.publish(4)
    assert pair.receive().version == 4
    assert pair.holds()


def test_receipts_of_the_version_held_say_what_was_held(tmp_path):
    with IpcTransport("policy", owner=True, root=str(tmp_path)) as lent:  # Nothing is kept.
        pair = Pair(lent, observe=lambda: pair.got)
        pair.publish(1)
        first, second = pair.receive(1), pair.receive(1)
        assert first.held is not None
        assert second.held == first.held


def test_a_failed_check_holds_no_copy(shared, monkeypatch):
    pair = Pair(shared)
    for version in (1, 2):
        pair.publish(version)
        pair.receive()
    monkeypatch.setattr(fetched, "apply_payloads", lambda *_: "another digest")
    monkeypatch.setattr(fetched, "_BYTES_A_THREAD", 1)  # Several threads, as for large weights.
    memory, taken = pair.reader._memory, defaultdict(set)

    def take(size):
        made = CachingAllocator.take(memory, size)
        taken[size].add(made.data_ptr())
        return made

    monkeypatch.setattr(memory, "take", take)
    gc.disable()
    try:
        for version in range(3, 7):
            pair.publish(version)
            with pytest.raises(CorruptionError):
                pair.receive(version)
    finally:
        gc.enable()
    assert 1 <= max(map(len, taken.values())) <= 2


class Pack:
    """Two codes of 4 bits a byte, under the parameter's own name."""

    def __call__(self, name, x):
        codes = x.to(torch.uint8) & 15
        return {name: codes[:, 0::2] | (codes[:, 1::2] << 4)}

    def describe(self, held):
        def packed(spec):
            return TensorSpec(torch.uint8, Layout.whole((spec.shape[0], spec.shape[1] // 2)))

        return Manifest(tuple((name, packed(spec)) for name, spec in held.items()))

    def origins(self, held):
        return {name: name for name in held}


def test_an_encoder_may_change_shapes_under_a_parameters_name(shared):
    weights, encode, got = {"a": torch.arange(64.0).view(8, 8)}, Pack(), {}
    source = encode.describe(describe(weights))
    plan = plan_sync([source], source.whole(), bucket_bytes=64)
    reader = Subscriber(plan, lambda all_: got.update({n: x.clone() for n, x in all_}), shared)
    Publisher(plan, weights, shared, encode=encode).publish(1, timeout_s=HANG_S)
    reader.receive(timeout_s=HANG_S)
    assert torch.equal(got["a"], encode("a", weights["a"])["a"])

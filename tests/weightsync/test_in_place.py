"""Deltas written into the tensors of an engine that `load_into` fills: all of one, or nothing."""

import pytest
import torch

from primeblocks.errors import CorruptionError, DeadlineError, TransferError
from primeblocks.weightsync import (
    Publisher,
    Subscriber,
    describe,
    fetched,
    load_into,
    plan_sync,
)
from tests.weightsync.contents import directory, same_bytes
from tests.weightsync.test_delta_faults import TIMEOUT_S, Setup


class InPlace(Setup):
    """Counts the loads, and the tensors that they copy."""

    def __init__(self, kind, path, **options):
        super().__init__(kind, path, **options)
        self.held = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.into = load_into(self.held, self.plan)
        self.loads, self.fail = 0, False
        self.subscriber = Subscriber(self.plan, self, self.transport)

    def __call__(self, tensors):
        self.loads += 1
        if self.fail:
            self.into([next(tensors)])
            raise RuntimeError("out of memory")
        self.into(tensors)

    def places(self):
        return self.into.places()

    def serves(self, version):
        return self.subscriber.version == version and self.has(version)

    def has(self, version):
        return same_bytes(self.held, self.versions[version])


@pytest.fixture(params=["shared_memory", "file"])
def setup(request, tmp_path):
    setup = InPlace(request.param, tmp_path)
    with setup.transport, setup.subscriber:
        setup.publish(0)
        setup.receive()
        setup.publish(1)
        yield setup


def test_what_changed_is_written_and_nothing_else_is_copied(setup):
    counted = {name: tensor._version for name, tensor in setup.held.items()}
    setup.receive()
    assert all(tensor._version > counted[name] for name, tensor in setup.held.items())
    loads = []
    for version in range(2, 9):
        loads.append(setup.loads)
        setup.publish(version)
        if version != 6:  # The next receive writes two deltas.
            setup.receive()
            assert setup.serves(version)
    assert loads == [1, 1, 1, 2, 2, 2, 2]  # 4 and 8 were sent in full.
    assert setup.loads == 3


def test_an_engine_that_changed_its_weights_gets_them_all(setup):
    setup.held["b"][3] = 100
    setup.receive()
    assert setup.serves(1)
    assert setup.loads == 2


def test_a_damaged_delta_touches_nothing(setup):
    file = setup.delta(1)
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    counted = {name: tensor._version for name, tensor in setup.held.items()}
    with pytest.raises(CorruptionError):
        setup.receive()
    assert setup.serves(0)
    assert all(tensor._version == counted[name] for name, tensor in setup.held.items())
    file.write_bytes(sound)
    setup.receive()
    assert (setup.serves(1), setup.loads) == (True, 1)


@pytest.mark.parametrize("bucket", [2, 3, 4])
def test_what_fails_in_between_is_put_back(setup, monkeypatch, bucket):
    check, done = fetched._check_bucket, []

    def late(*args, **options):
        done.append(args)
        if len(done) == bucket:
            assert not setup.has(0)
            raise DeadlineError("late")
        check(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fetched, "_check_bucket", late)
        with pytest.raises(DeadlineError, match="late"):
            setup.receive()
    assert setup.serves(0)
    setup.receive()
    assert (setup.serves(1), setup.loads) == (True, 1)


def test_a_version_that_is_only_verified_is_not_written(setup):
    assert setup.subscriber.verify(timeout_s=TIMEOUT_S).version == 1
    assert setup.serves(0)
    setup.receive()
    assert setup.serves(1)


def test_an_engine_that_lost_its_weights_gets_them_all(setup):
    setup.receive()
    setup.subscriber.forget()
    for tensor in setup.held.values():
        tensor.zero_()
    setup.receive(1)
    assert (setup.serves(1), setup.loads) == (True, 2)


@pytest.mark.parametrize("retired", [False, True])
def test_a_full_version_that_fails_ends_at_the_delta_before(setup, monkeypatch, retired):
    for version in (1, 2, 3):
        setup.publish(version)
        setup.receive()
    setup.publish(4)
    assert setup.bases()[-1] is None
    setup.fail = True

    def into(tensors):
        setup.fail = False
        setup.into([next(tensors)])
        assert not setup.has(3)
        raise RuntimeError("out of memory")

    if retired:  # The reader lags: the transport has the last one alone.
        markers = setup.transport.markers
        monkeypatch.setattr(setup.transport, "markers", lambda: markers()[-1:])
    monkeypatch.setattr(InPlace, "__call__", lambda self, t: into(t) if self.fail else self.into(t))
    with pytest.raises(TransferError, match="out of memory. Version 3 was loaded again"):
        setup.receive()
    assert setup.serves(3)
    setup.receive()
    assert setup.serves(4)


def test_a_cast_is_loaded(tmp_path):
    setup = Setup("shared_memory", tmp_path)
    held = {name: t.float() if name == "a" else t.clone() for name, t in setup.weights.items()}
    with setup.transport:
        subscriber = Subscriber(setup.plan, load_into(held, setup.plan), setup.transport)
        for version in range(3):
            setup.publish(version)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert held["a"].bfloat16().equal(setup.weights["a"])


@pytest.mark.parametrize("bucket", range(1, 9))
def test_tensors_that_share_memory_are_put_back(tmp_path, monkeypatch, bucket):
    check, done, tied = fetched._check_bucket, [], torch.randn(50, 40)
    weights, held = {"e": tied, "h": tied}, dict.fromkeys(("e", "h"), torch.zeros(50, 40))
    plan = plan_sync([describe(weights)], describe(weights).whole(), bucket_bytes=2000)
    with (
        directory("shared_memory", tmp_path, owner=True) as transport,
        Subscriber(plan, load_into(held, plan), transport) as subscriber,
    ):
        publisher = Publisher(plan, weights, transport, full_every=4)
        publisher.publish(0, timeout_s=TIMEOUT_S)
        subscriber.receive(timeout_s=TIMEOUT_S)
        before = tied.clone()
        tied.view(-1)[::100] += 1
        assert publisher.publish(1, timeout_s=TIMEOUT_S).bytes < plan.bytes_total

        def late(*args, **options):
            done.append(args)
            if len(done) == bucket:
                raise DeadlineError("late")
            check(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(fetched, "_check_bucket", late)
            with pytest.raises(DeadlineError, match="late"):
                subscriber.receive(timeout_s=TIMEOUT_S)
        assert held["e"].equal(before)
        subscriber.receive(timeout_s=TIMEOUT_S)
        assert held["e"].equal(tied)


def test_only_tensors_apart_from_each_other_are_written_in_place():
    buffer = torch.zeros(4, 6)

    def places(**tensors):
        return load_into(tensors, describe(tensors)).places()

    assert places(a=buffer[:2], b=buffer[2:], none=buffer[:0]).keys() == {"a", "b", "none"}
    assert places(a=buffer[:3], b=buffer[2:]) == {}
    assert places(a=buffer, b=buffer.view(-1)[-1:]) == {}
    assert places(a=buffer[:, :3], b=buffer[:, 3:]) == {}  # They may, as far as it looks.

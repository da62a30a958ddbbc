"""One trainer rank and one engine in this process; every fault of a receiver."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from primeblocks.errors import (
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    TransferError,
    UsageError,
)
from primeblocks.testing.faults import ManualClock, truncate
from primeblocks.weightsync import Publisher, Subscriber, fetched, held, receive
from primeblocks.weightsync.transports import FileTransport
from tests.weightsync.contents import flip_sent
from tests.weightsync.one_pair import TIMEOUT_S, Engine, Setup


def test_the_newest_version_is_loaded_once(setup):
    sent = setup.publish(1)
    received = setup.receive()
    assert (received.version, received.bytes, received.digest) == (1, 520, sent.digest)
    assert (setup.served(), setup.subscriber.version) == (1, 1)
    assert setup.receive(1).digest == sent.digest
    assert setup.engine.loads == 1
    assert list(setup.engine.serves) == ["a", "b"]


@pytest.mark.parametrize("wrong", [{"check": "after"}, {"threads": 0}, {"threads": 1.5}])
def test_a_wrong_way_to_check_is_refused(setup, wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name} must be"):
        Subscriber(setup.plan, setup.engine.load, setup.transport, **wrong)


def test_waiting_ends_when_a_version_is_committed(setup):
    received = []
    thread = threading.Thread(target=lambda: received.append(setup.receive()))
    thread.start()
    setup.publish(4)
    thread.join(TIMEOUT_S)
    assert received[0].version == 4


def test_waiting_ends_at_the_deadline(setup):
    setup.publish(1)
    setup.receive()
    with pytest.raises(
        DeadlineError, match=r"not committed .* has version 1, .* \[1\]. Publish this version"
    ):
        setup.receive(timeout_s=0.01)
    with pytest.raises(DeadlineError, match="version 3 was not committed"):
        setup.receive(3, timeout_s=0.01)
    assert setup.served() == 1


def test_a_late_joiner_gets_the_newest(setup):
    for version in range(5):
        setup.publish(version)
    late = Engine()
    with Subscriber(setup.plan, late.load, setup.transport) as subscriber:
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 4
    with pytest.raises(ClosedError):
        subscriber.receive(timeout_s=TIMEOUT_S)


def restarted(tmp_path):
    """An engine that verified version 5 of a trainer, which then started over and published 5."""
    path = tmp_path / "blobs"
    with FileTransport(path, owner=True) as owner:
        setup = Setup(owner, tmp_path, reader=FileTransport(path))
        first = setup.publish(5)
        assert setup.subscriber.verify(5, timeout_s=TIMEOUT_S).digest == first.digest
    setup.weights["a"].fill_(9)
    setup.weights["b"].fill_(9)
    owner = FileTransport(path, owner=True)
    publisher = Publisher(setup.plan, setup.weights, owner)
    return setup, first, publisher.publish(5, timeout_s=TIMEOUT_S), owner


def test_a_verify_does_not_take_a_version_of_an_ended_run_by_its_number(tmp_path):
    setup, first, second, owner = restarted(tmp_path)
    assert setup.subscriber.verify(5, timeout_s=TIMEOUT_S).digest == second.digest != first.digest
    assert setup.receive(5).digest == second.digest
    assert setup.served() == 9
    owner.close()


def test_a_receive_loads_what_verify_has_checked_even_if_the_trainer_started_over(tmp_path):
    setup, first, _, owner = restarted(tmp_path)
    assert setup.receive(5).digest == first.digest
    assert setup.served() == 5
    owner.close()


def test_a_second_verify_checks_no_byte_again(setup, monkeypatch):
    setup.publish(1)
    receipt = setup.subscriber.verify(1, timeout_s=TIMEOUT_S)
    monkeypatch.setattr(setup.transport, "receive", None)
    assert setup.subscriber.verify(1, timeout_s=TIMEOUT_S).digest == receipt.digest
    setup.publish(2)
    setup.publish(3)  # Version 1 is retired, and its bytes are kept.
    assert setup.subscriber.verify(1, timeout_s=TIMEOUT_S).digest == receipt.digest
    assert setup.receive(1).digest == receipt.digest
    assert setup.served() == 1


def test_the_version_before_can_be_asked_for(setup):
    setup.publish(1)
    setup.publish(2)
    setup.receive()
    assert setup.receive(1).version == 1
    assert setup.served() == 1
    setup.publish(3)
    with pytest.raises(TransferError, match=r"version 1 was retired. .* \[2, 3\]"):
        Subscriber(setup.plan, setup.engine.load, setup.transport).receive(1, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("offset", [0, 1, 77, 255, 256, 479, 480, 519])
def test_a_flipped_byte_is_refused_before_the_load(setup, offset):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    flip_sent(setup.transport, setup.path, 2, offset - 520)
    with pytest.raises(CorruptionError, match=r"bucket \d+ of version 2 fails .* Publish again"):
        setup.receive()
    assert (setup.served(), setup.subscriber.version, setup.engine.loads) == (1, 1, 1)
    flip_sent(setup.transport, setup.path, 2, offset - 520)
    assert setup.receive().version == 2
    assert setup.served() == 2


def test_a_truncated_blob_is_refused(setup):
    setup.publish(1)
    size = setup.blob(1).stat().st_size
    if setup.blob(1).is_symlink():
        with pytest.raises(PermissionError):
            truncate(setup.blob(1), size_bytes=size - 1)
        return
    truncate(setup.blob(1), size_bytes=size - 1)
    with pytest.raises(CorruptionError, match=f"{size - 1} bytes, but {size} bytes were sent"):
        setup.receive()
    assert setup.engine.loads == 0


@pytest.mark.parametrize("taken", [0, 1])
def test_a_failed_load_goes_back_to_the_version_before(setup, taken):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    setup.subscriber.verify(1, timeout_s=TIMEOUT_S)  # Which it has, and keeps.
    setup.publish(3)  # Version 1 is retired by now, but held.
    setup.engine.fail_at[2] = taken
    with pytest.raises(TransferError, match="out of memory. Version 1 was loaded again"):
        setup.receive(3)
    assert (setup.served(), setup.subscriber.version) == (1, 1)
    assert setup.receive().version == 3
    assert setup.served() == 3


def test_a_failed_first_load_is_not_called_a_roll_back(setup):
    setup.publish(1)
    setup.engine.fail_at[1] = 1
    with pytest.raises(EngineError, match="no version to go back to. Restart"):
        setup.receive()
    assert setup.subscriber.version is None


def test_a_failed_way_back_is_an_engine_error(setup):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    setup.engine.fail_at = {2: 1, 3: 0}
    with pytest.raises(EngineError, match="Going back to version 1 failed too"):
        setup.receive()


def test_a_way_back_that_cannot_be_looked_up_is_an_engine_error(setup, monkeypatch):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    setup.engine.fail_at[2] = 1

    def markers():
        raise TransferError("the store does not answer")

    monkeypatch.setattr(type(setup.subscriber), "_kept", None)
    whole = setup.engine.load

    def load(tensors):
        monkeypatch.setattr(setup.subscriber._transport, "markers", markers)
        whole(tensors)

    monkeypatch.setattr(setup.subscriber, "_load", load)
    with pytest.raises(EngineError, match="out of memory.*Going back to version 1 failed too"):
        setup.receive()


def test_a_load_that_leaves_tensors_is_undone(setup):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    whole, loads = setup.engine.load, []

    def lazy(tensors):
        loads.append(1)
        if len(loads) == 1:
            name, tensor = next(iter(tensors))
            setup.engine.serves[name] = tensor.clone()
        else:
            whole(tensors)

    setup.subscriber._load = lazy
    with pytest.raises(TransferError, match="load took 1 of 2 tensors.*Version 1 was loaded again"):
        setup.receive()
    assert setup.served() == 1


def test_a_load_need_not_ask_for_more_than_there_is(setup, monkeypatch):
    clock = ManualClock(time.monotonic())

    def load(tensors):
        clock.advance(3)
        setup.engine.serves = {name: t.clone() for name, t in itertools.islice(tensors, 2)}

    setup.publish(1)
    setup.subscriber._load = load
    with monkeypatch.context() as patch:
        patch.setattr(receive, "time", SimpleNamespace(monotonic=clock.now))
        assert setup.receive().seconds == pytest.approx(3)
    assert setup.served() == 1


@pytest.mark.parametrize("version", [2, 5])
def test_a_trainer_that_starts_over_may_count_from_anew(version, setup):
    setup.publish(5)
    reader = type(setup.transport)
    spec = {key: value for key, value in setup.transport.spec().items() if key != "kind"}
    subscriber = Subscriber(setup.plan, setup.engine.load, reader(**spec))
    subscriber.receive(timeout_s=TIMEOUT_S)
    setup.transport.close()
    with reader(**spec, owner=True) as transport:
        setup.publisher = Publisher(setup.plan, setup.weights, transport)
        setup.publish(version)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == version
        assert (setup.served(), setup.engine.loads) == (version, 2)
    subscriber.close()


def test_a_check_that_takes_too_long_is_given_up(setup):
    setup.publish(1)
    with pytest.raises(DeadlineError, match="checked 0 of 9 buckets in time"):
        setup.receive(timeout_s=0)
    assert setup.engine.loads == 0


@pytest.mark.parametrize("last", [0, 4, 8])
def test_nothing_is_loaded_after_the_deadline(last, setup, monkeypatch):
    clock, digest, taken = ManualClock(time.monotonic()), fetched.bucket_digest, []

    def slow(pieces):
        taken.append(None)
        if len(taken) == last + 1:
            clock.advance(TIMEOUT_S + 1)
        return digest(pieces)

    setup.publish(1)
    with monkeypatch.context() as patch:
        for module in (receive, held):
            patch.setattr(module, "time", SimpleNamespace(monotonic=clock.now))
        patch.setattr(fetched, "bucket_digest", slow)
        with pytest.raises(
            DeadlineError, match="checked (. of 9 buckets|all 9 buckets, but after)"
        ):
            setup.receive()
    assert len(taken) == last + 1  # What was under way, and no more.
    assert (setup.engine.loads, setup.subscriber.version) == (0, None)
    assert setup.receive().version == 1


def test_going_back_takes_the_time_it_needs(setup, monkeypatch):
    clock, load = ManualClock(time.monotonic()), setup.subscriber._load
    digest = fetched.bucket_digest
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    for module in (receive, held):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.now))

    def slow(pieces):
        clock.advance(1)
        return digest(pieces)

    def slow_and_bad(tensors):
        setup.subscriber._load = load
        clock.advance(TIMEOUT_S + 1)
        monkeypatch.setattr(fetched, "bucket_digest", slow)
        raise RuntimeError("no room")

    setup.subscriber._load = slow_and_bad
    setup.subscriber._last = setup.subscriber._last._replace(held=None)  # It has to be fetched.
    with pytest.raises(TransferError, match="Version 1 was loaded again"):
        setup.receive()
    assert setup.served() == 1

"""Commits and leases in a store; what is refused without a byte being read."""

import json
import time

import pytest
import torch.distributed as dist

from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import Publisher, Subscriber, Transport, describe, plan_sync
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports.board import Board
from primeblocks.weightsync.transports.pull import PullTransport
from primeblocks.weightsync.transports.store_commits import StoreCommits
from tests.weightsync.contents import Engine
from tests.weightsync.packed_site import parameters
from tests.weightsync.process_wire import ProcessWire

TIMEOUT_S = 5.0


def soon(seconds=TIMEOUT_S):
    return time.monotonic() + seconds


def made(commits, version):
    now = commits.read(deadline=soon())
    marker = Marker.make(run=now.run, version=version, plan="", sizes=(), buckets=())
    commits.commit(marker, deadline=soon())
    return marker


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def board(store):
    return Board(store, "test")


@pytest.fixture
def commits(board):
    owner = StoreCommits(board)
    owner.take_over(lease_s=0.5, deadline=soon())
    return owner


def test_what_is_committed_is_read_elsewhere(board, commits):
    assert StoreCommits(Board(dist.HashStore(), "test")).read(deadline=soon()) is None
    markers = [made(commits, version) for version in (1, 2)]
    assert StoreCommits(board).read(deadline=soon()).markers == tuple(markers)
    commits.retire(markers[1:], deadline=soon())
    assert StoreCommits(board).read(deadline=soon()).markers == tuple(markers[1:])
    commits.leave(deadline=soon())
    assert StoreCommits(board).read(deadline=soon()).markers == ()


def test_a_new_owner_takes_over_and_the_old_one_is_refused(board, commits):
    made(commits, 1)
    second = StoreCommits(board)
    second.take_over(lease_s=0.5, deadline=soon())
    assert second.read(deadline=soon()).markers == ()
    with pytest.raises(TransferError, match="another owner took over"):
        made(commits, 2)
    with pytest.raises(TransferError, match="another owner took over"):
        commits.retire([], deadline=soon())
    commits.leave(deadline=soon())
    marker = made(second, 1)
    assert commits.read(deadline=soon()).markers == (marker,)


def test_a_version_that_is_held_is_waited_for(commits):
    marker = made(commits, 1)
    commits.hold(marker, deadline=soon())
    start = time.monotonic()
    with pytest.raises(CapacityError, match=r"leases end in 0\.\d s"):
        commits.retire([], deadline=soon(0.05))
    with pytest.raises(TransferError, match="version 1 was retired"):
        commits.hold(marker, deadline=soon())  # And lets go of what it counted.
    commits.release(marker, deadline=soon())
    commits.retire([], deadline=soon())
    assert time.monotonic() - start < 0.4


def test_a_dead_reader_is_waited_for_as_long_as_its_lease(commits):
    marker = made(commits, 1)
    until = commits.hold(marker, deadline=soon())
    assert 0.4 < until - time.monotonic() <= 0.5
    commits.retire([], deadline=soon())
    assert time.monotonic() >= until


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 1, "lease_s": 1, "markers": ["{}"]}'])
def test_broken_commits_are_refused(board, commits, text):
    board.post("commits", text, deadline=soon())
    with pytest.raises(CorruptionError):
        commits.read(deadline=soon())


# --- the transport -----------------------------------------------------------------------------


@pytest.fixture
def site(store):
    weights = parameters(1)
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1000)
    with PullTransport(store, ProcessWire(), owner=True, lease_s=0.5) as owner:
        yield plan, owner, Publisher(plan, weights, owner)


def test_it_is_constructed_and_not_opened(site):
    _, owner, _ = site
    assert isinstance(owner, Transport)
    with pytest.raises(UnsupportedError, match="in each process"):
        owner.spec()


def test_only_the_owner_begins_and_commits(site, store):
    plan, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    with PullTransport(store, ProcessWire()) as other:
        for call in (
            lambda: other.begin(2, plan=plan, base=None, deadline=soon()),
            lambda: other.commit(other.markers()[0], deadline=soon()),
            lambda: other.abort(2),
        ):
            with pytest.raises(UsageError, match="owner=True"):
                call()
    with pytest.raises(ClosedError):
        other.markers()


def test_names_are_apart(site, store):
    _, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    with PullTransport(store, ProcessWire(), name="draft", owner=True) as other:
        assert other.markers() == ()
        assert len(owner.markers()) == 1


def test_close_hides_what_goes_with_the_trainer(site, store):
    _, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    with PullTransport(store, ProcessWire()) as reader:
        assert len(reader.markers()) == 1
        owner.close()
        assert reader.markers() == ()


def test_nobody_has_begun(site, store):
    plan, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    shipment = type("Outgoing", (), {"plan": plan, "rank": 0, "version": 2, "base": None})
    with (
        PullTransport(dist.HashStore(), ProcessWire()) as lonely,
        pytest.raises(TransferError, match="no owner has begun"),
    ):
        lonely.send(shipment, deadline=soon())


def test_buffers_are_registered_once(site, store):
    plan, owner, publisher = site
    tokens, engine = [], Engine()
    with PullTransport(store, ProcessWire()) as reader:
        subscriber = Subscriber(plan, engine, reader)
        for version in range(6):
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
            tokens.append((set(owner._wire.shared), set(reader._wire.shared)))
    assert len(tokens[1][0]) == 2
    assert tokens[1:] == [tokens[1]] * 5
    assert len(tokens[0][1]) == 1
    assert not reader._wire.shared


def test_a_lease_that_is_over_ends_the_read(site, store):
    plan, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    slow = ProcessWire(before_read=lambda read: time.sleep(0.3))
    engine = Engine()
    with PullTransport(store, slow) as reader:
        subscriber = Subscriber(plan, engine, reader)
        with pytest.raises(TimeoutError, match="reads in time"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        slow.before_read = lambda read: None
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    assert engine.loads == 1


def test_a_rank_without_the_version_is_a_typed_error(site, store):
    plan, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    run = owner.markers()[0].run
    board = Board(store, "weightsync/pull/policy")
    notes = json.loads(board.read(f"{run}/rank/0", deadline=soon()))
    with PullTransport(store, ProcessWire()) as reader:
        subscriber = Subscriber(plan, Engine(), reader)
        for told, error in (
            ({}, TransferError),
            ({"1": {**notes["1"], "bytes": 10}}, CorruptionError),
        ):
            board.post(f"{run}/rank/0", json.dumps(told), deadline=soon())
            with pytest.raises(error, match=r"rank 0 has (not version 1|10 bytes)"):
                subscriber.receive(timeout_s=TIMEOUT_S)
        board.post(f"{run}/rank/0", json.dumps(notes), deadline=soon())
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1


def test_a_store_that_is_gone_is_a_typed_error_in_time():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False)
    reader = PullTransport(store, ProcessWire())
    assert reader.markers() == ()
    del host
    start = time.monotonic()
    with pytest.raises(TransferError, match="store does not answer"):
        reader.markers()
    assert time.monotonic() - start < TIMEOUT_S

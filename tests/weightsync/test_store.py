"""Commits in a store: leases that end by the clock, owners that are deposed, stores that stall."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync import held as held_module
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import (
    PackedTransport,
    PullTransport,
    Transport,
    store_commits,
)
from primeblocks.weightsync.transports.carriers import HandleCarrier, WireCarrier
from primeblocks.weightsync.transports.store_commits import StoreCommits
from primeblocks.weightsync.transports.transport import Lease, ReceiveRequest
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine, same_bytes
from tests.weightsync.packed_site import parameters
from tests.weightsync.test_board import GRACE_S, Patience, Store, made

LEASE_S = 30.0


def soon(seconds=TIMEOUT_S):
    return time.monotonic() + seconds


class LocalWire:
    """Reads inside one process. Calls `before_read` with each read that is about to be done."""

    everyones = {}  # noqa: RUF012

    def __init__(self, *, before_read=lambda read: None):
        self.before_read, self.now, self.shared = before_read, time.monotonic, {}

    def spec(self):
        return {"kind": "local"}

    def share(self, buffer):
        self.shared[buffer.data_ptr()] = self.everyones[buffer.data_ptr()] = buffer
        return {"address": buffer.data_ptr()}

    def unshare(self, buffer):
        del self.shared[buffer.data_ptr()]

    def read(self, reads, *, deadline):
        for place, read in enumerate(reads):
            self.before_read(read)
            if self.now() > deadline:
                raise DeadlineError(f"{place} of {len(reads)} reads in time")
            found = self.everyones[read.note["address"]]
            read.target.copy_(found[read.start : read.start + len(read.target)])

    def close(self):
        self.shared.clear()


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def clock(monkeypatch):
    """Moves only where leases are waited for."""
    clock = ManualClock(time.monotonic())
    event = SimpleNamespace(wait=clock.advance)
    monkeypatch.setattr(store_commits, "time", SimpleNamespace(monotonic=clock.now))
    monkeypatch.setattr(store_commits, "threading", SimpleNamespace(Event=lambda: event))
    return clock


@pytest.fixture
def commits(store):
    return StoreCommits(store, owner=True, lease_s=LEASE_S)


def test_a_new_owner_takes_over_and_the_old_one_is_refused(store, commits):
    made(commits, 1)
    second = StoreCommits(store, owner=True, lease_s=LEASE_S)
    assert second.markers(deadline=soon()) == ()
    with pytest.raises(TransferError, match="another owner took over"):
        made(commits, 2)
    marker = made(second, 1)
    commits.close()
    assert second.markers(deadline=soon()) == (marker,)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan, math.inf])
def test_a_lease_without_a_length_is_refused_from_owner_and_note(store, commits, lease_s):
    with pytest.raises(UsageError, match="lease_s must be above 0 and finite"):
        StoreCommits(store, owner=True, lease_s=lease_s)
    key = "commits"
    note = json.loads(commits._board.read(key, deadline=soon()))
    commits._board.post(key, json.dumps({**note, "lease_s": lease_s}), deadline=soon())
    with pytest.raises(CorruptionError, match="lease_s is"):
        commits.markers(deadline=soon())


@pytest.mark.parametrize("call", ["commit", "begin", "close"])
def test_an_owner_that_is_deposed_between_its_look_and_its_write_writes_nothing(call):
    store = Store()
    first = StoreCommits(store, owner=True, lease_s=LEASE_S)
    marker = made(first, 1)
    first.begin(2, keep=[marker], deadline=soon())
    get, theirs = store.get, []

    def get_and_lose(key):
        text = get(key)
        store.get = get
        theirs.append(StoreCommits(store, owner=True, lease_s=LEASE_S))
        theirs.append(made(theirs[0], 7))
        return text

    later = Marker.make(run=marker.run, version=2, plan="", sizes=(), buckets=())
    calls = {
        "commit": lambda: first.commit(later, deadline=soon()),
        "begin": lambda: first.begin(3, keep=[], deadline=soon()),
        "close": first.close,
    }
    store.get = get_and_lose
    if call == "close":  # Best effort.
        calls[call]()
    else:
        with pytest.raises(TransferError, match="another owner took over"):
            calls[call]()
    assert theirs[0].markers(deadline=soon()) == (theirs[1],)


def test_a_version_that_is_held_is_waited_for(commits, clock):
    marker = made(commits, 1)
    lease = commits.hold(marker, deadline=soon())
    with pytest.raises(CapacityError, match=rf"leases end in {LEASE_S - 5:.1f} s"):
        commits.begin(2, keep=[], deadline=clock.now() + 5)
    with pytest.raises(TransferError, match="version 1 was retired"):
        commits.hold(marker, deadline=soon())  # And lets go of what it counted.
    lease.close()
    lease.close()  # Counts once.
    now = clock.now()
    commits.begin(2, keep=[], deadline=soon())
    assert clock.now() == now


def test_a_dead_reader_is_waited_for_as_long_as_its_lease(commits, clock, monkeypatch):
    monkeypatch.setattr(store_commits, "_LOOK_S", LEASE_S / 50)
    marker = made(commits, 1)
    until = commits.hold(marker, deadline=soon()).until
    assert until == clock.now() + LEASE_S
    commits.begin(2, keep=[], deadline=clock.now() + 2 * LEASE_S)
    assert until <= clock.now() <= until + store_commits._LOOK_S


# --- the transport -----------------------------------------------------------------------------


@pytest.fixture
def site(store):
    weights = parameters(1)
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1000)
    with PullTransport(store, LocalWire(), owner=True, lease_s=LEASE_S) as owner:
        yield plan, owner, Publisher(plan, weights, owner)


def test_a_store_that_lives_in_one_process_is_not_opened(site):
    _, owner, _ = site
    assert isinstance(owner, Transport)
    with pytest.raises(UnsupportedError, match="a HashStore cannot be opened in another process"):
        owner.spec()


def test_buffers_are_registered_once(site, store):
    plan, owner, publisher = site
    tokens, engine = [], Engine()
    with PullTransport(store, LocalWire()) as reader:
        subscriber = Subscriber(plan, engine, reader)
        for version in range(6):
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
            tokens.append((set(owner._carrier._wire.shared), set(reader._carrier._wire.shared)))
    assert len(tokens[1][0]) == 2
    assert tokens[1:] == [tokens[1]] * 5
    assert len(tokens[0][1]) == 1
    assert not reader._carrier._wire.shared


def test_a_lease_that_is_over_ends_the_read(site, store):
    plan, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    clock = ManualClock(time.monotonic())
    slow = LocalWire(before_read=lambda read: clock.advance(0.6 * LEASE_S))
    slow.now = clock.now
    engine = Engine()
    with PullTransport(store, slow) as reader:
        subscriber = Subscriber(plan, engine, reader)
        with pytest.raises(DeadlineError, match=r"lease ended .* Raise the owner's lease_s"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        with pytest.raises(DeadlineError, match="reads in time"):
            subscriber.receive(timeout_s=LEASE_S / 2)
        slow.before_read = lambda read: None
        slow.now = time.monotonic
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    assert engine.loads == 1


def test_a_buffer_whose_read_broke_is_not_used_again(site, store):
    plan, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    targets, engine = [], Engine()

    def breaks(read):
        targets.append(read.target)
        if len(targets) == 2:
            raise TransferError("the link is down")

    with PullTransport(store, LocalWire(before_read=breaks), keep=True) as reader:
        subscriber = Subscriber(plan, engine, reader)
        with pytest.raises(TransferError, match="the link is down"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        assert not reader._carrier._wire.shared
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
        right = {name: tensor.clone() for name, tensor in engine.tensors.items()}
        targets[0].fill_(0xFF)  # By a network card that was slow to give up.
        publisher.publish(2, timeout_s=TIMEOUT_S)
        subscriber.receive(2, timeout_s=TIMEOUT_S)
        subscriber.receive(1, timeout_s=TIMEOUT_S)
        assert same_bytes(engine.tensors, right)


def test_a_rank_without_the_version_is_a_typed_error(site, store):
    plan, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    run = owner.markers()[0].run
    notes = json.loads(owner.commits.look("rank-0", run=run, deadline=soon()))
    with PullTransport(store, LocalWire()) as reader:
        subscriber = Subscriber(plan, Engine(), reader)
        for told, error in (
            ({}, TransferError),
            ({"1": {**notes["1"], "bytes": 10}}, CorruptionError),
            ({"1": {"bytes": 10}}, CorruptionError),
        ):
            owner.commits.post("rank-0", json.dumps(told), deadline=soon())
            with pytest.raises(
                error, match=r"rank 0 (does not have version 1|has 10 bytes|cannot be read)"
            ):
                subscriber.receive(timeout_s=TIMEOUT_S)
        owner.commits.post("rank-0", json.dumps(notes), deadline=soon())
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1


def test_ranks_are_not_asked_after_the_deadline(monkeypatch):
    ranks = [{name: torch.zeros(4)} for name in "abc"]
    sources = [describe(rank) for rank in ranks]
    plan = plan_sync(sources, describe({**ranks[0], **ranks[1], **ranks[2]}), bucket_bytes=100)
    marker = Marker.make(
        run="r", version=1, plan="", sizes=(16,) * len(plan.buckets), buckets=("",) * 3
    )
    clock, asked = ManualClock(), []
    monkeypatch.setattr(held_module, "time", SimpleNamespace(monotonic=clock.now))

    def look(name, *, run, deadline):
        asked.append(name)
        clock.advance(1.0)
        return json.dumps({"1": {"bytes": 1 << 20, "at": {}}})

    lease = Lease(clock.now() + 60, lambda: None)
    commits = SimpleNamespace(
        look=look,
        look_s=1.0,
        hint=str,
        hold=lambda *_, **__: lease,
        markers=lambda deadline: (marker,),
    )
    request = ReceiveRequest(plan, 0, 1, None, None, clock.now() + 0.5)
    (found,) = PackedTransport(commits, WireCarrier(LocalWire())).receive(request)
    with pytest.raises(DeadlineError, match="1 of 3 ranks"):
        found.whole()
    assert len(asked) == 1  # A fetch begins at any rank.


def test_what_is_lent_for_a_time_is_copied_in_that_time(monkeypatch):
    """A load may take longer than a lease. It gets memory of this process."""
    weights, store = parameters(1), dist.HashStore()
    plan = plan_sync([describe(weights)], describe(weights).whole(), bucket_bytes=1000)
    clock, carrier = ManualClock(time.monotonic()), HandleCarrier()
    owner = PackedTransport(StoreCommits(store, owner=True, lease_s=LEASE_S), carrier)
    Publisher(plan, weights, owner).publish(1, timeout_s=TIMEOUT_S)
    reader = PackedTransport(StoreCommits(store, owner=False), carrier)
    fetch, got = carrier.fetch, []

    def slow(spans, **how):
        found = fetch(spans, **how)
        clock.advance(LEASE_S + 1)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(carrier, "fetch", slow)
        patch.setattr(held_module, "time", SimpleNamespace(monotonic=clock.now))
        with pytest.raises(DeadlineError, match="copied"):
            Subscriber(plan, got.append, reader).receive(timeout_s=TIMEOUT_S)
    assert not got

    def load(tensors):
        owner._full.used[1].buffer.fill_(66)  # Its lease is over: the trainer goes on.
        got.append({name: tensor.clone() for name, tensor in tensors})

    Subscriber(plan, load, reader, check="ahead").receive(timeout_s=TIMEOUT_S)
    assert same_bytes(got[0], weights)


def test_a_store_that_is_gone_is_a_typed_error_in_time():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False)
    reader = PullTransport(store, LocalWire())
    assert reader.markers() == ()
    del host
    with pytest.raises(TransferError, match="store does not answer"):
        reader.markers()


# --- stores that stall -------------------------------------------------------------------------


class Slow:
    """A trainer with version 1 in a store, and a reader of it."""

    def __init__(self):
        self.store, weights = Store(), parameters(1)
        self.plan = plan_sync([describe(weights)], describe(weights).whole(), bucket_bytes=1000)
        self.owner = PullTransport(self.store, LocalWire(), owner=True)
        Publisher(self.plan, weights, self.owner).publish(1, timeout_s=TIMEOUT_S)
        self.engine = Engine()
        reader = PullTransport(self.store, LocalWire(), keep=True)
        self.subscriber = Subscriber(self.plan, self.engine, reader)
        self.store.asked.clear()


@pytest.mark.parametrize("method", ["check", "get", "add"])
def test_a_store_that_stalls_is_waited_for_until_the_deadline(method, monkeypatch):
    slow = Slow()
    patience = Patience(slow.store, monkeypatch, then=slow.store.let_go.set)
    slow.store.hangs = {method}
    assert slow.subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    assert patience.waited_s[0] >= TIMEOUT_S


@pytest.mark.parametrize("method", ["check", "get", "add"])
def test_a_store_that_hangs_ends_one_receive_by_its_deadline_and_not_the_next(method, monkeypatch):
    slow = Slow()
    with monkeypatch.context() as patch:
        patience = Patience(slow.store, patch)
        slow.store.hangs = {method}
        with pytest.raises(TransferError, match="does not answer in time"):
            slow.subscriber.receive(timeout_s=0.2)
        # Nothing else is waited for, whatever is tried on the way out.
        assert patience.waited_s[0] >= GRACE_S
        assert not any(patience.waited_s[1:])
    slow.store.let_go.set()
    assert slow.subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    assert slow.engine.loads == 1

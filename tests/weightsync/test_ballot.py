"""Readers that vote after their loads: all keep a version or all go back, whoever fails or dies."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import (
    DeadlineError,
    EngineError,
    PrimeblocksError,
    TransferError,
    UsageError,
)
from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    plan_sync,
)
from primeblocks.weightsync.engines import Ballot
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import FileTransport, GroupTransport
from tests.deadlines import HANG_S as LONG_S
from tests.weightsync.contents import PACKED, packed_end
from tests.weightsync.test_kill import LANES, Lines

ranks.preload(__name__)  # With all that it imports.

READERS = ("a", "b", "c")


def weights(version):
    """Many small tensors, a tenth of which change with a version."""
    torch.manual_seed(0)
    tensors = {f"w{index}": torch.randn(32) for index in range(10)}
    tensors[f"w{version % 10}"] += version
    tensors["version"] = torch.tensor([version])
    return tensors


def a_plan(readers=1):
    source = describe(weights(0))
    return plan_sync([source], [source.whole()] * readers, bucket_bytes=256)


def transport_of(kind, where, **options):
    if kind in PACKED:
        if kind.startswith("store") and options:
            options["lease_s"] = 1.5  # Of a reader that died.
        return packed_end(kind, where, **options)
    if kind == "file":
        return FileTransport(where / "versions", **options)
    return SharedMemoryTransport("policy", root=str(where), **options)


class Reader:
    """A reader of a fleet; the next load breaks before tensor number `breaks`."""

    def __init__(self, name, ballot, transport, plan, **options):
        self.tensors, self.breaks = {}, None
        self.subscriber = Subscriber(
            plan, self.load, transport, member=ballot.member(name), **options
        )

    def load(self, tensors):
        for index, (name, tensor) in enumerate(tensors):
            if index == self.breaks:
                self.breaks = None
                raise RuntimeError("out of memory")
            self.tensors[name] = tensor.clone()

    def receive(self, timeout_s=LONG_S, version=None):
        try:
            return self.subscriber.receive(version, timeout_s=timeout_s).version
        except PrimeblocksError as error:
            return error

    @property
    def version(self):
        """The one whose weights it holds, all of them, and that it says it holds."""
        if not self.tensors:
            assert self.subscriber.version is None
            return None
        version = int(self.tensors["version"])
        assert all(self.tensors[name].equal(t) for name, t in weights(version).items())
        assert self.subscriber.version == version
        return version


class Fleet:
    """A trainer and its readers, each in a thread."""

    def __init__(self, kind, where, **options):
        self.ballot = Ballot(where / "votes", READERS)
        self.parameters, self.plan = weights(0), a_plan()
        self.kind, self.where = kind, where
        owner = transport_of(kind, where, owner=True)
        self.publisher = Publisher(self.plan, self.parameters, owner, **options)
        self.readers = [self.join(name) for name in READERS]
        self.threads = ThreadPoolExecutor(len(READERS) + 1)

    def join(self, name):
        return Reader(name, self.ballot, transport_of(self.kind, self.where), self.plan)

    def sync(self, version, readers=None, timeout_s=LONG_S, *, named=True):
        for name, tensor in weights(version).items():
            self.parameters[name].copy_(tensor)
        sent = self.threads.submit(self._publish, version, timeout_s)
        asked = version if named else None
        got = [self.threads.submit(r.receive, timeout_s, asked) for r in readers or self.readers]
        return [each.result() for each in (sent, *got)]

    def _publish(self, version, timeout_s):
        try:
            receipt = self.publisher.publish(
                version, timeout_s=timeout_s, await_readers=self.ballot
            )
        except PrimeblocksError as error:
            return error
        return receipt.version

    @property
    def versions(self):
        return [reader.version for reader in self.readers]


@pytest.mark.parametrize("full_every", [1, 4])
@pytest.mark.parametrize("kind", ["shared_memory", "file"])
def test_a_load_that_fails_anywhere_leaves_all_on_one_version(kind, full_every, tmp_path):
    fleet, dice, stands = Fleet(kind, tmp_path, full_every=full_every), random.Random(3), 1
    assert fleet.sync(1) == [1] * 4
    for version in range(2, 14):
        broken = dice.sample(fleet.readers, dice.choice([0, 1, 1, 2, 3]))
        for reader in fleet.readers:  # Of some, the others refused before they began.
            reader.breaks = dice.randrange(11) if reader in broken else None
        told = fleet.sync(version)
        if broken:
            assert all(isinstance(each, TransferError) for each in told), told
            assert "out of memory" in str(told[0])
        else:
            stands = version
            assert told == [version] * 4
        assert fleet.versions == [stands] * 3


def test_a_version_that_was_refused_is_loaded_once_it_is_published_again(tmp_path):
    fleet = Fleet("shared_memory", tmp_path)
    fleet.sync(1)
    fleet.readers[1].breaks = 3
    fleet.sync(2)
    assert isinstance(fleet.readers[0].receive(timeout_s=0.1), DeadlineError)
    with pytest.raises(TransferError, match="version 2 was refused: abort: b: RuntimeError"):
        fleet.readers[0].subscriber.receive(2, timeout_s=LONG_S)
    late = fleet.join("c")  # It takes the version that the others have.
    assert late.receive() == 1
    fleet.readers[2] = late
    assert fleet.sync(2, named=False) == [2] * 4
    assert fleet.versions == [2] * 3


def test_a_reader_that_does_not_come_is_waited_for_until_the_deadline(tmp_path):
    fleet = Fleet("file", tmp_path)
    fleet.sync(1)
    told = fleet.sync(2, fleet.readers[:2], timeout_s=4.0)
    assert all(isinstance(each, TransferError) for each in told)
    assert "waited in vain for ['c']" in str(told[0])
    assert "'c'" in str(told[0])
    assert fleet.versions == [1] * 3
    assert fleet.sync(3) == [3] * 4


def test_a_reader_that_joins_late_follows_the_decision_and_cannot_undo_it(tmp_path):
    fleet = Fleet("file", tmp_path)
    fleet.sync(1)
    late = fleet.join("a")
    late.breaks = 2
    assert isinstance(late.receive(), EngineError)
    assert late.receive() == 1
    assert fleet.versions == [1] * 3


def test_a_first_version_that_one_cannot_load_is_served_by_none(tmp_path):
    fleet = Fleet("file", tmp_path)
    fleet.readers[0].breaks = 0
    told = fleet.sync(1)
    assert isinstance(told[0], TransferError)
    # Whoever came after it was refused has not begun to load.
    assert all(isinstance(each, EngineError | TransferError) for each in told[1:])
    fleet.readers[0].breaks = None
    assert all(reader.subscriber.version is None for reader in fleet.readers)
    assert fleet.sync(1, named=False) == [1] * 4


def test_votes_that_cannot_be_reached_leave_no_doubtful_version_served(tmp_path, monkeypatch):
    fleet = Fleet("file", tmp_path)
    fleet.sync(1)
    reader = fleet.readers[0]
    post = fleet.ballot._notes.post_first

    def fails(key, text, *, deadline):
        if "vote/a" in key:
            raise TransferError("the store does not answer")
        return post(key, text, deadline=deadline)

    monkeypatch.setattr(fleet.ballot._notes, "post_first", fails)
    told = fleet.sync(2, timeout_s=1.0)
    assert isinstance(told[1], EngineError)
    assert "Stop serving" in str(told[1])
    assert reader.subscriber.version is None
    assert [each.version for each in fleet.readers[1:]] == [1, 1]
    monkeypatch.undo()
    assert reader.receive() == 1
    assert fleet.sync(3) == [3] * 4


def test_votes_on_a_replaced_trainers_version_are_none_on_its_successors(tmp_path):
    notes = Ballot(tmp_path, ["a"])
    notes.member("a").ballot._notes.post_first("old/5/0/decision", "abort: x", deadline=0.0)
    threading.Thread(
        target=lambda: notes._notes.post_first("new/5/0/decision", "commit", deadline=0.0)
    ).start()
    deadline = time.monotonic() + LONG_S
    notes.await_all("new", 5, again=False, deadline=deadline)
    with pytest.raises(TransferError, match="abort: x"):
        notes.await_all("old", 5, again=False, deadline=deadline)


def test_a_trainer_that_was_replaced_commits_nothing_that_a_reader_takes(tmp_path):
    """Its lock on the directory was lost, as by a file system that forgot it."""
    first = Fleet("file", tmp_path)
    assert first.sync(1) == [1] * 4
    for lock in tmp_path.rglob("primeblocks.lock"):
        lock.unlink()
    second = Fleet("file", tmp_path)
    second.readers = first.readers
    told = first._publish(2, timeout_s=1.0)
    assert isinstance(told, TransferError), told
    assert second.sync(1) == [1] * 4  # The same number, and another run's votes.
    assert second.versions == [1] * 3
    assert second.sync(2) == [2] * 4


@pytest.mark.parametrize("kind", ["directory", "file store", "TCP store"])
def test_votes_are_removed_once_two_later_versions_stood(kind, tmp_path, host):
    place = tmp_path / "notes"
    if kind != "directory":
        place = dist.FileStore(str(place), -1) if kind == "file store" else dist.TCPStore(*host)
    ballot, kept = Ballot(place, ["a"]), []
    for version in range(1, 9):
        turn = Marker.make(run="r", version=version, plan="", sizes=(), buckets=())
        entered = ballot.member("a").enter(turn, deadline=time.monotonic() + LONG_S)
        if version % 3 == 0:
            entered.refuse("no room")
            with pytest.raises(TransferError, match="no room"):
                ballot.await_all("r", version, again=False, deadline=time.monotonic() + LONG_S)
        else:
            assert entered.vote(deadline=time.monotonic() + LONG_S) == ""
            ballot.await_all("r", version, again=False, deadline=time.monotonic() + LONG_S)
        looks = [f"r/{known}/0/vote/a" for known in range(1, version + 1)]
        at = time.monotonic() + LONG_S
        kept.append(sum(ballot._notes.look(key, deadline=at) is not None for key in looks))
    assert kept == [1, 2, 2, 2, 2, 2, 2, 2]
    late = Marker.make(run="r", version=1, plan="", sizes=(), buckets=())
    at = time.monotonic() + LONG_S
    assert ballot.member("a").enter(late, deadline=at).vote(deadline=at) == ""  # As all others.
    late = Marker.make(run="r", version=3, plan="", sizes=(), buckets=())
    with pytest.raises(TransferError, match="no room"):
        ballot.member("a").enter(late, deadline=at)
    if kind == "directory":
        assert len(list(place.iterdir())) == 8 + 2 + 1  # Decisions, votes, that of the late one.


def test_members_that_make_no_sense_are_refused(tmp_path):
    for members in ([], ["a", "a"]):
        with pytest.raises(UsageError, match="name of its own"):
            Ballot(tmp_path, members)
    with pytest.raises(UsageError, match="'x' is not among"):
        Ballot(tmp_path, ["a"]).member("x")


# --- deaths --------------------------------------------------------------------------------------


def killed_body(kind, where, in_store, point, timeout_s):
    """Rank 0 trains, 1 and 2 read, 2 dies at a line of its receive, 3 comes in its stead."""
    rank, meet = dist.get_rank(), dist.FileStore(str(where / "meet"), -1)
    place = dist.FileStore(str(where / "votes"), -1) if in_store else where / "votes"
    ballot, plan = Ballot(place, ["1", "2"]), a_plan()
    if rank == 0:
        parameters = weights(1)
        publisher = Publisher(plan, parameters, transport_of(kind, where, owner=True),
                              group=dist.new_group([0]), full_every=4)  # fmt: skip
        meet.set("owned", "")
    else:
        dist.new_group([0])
        meet.get("owned")
        reader = Reader(str(min(rank, 2)), ballot, transport_of(kind, where), plan)

    def publish(version, timeout_s=LONG_S):
        for name, tensor in weights(version).items():
            parameters[name].copy_(tensor)
        try:
            publisher.publish(version, timeout_s=timeout_s, await_readers=ballot)
        except TransferError:
            return False
        return True

    if rank == 0:
        assert publish(1)
        done = publish(2, timeout_s)
        meet.set("ended", "")
        meet.get("joined")
        assert publish(3)
        meet.get("1 has it")
        meet.get("2 has it")
        return 2 if done else 1
    if rank < 3:
        with Lines() as lines:
            assert reader.receive() == 1
        if rank == 2:
            # Of all, or of those that vote.
            by = {"inside": "weightsync/ballot", "last": point} if point >= 1 else {}
            with Lines(**{"last": int(lines.count * point), **by}) as lines:
                reader.receive(timeout_s)
            return lines.count
        reader.receive(timeout_s)
        before = reader.version
    else:
        meet.get("ended")
        got = reader.receive()
        before = reader.version
        assert got == before
        meet.set("joined", "")
    assert reader.receive() == 3
    assert reader.version == 3
    meet.set(f"{min(rank, 2)} has it", "")
    return before


@pytest.mark.timeout(3600)
def test_a_reader_that_is_killed_anywhere_leaves_all_on_one_version(tmp_path, full):
    kinds, dice = ("file", "shared_memory", *PACKED), random.Random(1)
    cases = 2 * len(kinds) * (17 if full else 1)
    points = [dice.choice([dice.random(), dice.randrange(1, 200)]) for _ in range(cases)]

    def killed(case):
        where = tmp_path / str(case)
        where.mkdir()
        kind, in_store = kinds[case // 2 % len(kinds)], bool(case % 2)
        args = (kind, where, in_store, points[case], 3.0)
        trainer, survivor, victim, successor = ranks.run(killed_body, *args, world_size=4)
        assert survivor == trainer == successor, (args, victim)
        return trainer, victim is None

    with ThreadPoolExecutor(LANES) as pool:
        stood, dead = zip(*pool.map(killed, range(cases)), strict=True)
    print(f"{cases} cases, {sum(dead)} killed, version 2 stood in {stood.count(2)}")
    assert set(stood) <= {1, 2}


def group_body(where):
    rank = dist.get_rank()
    ballot = Ballot(dist.FileStore(str(where / "votes"), -1), ["1", "2"])
    plan, parameters = a_plan(readers=2), weights(1)
    group = dist.new_group([0, 1, 2], backend="gloo")
    store = dist.FileStore(str(where / "meet"), -1)
    transport = GroupTransport(group=group, store=store, trainers=1, keep=True)
    told = []
    if rank == 0:
        publisher = Publisher(plan, parameters, transport, group=dist.new_group([0]))
    else:
        dist.new_group([0])
        reader = Reader(str(rank), ballot, transport, plan, reader=rank - 1)
    for version in (1, 2, 3):
        if rank == 0:
            for name, tensor in weights(version).items():
                parameters[name].copy_(tensor)
            try:
                publisher.publish(version, timeout_s=LONG_S, await_readers=ballot)
                told.append(version)
            except TransferError as error:
                told.append("out of memory" in str(error))
        else:
            reader.breaks = 4 if (version, rank) == (2, 2) else None
            reader.receive()
            told.append(reader.version)
    return told


def test_a_process_group_votes_a_second_time(tmp_path):
    assert ranks.run(group_body, tmp_path, world_size=3) == [[1, True, 3], [1, 1, 3], [1, 1, 3]]

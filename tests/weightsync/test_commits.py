"""One suite over both kinds of `Commits`, in a directory and in a store."""

import fcntl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from primeblocks.errors import CapacityError, ClosedError, TransferError, UsageError
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import directory_commits
from primeblocks.weightsync.transports.directory_commits import DirectoryCommits
from primeblocks.weightsync.transports.open import open_spec
from primeblocks.weightsync.transports.place import PrivatePlace
from primeblocks.weightsync.transports.store_commits import StoreCommits
from tests.deadlines import HANG_S as TIMEOUT_S


def soon(seconds=TIMEOUT_S):
    return time.monotonic() + seconds


@pytest.fixture(params=["directory", "store"])
def make(request, tmp_path):
    """Ends of one set of commits, closed at the end."""
    store = dist.FileStore(str(tmp_path / "store"))

    def build(name="policy", *, owner=False):
        if request.param == "directory":
            place = PrivatePlace(name, str(tmp_path), prefix="primeblocks-test")
            return made.enter_context(Closing(DirectoryCommits(place, owner=owner)))
        return made.enter_context(Closing(StoreCommits(store, name=name, owner=owner)))

    build.kind = request.param
    with ExitStack() as made:
        yield build


class Closing(ExitStack):
    """`Commits` as a context, and everything else that they are."""

    def __init__(self, commits):
        super().__init__()
        self.inner = commits
        self.callback(commits.close)

    def __enter__(self):
        super().__enter__()
        return self.inner


def begun(owner, version, *, keep=(), seconds=TIMEOUT_S):
    owner.begin(version, keep=keep, deadline=soon(seconds))


def marker_of(owner, version):
    return Marker.make(run=owner.run, version=version, plan="", sizes=(), buckets=())


def committed(owner, version, *, keep=None):
    begun(owner, version, keep=owner.markers(deadline=soon()) if keep is None else keep)
    marker = marker_of(owner, version)
    owner.commit(marker, deadline=soon())
    return marker


def seen(reader):
    return list(reader.markers(deadline=soon()))


def test_what_is_committed_is_seen_elsewhere_and_what_is_begun_is_not(make):
    reader = make()
    assert seen(reader) == []
    owner = make(owner=True)
    first = committed(owner, 1)
    assert seen(reader) == seen(owner) == [first]
    begun(owner, 2, keep=[first])
    assert seen(reader) == [first]
    owner.abort(2)
    owner.abort(2)
    second = committed(owner, 2)
    assert seen(reader) == [first, second]
    third = committed(owner, 3, keep=[second])
    assert seen(reader) == [second, third]
    assert (first.run, second.run) == (owner.run, owner.run)


def test_what_was_not_begun_is_not_committed(make):
    owner = make(owner=True)
    marker = committed(owner, 1)
    for abort in (False, True):
        if abort:
            begun(owner, 2, keep=[marker])
            owner.abort(2)
        with pytest.raises(UsageError, match="version 2, which was not begun"):
            owner.commit(marker_of(owner, 2), deadline=soon())
    assert seen(owner) == [marker]


def test_only_the_owner_begins_commits_and_aborts(make):
    owner, other = make(owner=True), make()
    marker = committed(owner, 1)
    for call in (
        lambda: begun(other, 2),
        lambda: other.commit(marker, deadline=soon()),
        lambda: other.abort(2),
    ):
        with pytest.raises(UsageError, match="owner=True"):
            call()


def test_a_version_that_is_held_stays_until_its_reader_lets_go(make):
    owner, reader, other = make(owner=True), make(), make()
    marker = committed(owner, 1)
    leases = [reader.hold(marker, deadline=soon()), other.hold(marker, deadline=soon())]
    assert all(lease.until > soon(10) for lease in leases)
    for lease in leases:
        with pytest.raises(CapacityError, match="version 1 is still being read"):
            begun(owner, 2, seconds=0)
        lease.close()
        lease.close()
    begun(owner, 2)
    with pytest.raises(TransferError, match="version 1 was retired"):
        reader.hold(marker, deadline=soon())
    begun(owner, 2)  # Whoever came too late holds up nobody.


def test_a_version_that_is_kept_may_be_held_by_anybody(make):
    owner, reader = make(owner=True), make()
    first = committed(owner, 1)
    lease = reader.hold(first, deadline=soon())
    second = committed(owner, 2)
    assert seen(owner) == [first, second]
    lease.close()


def test_a_version_of_an_owner_before_is_not_held(make):
    owner, reader = make(owner=True), make()
    old = committed(owner, 1)
    owner.close()
    again = make(owner=True)
    assert again.run != old.run
    committed(again, 1)
    with pytest.raises(TransferError, match="version 1 was retired"):
        reader.hold(old, deadline=soon())


def test_each_rank_has_one_note(make):
    reader = make()
    with pytest.raises(TransferError, match="does not have an owner yet"):
        reader.post("rank-0", "lost", deadline=soon())
    owner = make(owner=True)
    marker = committed(owner, 1)
    assert reader.look("rank-0", run=marker.run, deadline=soon()) is None
    for text in ("first", "second"):
        owner.post("rank-0", text, deadline=soon())
        reader.post("rank-1", f"of 1: {text}", deadline=soon())
        assert reader.look("rank-0", run=marker.run, deadline=soon()) == text
        assert owner.look("rank-1", run=marker.run, deadline=soon()) == f"of 1: {text}"


def test_close_ends_the_versions_and_twice_is_fine(make):
    owner, reader = make(owner=True), make()
    committed(owner, 1)
    for _ in range(2):
        owner.close()
    assert seen(reader) == []
    with pytest.raises(ClosedError):
        seen(owner)
    with pytest.raises(ClosedError):
        begun(owner, 2)


def test_close_ends_a_begin_that_waits_for_a_reader_in_another_thread(make, monkeypatch):
    owner, reader = make(owner=True), make()
    lease = reader.hold(committed(owner, 1), deadline=soon())
    flock, is_locked = fcntl.flock, threading.Event()

    def spied(fd, how):
        try:
            flock(fd, how)
        except BlockingIOError:
            is_locked.set()
            raise

    monkeypatch.setattr(fcntl, "flock", spied)
    with ThreadPoolExecutor(2) as pool:
        begins = pool.submit(begun, owner, 2, seconds=3 * TIMEOUT_S)
        while not is_locked.wait(0.01) and seen(reader):
            assert not begins.done()
        pool.submit(owner.close).result(TIMEOUT_S)
        with pytest.raises(ClosedError):
            begins.result(TIMEOUT_S)
    lease.close()


def test_threads_commit_one_after_the_other(make, monkeypatch):
    """A second thread commits while the first one writes its record: it waits."""
    owner = make(owner=True)
    place, name = (directory_commits, "write_over")
    if make.kind == "store":
        place, name = owner._board, "replace"
    markers = [marker_of(owner, version) for version in (1, 2)]
    for version in (0, 1, 2):
        begun(owner, version)
    write = getattr(place, name)

    def slow(*args, **how):
        monkeypatch.setattr(place, name, write)
        second.start()
        second.join(0.5)  # Without a lock it ends here. With one it cannot.
        return write(*args, **how)

    second = threading.Thread(target=owner.commit, args=markers[1:], kwargs={"deadline": soon()})
    monkeypatch.setattr(place, name, slow)
    owner.commit(markers[0], deadline=soon())
    second.join()
    assert seen(owner) == markers
    if make.kind == "directory":
        with pytest.raises(UsageError, match="version 0, but another .* has committed version 2"):
            owner.commit(marker_of(owner, 0), deadline=soon())


def test_names_are_apart(make):
    owner, other = make(owner=True), make("draft", owner=True)
    committed(owner, 1)
    assert (len(seen(owner)), seen(other)) == (1, [])


def test_they_are_opened_by_their_spec(make):
    owner = make(owner=True)
    marker = committed(owner, 1)
    reader = open_spec(owner.spec())
    assert type(reader) is type(owner)
    assert reader.spec() == owner.spec()
    assert seen(reader) == [marker]
    reader.hold(marker, deadline=soon()).close()
    reader.close()

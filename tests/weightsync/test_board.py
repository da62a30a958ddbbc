"""Notes in a store: each call ends by its deadline, whatever the store does."""

import json
import random
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from primeblocks.errors import CapacityError, CorruptionError, DeadlineError, TransferError
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import board as board_module
from primeblocks.weightsync.transports.board import Board, Go, Transaction
from primeblocks.weightsync.transports.store_commits import StoreCommits
from tests.deadlines import HANG_S

SOON_S = 0.2
GRACE_S = board_module._GRACE_S


class Store(dist.Store):
    """A dictionary that hangs or fails where it is told to."""

    def __init__(self):
        super().__init__()
        self.notes, self.hangs, self.fails, self.asked = {}, set(), set(), []
        self.hanging, self.let_go = threading.Event(), threading.Event()

    def _meet(self, method):
        self.asked.append(method)
        if method in self.hangs:
            self.hanging.set()
            self.let_go.wait()
            self.hanging.clear()
        if method in self.fails:
            raise RuntimeError("connection reset\nwith a stack below")

    def add(self, key, amount):
        self._meet("add")
        self.notes[key] = total = self.notes.get(key, 0) + amount
        return total

    def set(self, key, value):
        self._meet("set")
        self.notes[key] = value

    def check(self, keys):
        self._meet("check")
        return all(key in self.notes for key in keys)

    def get(self, key):
        self._meet("get")
        return self.notes[key].encode()

    def compare_set(self, key, expected, desired):
        self._meet("compare_set")
        if self.notes.get(key, "") == expected:
            self.notes[key] = desired
        return self.notes[key].encode()


class Patience:
    """How long a board would wait for a store that hangs, by a clock that it moves. See `store`."""

    def __init__(self, store, monkeypatch, *, then=lambda: None):
        self.clock, self.waited_s = ManualClock(time.monotonic()), []
        join = threading.Thread.join

        def patient(thread, timeout_s):
            while thread.is_alive() and not store.hanging.is_set():
                join(thread, 0.001)
            if thread.is_alive():
                self.waited_s.append(timeout_s)
                self.clock.advance(timeout_s)
                then()
                if store.let_go.is_set():
                    join(thread)

        thread = type("Thread", (threading.Thread,), {"join": patient})
        fake = SimpleNamespace(Thread=thread, Event=threading.Event)
        monkeypatch.setattr(board_module, "threading", fake)
        monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=self.clock.now))
        left_s = lambda deadline: max(0.0, deadline - self.clock.now())  # noqa: E731
        monkeypatch.setattr(board_module, "left_s", left_s)


@pytest.fixture
def store():
    store = Store()
    yield store
    store.let_go.set()


def soon(seconds=SOON_S):
    return time.monotonic() + seconds


CALLS_UNTIL = {
    "add": lambda board, until: board.add("n", 1, deadline=until),
    "set": lambda board, until: board.post("k", "text", deadline=until),
    "compare_set": lambda board, until: board.replace("k", "", "text", deadline=until),
    "check": lambda board, until: board.read("there", deadline=until),
    "get": lambda board, until: board.read("there", deadline=until, waits=False),
}
CALLS = {name: lambda board, call=call: call(board, soon()) for name, call in CALLS_UNTIL.items()}


def test_notes_are_read_and_the_first_stands(store):
    board, other = Board(store, "a"), Board(store, "b")
    board.post("k", "text", deadline=soon())
    assert board.read("k", deadline=soon()) == "text"
    assert other.read("k", deadline=soon(0.01)) is None
    assert [board.add("n", by, deadline=soon()) for by in (1, 2)] == [1, 3]
    assert [board.replace("f", "", word, deadline=soon()) for word in "xy"] == ["x", "x"]
    assert board.read_any(["none", "f"], deadline=soon()) == ("f", "x")


def test_a_note_is_waited_for_in_pauses_that_grow(store, monkeypatch):
    pauses, post = [], lambda: len(pauses) < 9 or store.set("a/k", "text")
    event = type("Event", (), {"wait": lambda _, seconds: pauses.append(seconds) or post()})
    fake = SimpleNamespace(Thread=threading.Thread, Event=event)
    monkeypatch.setattr(board_module, "threading", fake)
    assert Board(store, "a").read("k", deadline=soon(HANG_S)) == "text"
    assert pauses == [0.005, 0.01, 0.02, 0.04] + 5 * [0.05]


def test_a_deadline_in_the_past_still_looks_once(store):
    board = Board(store, "a")
    board.post("k", "text", deadline=0.0)
    assert board.read("k", deadline=0.0) == "text"
    assert board.read("none", deadline=0.0) is None


@pytest.mark.parametrize("method", CALLS)
def test_a_store_that_hangs_is_given_up_and_asked_again_once_it_answers(method, store, monkeypatch):
    patience = Patience(store, monkeypatch)
    now = patience.clock.now
    store.notes["a/there"] = "text"
    store.hangs = {method}
    board = Board(store, "a")
    deadline = now() + 5
    with pytest.raises(TransferError, match="does not answer in time"):
        CALLS_UNTIL[method](board, deadline)
    assert patience.waited_s == [pytest.approx(5 + GRACE_S)]
    for late_s in (0, 3):  # No second call beside it, and nothing is waited for twice.
        with pytest.raises(TransferError, match="does not answer in time"):
            board.add("n", 1, deadline=now() + late_s)
    assert patience.waited_s[1:] == [0, pytest.approx(3)]
    assert store.asked.count(method) == 1
    store.let_go.set()
    assert board.add("n", 1, deadline=now() + 5) == 1 + (method == "add")
    assert CALLS_UNTIL[method](board, now() + 5) != ""


def test_a_note_is_written_over_only_by_whom_has_read_it(store):
    board = Board(store, "a")
    board.post("k", "1", deadline=soon())
    assert board.replace("k", "1", "2", deadline=soon()) == "2"
    assert board.replace("k", "1", "3", deadline=soon()) == "2"
    assert board.read("k", deadline=soon(), waits=False) == "2"
    assert board.read("none", deadline=0.0, waits=False) is None


@pytest.mark.parametrize("method", CALLS)
def test_a_store_that_fails_is_a_typed_error_and_asked_again(method, store):
    store.notes["a/there"] = "text"
    store.fails = {method}
    board = Board(store, "a")
    with pytest.raises(TransferError, match="the store does not answer: connection reset$"):
        CALLS[method](board)
    store.fails = set()
    CALLS[method](board)


@pytest.mark.parametrize(
    "write", [Board.post, lambda b, k, text, **how: b.replace(k, "", text, **how)]
)
def test_a_note_that_would_end_the_connection_is_not_sent(write):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False), "a")
    most = board_module._MAX_BYTES
    with pytest.raises(CapacityError, match=r"8,388,609 bytes, .* Pass a larger bucket_bytes"):
        write(board, "k", "x" * (most + 1), deadline=soon(HANG_S))
    write(board, "k", "x" * most, deadline=soon(HANG_S))
    assert board.read("k", deadline=soon(HANG_S)) == "x" * most


def test_notes_are_emptied_if_the_store_answers(store):
    board = Board(store, "a")
    for fails in ({"set"}, set()):
        store.notes["a/k"] = "text"
        store.fails = fails
        board.clear(["k", "none"], deadline=soon())
        assert bool(store.notes["a/k"]) is bool(fails)


@pytest.fixture
def ranks_of(store):
    """Two readers and rank 0 of one transaction."""
    return [Transaction(Board(store, "t"), 1, rank=rank) for rank in range(3)]


def test_it_begins_once_all_have_come_or_is_called_off(ranks_of):
    trainer, reader, other = ranks_of
    trainer.post("begun", {"version": 3, "plan": "p"}, deadline=soon())
    assert reader.read_begun(deadline=soon()) == {"version": 3, "plan": "p"}
    reader.post("join/0", 2, deadline=soon())
    assert trainer.read_join(0, deadline=soon()) == 2
    with pytest.raises(TransferError, match="reader 1 did not ask in time"):
        trainer.read_join(1, deadline=soon(0.01))
    assert reader.read_go(deadline=soon(0.01)) is None
    assert reader.decide(Go(None, "too late"), deadline=soon()) == Go(None, "too late")
    assert trainer.decide(Go(2, ""), deadline=soon()) == Go(None, "too late")
    with pytest.raises(TransferError, match="too late"):
        trainer.read_join(1, deadline=soon())
    assert other.read_begun(deadline=soon()) == {}


def test_what_began_cannot_be_called_off(ranks_of):
    trainer, reader, _ = ranks_of
    assert trainer.decide(Go(2, ""), deadline=soon()) == Go(2, "")
    assert reader.decide(Go(None, "too late"), deadline=soon()) == Go(2, "")
    assert reader.read_go(deadline=soon()) == Go(2, "")


def test_the_last_vote_commits_and_the_first_word_stands(ranks_of):
    trainer, reader, other = ranks_of
    with pytest.raises(DeadlineError, match="the marker did not arrive"):
        reader.read_or_abort("marker", deadline=soon(0.01))
    for one in (reader, other):
        one.vote(2, deadline=soon())
    assert trainer.abort("late", deadline=soon()) == "commit"
    trainer.finish(lambda: None, deadline=soon())
    with pytest.raises(TransferError, match="commit"):
        reader.read_or_abort("marker", deadline=soon())


def test_one_vote_is_not_enough(ranks_of):
    trainer, reader, _ = ranks_of
    reader.vote(2, deadline=soon())
    with pytest.raises(
        TransferError, match="abort: rank 0 waited for the other ranks until the deadline"
    ):
        trainer.finish(lambda: None, deadline=soon(0.01))
    with pytest.raises(TransferError, match="abort: rank 0"):
        reader.finish(lambda: None, deadline=soon())


def test_whose_last_answer_is_lost_follows_what_was_decided(ranks_of, store):
    trainer, reader, other = ranks_of

    def lost():
        reader.vote(2, deadline=soon())
        other.vote(2, deadline=soon())
        raise TransferError("reset after the vote")

    reader.finish(lost, deadline=soon())
    trainer.finish(lambda: None, deadline=soon())


# --- commits -----------------------------------------------------------------------------------


class Between(Store):
    """A store in which something happens after its first answer to a method."""

    def happens_after(self, method, what):
        inner = getattr(self, method)

        def answer(*args):
            setattr(self, method, inner)
            found = inner(*args)
            what()
            return found

        setattr(self, method, answer)


@pytest.mark.parametrize("between", ["look and count of a reader", "count and look of the owner"])
def test_of_an_owner_and_a_reader_at_the_same_time_one_sees_the_other(between):
    store, outcome = Between(), []
    owner = StoreCommits(store, owner=True, lease_s=100.0)
    reader = StoreCommits(store, owner=False)
    start = time.monotonic()
    owner.begin(1, keep=[], deadline=start + 100)
    marker = Marker.make(run=owner.run, version=1, plan="", sizes=(), buckets=())
    owner.commit(marker, deadline=start + 100)

    def retire():
        with suppress(CapacityError):
            until = start + 100 * (between == "count and look of the owner")
            owner.begin(2, keep=[], deadline=until)
            outcome.append("retired")

    def hold():
        with suppress(TransferError):
            reader.hold(marker, deadline=start + 100)
            outcome.append("held")

    if between == "look and count of a reader":
        store.happens_after("get", retire)
        hold()
    else:
        store.happens_after("add", hold)
        retire()
    assert len(outcome) == 1


def made(owner, version, *, keep=(), buckets=()):
    owner.begin(version, keep=keep, deadline=soon(HANG_S))
    sizes = (1,) * len(buckets)
    marker = Marker.make(run=owner.run, version=version, plan="", sizes=sizes, buckets=buckets)
    owner.commit(marker, deadline=soon(HANG_S))
    return marker


def marker_notes(store):
    return [
        key.rsplit("/marker-", 1)[1]
        for key in store.notes
        if "/marker-" in key and store.notes[key]
    ]


def test_each_marker_is_read_once_and_emptied_with_its_version(store):
    owner, reader = StoreCommits(store, owner=True), StoreCommits(store)
    first = made(owner, 1)
    second = made(owner, 2, keep=[first])
    for reads in (3, 1):  # The list, and each new marker.
        store.asked.clear()
        assert reader.markers(deadline=soon(HANG_S)) == (first, second)
        assert store.asked.count("get") == reads
    owner.begin(3, keep=[second], deadline=soon(HANG_S))
    assert marker_notes(store) == [second.digest]
    assert reader.markers(deadline=soon(HANG_S)) == (second,)
    owner.close()
    assert marker_notes(store) == []


class Publishes(dist.Store):
    """A TCPStore in which something happens after the next look for a marker."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.then = inner, None

    def check(self, keys):
        found = self.inner.check(keys)
        if "/marker-" in keys[0] and self.then is not None:
            then, self.then = self.then, None
            then()
        return found

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, amount):
        return self.inner.add(key, amount)


def test_a_marker_that_goes_while_it_is_read_does_not_hang_its_reader():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = Publishes(dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False))
    owner, reader = StoreCommits(host, owner=True), StoreCommits(store)
    made(owner, 1)
    later = []
    store.then = lambda: later.append(made(owner, 2))
    assert reader.markers(deadline=soon(HANG_S)) == tuple(later)


def test_a_reader_whose_marker_is_emptied_between_its_reads_reads_the_list_again():
    store, later = Between(), []
    owner, reader = StoreCommits(store, owner=True), StoreCommits(store)
    made(owner, 1)
    store.happens_after("get", lambda: later.append(made(owner, 2)))
    assert reader.markers(deadline=soon(HANG_S)) == tuple(later)
    del store.notes[next(key for key in store.notes if later[0].digest in key)]
    with pytest.raises(CorruptionError, match="lost the marker of a version"):
        StoreCommits(store).markers(deadline=soon(HANG_S))


def test_a_long_plan_and_a_long_chain_fit_into_a_store_of_small_values(monkeypatch):
    monkeypatch.setattr(board_module, "_MAX_BYTES", 1 << 16)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False) for _ in range(2)]
    owner, reader = StoreCommits(clients[0], owner=True), StoreCommits(clients[1])
    text = json.dumps([{"name": "experts", "index": index} for index in range(1 << 12)])
    assert len(text) > board_module._MAX_BYTES
    owner.post("announced", text, deadline=soon(HANG_S))
    assert reader.look("announced", deadline=soon(HANG_S)) == text
    buckets = tuple(random.Random(0).randbytes(1 << 14).hex(" ", 16).split())
    markers = []
    for version in range(4):
        markers.append(made(owner, version, keep=markers, buckets=buckets))
    assert sum(len(marker.to_json()) for marker in markers) > board_module._MAX_BYTES
    assert reader.markers(deadline=soon(HANG_S)) == tuple(markers)

"""No call hangs and no thread ends, whatever a tier, a policy or a copy does."""

import threading

import numpy as np
import pytest

from primeblocks.errors import CancelledError
from primeblocks.kvoffload import TieredStore, copier
from primeblocks.kvoffload.moves import (
    Ask,
    HostPage,
    LoadRequest,
    LowerCopy,
    Write,
)
from primeblocks.kvoffload.worker import TierWorker
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of, load, page_of, save

pytestmark = pytest.mark.usefixtures("patient")


@pytest.mark.parametrize("answer", [RuntimeError("a client of C++"), []])
def test_a_tier_that_does_not_say_what_it_holds_costs_a_miss(host, memory, answer):
    below = memory(0, common={})

    def holds(keys):
        if isinstance(answer, Exception):
            raise answer
        return answer

    below.holds = holds
    with TieredStore([host(1), below]) as store:
        assert load(store, 0) is None
        assert load(store, 0) is None
        assert store.holds([key_of(0)]).wait(timeout_s=SOON) == [False]


def test_a_tier_that_answers_for_too_few_pages_goes_on(host, memory):
    below = memory(4)
    put = below.put
    below.put = lambda records: []
    with TieredStore([host(1), below]) as store:
        save(store, 0)
        store.save(key_of(1), page_of(1)).wait(timeout_s=SOON)
        below.put = put
        assert store.statistics()["memory"].failures == 1


def test_writes_move_under_constant_questions(host, memory):
    below, slab, put = memory(0, common={}), host(2), threading.Event()
    rounds = []

    def ask_again(keys):
        rounds.append(len(keys))
        if len(rounds) < 200 and not put.is_set():
            worker.give(Ask(0, LoadRequest(key_of(9))))
        return [False] * len(keys)

    def kept(records):
        put.set()
        return [None] * len(records)

    below.holds, below.put = ask_again, kept
    worker = TierWorker(below, slab, report=lambda outcomes: None)
    worker._order.changed.acquire()
    worker.give(Ask(0, LoadRequest(key_of(9))))
    worker.give(Write(0, HostPage(key_of(0), frame=0, length=PAGE), LowerCopy(here=False)))
    worker._order.changed.release()
    worker.stop().join(SOON)
    assert put.is_set()
    assert len(rounds) < 20


def test_closing_finishes_what_a_save_leads_to(host, memory, monkeypatch):
    go, copy = threading.Event(), copier.copy_pages
    monkeypatch.setattr(copier, "copy_pages", lambda *a, **to: (go.wait(0.2), copy(*a, **to)))
    below = memory(4)
    store = TieredStore([host(3), below], write="through")
    store.save(key_of(0), page_of(0))
    store.close()
    assert below.holds([key_of(0)]) == [True]


def test_a_batch_that_failed_touches_no_buffer_later(host, monkeypatch):
    go, entered, copy = threading.Event(), threading.Event(), copier.copy_pages

    def slow(pages, rooms, **how):
        if rooms[0][0] == 1:
            entered.wait(SOON)
            raise RuntimeError("CUDA")
        entered.set()
        go.wait(SOON)
        copy(pages, rooms, **how)

    monkeypatch.setattr(copier, "_TOGETHER_PAGES", 1)  # so that two threads copy
    with TieredStore([host(3)]) as store:
        for number in (1, 2):
            save(store, number)
        monkeypatch.setattr(copier, "copy_pages", slow)
        into = [np.zeros(PAGE, np.uint8) for _ in range(2)]
        pending = store.load_batch([key_of(1), key_of(2)], into=into)
        threading.Timer(0.1, go.set).start()
        with pytest.raises(RuntimeError, match="CUDA"):
            pending.wait(timeout_s=SOON)
        before = into[1].copy()
        store.close()
        assert np.array_equal(into[1], before), "written after wait had raised"


@pytest.mark.parametrize("error", [OSError("read-only"), RuntimeError("read-only: a bug")])
@pytest.mark.parametrize("call", ["clear", "flush", "drop"])
def test_what_a_tier_could_not_do_is_said_once_and_service_goes_on(host, memory, call, error):
    below = memory(4)

    def fail(*_):
        raise error

    with TieredStore([host(1), below]) as store:
        save(store, 0)
        save(store, 1)
        setattr(below, call, fail)
        save(store, 0)
        ask = store.clear if call == "clear" else store.flush
        with pytest.raises(type(error), match="read-only"):
            ask().wait(timeout_s=SOON)
        delattr(below, call)
        ask().wait(timeout_s=SOON)
        save(store, 2)
        save(store, 3)
        assert load(store, 2) == "memory"


def test_giving_up_waits_for_a_copy_that_began(host, monkeypatch):
    go, entered, copy = threading.Event(), threading.Event(), copier.copy_pages

    def slow(pages, rooms, **how):
        entered.set()
        go.wait(SOON)
        copy(pages, rooms, **how)

    with TieredStore([host(1)]) as store:
        save(store, 0)
        monkeypatch.setattr(copier, "copy_pages", slow)
        into = np.ones(PAGE, np.uint8)
        pending = store.load(key_of(0), into=into)
        assert entered.wait(SOON)
        threading.Timer(0.1, go.set).start()
        pending.cancel()
        assert not into.any(), "still being written"


def test_a_batch_given_up_between_two_copies_has_no_result(host, monkeypatch):
    entered, go, copy = threading.Event(), threading.Event(), copier.copy_pages

    def slow(pages, rooms, **how):
        entered.set()
        go.wait(SOON)
        copy(pages, rooms, **how)

    monkeypatch.setattr(copier, "_TOGETHER_PAGES", 1)
    with TieredStore([host(2)], copy_threads=1) as store:
        save(store, 0)
        save(store, 1)
        monkeypatch.setattr(copier, "copy_pages", slow)
        into = [np.zeros(PAGE, np.uint8) for _ in range(2)]
        pending = store.load_batch([key_of(0), key_of(1)], into=into)
        assert entered.wait(SOON)
        with pending.buffers():  # As a copy of another thread that still runs.
            giver = threading.Thread(target=pending.cancel)
            giver.start()
            held = True
            while held:
                with pending.buffers() as held:
                    pass
            go.set()
            assert load(store, 0) == "host"  # Copies are made in order.
            assert not pending.done()
        giver.join(SOON)
        with pytest.raises(CancelledError):
            pending.wait(timeout_s=0)


def test_what_was_given_up_is_not_even_read(host, memory, monkeypatch):
    below = memory(4)
    below.stuck = True
    with TieredStore([host(1), below]) as store:
        save(store, 0)
        copies = []
        monkeypatch.setattr(copier, "copy_pages", lambda *pages, **to: copies.append(pages))
        slow = store.save(key_of(1), page_of(1))
        assert below.entered.wait(SOON)
        late = store.load(key_of(1), into=np.zeros(PAGE, np.uint8))
        assert slow.cancel()
        assert late.cancel()
        below.release.set()
    assert copies == []


def test_a_copy_that_fails_is_heard_and_stores_nothing(host, monkeypatch):
    def broken(pages, rooms, **how):
        raise RuntimeError("CUDA")

    with TieredStore([host(1)]) as store:
        with monkeypatch.context() as patch:
            patch.setattr(copier, "copy_pages", broken)
            with pytest.raises(RuntimeError, match="CUDA"):
                save(store, 0)
        assert load(store, 0) is None
        assert save(store, 0).stored

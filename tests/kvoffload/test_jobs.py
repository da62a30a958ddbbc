"""Batches for a caller that must not wait."""

import threading

import numpy as np
import pytest

from primeblocks.errors import ClosedError
from primeblocks.kvoffload import Loaded, PageKey, Saved, TieredStore
from primeblocks.kvoffload.jobs import PageJobs
from primeblocks.kvoffload.pending import Pending
from primeblocks.testing.faults import ManualClock

PAGE, SOON = 48, 5.0


def keys(*numbers):
    return [PageKey("s", bytes([number])) for number in numbers]


def rows(*numbers):
    return [np.full(PAGE, number, np.uint8) for number in numbers]


@pytest.fixture
def store(host):
    with TieredStore([host(8)]) as store:
        yield store


@pytest.fixture
def jobs(store):
    return PageJobs(store, timeout_s=SOON)


def drained(jobs, *, timeout_s=SOON):
    jobs.drain(timeout_s=timeout_s)
    return jobs.finished()


def test_a_batch_reports_each_page(jobs):
    jobs.save(7, keys(1, 2), rows(1, 2), attachments=[{"routes": b"ab"}, None])
    into = rows(0, 0, 0)
    jobs.load(8, keys(1, 5, 2), into)
    saved, loaded = drained(jobs)
    assert (saved.id, saved.succeeded, saved.attachments) == (7, (True, True), ({}, {}))
    assert (loaded.id, loaded.succeeded) == (8, (True, False, True))
    assert loaded.attachments == ({"routes": b"ab"}, {}, {})
    assert [row[0] for row in into] == [1, 0, 2]
    assert jobs.finished() == []


def test_a_batch_is_reported_once_it_is_over(jobs, store):
    jobs.save(1, keys(1), rows(1), attachments=[None])
    store.load(keys(1)[0], into=rows(0)[0]).wait(timeout_s=SOON)  # sees every save before it
    assert [job.id for job in jobs.finished()] == [1]
    assert jobs.finished() == []


def test_a_page_that_is_there_is_not_saved_again(jobs, store):
    jobs.save(0, keys(1), rows(1), attachments=[None])
    drained(jobs)
    jobs.save(1, keys(2, 1, 3), rows(2, 1, 3), attachments=[None] * 3)
    (job,) = drained(jobs)
    assert job.succeeded == (True, True, True)
    assert store.statistics()["host"].stores == 3


def test_a_declined_page_counts_as_failed(host):
    with TieredStore([host(1)], max_pending=1) as store:
        jobs = PageJobs(store, timeout_s=SOON)
        jobs.save(0, keys(*range(9)), rows(*range(9)), attachments=[None] * 9)
        (job,) = drained(jobs)
        assert not all(job.succeeded)
        assert any(job.succeeded)


class StuckStore(TieredStore):
    """A fake: takes batches and never finishes them."""

    def __init__(self):
        pass

    def __contains__(self, key):
        return False

    def save_batch(self, keys, pages, *, attachments, rollout):
        self.pending = Pending()
        return self.pending

    def load_batch(self, keys, *, into, rollout):
        self.pending = Pending()
        return self.pending


@pytest.mark.parametrize("saves", [True, False])
def test_a_batch_is_given_up_at_its_deadline(saves):
    clock, store = ManualClock(), StuckStore()
    jobs = PageJobs(store, timeout_s=2.0, clock=clock.now)
    if saves:
        jobs.save(3, keys(1, 2), rows(1, 2), attachments=[None] * 2)
    else:
        jobs.load(3, keys(1, 2), rows(1, 2))
    clock.advance(1.5)
    assert jobs.finished() == []
    clock.advance(0.5)
    (job,) = jobs.finished()
    assert (job.id, job.succeeded, job.seconds) == (3, (False, False), 2.0)
    with store.pending.buffers() as held:
        assert not held, "its pages may still be read or written"
    assert jobs.finished() == []


def test_a_drain_gives_up_what_takes_longer():
    jobs = PageJobs(StuckStore(), timeout_s=SOON)
    jobs.load(0, keys(1), rows(0))
    jobs.load(1, keys(1), rows(0))
    assert [job.succeeded for job in drained(jobs, timeout_s=0.0)] == [(False,), (False,)]


def test_a_drain_ends_whatever_a_copy_raised_and_keeps_each_time():
    clock, store = ManualClock(), StuckStore()
    jobs = PageJobs(store, timeout_s=SOON, clock=clock.now)
    for number, end in enumerate((Pending.fail, Pending.finish)):
        jobs.save(number, keys(number), rows(number), attachments=[None])
        end(store.pending, MemoryError("no room") if end is Pending.fail else [Saved(True)])
    for _ in range(2):
        clock.advance(1.0)
        jobs.drain(timeout_s=SOON)
    with pytest.raises(MemoryError):
        jobs.finished()
    (job,) = jobs.finished()
    assert (job.id, job.seconds) == (1, 1.0)


def test_a_late_answer_of_success_is_kept(host):
    clock = ManualClock()
    with TieredStore([host(8)]) as store:
        jobs = PageJobs(store, timeout_s=2.0, clock=clock.now)
        jobs.save(0, keys(1), rows(1), attachments=[None])
        store.load(keys(1)[0], into=rows(0)[0]).wait(timeout_s=SOON)
        clock.advance(9)
        assert [job.succeeded for job in jobs.finished()] == [(True,)]


def test_rest_ends_with_the_batch_and_gives_nothing_up():
    store = StuckStore()
    jobs = PageJobs(store, timeout_s=SOON)
    jobs.load(0, keys(1), rows(0))
    jobs.rest(0, at_most_s=1e-3)
    assert jobs.finished() == []
    with store.pending.buffers() as held:
        assert held
    ends = threading.Thread(target=lambda: store.pending.finish([Loaded("disk")]))
    with store.pending._changed:  # rest waits in here, or comes later
        ends.start()
        jobs.rest(0, at_most_s=60.0)
    ends.join()
    assert [job.succeeded for job in jobs.finished()] == [(True,)]
    jobs.rest(0, at_most_s=60.0)


def test_nothing_starts_on_a_closed_store(jobs, store):
    store.close(timeout_s=SOON)
    with pytest.raises(ClosedError):
        jobs.save(0, keys(1), rows(1), attachments=[None])
    with pytest.raises(ClosedError):
        jobs.load(0, keys(1), rows(0))
    assert drained(jobs) == []


def test_outcomes_follow_the_stores_answers():
    store = StuckStore()
    jobs = PageJobs(store, timeout_s=SOON)
    jobs.save(0, keys(1, 2), rows(1, 2), attachments=[None] * 2)
    store.pending.finish([Saved(stored=False, reason="full"), Saved(stored=True)])
    jobs.load(1, keys(1, 2), rows(1, 2))
    store.pending.finish([Loaded("disk", {"a": b"1"}), Loaded(None)])
    saved, loaded = jobs.finished()
    assert saved.succeeded == (False, True)
    assert loaded.succeeded == (True, False)
    assert loaded.attachments == ({"a": b"1"}, {})

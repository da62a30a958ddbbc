"""Batches for a caller that must not wait."""

import threading

import numpy as np
import pytest

from primeblocks.errors import ClosedError, DeadlineError
from primeblocks.kvoffload import PageKey, TieredStore
from primeblocks.kvoffload.jobs import PageJobs

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
    jobs = PageJobs(store, page_timeout_s=SOON)
    yield jobs
    jobs.close(timeout_s=SOON)


def test_a_batch_reports_each_page(jobs):
    jobs.save(7, keys(1, 2), rows(1, 2))
    into = rows(0, 0, 0)
    jobs.load(8, keys(1, 5, 2), into)
    jobs.drain(timeout_s=SOON)
    saved, loaded = jobs.finished()
    assert (saved.id, saved.succeeded) == (7, (True, True))
    assert (loaded.id, loaded.succeeded) == (8, (True, False, True))
    assert [row[0] for row in into] == [1, 0, 2]
    assert jobs.finished() == []


def test_a_page_that_is_there_is_not_saved_again(jobs, store):
    jobs.save(0, keys(1), rows(1))
    jobs.save(1, keys(1), rows(1))
    jobs.drain(timeout_s=SOON)
    assert [job.succeeded for job in jobs.finished()] == [(True,), (True,)]
    assert store.statistics()["host"].stores == 1


def test_calls_return_while_a_batch_is_stuck_and_waits_have_deadlines(host):
    entered, release = threading.Event(), threading.Event()
    tier = host(2)
    put = tier.put

    def slow(*page):
        entered.set()
        assert release.wait(SOON)
        put(*page)

    tier.put = slow
    with TieredStore([tier]) as store:
        jobs = PageJobs(store, page_timeout_s=0.01)
        jobs.save(0, keys(1), rows(1))
        assert entered.wait(SOON)
        jobs.load(1, keys(1), rows(0))
        with pytest.raises(DeadlineError, match="batches"):
            jobs.drain(timeout_s=0)
        with pytest.raises(DeadlineError, match="batches"):
            jobs.close(timeout_s=0)
        jobs.close(timeout_s=SOON)  # both batches gave up at the deadline of a page
        assert [job.succeeded for job in jobs.finished()] == [(False,), (False,)]
        with pytest.raises(ClosedError):
            jobs.save(2, keys(1), rows(1))
        release.set()


def test_a_batch_that_cannot_even_start_fails_and_the_next_one_works(jobs, store, caplog):
    jobs.load(0, keys(1, 2), [bytearray(PAGE), bytearray(PAGE - 1)])
    jobs.save(1, keys(1), rows(1))
    jobs.drain(timeout_s=SOON)
    assert [job.succeeded for job in jobs.finished()] == [(False, False), (True,)]
    assert "2 pages failed" in caplog.text

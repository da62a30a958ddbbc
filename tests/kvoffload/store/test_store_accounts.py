"""What is found after a clear, what counts say, what ended rollouts and late saves leave behind."""

import numpy as np
import pytest

from primeblocks.errors import CapacityError, CorruptionError
from primeblocks.kvoffload import HostTier, TieredStore, copier
from primeblocks.kvoffload.evict import RolloutAware, VersionAware, lru
from primeblocks.kvoffload.moves import Ask, CopyIn, PageRead, SaveRequest, Write
from primeblocks.testing.faults import ManualClock
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of, level_of, load, page_of, save
from tests.kvoffload.store.test_catalogue_steps import Steps

pytestmark = pytest.mark.usefixtures("patient")


def test_no_load_after_clear_finds_a_page_of_a_shared_tier(host, memory):
    below = memory(0, common={})
    with TieredStore([host(2), below], write="through") as store:
        save(store, 0)
        store.flush().wait(timeout_s=SOON)
        below.stuck = True
        store.save(key_of(1), page_of(1)).wait(timeout_s=SOON)
        assert below.entered.wait(SOON)
        store.clear()
        into = np.zeros(PAGE, np.uint8)
        late, held = store.load(key_of(0), into=into), store.holds([key_of(0)])
        below.release.set()
        assert not late.wait(timeout_s=SOON)
        assert held.wait(timeout_s=SOON) == [False]


def test_a_question_asked_before_clear_brings_no_page_back():
    steps = Steps(2, level_of(name="common", shared=True))
    _, (ask,) = steps.load(0, hold=Ask)
    steps.catalogue.clear()
    steps.catalogue.asked(ask, held=True)
    steps.settle()
    assert not steps.catalogue.knows(key_of(0))


def test_a_full_tier_is_written_in_batches_too(host, memory):
    below = memory(32)
    puts, drops = [], []
    put, drop = below.put, below.drop
    below.put = lambda records: (puts.append(len(records)), put(records))[1]
    below.drop = lambda keys: (drops.append(len(keys)), drop(keys))[1]
    with TieredStore([host(32), below], write="through") as store:
        for start in (0, 32, 64):
            keys = [key_of(start + n) for n in range(32)]
            store.save_batch(keys, [page_of(n) for n in range(32)]).wait(timeout_s=SOON)
            store.flush().wait(timeout_s=SOON)
            if start == 0:
                puts.clear()
    assert sum(puts) == 64
    assert len(puts) < 32
    assert len(drops) < 32


def test_a_page_that_is_used_before_it_left_was_not_evicted():
    steps = Steps(16, level_of(pages=64), max_pending=16)
    steps.save(*range(16))
    for _ in range(50):
        (leaving,) = steps.catalogue._leaving
        steps.load(leaving.key.hash[0])
    count = steps.count("host")
    assert (count.stores, count.pages, count.evictions) == (16, 16, 0)


def test_without_a_tier_below_no_page_is_chosen_ahead_of_need():
    asked = []
    steps = Steps(32, evict=lambda snapshot: asked.append(1) or lru(snapshot))
    steps.save(*range(32))
    for number in range(32):
        steps.load(number)
    assert len(asked) == 0
    steps.save(40)
    assert len(asked) == 1


@pytest.mark.parametrize("held", [CopyIn, Write])
def test_a_rollout_that_ended_stays_ended(held):
    level = level_of(evict=VersionAware(9))
    steps = Steps(1, level, evict=VersionAware(9))
    _, waiting = steps.save(0, users=("one",), hold=held)
    if held is Write:
        _, waiting = steps.save(1, hold=held)
    steps.catalogue.end("one")
    for move in waiting:
        if isinstance(move, CopyIn):
            steps.catalogue.copied_in(move, copied=True)
            steps.settle()
            assert steps.catalogue._ledger.rollouts(key_of(0)) == ()
        else:
            steps.catalogue.written(move, None)
            assert level.ledger.rollouts(key_of(0)) == ()


def test_a_load_says_which_tier_served_it():
    steps = Steps(2, level_of([0]))
    request, (read,) = steps.load(0, hold=PageRead)
    steps.catalogue.save([SaveRequest(key_of(0), 1)])  # a newer page, in host memory
    steps.catalogue.read(read, length=0, error=CorruptionError("a flipped bit"))
    steps.settle()
    assert request.tier == "host"


def test_demoted_pages_keep_the_order_of_their_rollout():
    """A rollout's last page leaves host memory first, and is the first to leave the disk too."""
    level = level_of(pages=3, evict=RolloutAware(1))
    for number in (2, 1, 0):
        copy, _ = level.admit(key_of(number), version=0, feed=1)
        level.written(key_of(number), copy, length=1, users=("one",))
    (one,) = level.ledger.snapshot(version=0).live
    assert one.page.key == key_of(2)


def test_pages_refused_together_leave_a_full_tier_what_it_holds():
    level = level_of()
    pages = [(key_of(n), level.admit(key_of(n), version=0, feed=1)[0]) for n in range(5)]
    for key, copy in pages[:3]:
        level.written(key, copy, length=1, users=())
    for key, copy in pages[3:]:  # Admitted before the first was refused; no page left for them.
        level.refused(key, copy, CapacityError("full"))
    assert level.breaker.room == 3
    copy, left = level.admit(key_of(9), version=0, feed=1)
    assert copy is not None
    assert left == key_of(0)
    level.refused(key_of(9), copy, CapacityError("full"))
    assert level.admit(key_of(9), version=0, feed=1) == (None, None)  # Until the rest is over.


def test_a_flush_trades_no_kept_pages_for_trials():
    clock = ManualClock()
    level = level_of(range(8), clock=clock.now)
    copy, _ = level.admit(key_of(50), version=0, feed=1)
    level.refused(key_of(50), copy, OSError(5, "input/output error"))
    clock.advance(1.1)
    left = 0
    for number in range(60, 68):
        copy, victim = level.admit(key_of(number), version=0, feed=None)
        left += victim is not None
        if copy is not None:
            level.breaker.given(write=True)
    assert left == 0  # One went to the place that the refused page left.
    assert level.counts["skipped"] == 7


def test_a_flush_into_a_full_tier_evicts_one_for_one():
    level = level_of(range(3))
    copy, _ = level.admit(key_of(50), version=0, feed=1)
    level.refused(key_of(50), copy, CapacityError("full"))
    for number in range(60, 65):
        assert level.admit(key_of(number), version=0, feed=None)[1] is None
    copy, left = level.admit(key_of(70), version=0, feed=None)
    assert copy is not None
    assert left == key_of(0)


def test_superseded_saves_do_not_use_up_the_bound():
    steps = Steps(1, level_of(), max_pending=2)
    steps.save(0)
    for _ in range(4):
        steps.catalogue.save([SaveRequest(key_of(1), 1)])
    steps.settle()
    assert steps.catalogue.knows(key_of(1))


def test_damage_in_a_shared_tier_is_dropped(host, memory):
    below = memory(0, common={})
    with TieredStore([host(1), below], write="through") as store:
        save(store, 0)
        save(store, 1)
        store.flush().wait(timeout_s=SOON)
        below.damage(key_of(0))
        assert load(store, 0) is None
        store.flush().wait(timeout_s=SOON)
        assert key_of(0) not in below.pages


@pytest.mark.parametrize(
    ("page_bytes", "pages", "threads", "parts"),
    [(1 << 20, 8, 2, [4, 4]), (64 << 10, 8, 2, [8]), (1 << 20, 20, 1, [16, 4])],
    ids=["threads share large pages", "not a few small ones", "at most 16 MiB together"],
)
def test_a_batch_is_copied_in_few_parts(page_bytes, pages, threads, parts, monkeypatch):
    made, copy = [], copier.copy_pages
    monkeypatch.setattr(
        copier,
        "copy_pages",
        lambda pages, *a, **to: (made.append(len(pages)), copy(pages, *a, **to)),
    )
    slab = HostTier(capacity_bytes=pages * page_bytes, page_bytes=page_bytes)
    with TieredStore([slab], copy_threads=threads) as store:
        keys = [key_of(number) for number in range(pages)]
        page = np.ones(page_bytes, np.uint8)
        store.save_batch(keys, [page] * pages).wait(timeout_s=SOON)
        assert sorted(made, reverse=True) == parts
        store.load_batch(keys, into=[page] * pages).wait(timeout_s=SOON)
        assert sorted(made, reverse=True) == sorted([*parts, *parts], reverse=True)

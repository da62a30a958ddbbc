import threading
from collections import Counter

import numpy as np
import pytest

from primeblocks.contrib.route_store import RouteStore
from primeblocks.errors import ShapeError, UsageError
from primeblocks.replay import Routes
from tests.contrib import route_schedule
from tests.deadlines import HANG_S

PAGE_TOKENS = 4
PAGE_BYTES = 4 * 2 * 2 + 4


def make_store(pages, **options):
    return RouteStore(
        num_experts=16,
        layer_ids=(0, 2),
        top_k=2,
        page_tokens=PAGE_TOKENS,
        capacity_bytes=pages * PAGE_BYTES,
        **options,
    )


def page(seed, tokens=PAGE_TOKENS):
    generator = np.random.default_rng(seed)
    experts = generator.random((tokens, 2, 16)).argsort(-1)[..., :2]
    return Routes.from_array(experts, num_experts=16, layer_ids=(0, 2))


def test_pages_come_back_in_the_order_of_their_keys():
    store = make_store(3)
    assert all(store.put(("salt", i), page(i)) for i in range(3))
    assert store.get([("salt", 2), ("salt", 0)]) == Routes.join([page(2), page(0)])
    assert store.nbytes == 3 * PAGE_BYTES
    assert store.get([]).tokens == 0


def test_what_is_not_here_is_missing():
    store = make_store(3)
    store.put("a", page(1))
    found = store.get(["b", "a"])
    assert found.missing.tolist() == [True] * 4 + [False] * 4
    assert found[4:] == page(1)
    assert not found.experts[:4].any()
    assert (store.statistics.hits, store.statistics.misses) == (1, 1)


def test_rows_are_copied_in_and_out():
    rows = np.tile(np.arange(2, dtype=np.uint8), (4, 2, 1))
    store = make_store(1)
    store.put("a", Routes.from_array(rows, num_experts=16, layer_ids=(0, 2)))
    rows[:] = 9
    before = store.get(["a"])
    store.put("b", page(1))
    assert before.experts.tolist() == [[[0, 1], [0, 1]]] * 4


def test_the_least_recently_used_goes_first_and_retained_pages_stay():
    store = make_store(2)
    for key in "ab":
        store.put(key, page(key == "b"))
    store.get(["a"])
    assert store.put("c", page(3))
    assert [key in store for key in "abc"] == [True, False, True]
    store.retain(["a", "a", "c"])
    assert not store.put("d", page(4))
    assert store.statistics.refused == 1
    store.release(["a"])
    assert not store.put("d", page(4))
    store.release(["a"])
    assert store.put("d", page(4))
    assert [key in store for key in "acd"] == [False, True, True]
    with pytest.raises(UsageError, match="'a' is not retained"):
        store.release(["a"])


def test_a_key_can_be_retained_before_its_page_comes():
    store = make_store(1)
    store.retain(["a"])
    store.put("a", page(1))
    assert not store.put("b", page(2))
    assert store.get(["a"]) == page(1)


def test_two_pages_under_one_key_are_both_missing():
    store = make_store(2)
    assert store.put("a", page(1))
    assert store.put("a", page(1))
    assert not store.put("a", page(2))
    assert store.get(["a"]).missing.all()
    assert not store.put("a", page(1))
    assert store.statistics.disputed == 1
    assert len(store) == 0


def test_a_dispute_with_an_evicted_page_is_seen():
    store = make_store(1, remembered_pages=3)
    store.put("a", page(1))
    store.put("b", page(2))  # evicts a
    assert not store.put("a", page(3))
    assert store.put("b", page(2))
    for other in "cdef":  # a is forgotten
        store.put(other, page(5))
    assert store.put("a", page(3))


def test_a_page_whose_kv_is_gone_everywhere_is_new_when_it_comes_again():
    store = make_store(2)
    store.put("a", page(1))
    store.retain(["a"])
    store.drop(["a", "never seen"])
    assert store.get(["a"]).missing.all()
    assert store.put("a", page(2))
    assert store.get(["a"]) == page(2)
    assert not store.put("a", page(3))  # this one was not dropped
    store.drop(["a"])
    assert store.put("a", page(3))
    store.release(["a"])
    assert [store.put(key, page(4)) for key in "bc"] == [True, True]
    assert "a" not in store


def test_missing_tokens_of_a_page_stay_missing():
    part = page(1)[:3].with_missing(after=1)
    store = make_store(1)
    store.put("a", part)
    assert store.get(["a"]) == part
    assert not store.put("a", page(1))


def test_what_does_not_fit_is_refused():
    store = make_store(1)
    with pytest.raises(ShapeError, match="no page of 4 tokens"):
        store.put("a", page(1, tokens=3))
    with pytest.raises(ShapeError, match="no page"):
        store.put("a", page(1).select_layers([0]))
    with pytest.raises(UsageError, match=f"19 bytes hold no page: one takes {PAGE_BYTES}"):
        RouteStore(
            num_experts=16, layer_ids=(0, 2), top_k=2, page_tokens=4, capacity_bytes=PAGE_BYTES - 1
        )
    with pytest.raises(UsageError, match="at least the 2 that fit; got 1"):
        make_store(2, remembered_pages=1)


@pytest.mark.stress
def test_threads_never_see_half_a_page():
    with make_store(8, remembered_pages=64) as store:
        failures = []

        def work(seed):
            generator = np.random.default_rng(seed)
            for _ in range(300):
                key = int(generator.integers(20))
                store.put(key, page(key))
                found = store.get([key])
                if not (found.missing.all() or found == page(key)):
                    failures.append(key)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=HANG_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)
        assert len(store) <= 8
    assert len(store) == 0


@pytest.mark.stress
def test_random_schedules_hand_out_no_wrong_row(full):
    """Hits in any tier, evictions, preemptions, aborts, turns, updates in flight; see
    `route_schedule`. Ten thousand with `pytest --full`."""
    total = Counter()
    for seed in range(10_000 if full else 500):
        counts = route_schedule.run(seed)
        assert not counts["wrong"], f"seed {seed}: {counts}"
        total += counts
    print(dict(total))
    for happened in ("hits", "evictions", "preemptions", "aborts", "turns", "version changes"):
        assert total[happened] > 500
    assert total["bad loads"] > 20
    assert total["disputed"] > 100
    assert total["known"] > 3 * total["missing"] > 0


@pytest.mark.stress
def test_a_roomy_store_misses_nothing_while_the_weights_stay():
    total = Counter()
    for seed in range(200):
        total += route_schedule.run(seed, roomy=True, updates=False)
    assert total["known"] > 10_000
    assert total["missing"] == total["wrong"] == 0


@pytest.mark.stress
def test_prefill_and_decode_engines_make_one_whole():
    total = Counter()
    for seed in range(200):
        total += route_schedule.run_disaggregated(seed)
    assert total["wrong"] == 0
    assert total["missing"] < total["missing on decode"] / 4
    assert total["missing on decode"] > 1000

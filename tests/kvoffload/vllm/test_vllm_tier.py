"""Our tier and its routes, driven as vLLM's tiering manager drives them; no engine."""

import re

import numpy as np
import pytest

from primeblocks.errors import UsageError
from primeblocks.kvoffload import Loaded, Pending, Saved
from primeblocks.testing.faults import ManualClock
from tests.kvoffload.vllm.fakes import PAGE, ROW, Pool
from tests.kvoffload.vllm.named_pages import ROWS, hash_of, keys_of, routes_of

pytestmark = pytest.mark.vllm


@pytest.fixture
def pool(adapter):
    pool = Pool(adapter)
    yield pool
    pool.tier.shutdown()


def test_pages_come_back_with_their_routes(pool):
    request = pool.request(version=3)
    assert pool.store([1, 2], request) == [True, True]
    assert pool.holds(1, request)
    assert not pool.holds(5, request)
    assert pool.load([2, 5, 1], request) == [True, False, True]
    assert pool.routes([2, 5, 1]) == [routes_of(2), None, routes_of(1)]


def test_a_page_that_is_there_is_not_saved_again(pool):
    request = pool.request()
    pool.store([1], request)
    assert pool.store([2, 1, 3], request) == [True, True, True]
    assert pool.tier._store.statistics()["host"].stores == 3


@pytest.fixture
def stuck(pool, monkeypatch):
    """Two jobs whose `Pending` is never over by itself, and the time."""
    clock, pending = ManualClock(), []

    def never(*_, **__):
        pending.append(Pending())
        return pending[-1]

    monkeypatch.setattr(pool.tier._store, "save_batch", never)
    monkeypatch.setattr(pool.tier._store, "load_batch", never)
    pool.tier._clock = clock.now
    for move in (pool.tier.submit_store, pool.tier.submit_load):
        pool.submit(move, keys_of([1, 2]), range(2), pool.request())
    return pool.tier, pending, clock


def test_a_job_is_given_up_at_its_deadline(stuck):
    tier, pending, clock = stuck
    clock.advance(29.5)
    assert [*tier.get_finished_jobs()] == []
    clock.advance(0.5)
    jobs = [*tier.get_finished_jobs()]
    assert [(job.job_id, job.success, job.transfer_time) for job in jobs] == [
        (1, False, 30.0),
        (2, False, 30.0),
    ]
    for each in pending:
        with each.buffers() as held:
            assert not held, "its pages may still be read or written"
    assert [*tier.get_finished_jobs()] == []


def test_a_page_that_did_not_come_is_computed_by_its_request(pool, monkeypatch):
    first, other = pool.request(), pool.request()
    other.req_id = "other"
    pool.tier.on_new_request(other)
    assert pool.store([1, 2], first) == [True, True]
    one, two = keys_of([1, 2])

    def fails(*_, **__):
        pending = Pending()
        pending.finish([Loaded(None), Loaded("host", {})])
        return pending

    monkeypatch.setattr(pool.tier._store, "load_batch", fails)
    assert pool.job(pool.tier.submit_load, [one, two], range(2), first) == [False, True]
    assert [pool.holds(number, first) for number in (1, 2)] == [False, True]
    assert pool.holds(1, other), "another request may have more luck"
    pool.tier.on_request_finished(first)
    assert pool.holds(1, pool.request())


def test_jobs_report_each_page_and_their_time_though_they_are_asked_late(stuck):
    tier, (save, load), clock = stuck
    save.finish([Saved(stored=False, reason="full"), Saved(stored=True)])
    load.finish([Loaded("disk", {}), Loaded(None)])
    clock.advance(1.0)
    tier.drain_jobs()
    clock.advance(90.0)
    one, two = keys_of([1, 2])
    jobs = [(each.successful_keys, each.transfer_time) for each in tier.get_finished_jobs()]
    assert jobs == [((two,), 1.0), ((one,), 1.0)]


def test_a_drain_gives_up_what_takes_longer(adapter, stuck, monkeypatch):
    tier, pending, _ = stuck
    monkeypatch.setattr(adapter.tier, "_TIMEOUT_S", 0.0)
    tier.drain_jobs()
    for each in pending:
        with each.buffers() as held:
            assert not held, "a shutdown takes the memory away next"
    assert [job.successful_keys for job in tier.get_finished_jobs()] == [(), ()]


def test_a_page_stored_without_its_routes_comes_back_without(pool):
    request = pool.request()
    pool.store([1], request)
    pool.store([2], request, routes=False)
    assert pool.load([1, 2], request) == [True, True]
    assert pool.routes([1, 2]) == [routes_of(1), None]


def test_routes_of_another_page_in_the_same_place_are_not_taken(pool):
    request = pool.request()
    pool.tail.write(pool.rows[0], hash_of(7), routes_of(7))
    pool.rows[0, :PAGE] = 1
    pool.job(pool.tier.submit_store, keys_of([1]), [0], request)
    pool.load([1], request)
    assert pool.routes([1]) == [None]


@pytest.mark.parametrize("byte", [PAGE, PAGE + 15, PAGE + 16, PAGE + 15 + ROWS])
def test_a_changed_byte_makes_routes_missing(adapter, byte):
    tail, row = adapter.routes.Tail(PAGE, ROWS), np.zeros(ROW, np.int8)
    tail.write(row, b"page", b"r" * ROWS)
    assert tail.read(row, b"page") == b"r" * ROWS
    assert tail.read(row, b"pagf") is None
    row[byte] ^= 1
    assert tail.read(row, b"page") is None


def test_sealed_routes_of_another_length_are_missing(adapter):
    tail, row = adapter.routes.Tail(PAGE, ROWS), np.zeros(ROW, np.int8)
    shorter = adapter.routes.Tail(PAGE, ROWS - 1)
    shorter.write(row, b"page", b"r" * (ROWS - 1))
    tail.restore(row, shorter.sealed(row))
    assert tail.read(row, b"page") is None


def test_versions_and_resets_never_meet(pool):
    old = pool.request(version=1)
    pool.store([1], old)
    assert not pool.holds(1, pool.request(version=2))
    assert not pool.holds(1, pool.request())
    assert pool.holds(1, old)
    pool.tier.forget()
    assert not pool.holds(1, old)


def test_stale_versions_leave_first(adapter):
    pool = Pool(adapter, max_staleness=1)
    fresh, ours = pool.request(version=2), pool.request(version=1)
    for number in range(2, 63):
        pool.store([number], fresh)
    pool.store([1], ours)  # the last to come
    for number in range(63, 75):
        pool.store([number], pool.request(version=3))
    assert not pool.holds(1, ours)
    assert all(pool.holds(number, fresh) for number in range(14, 63))
    pool.tier.shutdown()


def test_after_a_reset_versions_may_be_older(adapter):
    pool = Pool(adapter, max_staleness=1)
    pool.request(version=9)
    pool.tier.forget()
    older, newer = pool.request(version=2), pool.request(version=3)
    pool.store([1], newer)
    for number in range(2, 65):
        pool.store([number], older)
    pool.store([65], newer)
    assert not pool.holds(1, newer), "the least recently used"
    assert pool.holds(2, older)
    pool.tier.shutdown()


def test_pages_of_rollouts_that_ended_leave_first(adapter):
    pool = Pool(adapter, max_staleness=8)
    first, other = pool.request(version=1, rollout="a"), pool.request(version=1, rollout="b")
    pool.store([1, 4], first)
    pool.store([2, 3], other)
    pool.tier.on_request_finished(first)
    pool.tier.on_request_finished(pool.request(version=1, ends=["b"]))
    third = pool.request(version=1, rollout="c")
    for number in range(5, 67):
        pool.store([number], third)
    assert not pool.holds(2, other)
    assert not pool.holds(3, other)
    assert pool.holds(1, first)
    assert pool.holds(4, first)
    pool.tier.shutdown()


@pytest.mark.parametrize("evict", ["versions", "rollouts"])
@pytest.mark.parametrize("loads", [False, True])
def test_the_last_pages_of_a_prompt_leave_first(adapter, evict, loads):
    pool = Pool(adapter, evict=evict)
    first, other = pool.request(rollout="a"), pool.request(rollout="b")
    for number in range(4):
        first.set_offload_key_position(keys_of([number])[0], 32 * (number + 1))
    pool.store([2, 0, 3, 1], first)  # vLLM passes a set
    if loads:
        pool.load([1, 3, 0, 2], first)
    for number in range(10, 72):
        pool.store([number], other)
    assert [pool.holds(number, first) for number in range(4)] == [True, True, False, False]
    pool.tier.shutdown()


def restarted(adapter, tmp_path, persist, **how):
    """Which of a page's KV and routes a second engine finds that a first one stored."""
    first = Pool(adapter, tmp_path, persist="run")
    first.store([1], first.request(version=3))
    first.tier.shutdown()
    second = Pool(adapter, tmp_path, persist=persist, **how)
    try:
        (found,) = second.load([1], second.request(version=3))
        return found, second.routes([1]) == [routes_of(1)]
    finally:
        second.tier.shutdown()


def test_pages_and_routes_outlive_the_engine_if_it_is_named(adapter, tmp_path):
    assert restarted(adapter, tmp_path, "run") == (True, True)


@pytest.mark.parametrize("how", [{"persist": "other"}, {"persist": None}])
def test_another_name_or_none_finds_nothing(adapter, tmp_path, how):
    assert restarted(adapter, tmp_path, **how) == (False, False)


def test_another_model_finds_nothing(adapter, tmp_path):
    assert restarted(adapter, tmp_path, "run", model="n") == (False, False)


def test_what_follows_a_reset_is_not_kept_under_the_name(adapter, tmp_path):
    first = Pool(adapter, tmp_path, persist="run")
    first.tier.forget()
    first.store([1], first.request())
    assert first.holds(1, first.request())
    first.tier.shutdown()
    second = Pool(adapter, tmp_path, persist="run")
    assert not second.holds(1, second.request())
    second.tier.forget()  # the same history, other weights
    assert not second.holds(1, second.request())
    second.tier.shutdown()


def test_without_routes_rows_are_pages(adapter):
    pool = Pool(adapter, routes=False)
    request = pool.request()
    pool.rows[0] = 5
    assert pool.job(pool.tier.submit_store, keys_of([5]), [0], request) == [True]
    pool.rows[:] = 0
    assert pool.job(pool.tier.submit_load, keys_of([5]), [3], request) == [True]
    assert (pool.rows[3] == 5).all()
    pool.tier.shutdown()


def test_requests_say_what_they_are_told(adapter):
    said = adapter.request_args(7, rollout="a/3", ends=["a/2"], waits={"a/1": "pytest"})
    assert set(said) == {"kv_transfer_params"}
    read = adapter.tier.read_request(said["kv_transfer_params"])
    assert (read.version, read.rollout, read.ends) == (7, "a/3", ("a/2",))
    assert read.waits == {"a/1": "pytest"}
    assert adapter.request_args() == {"kv_transfer_params": {}}
    for nothing in (None, {}, {"do_remote_decode": True}):
        assert adapter.tier.read_request(nothing) == adapter.tier.PageRequest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "7"},
        {"version": True},
        {"version": 1 << 63},
        {"version": -1},
        {"rollout": 3},
        {"ends": "a"},
        {"ends": [1]},
        {"waits": ["a"]},
        {"waits": {"a": 1}},
    ],
)
def test_malformed_requests_are_refused_in_front_and_ignored_behind(adapter, wrong, caplog):
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=re.escape(repr(value))):
        adapter.request_args(**wrong)
    good = adapter.request_args(1, rollout="x", ends=["y"], waits={"z": "t"})["kv_transfer_params"]
    (field,) = [each for each in good if each.endswith((name, f"that_{name[:-1]}"))]
    assert adapter.tier.read_request({**good, field: value}) == adapter.tier.PageRequest()
    assert "are ignored" in caplog.text


@pytest.mark.parametrize("version", [1 << 63, 1 << 80, -(1 << 63) - 1])
def test_a_version_that_no_page_can_have_does_not_end_the_engine(pool, version):
    from vllm.v1.kv_offload.base import ReqContext

    parameters = pool.adapter.request_args(1)["kv_transfer_params"]
    context = ReqContext("r", dict.fromkeys(parameters, version))
    pool.tier.on_new_request(context)
    assert not pool.holds(1, context)


@pytest.mark.parametrize("leap", [1 << 62, 1 << 40, 1 << 21])
def test_one_request_cannot_make_every_page_stale(pool, monkeypatch, caplog, leap):
    """Whether it is the first that the engine sees, or comes later."""
    versions = []
    monkeypatch.setattr(pool.tier._store, "advance", lambda *, version: versions.append(version))
    for version in (leap, 5, leap, 6, 6 + (1 << 20)):
        pool.request(version=version)
    assert versions == [5, 6, 6 + (1 << 20)]
    assert f"version {leap} after version 5" in caplog.text


def test_rollouts_between_turns_wait_for_a_tool(pool, monkeypatch):
    said = []
    monkeypatch.setattr(pool.tier._store, "pause", lambda *what: said.append(what))
    first = pool.request(rollout="a")
    pool.request(waits={"a": "pytest"})
    assert said == [], "it runs: what was said is too old"
    pool.tier.on_request_finished(first)
    pool.request(rollout="b", waits={"a": "pytest", "b": "search"})
    assert said == [("a", "turn"), ("a", "pytest")]


def test_the_end_of_a_request_reads_only_its_own_rollout(pool):
    first, second, _ = (pool.request(rollout=name) for name in "aab")
    active = pool.tier._active
    pool.tier.on_request_finished(first)
    assert active == {"a": 1, "b": 1}
    pool.tier.on_request_finished(second)
    assert pool.tier._active is active, "counts of all rollouts were copied"
    assert dict(active) == {"b": 1}

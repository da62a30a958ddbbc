"""Our manager and tier under a scheduler that is a loop: who gets pages through a small pool."""

import pytest

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.kvoffload import Pending
from primeblocks.testing.faults import ManualClock
from tests.deadlines import HANG_S
from tests.kvoffload.vllm.fakes import Scheduler
from tests.kvoffload.vllm.named_pages import keys_of
from tests.kvoffload.vllm.specs import PAGE, make_spec

pytestmark = pytest.mark.vllm


@pytest.fixture
def scheduler(adapter, monkeypatch):
    monkeypatch.setattr(adapter.manager, "_UNMEASURED_S", HANG_S)  # however busy the machine is
    made = []

    def make(**how):
        made.append(Scheduler(make_spec(adapter, **how)))
        return made[-1]

    yield make
    for each in made:
        each.rows = None
        each.manager.shutdown()


def test_pages_that_a_group_shares_need_room_once(scheduler):
    shared, own = list(range(8)), range(10, 26)
    it = scheduler(pool_pages=len(shared) + len(own))
    it.store([*shared, *own, *range(100, 100 + len(shared) + len(own))])
    wanted = {f"r{page}": [*shared, page] for page in own}
    assert it.serve(wanted) == (wanted, 1), "one step to ask, one to take"


@pytest.mark.parametrize("pool_pages", [4, 5, 7, 24])
def test_every_request_gets_all_its_pages(scheduler, pool_pages):
    it = scheduler(pool_pages=pool_pages)
    wanted = {f"r{index}": list(range(4 * index, 4 * index + 4)) for index in range(6)}
    it.store([*range(24), *range(100, 124)])
    served, steps = it.serve(wanted)
    assert served == wanted
    assert steps <= 24


def test_a_prompt_longer_than_the_pool_gets_what_fits(scheduler):
    it = scheduler(pool_pages=3)
    it.store(range(8))
    served, _ = it.serve({"long": list(range(8)), "short": [6, 7]})
    assert served == {"long": [0, 1, 2], "short": [6, 7]}


def test_pages_that_nobody_has_are_not_waited_for(scheduler):
    it = scheduler(pool_pages=4)
    it.store(range(4))
    served, _ = it.serve({"a": [0, 1, 50, 2], "b": [51]})
    assert served == {"a": [0, 1], "b": []}


def test_a_request_that_ends_lets_others_go_on(scheduler):
    it = scheduler(pool_pages=2)
    it.store([*range(4), *range(10, 14)])
    first, second = it.request("first"), it.request("second")
    assert it._look_up(first, [0, 1]) is None
    assert it._look_up(second, [2, 3]) is None
    it.manager.on_request_finished(first)
    it.settle()
    served, _ = it.serve({"third": [2, 3]})
    assert served == {"third": [2, 3]}


def test_the_first_request_keeps_its_pages_when_it_brings_more(scheduler):
    it = scheduler(pool_pages=3)
    it.store([*range(5), *range(10, 13)])
    first, second = it.request("first"), it.request("second")
    for request, numbers in ((first, [0]), (second, [2, 3]), (first, [0, 1])):
        assert it._look_up(request, numbers) is None
        it.settle()
    assert it._look_up(first, [0, 1]) == 2
    for request in (first, second):
        it.manager.on_request_finished(request)


def test_a_reset_reaches_the_tier(scheduler):
    it = scheduler(pool_pages=4)
    it.store(range(3))
    it.manager.reset_cache()
    served, _ = it.serve({"a": [0, 1, 2]})
    assert served == {"a": []}


def test_rows_of_the_pool_have_room_for_routes(adapter):
    spec = make_spec(adapter, pool_pages=10, routes=8)
    assert (spec.tail.offset, spec.tail.end) == (PAGE, PAGE + 16 + 8 * 32)
    assert (spec.kv_bytes_per_chunk, spec.num_chunks) == (2 * PAGE, 5)
    assert make_spec(adapter, pool_pages=10).tail is None


@pytest.mark.parametrize("how", [{"blocks_per_chunk": 2}, {"group_tokens": (32, 64)}])
def test_pages_that_are_not_hashed_singly_carry_no_routes(adapter, how):
    with pytest.raises(UnsupportedError, match="blocks_per_chunk=1"):
        make_spec(adapter, pool_pages=10, routes=8, **how)


def test_chunks_of_several_blocks_are_not_copied_on_a_cpu(adapter):
    from vllm.v1.kv_offload.base import CanonicalKVCaches

    with pytest.raises(UnsupportedError, match="blocks_per_chunk=1"):
        make_spec(adapter, pool_pages=10, blocks_per_chunk=2).get_worker(CanonicalKVCaches([], []))


def test_a_pool_without_a_page_is_refused(adapter):
    with pytest.raises(PlanError, match="too small for one page of 8192"):
        make_spec(adapter, pool_pages=1, routes=8)


def test_chunks_carry_the_hashes_of_their_pages(adapter):
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    def pages(chunks, *blocks):
        where = GPULoadStoreSpec(list(blocks), (len(blocks),), (0,))
        return [tuple(page) for page in chunks.pages(where, group=0)]

    it = Scheduler(make_spec(adapter, pool_pages=10, routes=8))
    request = it.request("a")
    stored = it.manager.prepare_store(keys_of([1, 2]), request)
    first, second = stored.store_spec.chunk_ids.tolist()
    one, two = bytes([1]) * 32, bytes([2]) * 32
    assert pages(stored.store_spec, 7, 4) == [(one, first, 7), (two, second, 4)]
    it.manager.complete_store(keys_of([1, 2]), request)
    loaded = it.manager.prepare_load(keys_of([2]), request)
    assert pages(loaded, 9) == [(two, second, 9)]
    it.manager.complete_load(keys_of([2]), request)
    it.settle()
    it.rows = None
    it.manager.shutdown()


# --- the queue -------------------------------------------------------------------------------


def test_pages_of_a_queued_request_are_there_when_its_turn_comes(scheduler):
    it = scheduler(pool_pages=8)
    it.store([*range(4), *range(100, 108)])
    queued, late = it.queue("queued", [0, 1, 2, 3, 50, 4]), it.request("late")
    it.settle()
    assert it._look_up(queued, range(4)) == 4, "at the first look"
    assert it._look_up(late, [100]) is None
    assert it._look_up(queued, [50]) == 0
    for request in (queued, late):
        it.manager.on_request_finished(request)
    it.settle()


def test_the_head_of_the_queue_gets_the_room(scheduler):
    it = scheduler(pool_pages=5)
    it.store([*range(8), *range(100, 110)])
    head, second = it.queue("head", range(4)), it.queue("second", range(4, 8))
    it.settle()
    in_pool = [it.manager.primary_tier.lookup(key, head).name == "HIT" for key in keys_of(range(8))]
    assert in_pool == [True] * 5 + [False] * 3
    assert it._look_up(head, range(4)) == 4
    it.manager.prepare_load(keys_of(range(4)), head)
    it.manager.complete_load(keys_of(range(4)), head)
    it.settle()
    assert it._look_up(second, range(4, 8)) == 4
    for request in (head, second):
        it.manager.on_request_finished(request)


def test_what_is_brought_ahead_gives_way(scheduler):
    """To a request that runs before those that came earlier: a queue by priority."""
    it = scheduler(pool_pages=4)
    it.store([*range(8), *range(100, 108)])
    queued = it.queue("queued", range(4))
    it.settle()
    served, steps = it.serve({"urgent": [4, 5, 6, 7]})
    assert served == {"urgent": [4, 5, 6, 7]}
    assert steps <= 2
    it.manager.on_request_finished(queued)
    assert not it.manager._queue
    assert not it.manager._turns._all_users


def test_a_step_looks_up_only_some_pages_ahead(scheduler, adapter, monkeypatch):
    monkeypatch.setattr(adapter.manager, "_AHEAD", 3)
    it = scheduler(pool_pages=16)
    it.store([*range(8), *range(100, 116)])
    queued = it.queue("queued", range(8))
    for expected in (3, 6, 8):
        it.step()
        asked = [it.manager.primary_tier.lookup(key, queued).name for key in keys_of(range(8))]
        assert [name != "MISS" for name in asked].count(True) == expected
    it.settle()
    it.manager.on_request_finished(queued)


def test_the_tier_knows_the_queue(scheduler, adapter, monkeypatch):
    told = []
    monkeypatch.setattr(adapter.StoreTier, "queue", lambda tier, rollouts: told.append(rollouts))
    it = scheduler(pool_pages=8)

    def named(rollout):
        return adapter.request_args(rollout=rollout)

    a = it.queue("1", [], **named("a"))
    it.queue("2", [], **named("b"))
    it.queue("3", [], **named("a"))
    it.queue("4", [])
    it.step()
    it.step()
    it.step(begins=["1"])
    it.step(begins=["2", "3"], preempts=["1"])
    it.step(resumes=["1"])
    # After a reset, vLLM's newer runner lists a resumed request as a new one.
    it.step(begins=["1"], preempts=["1"])
    it.step(resumes=["1"], preempts=["1"])
    it.step(preempts=["1"])
    it.manager.on_request_finished(a)
    it.step()
    assert told == [["a", "b"], ["b", "a"], ["a"], [], ["a"], []]


def test_a_step_without_work_rests_while_pages_come(scheduler, adapter, monkeypatch):
    done, rested = Pending.done, []

    def noted(pending, *, within_s=0.0):
        rested.extend([pending] * (within_s == adapter.tier._REST_S))
        return done(pending, within_s=within_s)

    monkeypatch.setattr(Pending, "done", noted)
    it = scheduler(pool_pages=8)
    it.store([*range(2), *range(100, 108)])
    it.manager.rest()
    request = it.request("a")
    assert it._look_up(request, [0, 1]) is None
    it.step()
    it.manager.rest()
    assert len(rested) == 1, "once, while a page comes"
    it.settle()
    it.manager.rest()
    assert len(rested) == 1
    it.manager.on_request_finished(request)


def test_routes_and_loads_within_a_step_are_refused(adapter):
    within = {"sync_load_budget_bytes": 1 << 20}  # vLLM 0.33 has it
    make_spec(adapter, pool_pages=4, extra=within)
    with pytest.raises(UnsupportedError, match="Leave out sync_load_budget_bytes"):
        make_spec(adapter, pool_pages=4, routes=8, extra=within)


# --- how long to wait ------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
def test_steps_that_begin_requests_tell_how_fast_pages_are_computed(scheduler, overlap):
    """With overlap, the engine plans a step while the one before runs."""
    it, clock = scheduler(pool_pages=16), ManualClock()
    it.manager._clock = clock.now
    it.manager.set_overlap(steps=overlap)
    spans = [(("a",), (1, 2, 3), 6.0), ((), (4,), 5.0), (("b",), (), 9.0)]
    for begins, computes, seconds in spans:
        it.step(begins=begins, computes=computes)
        clock.advance(seconds)
    it.step()
    compute = it.manager._speeds.compute
    assert (compute.pages, compute.seconds) == (3, 5.0 if overlap else 6.0)


def test_a_request_waits_as_long_as_its_pages_are_worth(scheduler):
    it, clock = scheduler(pool_pages=2), ManualClock()
    it.manager._clock = it.manager._turns._clock = clock.now
    it.store([*range(5), *range(10, 12)])
    assert it.manager._speeds.load.pages == 0
    first = it.request("first")
    assert it._look_up(first, [0, 1]) is None
    it.settle()
    assert it.manager._speeds.load.pages == 2, "measured"
    it.manager._speeds.load.seconds = 2.0
    it.manager._speeds.compute.add(1, 4.0)
    second = it.queue("second", [1, 2, 3, 4, 50])  # 1 is in the pool, nobody has 50
    assert it._look_up(second, [2, 3, 4]) is None
    clock.advance(8.9)
    assert it._look_up(second, [2, 3, 4]) is None
    clock.advance(0.1)
    assert it._look_up(second, [2, 3, 4]) == 0, "three pages of 4 s, less 1 s each to load them"
    third = it.request("third")
    it.step(preempts=["third"])
    assert it._look_up(third, [3, 4]) is None, "as long as before any measurement"
    for request in (first, second, third):
        it.manager.on_request_finished(request)

"""Routes, the fleet that follows one, and engines with caches in virtual time."""

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving_parts.simulator import AgentTurn, ServingModel, Session, simulate_serving
from primeblocks.errors import EngineError, PrimeblocksError, UsageError
from primeblocks.planning import EngineModel, decode_latency
from primeblocks.serving import (
    EngineState,
    Fleet,
    PrefixAndLoad,
    Request,
    consistent_hash,
    engines_to_restart,
    least_loaded,
    round_robin,
)
from tests.weightsync.fake_engine import in_a_loop

NAMES = [f"engine-{place}" for place in range(5)]


def states(loads, matched=None, names=NAMES):
    matched = [0] * len(loads) if matched is None else matched
    return [EngineState(*each) for each in zip(names, loads, [10] * len(loads), matched)]  # noqa: B905


def test_round_robin_and_least_loaded():
    chosen = [round_robin(Request(ordinal=i), states([9, 0, 0])) for i in range(4)]
    assert chosen == [0, 1, 2, 0]
    assert least_loaded(Request(), states([3, 1, 1])) == 1
    uneven = [EngineState("a", 3, 4), EngineState("b", 6, 16)]
    assert least_loaded(Request(), uneven) == 1


def test_an_engine_that_leaves_moves_its_own_sessions_and_no_others():
    sessions, all_of_them = [f"session-{i}" for i in range(500)], states([0] * 5)
    before = {each: consistent_hash(Request(each), all_of_them) for each in sessions}
    fewer = all_of_them[:3] + all_of_them[4:]
    after = {each: fewer[consistent_hash(Request(each), fewer)].name for each in sessions}
    for each in sessions:
        assert before[each] == 3 or after[each] == NAMES[before[each]]
    # Binomial: 500 draws of 1/5, six standard deviations.
    assert all(
        abs(count - 100) < 6 * (500 * 0.2 * 0.8) ** 0.5
        for count in Counter(before.values()).values()
    )


def test_prefix_against_load():
    request, held = Request(pages=tuple("abcd")), [4, 0, 0, 0, 0]
    # A mean of 2: the engine that holds all has three means more than the others.
    assert PrefixAndLoad(beta=0.3)(request, states([6, 1, 1, 1, 1], held)) == 0
    assert PrefixAndLoad(beta=0.5)(request, states([6, 2, 1, 1, 0], held)) == 4
    assert PrefixAndLoad(beta=0.5)(request, states([1, 0, 0, 0, 0], held)) == 0
    assert PrefixAndLoad(beta=0)(request, states([9, 0, 0, 0, 0], held)) == 0
    # It has no room, and others have; then nobody has.
    assert PrefixAndLoad(beta=0)(request, states([10, 9, 8, 9, 9], held)) == 2
    assert PrefixAndLoad(beta=0)(request, states([12, 10, 11, 10, 10], held)) == 0
    assert PrefixAndLoad()(Request(), states([3, 2, 1, 1, 4])) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        *({"beta": beta} for beta in (-1.0, math.nan, math.inf)),
        *({"saturated": load} for load in (0.0, math.nan, math.inf)),
    ],
)
def test_weights_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match=f"PrefixAndLoad needs .*{next(iter(wrong))} >"):
        PrefixAndLoad(**wrong)


@pytest.mark.parametrize(
    "route",
    [round_robin, least_loaded, consistent_hash, PrefixAndLoad()],
)
def test_a_route_among_no_engines_is_a_mistake(route):
    with pytest.raises(UsageError, match="at least one open engine; got none"):
        route(Request(session="a", pages=(1,)), [])


@pytest.mark.parametrize("wrong", [(-1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_engines_of_which_no_load_can_be_told_are_refused(wrong):
    with pytest.raises(UsageError, match="engine 'a' needs in_flight >= 0"):
        EngineState("a", *wrong)


def test_any_text_is_a_session():
    names = {consistent_hash(Request(session=f"\ud800{i}"), states([0] * 3)) for i in range(20)}
    assert names == {0, 1, 2}


def test_part_of_a_name_is_no_engine():
    with pytest.raises(UsageError, match="a collection of names"):
        engines_to_restart("a1", {"b": "a12"})


def test_a_prefill_engine_that_restarts_takes_along_who_holds_its_agents():
    pull = {"d0": {"p0", "p1"}, "d1": {"p1"}, "d2": {"p2"}}
    assert engines_to_restart("p0", pull) == ("d0",)
    assert engines_to_restart("p1", pull) == ("d0", "d1")
    assert engines_to_restart("d0", pull) == ()
    both = pull | {"p0": {"d0"}, "p1": {"d0", "d1"}, "p2": {"d2"}}
    assert engines_to_restart("p0", both) == ("d0", "p1", "d1")
    assert engines_to_restart("gone", both) == ()


class Engines:
    """Engines that answer when they are let."""

    def __init__(self, names="abc"):
        self.came = {name: [] for name in names}
        self.events = {name: asyncio.Event() for name in names}

    def __getitem__(self, name):
        async def generate(prompt, *, version):
            self.came[name].append(prompt)
            await self.events[name].wait()
            if prompt == "broken":
                raise EngineError("lost")
            return name, prompt, version

        return generate


@in_a_loop
async def test_requests_go_to_the_engine_with_the_fewest_and_none_to_one_that_failed():
    engines = Engines()
    fleet = Fleet({name: engines[name] for name in "abc"})
    first = [asyncio.ensure_future(fleet(i, version=7)) for i in range(4)]
    await asyncio.sleep(0)
    assert list(engines.came.values()) == [[0, 3], [1], [2]]
    engines.events["b"].set()
    assert await first[1] == ("b", 1, 7)
    with pytest.raises(EngineError, match="lost") as raised:
        await fleet("broken", version=7)
    assert raised.value.__notes__ == ["This error is from engine 'b' of the fleet."]
    assert [state.name for state in fleet.states()] == ["a", "c"]
    fleet.drain("c")
    again = asyncio.ensure_future(fleet(4, version=7))
    await asyncio.sleep(0)
    assert engines.came["a"] == [0, 3, 4]
    fleet.drain("a")
    with pytest.raises(EngineError, match="all 3 engines"):
        await fleet(5, version=7)
    fleet.add("b", engines["b"])
    assert await fleet(6, version=8) == ("b", 6, 8)
    for event in engines.events.values():
        event.set()
    await asyncio.gather(*first, again)
    fleet.add("a", engines["a"])
    assert [state.in_flight for state in fleet.states()] == [0, 0]


@in_a_loop
async def test_an_error_that_all_requests_of_an_engine_raise_names_it_once():
    gone, lost = asyncio.Event(), EngineError("lost")

    async def generate(prompt):
        await gone.wait()
        raise lost

    fleet = Fleet({"a": generate})
    requests = [asyncio.ensure_future(fleet(i)) for i in range(3)]
    await asyncio.sleep(0)
    gone.set()
    assert await asyncio.gather(*requests, return_exceptions=True) == [lost] * 3
    assert lost.__notes__ == ["This error is from engine 'a' of the fleet."]


@in_a_loop
async def test_an_engine_that_was_added_again_is_not_closed_by_a_call_of_before():
    engines = Engines("a")
    fleet = Fleet({"a": engines["a"]})
    old = asyncio.ensure_future(fleet("broken", version=1))
    await asyncio.sleep(0)
    fleet.add("a", engines["a"])
    assert fleet.states()[0].in_flight == 1
    engines.events["a"].set()
    with pytest.raises(EngineError):
        await old
    assert await fleet("fine", version=2) == ("a", "fine", 2)
    assert fleet.states()[0].in_flight == 0


@pytest.mark.parametrize("route", [least_loaded, PrefixAndLoad()])
@in_a_loop
async def test_an_engine_that_refuses_at_once_does_not_attract_the_requests(route):
    asked, is_busy = Counter(), True

    def engine(name):
        async def generate(prompt):
            asked[name] += 1
            if name == "b" and is_busy:
                raise PrimeblocksError("503")
            await asyncio.sleep(0)
            return name

        return generate

    fleet = Fleet({name: engine(name) for name in "abc"}, route=route)

    async def ask(count):
        """Nine at a time, as a loop does that starts a request when another ends."""
        left = iter(range(count))

        async def one_by_one():
            for prompt in left:
                with contextlib.suppress(PrimeblocksError):
                    await fleet(prompt)

        await asyncio.gather(*(one_by_one() for _ in range(9)))
        return asked.copy()

    before = await ask(900)
    assert before["b"] < 90 < min(before["a"], before["c"])
    assert len(fleet.states()) == 3
    is_busy = False
    after = await ask(3000)
    assert after["b"] - before["b"] > 600  # As soon as it answers, it has its share again.
    assert [state.in_flight for state in fleet.states()] == [0, 0, 0]


def test_fleets_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="at least one engine"):
        Fleet({})
    with pytest.raises(UsageError, match="max_in_flight of engine 'b'"):
        Fleet({"a": print, "b": print}, max_in_flight={"a": 1})
    fleet = Fleet({"a": print}, route=lambda request, engines: 1)
    with pytest.raises(UsageError, match="chose engine 1 of 1"):
        fleet.choose(Request())
    with pytest.raises(UsageError, match="no engine 'b'"):
        fleet.drain("b")
    for odd in (None, "0", 0.0, float("nan"), -1):
        fleet = Fleet({"a": print}, route=lambda request, engines, odd=odd: odd)
        with pytest.raises(UsageError, match="the route chose engine"):
            fleet.choose(Request())


prompts = st.lists(st.sampled_from("abcdef"), max_size=5).map(
    lambda pages: tuple(f"{place}{page}" for place, page in enumerate(pages))
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), prompts),
        st.tuples(st.sampled_from(["drain", "add"]), st.sampled_from("xyz")),
    ),
    max_size=40,
)


@given(events=events, cache_pages=st.integers(1, 8))
@in_a_loop
async def test_what_a_fleet_believes_is_a_cache_of_each_engine(events, cache_pages):
    """Against one ordered dictionary an engine, looked through page by page."""

    async def answer(pages):
        return pages

    plain = {name: OrderedDict() for name in "xyz"}
    seen = []

    def route(request, engines):
        seen.append(engines)
        return request.ordinal % len(engines)

    fleet = Fleet(
        dict.fromkeys("xyz", answer),
        route=route,
        describe=lambda pages: Request(pages=pages),
        cache_pages=cache_pages,
    )
    still_open, asked = set("xyz"), 0
    for kind, what in events:
        if kind == "add":
            fleet.add(what, answer)
            plain[what].clear()
            still_open.add(what)
        elif kind == "drain":
            fleet.drain(what)
            plain[what].clear()
            still_open.discard(what)
        elif still_open:
            await fleet(what)
            names = [state.name for state in seen[-1]]
            assert set(names) == still_open
            for state in seen[-1]:
                held, lead = plain[state.name], 0
                while lead < len(what) and what[lead] in held:
                    lead += 1
                assert state.matched == lead
            cache = plain[names[asked % len(names)]]
            asked += 1
            for page in reversed(what[:cache_pages]):
                cache[page] = None
                cache.move_to_end(page)
            while len(cache) > cache_pages:
                cache.popitem(last=False)
    assert len(fleet._held) == len({page for cache in plain.values() for page in cache})


# --- Engines with caches


def model(**how):
    how = {"cache_pages": 100, "page_tokens": 10, "prefill_tokens_per_s": 100.0} | how
    return ServingModel(EngineModel(decode_latency(step_s=0.5), max_running=8), **how)


def test_one_session_takes_the_time_that_its_tokens_take():
    session = Session("s", (AgentTurn(100, 20, tool_s=7), AgentTurn(35, 10)))
    serving = simulate_serving([session], {"a": model()}, route=least_loaded, in_flight=1)
    first, second = serving.requests
    assert (first.prompt_tokens, first.hit_tokens) == (100, 0)
    assert (second.prompt_tokens, second.hit_tokens) == (155, 120)
    assert first.wait_s == pytest.approx(1.0)
    assert first.end_s == pytest.approx(1.0 + 10.0)
    assert second.wait_s == pytest.approx(0.35)
    assert serving.total_s == pytest.approx(11.0 + 7.0 + 0.35 + 5.0)
    assert serving.hit_rate == pytest.approx(120 / 255)
    assert serving.busy_s["a"] == pytest.approx(15.0)


def test_a_prompt_stops_the_decoding_of_others_and_a_full_cache_makes_them_wait():
    sessions = [Session("s", (AgentTurn(100, 20),)), Session("t", (AgentTurn(100, 20),))]
    alone = simulate_serving(sessions, {"a": model()}, route=least_loaded, in_flight=2)
    # The second prompt is computed while the first waits to decode.
    assert [each.wait_s for each in alone.requests] == pytest.approx([1.0, 2.0])
    full = simulate_serving(sessions, {"a": model(cache_pages=13)}, route=least_loaded, in_flight=2)
    assert [each.wait_s for each in full.requests] == pytest.approx([1.0, 12.0])


def test_pages_of_a_shared_beginning_are_found_and_those_of_another_version_are_not():
    sessions = [Session(name, (AgentTurn(20, 10),), "system", 50) for name in "stu"]
    how = {"engines": {"a": model()}, "route": least_loaded, "in_flight": 1}
    assert [each.hit_tokens for each in simulate_serving(sessions, **how).requests] == [0, 50, 50]
    updated = simulate_serving(sessions, update_s=6.0, **how)
    assert [each.hit_tokens for each in updated.requests] == [0, 50, 0]


def agents(count, *, seed):
    draw = np.random.default_rng(seed)
    return [
        Session(
            f"task-{task}",
            tuple(
                AgentTurn(
                    int(draw.integers(60, 180)),
                    int(draw.integers(5, 25)),
                    float(draw.exponential(2)),
                )
                for _ in range(draw.integers(6, 16))
            ),
        )
        for task in range(count)
    ]


@pytest.mark.parametrize("seed", [1, 0, 2])
def test_sessions_bound_to_a_saturated_engine_lose_its_cache_and_others_stand_idle(seed, full):
    """The collapse of prime-rl #3255 in small, and the route that avoids it."""
    if seed != 1 and not full:
        pytest.skip("more draws with --full")
    engine = ServingModel(
        EngineModel(decode_latency(step_s=0.01, request_s=0.0005), max_running=16), 1000.0, 750, 10
    )
    how = {"engines": dict.fromkeys(NAMES, engine), "in_flight": 30}
    sessions = agents(150 if full else 75, seed=seed)
    hashed = simulate_serving(sessions, route=consistent_hash, **how)
    moved = simulate_serving(sessions, route=PrefixAndLoad(), **how)
    assert moved.total_s < 0.9 * hashed.total_s
    assert hashed.wait_s > 1.5 * moved.wait_s
    assert moved.hit_rate > hashed.hit_rate
    tokens = [sum(each.prompt_tokens for each in serving.requests) for serving in (hashed, moved)]
    assert tokens[0] == tokens[1]


def test_fleets_that_cannot_be_served_are_refused():
    session = Session("s", (AgentTurn(100, 20),))
    how = {"route": least_loaded, "in_flight": 1}
    with pytest.raises(UsageError, match="has 120 tokens in the end, and a cache has room for 110"):
        simulate_serving([session], {"a": model(cache_pages=11)}, **how)
    for wrong in ({"in_flight": 0}, {"update_s": 0}):
        with pytest.raises(UsageError, match="needs a session"):
            simulate_serving([session], {"a": model()}, **(how | wrong))
    with pytest.raises(UsageError, match="one page size"):
        simulate_serving([session], {"a": model(), "b": model(page_tokens=5)}, **how)
    with pytest.raises(UsageError, match="must be positive"):
        model(prefill_tokens_per_s=0.0)

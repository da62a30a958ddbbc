"""A trace is what a fleet of agents may really do."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kvoffload_parts.eviction_fleets import Agents, Spread, Tool, simulate
from benchmarks.kvoffload_parts.eviction_traces import Advance, End, Use, Wait, read, recorded
from primeblocks.kvoffload import PageKey

SMALL = Agents(
    concurrent=6, samples=3, batch=3, step_s=5.0, max_staleness=1, num_versions=6,
    system_tokens=600, prompt_tokens=Spread(700, 0.5), turns=Spread(4, 0.5), max_tokens=6000,
)  # fmt: skip

TOOLS = (
    Tool("look", Spread(0.1, 1.0), Spread(400, 1.0), share=3),
    Tool("test", Spread(30, 0.5), Spread(900, 1.0), share=1),
)

agents = st.builds(
    replace,
    st.just(SMALL),
    concurrent=st.integers(1, 9),
    samples=st.integers(1, 4),
    batch=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    system_tokens=st.sampled_from([0, 100, 256, 1000]),
    running=st.none() | st.integers(1, 9),
    groups=st.integers(1, 3),
    tools=st.sampled_from([SMALL.tools, TOOLS]),
)


@settings(max_examples=30)
@given(agents, st.integers(0, 99))
def test_every_trace_obeys_the_rules(agents, seed):
    trace = simulate(agents, seed=seed)
    assert trace == simulate(agents, seed=seed)
    version, live, writing, due, seen, chains = 0, set(), set(), set(), set(), {}
    for event in trace.events:
        if isinstance(event, Advance):
            version += 1
            assert event.version == version
            old = version - agents.max_staleness
            due = {r for r in live if chains[r] and chains[r][0].version < old}
        elif isinstance(event, End):
            live.discard(event.rollout)  # dropped, perhaps before its first request
            writing.discard(event.rollout)
        elif isinstance(event, Wait):
            assert event.what in {tool.what for tool in agents.tools} | {"queue"}
            if event.what == "queue":
                assert len(writing) == agents.running
            else:
                writing.remove(event.rollout)
        else:
            rollout, pages = event.rollout, event.pages
            # No inadmissible rollout asks: those that became too old have ended.
            assert rollout not in due & live
            assert {key.version for key in pages} <= set(range(version + 1))
            assert all(version - key.version <= agents.max_staleness for key in pages)
            assert len({key.version for key in pages}) <= 1
            asked = [key in seen for key in pages]
            assert asked == [True] * event.asked + [False] * (len(pages) - event.asked)
            chain = chains.setdefault(rollout, [])
            if event.asked or not chain:
                assert list(pages[: len(chain)]) == chain
                chain[:] = pages
            elif pages[0] not in chain:
                chain += pages
            writing.add(rollout)
            assert len(writing) <= (agents.running or agents.concurrent)
            seen.update(pages)
            live.add(rollout)
            assert len(live) <= agents.concurrent
    assert version == agents.num_versions


def test_siblings_share_their_prompt_and_all_share_the_system_prompt():
    trace = simulate(SMALL, seed=0)
    users = {}
    for event in trace.events:
        if isinstance(event, Use):
            for key in event.pages:
                users.setdefault(key, set()).add(event.rollout)
    shared = Counter(key.hash[:1] for key, who in users.items() if len(who) > 1)
    assert shared[b"s"]
    assert shared[b"p"]
    assert not shared[b"r"]
    assert max(len(who) for key, who in users.items() if key.hash[:1] == b"p") == SMALL.samples


def test_rollouts_that_become_too_old_are_dropped_and_asked_again():
    slow = replace(SMALL, max_staleness=0, tools=(Tool("tool", Spread(5, 2.0), Spread(400, 1.0)),))
    trace = simulate(slow, seed=3)
    assert 0 < trace.dropped < trace.rollouts
    never = simulate(replace(slow, max_staleness=slow.num_versions), seed=3)
    assert never.dropped == 0


def test_the_queue_is_served_in_its_order():
    trace = simulate(replace(SMALL, running=2, max_staleness=6), seed=4)
    queue = []
    for event in trace.events:
        if isinstance(event, Wait) and event.what == "queue":
            queue.append(event.rollout)
        elif isinstance(event, Use) and event.rollout in queue:
            assert queue.pop(0) == event.rollout


def test_partial_rollouts_go_on_with_the_newest_version():
    trace = simulate(replace(SMALL, partial=True, num_versions=4), seed=2)
    version, moved, last = 0, 0, {}
    for event in trace.events:
        if isinstance(event, Advance):
            version = event.version
        elif isinstance(event, Use) and event.pages:
            (own,) = {key.version for key in event.pages}
            moved += last.get(event.rollout, own) < own
            assert last.get(event.rollout, own) <= own <= version
            last[event.rollout] = own
    assert moved
    assert trace.dropped == 0


def test_lines_of_a_recorded_run():
    def line(kind, name, keep, *pages):
        return {kind: name, "version": 1, "keep": keep, "pages": list(pages)}

    lines = [
        {"advance": 1},
        line("begin", "a", 0, "00", "01"),
        {"queue": ["b"]},
        {"save": "a", "pages": ["00", "01"]},
        line("finish", "a", 2, "02"),
        {"pause": "a", "reason": "turn"},
        {"queue": []},
        line("begin", "b", 0, "00", "11"),
        {"end": "b"},
        line("begin", "a", 2, "02", "03"),
    ]
    zero, one, two, three, other = (
        PageKey("", bytes([number]), version=1) for number in (0, 1, 2, 3, 0x11)
    )
    trace = read(lines)
    assert trace.events == (
        Advance(1),
        Use("a", (zero, one), 0),
        Wait("b", "queue"),
        Use("a", (two,), 0),
        Wait("a", "turn"),
        Use("b", (zero, other), 1),
        End("b"),
        Use("a", (zero, one, two, three), 3),
    )
    assert (trace.working_pages, trace.rollouts) == (4, 2)  # 2, 4 and 4 pages in flight


@pytest.mark.parametrize("name", ["queue", "no_queue"])
def test_recorded_runs_are_read(name):
    trace = recorded(name)
    waits = Counter(event.what for event in trace.events if isinstance(event, Wait))
    assert {"turn", "read", "search", "python", "pytest"} < waits.keys()
    assert trace.rollouts == 72
    assert 24 < trace.working_pages < 24 * 48

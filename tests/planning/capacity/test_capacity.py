"""plan_capacity against the simulator: exactly enough, and a byte less is not."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import CapacityError, PlanError
from primeblocks.planning.capacity import Gpu, KvGroup, Rollouts, Weights, plan_capacity
from primeblocks.planning.kv_shapes import footprint, prefill_flops
from tests.planning.capacity.simulator import Simulator

FULL = KvGroup("full", 2, head_bytes=6, heads=2, pair_flops=10)
NONE = Weights(0)


def room(capacity_bytes):
    return Gpu(capacity_bytes, memory_fraction=1.0, reserve_bytes=0)


@st.composite
def groups(draw):
    made = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        window = draw(st.none() | st.integers(1, 9))
        kept = draw(st.integers(0, 5))
        state = draw(st.integers(0 if kept else 1, 4)) if draw(st.booleans()) or not kept else 0
        made.append(
            KvGroup(name, draw(st.integers(1, 3)), kept, window=window, state_head_bytes=state)
        )
    return made


kinds = st.builds(
    Rollouts,
    prompts=st.integers(1, 2),
    prompt_tokens=st.integers(1, 7),
    completion_tokens=st.integers(1, 7),
    samples=st.integers(1, 3),
)
small = {"groups": groups(), "page_tokens": st.integers(1, 4)}


def highest(shapes, kind, page_tokens):
    """The most that one prompt's samples can hold: every combination of lengths is tried."""
    one = dataclasses.replace(kind, prompts=1)
    world = Simulator(shapes, [one], 0, page_tokens)
    later = [0, *range(kind.prompt_tokens, kind.tokens + 1)]
    alone = [(n, *[0] * (kind.samples - 1)) for n in range(1, kind.tokens + 1)]
    best, where = 0, None
    for lengths in [*alone, *itertools.product(later, repeat=kind.samples)]:
        world.lengths = list(lengths)
        world.began = [i for i, n in enumerate(lengths) if n]
        if world.used_bytes() > best:
            best, where = world.used_bytes(), lengths
    return best, where


def turns_to(kind, lengths):
    """An order of turns of one prompt's samples that ends at these lengths."""
    order = sorted(range(kind.samples), key=lambda i: -lengths[i])
    first, rest = order[0], order[1:]
    turns = [first] * lengths[first]
    for i in rest:
        turns += [i] * (lengths[i] - kind.prompt_tokens + 1 if lengths[i] else 0)
    return turns


@pytest.mark.parametrize(("page_tokens", "shapes"), [(1, "sliding"), (2, "sliding"), (3, "both")])
def test_the_peak_of_every_small_window_prompt_and_length(page_tokens, shapes):
    """Where a window moves over page ends, the last length is not the largest."""
    full = [KvGroup("full", 1, 2)] if shapes == "both" else []
    for window, prompt, more, samples in itertools.product(*[range(1, 6)] * 3, (1, 2)):
        groups = [KvGroup("sliding", 1, 3, window=window), *full]
        kind = Rollouts(1, prompt_tokens=prompt, completion_tokens=more, samples=samples)
        found = footprint(groups, kind, page_tokens=page_tokens)
        assert found.total_bytes == highest(groups, kind, page_tokens)[0]


@settings(max_examples=settings().max_examples // 3)
@given(shapes=st.lists(kinds, min_size=1, max_size=2), data=st.data(), **small)
def test_the_peak_is_exactly_enough(groups, shapes, page_tokens, data):
    plan = plan_capacity(
        groups, shapes, gpu=room(1 << 40), weights=NONE, gpus=1, page_tokens=page_tokens
    )
    assert plan.fits
    rollouts = sum(kind.prompts * kind.samples for kind in shapes)
    turns = data.draw(st.lists(st.integers(0, rollouts - 1), max_size=120))
    worst, begin = [], 0
    for kind in shapes:
        _, lengths = highest(groups, kind, page_tokens)
        for _ in range(kind.prompts):
            worst += [begin + turn for turn in turns_to(kind, lengths)]
            begin += kind.samples
    for order in (turns, worst):
        enough = Simulator(groups, shapes, plan.peak_bytes, page_tokens)
        enough.play(order)
        assert enough.evictions == 0
    assert enough.peak_bytes == plan.peak_bytes
    less = Simulator(groups, shapes, plan.peak_bytes - 1, page_tokens)
    if rollouts > 1:
        less.play(worst)
        assert less.evictions > 0
    else:
        with pytest.raises(PlanError, match="do not hold one rollout"):
            less.play(worst)


@given(kind=kinds, pages=st.integers(1, 40), **small)
def test_the_fewest_gpus_are_the_fewest(groups, kind, pages, page_tokens):
    """Against dealing prompts one by one and asking for every number of GPUs in turn."""
    size = highest(groups, kind, page_tokens)[0]
    capacity = size + pages
    plan = plan_capacity(groups, [kind], gpu=room(capacity), weights=NONE, page_tokens=page_tokens)
    for gpus in range(1, kind.prompts + 1):
        fullest = max(len(range(kind.prompts)[rank::gpus]) for rank in range(gpus))
        if fullest * size <= capacity:
            assert plan.gpus == gpus
            return
    raise AssertionError("a prompt a GPU fits")


def test_heads_split_over_ranks_until_there_are_none_left():
    kind = Rollouts(prompts=1, prompt_tokens=4, completion_tokens=1)
    peaks = [
        plan_capacity(
            [FULL], [kind], gpu=room(1 << 20), weights=NONE, tensor=tensor, page_tokens=4
        ).peak_bytes
        for tensor in (1, 2, 4)
    ]
    assert peaks == [2 * 2 * 6 * 4, 2 * 6 * 4, 2 * 6 * 4]
    with pytest.raises(PlanError, match=r"2 heads .* tensor=3\. Use one of \[1, 2\]"):
        plan_capacity([FULL], [kind], gpu=room(1 << 20), weights=NONE, tensor=3)


def test_spread_experts_make_room_on_every_gpu():
    weights = Weights(100, expert_bytes=800, experts=8, spread_experts=True)
    assert [weights.rank_bytes(tensor=2, data=n) for n in (1, 2, 3, 4)] == [450, 250, 250, 150]
    split = dataclasses.replace(weights, spread_experts=False)
    assert [split.rank_bytes(tensor=2, data=n) for n in (1, 4)] == [450, 450]
    kind = Rollouts(prompts=1, prompt_tokens=1, completion_tokens=1)
    how = {"weights": weights, "tensor": 2, "page_tokens": 1}
    page = FULL.page_bytes(1, tensor=2)
    assert plan_capacity([FULL], [kind], gpu=room(250 + page), **how).gpus == 4
    assert plan_capacity([FULL], [kind], gpu=room(249 + page), **how).gpus == 8


def test_what_gpus_do_not_hold_goes_to_host_then_disk_then_is_computed_again():
    kind = Rollouts(prompts=8, prompt_tokens=9, completion_tokens=8, samples=2)
    page = FULL.page_bytes(4)
    prompt = (4 + 2) * page  # 16 tokens and two shared pages: 2 + 2 + 2
    plan = plan_capacity(
        [FULL],
        [kind],
        gpu=room(prompt + page),
        weights=Weights(0, active_parameters=100),
        gpus=4,
        tensor=2,
        page_tokens=4,
        host_bytes=2 * prompt - 1,
        disk_bytes=prompt,
    )
    assert not plan.fits
    assert plan.peak_bytes == 4 * prompt // 2
    by_name = {tier.name: tier for tier in plan.tiers}
    assert by_name["gpu"].rollouts == 2 * 2 * 2
    assert by_name["gpu"].used_bytes == 4 * prompt
    assert (by_name["host"].rollouts, by_name["host"].used_bytes) == (2, prompt)
    assert (by_name["disk"].rollouts, by_name["disk"].used_bytes) == (2, prompt)
    assert plan.left_over.rollouts == 2 * 2
    assert plan.left_over.tokens == 2 * (16 + 8)
    whole = sum(200 + 2 * 10 * keys for keys in range(1, 17))
    half = sum(200 + 2 * 10 * keys for keys in range(9, 17))
    assert plan.left_over.flops == 2 * (whole + half)
    assert "4 GPUs, 2 x 2: rollouts are evicted" in plan.table()


@given(
    start=st.integers(0, 20),
    more=st.integers(0, 20),
    window=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(1, 9),
)
def test_attention_is_counted_as_a_loop_does(start, more, window, most):
    group = KvGroup("a", 3, 1, window=window, max_keys=most, pair_flops=7)
    loop = 0
    for token in range(start, start + more):
        keys = [key for key in range(token + 1) if window is None or key > token - window]
        loop += 2 * 5 + 3 * 7 * len(keys[: most or len(keys)])
    assert loop == prefill_flops([group], start=start, end=start + more, active_parameters=5)


def test_states_are_computed_from_the_first_token():
    state = KvGroup("linear", 1, 0, state_head_bytes=3)
    kind = Rollouts(prompts=1, prompt_tokens=9, completion_tokens=8, samples=4)
    plan = plan_capacity([FULL, state], [kind], gpu=room(1), weights=NONE, gpus=1)
    assert plan.left_over.tokens == 4 * 16


def test_refusals_carry_numbers():
    kind = Rollouts(prompts=3, prompt_tokens=64, completion_tokens=64)
    how = {"gpu": room(1 << 20), "weights": NONE}
    with pytest.raises(PlanError, match="groups and rollouts; got 0 and 1"):
        plan_capacity([], [kind], **how)
    with pytest.raises(PlanError, match=r"gpus=6 .* tensor=4\. Use 4 or 8"):
        plan_capacity([FULL], [kind], gpus=6, tensor=4, **how)
    with pytest.raises(PlanError, match="page_tokens must be at least 1; got 0"):
        plan_capacity([FULL], [kind], page_tokens=0, **how)
    with pytest.raises(PlanError, match="host_bytes must be at least 0; got -1"):
        plan_capacity([FULL], [kind], host_bytes=-1, **how)
    need = 8 * FULL.page_bytes(16)
    with pytest.raises(CapacityError, match="3 replicas .* need 1 bytes more"):
        plan_capacity([FULL], [kind], gpu=room(need - 1), weights=NONE)
    with pytest.raises(CapacityError, match="weights need 76 bytes more on each of 2 GPUs"):
        plan_capacity([FULL], [kind], gpu=room(24), weights=Weights(100), gpus=2)
    with pytest.raises(PlanError, match="leave no bytes"):
        Gpu(1 << 30)
    with pytest.raises(PlanError, match="expert_bytes needs experts"):
        Weights(1, expert_bytes=1)
    with pytest.raises(PlanError, match="at least 1"):
        Rollouts(prompts=0, prompt_tokens=1, completion_tokens=1)
    with pytest.raises(PlanError, match="stores no bytes"):
        KvGroup("a", 1, 0)


def test_large_numbers_cost_no_more_than_small_ones():
    # Once as long as there are tokens in a page, and as there are replicas.
    kind = Rollouts(prompts=10**9 + 7, prompt_tokens=10**9, completion_tokens=10**9)
    how = {"gpu": room(1 << 50), "weights": NONE, "page_tokens": 10**9}
    plan = plan_capacity([FULL], [kind], gpus=10**9, **how)
    assert plan.tiers[0].rollouts == kind.prompts
    assert plan.pages == (2 * 2,)  # Of the seven replicas that have two prompts.
    with pytest.raises(CapacityError, match="replicas of tensor=1 are not enough"):
        plan_capacity([FULL], [Rollouts(1 << 62, 1, 1)] * 4, gpu=room(1), weights=NONE)


LONG = pytest.param(10**5000, id="long")


@pytest.mark.parametrize("odd", [True, -1, 1 << 63, LONG])
def test_what_counts_nothing_is_refused_by_name(odd):
    how = {"gpu": room(1 << 20), "weights": NONE}
    kind = {"prompts": 3, "prompt_tokens": 64, "completion_tokens": 64}
    for name, build in {
        "prompts": lambda: Rollouts(**kind | {"prompts": odd}),
        "heads": lambda: KvGroup("a", 1, 1, heads=odd),
        "dense_bytes": lambda: Weights(odd),
        "memory_bytes": lambda: Gpu(odd),
        "tensor": lambda: plan_capacity([FULL], [Rollouts(**kind)], tensor=odd, **how),
        "host_bytes": lambda: plan_capacity([FULL], [Rollouts(**kind)], host_bytes=odd, **how),
    }.items():
        with pytest.raises(PlanError, match=f"{name} must be"):
            build()
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(PlanError, match="memory_fraction must be above 0 and at most 1; got"):
            Gpu(1 << 40, memory_fraction=fraction)

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.contrib.redundant_experts import Placement, plan_placement
from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import reference
from primeblocks.parallel.experts import AllToAllDispatcher, grouped_swiglu
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64, assert_same_bits, gradients_of

HIDDEN, INTERMEDIATE = 5, 3
SOME_LOADS = st.one_of(
    st.integers(0, 12),
    st.floats(0, 1e6, allow_subnormal=False),
    st.sampled_from([0, 1, 1e100, 1e-300]),
)


@st.composite
def problems(draw, most_ranks=5, most_share=5, loads=SOME_LOADS):
    """Arguments of plan_placement."""
    size = draw(st.integers(1, most_ranks))
    experts = size * draw(st.integers(1, most_share))
    redundant = size * draw(st.integers(0, experts * (size - 1) // size))
    tokens = draw(st.lists(loads, min_size=experts, max_size=experts))
    return tokens, size, redundant


def _zipf(experts, *, seed=0):
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    return (1e6 / (order + 1)).double()


def _held(plan):
    width = plan.physical_per_rank
    return [plan.logical_of_physical[r * width : (r + 1) * width] for r in range(plan.ranks)]


def _copies(plan):
    return [plan.logical_of_physical.count(e) for e in range(plan.num_experts)]


@given(problem=problems(), slack=st.sampled_from([0, 0.02, 1.0]))
def test_a_plan_covers_all_experts_and_fills_all_ranks(problem, slack):
    loads, size, redundant = problem
    plan = plan_placement(loads, ranks=size, redundant=redundant, slack=slack)
    as_tensor = torch.tensor(loads, dtype=torch.float64)
    assert plan == plan_placement(as_tensor, ranks=size, redundant=redundant, slack=slack)
    assert plan.num_physical == len(loads) + redundant == size * plan.physical_per_rank
    assert set(plan.logical_of_physical) == set(range(len(loads)))
    for held in _held(plan):
        assert list(held) == sorted(set(held))
    assert math.fsum(plan.rank_loads) == pytest.approx(sum(loads))


@given(problem=problems(), slack=st.sampled_from([0, 0.02, 1.0]))
def test_no_rank_exceeds_the_bound(problem, slack):
    loads, size, redundant = problem
    plan = plan_placement(loads, ranks=size, redundant=redundant, slack=slack)
    mean = sum(loads) / size
    hottest = max(load / count for load, count in zip(loads, _copies(plan), strict=True))
    bound = max(mean + hottest * (1 - 1 / size), mean * (1 + slack))
    assert max(plan.rank_loads) <= bound * (1 + 1e-8)
    if redundant == 0:
        assert plan.max_over_mean <= plan.max_over_mean_before


@given(problem=problems())
def test_copies_go_where_a_copy_has_most_to_do(problem):
    loads, size, redundant = problem
    copies = _copies(plan_placement(loads, ranks=size, redundant=redundant))
    want = [1] * len(loads)
    for _ in range(redundant):
        open_ = [e for e in range(len(loads)) if want[e] < size]
        want[max(open_, key=lambda e: (loads[e] / want[e], -want[e], -e))] += 1
    assert copies == want


def _optimum(loads, ranks, copies):
    """The smallest possible load of the busiest rank, over every way to deal them."""
    best = math.inf

    def place(expert, load, room):
        nonlocal best
        if expert == len(loads):
            best = min(best, max(load))
            return
        for chosen in itertools.combinations([r for r in range(ranks) if room[r]], copies[expert]):
            after = [x + loads[expert] / copies[expert] * (r in chosen) for r, x in enumerate(load)]
            if max(after) < best:
                place(expert + 1, after, [n - (r in chosen) for r, n in enumerate(room)])

    place(0, [0.0] * ranks, [sum(copies) // ranks] * ranks)
    return best


def _all_copies(experts, ranks, redundant):
    for extra in itertools.product(range(ranks), repeat=experts):
        if sum(extra) == redundant:
            yield [1 + n for n in extra]


@given(problem=problems(most_ranks=3, most_share=2, loads=st.integers(0, 20)))
def test_tiny_plans_are_near_the_optimum(problem):
    loads, size, redundant = problem
    plan = plan_placement(loads, ranks=size, redundant=redundant, slack=0)
    busiest = max(plan.rank_loads)
    assert busiest <= 1.1 * _optimum(loads, size, _copies(plan)) + 1e-9
    every = (_optimum(loads, size, c) for c in _all_copies(len(loads), size, redundant))
    assert busiest <= 4 / 3 * min(every) + 1e-9


def test_exchanges_begin_from_largest_first():
    # Begun from any other order, or from ranks in turn, they end at 16/3.
    plan = plan_placement([1, 0, 7, 2, 1, 2], ranks=3, redundant=3, slack=0)
    assert max(plan.rank_loads) == pytest.approx(13 / 3)


def test_zipf_loads_are_levelled():
    loads = _zipf(256)
    exact = plan_placement(loads, ranks=32, redundant=32, slack=0)
    default = plan_placement(loads, ranks=32, redundant=32)
    assert default.max_over_mean_before > 5
    assert exact.max_over_mean < 1.001
    assert default.max_over_mean <= 1.02 + 1e-9
    # What slack is for: the copies themselves are 32.
    assert default.bytes_sent(1) < exact.bytes_sent(1) / 2
    assert plan_placement(loads, ranks=32, redundant=32, slack=0.1).bytes_sent(1) < 64


def test_without_loads_copies_are_even_and_experts_stay():
    plan = plan_placement([0] * 8, ranks=4, redundant=8)
    assert _copies(plan) == [2] * 8
    assert (plan.max_over_mean, plan.max_over_mean_before) == (1, 1)
    alone = plan_placement([0] * 8, ranks=4, redundant=0)
    assert alone.logical_of_physical == tuple(range(8))
    assert alone.bytes_sent(100) == 0


def test_without_copies_balanced_owners_stay_as_they_are():
    # Largest first comes to 18 of 17 here.
    plan = plan_placement([3, 5, 6, 3, 9, 6, 1, 1], ranks=2, redundant=0)
    assert plan.logical_of_physical == tuple(range(8))


def test_one_hot_expert_gets_a_copy_on_every_rank_and_no_more():
    plan = plan_placement([0, 9, 0, 0, 0, 0], ranks=3, redundant=6)
    assert _copies(plan) == [2, 3, 2, 2, 2, 1]
    assert plan.rank_loads == (3, 3, 3)
    assert plan.max_over_mean_before == 3
    everything = plan_placement([5, 1, 1], ranks=3, redundant=6)
    assert everything.logical_of_physical == (0, 1, 2) * 3


def test_a_plan_shows_itself_in_one_line():
    plan = plan_placement([8, 4, 2, 2], ranks=2, redundant=2)
    assert repr(plan) == "<Placement of 4 experts as 6 on 2 ranks>"


def test_the_table_shows_what_moves():
    assert plan_placement([8, 4, 2, 2], ranks=2, redundant=2).table().splitlines() == [
        "4 experts, 6 physical, on 2 ranks; max/mean 1.500 -> 1.000; 3 experts sent",
        "rank      before       after  experts",
        "   0        12.0         8.0  0 1 2*",
        "   1         4.0         8.0  0* 1* 3",
    ]


BAD_PLANS = {
    r"1 of 2 do not, expert 1 first: nan": {"loads": [1, math.nan]},
    r"1 of 2 do not, expert 0 first: inf": {"loads": [math.inf, 1]},
    r"2 of 3 do not, expert 1 first: -1.0": {"loads": [1, -1, -2]},
    r"got shape \(2, 2\)": {"loads": torch.ones(2, 2)},
    r"ranks=2 cannot own equal shares of 0 experts": {"loads": []},
    r"ranks=4 cannot own equal shares of 6 experts. Use one of \[1, 2, 3, 6\]": {"ranks": 4},
    r"ranks=0 cannot own": {"ranks": 0},
    r"redundant=3 must be a multiple of 2 \(ranks\) from 0 to 6": {"redundant": 3},
    r"redundant=-2 must be": {"redundant": -2},
    r"redundant=8 must be .* every rank holds all 6 experts": {"redundant": 8},
    r"slack=-0.1 must be": {"slack": -0.1},
    r"slack=nan must be": {"slack": math.nan},
}


@pytest.mark.parametrize("said", BAD_PLANS)
def test_bad_plans_are_refused(said):
    arguments = {"loads": [1] * 6, "ranks": 2, "redundant": 2} | BAD_PLANS[said]
    with pytest.raises(PlanError, match=said):
        plan_placement(arguments.pop("loads"), **arguments)


@given(problem=problems(), seed=st.integers(0, 99), rank=st.integers(0, 40))
def test_choices_go_round_the_copies_of_their_expert(problem, seed, rank):
    loads, size, redundant = problem
    plan = plan_placement(loads, ranks=size, redundant=redundant)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(loads), (int(torch.randint(9, (), generator=g)), 3), generator=g)
    physical = plan.assign(ids, rank=rank)
    assert (physical.dtype, physical.shape) == (torch.int64, ids.shape)
    rounds = {
        e: itertools.cycle([s for s, held in enumerate(plan.logical_of_physical) if held == e])
        for e in range(len(loads))
    }
    for e, count in enumerate(_copies(plan)):
        for _ in range(rank % count):
            next(rounds[e])
    assert physical.flatten().tolist() == [next(rounds[e]) for e in ids.flatten().tolist()]


def test_ranks_with_one_token_choose_different_copies():
    plan = plan_placement([9, 0, 0, 0], ranks=4, redundant=4)
    one = torch.zeros(1, 1, dtype=torch.int32)
    assert len({plan.assign(one, rank=rank).item() for rank in range(4)}) == 4


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([[0, 4]]), r"lie in \[0, 4\]; the plan has experts 0 to 3"),
        (torch.tensor([[-1, 0]]), r"lie in \[-1, 0\]"),
        (torch.tensor([0]), r"got torch.int64 \(1,\)"),
        (torch.zeros(1, 2), r"got torch.float32 \(1, 2\)"),
    ],
)
def test_bad_ids_are_refused(ids, said):
    with pytest.raises(ShapeError, match=said):
        plan_placement([1] * 4, ranks=2, redundant=2).assign(ids, rank=0)


def _batch(tokens, *, num_experts, seed):
    """Most choices are expert 0; a token may choose an expert twice."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64)
    scores = torch.rand(tokens, 2, generator=g, dtype=torch.float64)
    ids = torch.randint(num_experts, (tokens, 2), generator=g)
    return x, scores, ids.where(torch.rand(ids.shape, generator=g) < 0.5, 0)


def _weights(num_experts):
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=g, dtype=torch.float64)
    return gate_up, torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=g, dtype=torch.float64)


def _layer_with_copies(plan, tokens_by_rank, seed):
    group = dist.group.WORLD
    rank = group.rank()
    share = plan.num_experts // plan.ranks
    x, scores, ids = _batch(tokens_by_rank[rank], num_experts=plan.num_experts, seed=seed + rank)
    dispatcher = AllToAllDispatcher(group)

    def layer(x, scores, gate_up, down):
        physical = plan.assign(ids, rank=rank)
        sent = dispatcher.dispatch(x, scores, physical, num_experts=plan.num_physical)
        own = (plan.copies(w, group=group) for w in (gate_up, down))
        return dispatcher.combine(grouped_swiglu(sent.tokens, sent.counts, *own), sent)

    own = (w[rank * share : (rank + 1) * share] for w in _weights(plan.num_experts))
    return gradients_of(layer, x, scores, *own)


def _check_against_one_rank(plan, tokens_by_rank, seed):
    got = ranks.run(_layer_with_copies, plan, tokens_by_rank, seed, world_size=plan.ranks)
    weights = _weights(plan.num_experts)
    want = [torch.zeros_like(w) for w in weights]
    for rank, tokens in enumerate(tokens_by_rank):
        x, scores, ids = _batch(tokens, num_experts=plan.num_experts, seed=seed + rank)

        def loops(x, scores, gate_up, down, ids=ids):
            out = reference.experts(x, ids, scores, gate_up, down)
            return out + 0 * (gate_up.sum() + down.sum() + x.sum() + scores.sum())

        output, gradients = gradients_of(loops, x, scores, *weights)
        assert_close_float64(got[rank].output, output)
        assert_close_float64(got[rank].gradients[:2], gradients[:2])
        want = [a + b for a, b in zip(want, gradients[2:], strict=True)]
    for which, whole in enumerate(want):
        assert_close_float64(torch.cat([mine.gradients[2 + which] for mine in got]), whole)


@pytest.mark.parametrize(
    ("tokens_by_rank", "num_experts", "redundant"),
    [
        ((4, 7), 6, 0),
        ((4, 7), 6, 2),
        ((9, 0), 4, 4),
        ((5, 0, 2), 6, 3),
        ((1, 1, 1), 3, 6),
        ((0, 0, 0), 6, 6),
        ((8, 3, 0, 6), 8, 4),
        ((8, 3, 0, 6), 8, 12),
    ],
    ids=str,
)
def test_a_layer_with_copies_matches_one_rank(tokens_by_rank, num_experts, redundant):
    size = len(tokens_by_rank)
    batches = (_batch(t, num_experts=num_experts, seed=3 + r) for r, t in enumerate(tokens_by_rank))
    chosen = torch.cat([ids.flatten() for _, _, ids in batches])
    loads = chosen.bincount(minlength=num_experts)
    plan = plan_placement(loads, ranks=size, redundant=redundant)
    _check_against_one_rank(plan, tokens_by_rank, seed=3)


@settings(max_examples=6)
@given(data=st.data(), problem=problems(most_ranks=4, most_share=3), seed=st.integers(9, 99))
def test_any_plan_matches_one_rank(data, problem, seed):
    loads, size, redundant = problem
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    plan = plan_placement(loads, ranks=size, redundant=redundant)
    _check_against_one_rank(plan, tokens, seed)


def _fetched(plan, dtype):
    """The weights of a rank's physical experts, the gradient of its own, the bytes it sent."""
    rank, share = dist.get_rank(), plan.num_experts // plan.ranks
    own = torch.arange(rank * share, (rank + 1) * share).to(dtype)[:, None].expand(-1, 7)
    own = own.clone().requires_grad_()
    real, bytes_sent = dist.all_to_all_single, []

    def counted(out, x, out_splits, in_splits, **keywords):
        to_others = sum(in_splits) - in_splits[rank]
        bytes_sent.append(to_others * x[:1].nbytes if to_others else 0)
        return real(out, x, out_splits, in_splits, **keywords)

    with mock.patch.object(dist, "all_to_all_single", counted):
        weights = plan.copies(own, group=dist.group.WORLD)
        weights.sum().backward()
    return weights.detach(), own.grad, bytes_sent


@pytest.mark.parametrize("slack", [0, 1.0])
def test_copies_arrive_gradients_are_summed_and_bytes_are_as_planned(slack):
    plan = plan_placement(_zipf(12), ranks=4, redundant=8, slack=slack)
    got = ranks.run(_fetched, plan, torch.bfloat16, world_size=4)
    copies = torch.tensor(_copies(plan)).bfloat16()
    for rank, (weights, grad, _) in enumerate(got):
        held = torch.tensor(_held(plan)[rank]).bfloat16()
        assert_same_bits(weights, held[:, None].expand(-1, 7).contiguous())
        own = copies[3 * rank : 3 * rank + 3]
        assert_same_bits(grad, own[:, None].expand(-1, 7).contiguous())
    forward, backward = (sum(sent) for sent in zip(*(each[2] for each in got), strict=True))
    lacking = [e for r, held in enumerate(_held(plan)) for e in held if e // 3 != r]
    assert forward == backward == plan.bytes_sent(7 * 2) == len(lacking) * 14 > 0


def _refusals():
    group = dist.group.WORLD
    with pytest.raises(PlanError, match="planned for 4 ranks; the group has 2"):
        plan_placement([1] * 4, ranks=4, redundant=4).copies(torch.zeros(1, 2), group=group)
    plan = plan_placement([1] * 4, ranks=2, redundant=2)
    with pytest.raises(ShapeError, match="owns 2 of 4 experts; got 3"):
        plan.copies(torch.zeros(3, 2), group=group)
    # Nothing was sent before a refusal: the group still works.
    return plan.copies(torch.full((2, 1), float(group.rank())), group=group).flatten().tolist()


def test_weights_that_do_not_fit_are_refused_before_anything_is_sent():
    plan = plan_placement([1] * 4, ranks=2, redundant=2)
    want = [[float(e // 2) for e in held] for held in _held(plan)]
    assert ranks.run(_refusals, world_size=2) == want


def test_a_placement_is_a_value():
    plan = plan_placement([3, 1], ranks=2, redundant=2)
    assert plan == Placement(loads=(3, 1), ranks=2, logical_of_physical=(0, 1, 0, 1))
    assert len({plan, plan_placement([3.0, 1.0], ranks=2, redundant=2)}) == 1

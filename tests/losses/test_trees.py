"""Trees of rollouts against a trie of dictionaries: what is shared, and what is not."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop import Rollout
from primeblocks.attachments import Aligned
from primeblocks.errors import PlanError, ShapeError, UsageError
from primeblocks.losses.packing import (
    pack,
    plan_packing,
    plan_tree_packing,
    plan_trees,
    sequence_flops,
)
from primeblocks.replay import Routes

LAYERS, TOP_K = 2, 2
ROUTES = Routes.from_array(np.ones((2, LAYERS, 1), np.uint8), num_experts=4, layer_ids=(0, 1))


def rollout(tokens, *, prompt_length=1, routes=None, images=None, **more):
    sampled = len(tokens) - prompt_length
    attachments = {} if routes is None else {"routes": routes}
    if images is not None:
        attachments["images"] = images
    return Rollout(
        tokens=np.array(tokens),
        prompt_length=prompt_length,
        logprobs=-np.ones(sampled),
        versions=np.zeros(sampled, np.int64),
        finish_reason="stop",
        attachments=attachments | more,
    )


@st.composite
def batches(draw, *, with_routes=True, with_images=True):
    """Rollouts of two words: many agree for a while. Some are equal, or prefixes of others."""
    words = draw(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), max_size=9))
    kind = draw(st.sampled_from(["none", "whole", "short", "mixed"])) if with_routes else "none"
    batch = []
    for tokens in words:
        routes, images = None, None
        if kind != "none" and not (kind == "mixed" and draw(st.booleans())):
            lack = kind != "whole" and (kind == "short" or draw(st.booleans()))
            count = len(tokens) - lack
            odd = draw(st.sets(st.integers(0, 8), max_size=1))
            routes = np.zeros((count, LAYERS, TOP_K), np.uint8)
            routes[[i for i in odd if i < count], 1, 0] = draw(st.integers(1, 2))
            routes = Aligned.rows(routes) if draw(st.booleans()) else torch.from_numpy(routes)
        if with_images and draw(st.booleans()):
            start = draw(st.integers(0, len(tokens) - 1))
            stop = draw(st.integers(start + 1, len(tokens)))
            images = (Aligned(draw(st.sampled_from(["cat", "dog"])), start, stop),)
        batch.append(rollout(np.array(tokens), routes=routes, images=images))
    return batch


def _rows_of(each):
    value = each.attachments.get("routes")
    value = value.value if isinstance(value, Aligned) else value
    return None if value is None else np.asarray(value)


def _keys(each, *, routes):
    """By position what must agree: the token, the images that begin there, the routes."""
    rows = _rows_of(each)
    for at, token in enumerate(each.tokens.tolist()):
        images = [(x.stop, x.value) for x in each.attachments.get("images", ()) if x.start == at]
        if not routes:
            row = None
        elif rows is None:
            row = "unknown"
        else:
            row = rows[at].tobytes() if at < len(rows) else "any"
        yield token, tuple(sorted(images)), row


def _naive(batch, *, routes):
    """Each rollout's path through a trie of dictionaries, nodes numbered as they are met.

    A last token without routes goes where a token with routes is, if there is one.
    """
    keys = [[*_keys(each, routes=routes)] for each in batch]
    nodes, count = {}, itertools.count()
    paths = [[] for _ in keys]
    loose = []
    for i, own in enumerate(keys):
        prefix = ()
        for key in own:
            if key[2] == "any":
                loose.append((i, prefix, key))
                break
            prefix = (*prefix, key)
            paths[i].append(nodes.setdefault(prefix, next(count)))
    for i, prefix, key in loose:
        like = [p for p in nodes if p[:-1] == prefix and p[-1][:2] == key[:2]]
        same = [nodes[p] for p in like if p[-1][2] != "unknown"]
        paths[i].append(same or nodes.setdefault((*prefix, key), next(count)))
    return paths


@given(batch=batches(), routes=st.sampled_from(["exact", "first", "own"]))
def test_positions_are_shared_exactly_where_a_naive_trie_shares_them(batch, routes):
    plan = plan_trees(batch, routes=routes)
    paths = _naive(batch, routes=routes == "exact")
    starts = np.cumsum([0, *plan.lengths])
    rows = [plan.rows[a:b].tolist() for a, b in itertools.pairwise(starts)]
    row_of, node_of = {}, {}
    for own, path in zip(rows, paths, strict=True):
        assert len(own) == len(path)
        for row, found in zip(own, path, strict=True):
            # A last token may go to any of several.
            node = node_of.get(row, found[0]) if isinstance(found, list) else found
            assert not isinstance(found, list) or node in found
            assert row_of.setdefault(node, row) == row
            assert node_of.setdefault(row, node) == node
    assert len(plan.places) == len(row_of)
    _assert_sound(plan, batch)


def _assert_sound(plan, batch):
    """Segments in preorder, ancestors by intervals, and values that each row may have."""
    lengths, parents = plan.segment_lengths, plan.parents
    assert min(lengths, default=1) > 0
    starts = np.cumsum([0, *lengths])
    assert starts[-1] == len(plan.places)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    for i, parent in enumerate(parents):
        assert parent < i
        assert (
            parent == -1 or plan.positions[starts[i]] == plan.positions[starts[parent + 1] - 1] + 1
        )
    ends = starts[1:].copy()
    for i in reversed(range(len(lengths))):
        if parents[i] >= 0:
            ends[parents[i]] = max(ends[parents[i]], ends[i])
    tokens = np.concatenate([np.zeros(0, int), *(each.tokens for each in batch)])
    cu = np.cumsum([0, *plan.lengths])
    for i, each in enumerate(batch):
        rows = plan.rows[cu[i] : cu[i + 1]]
        assert np.array_equal(tokens[plan.places[rows]], each.tokens)
        assert plan.positions[rows].tolist() == list(range(len(rows)))
        for row in rows:  # Ancestors of a row are its rollout's rows up to it.
            seen = [j for j in range(row + 1) if row < ends[segment[j]]]
            assert seen == rows[: plan.positions[row] + 1].tolist()
    seen = [sum(j <= i < ends[segment[j]] for j in range(i + 1)) for i in range(len(plan.places))]
    assert plan.pairs == (sum(n * (n + 1) // 2 for n in plan.lengths), sum(seen))


@given(batch=batches(), routes=st.sampled_from(["exact", "first", "own"]))
def test_imposed_routes_are_each_rollouts_own_or_by_the_rule(batch, routes):
    plan = plan_trees(batch, routes=routes)
    cu = np.cumsum([0, *plan.lengths])
    recorded = {}
    for i, each in enumerate(batch):
        rows = _rows_of(each)
        for at in range(0 if rows is None else len(rows)):
            recorded.setdefault(int(plan.rows[cu[i] + at]), []).append((i, rows[at].tobytes()))
    owner = np.searchsorted(cu, plan.places, side="right") - 1
    for row, found in recorded.items():
        assert owner[row] == found[0][0]  # The first that has a row.
        differs = len({value for _, value in found}) > 1
        if routes == "exact":
            assert not differs
            assert not plan.differing[row]
        elif differs:
            assert plan.differing[row]


def test_rollouts_that_are_equal_or_prefixes_need_no_rows_of_their_own():
    whole = rollout(np.arange(6))
    for others, rows in (([whole], 6), ([rollout(np.arange(3))], 6), ([rollout(np.arange(9))], 9)):
        plan = plan_trees([whole, *others])
        assert plan.segment_lengths == (rows,)
        assert plan.parents == (-1,)


def test_a_last_token_without_routes_goes_with_one_that_has_them():
    whole = np.zeros((4, LAYERS, TOP_K), np.uint8)
    other = whole.copy()
    other[3] = 1
    for lengths in ((4, 4, 4), (4, 6, 6)):
        routes = [whole[:3], *(np.resize(x, (n, LAYERS, TOP_K)) for x, n in
                               zip((whole, other), lengths[1:], strict=True))]  # fmt: skip
        batch = [rollout(np.arange(n), routes=x) for n, x in zip(lengths, routes, strict=True)]
        plan = plan_trees(batch)
        assert plan.segment_lengths == (3, lengths[1] - 3, lengths[2] - 3)
        assert plan.rows[:4].tolist() == [0, 1, 2, 3]
        assert plan.places[3] == lengths[0] + 3  # Of the second, which has a row there.


def test_a_missing_row_gives_way_to_a_known_one():
    known = np.full((5, LAYERS, TOP_K), 3)
    gone = np.full((5, LAYERS, TOP_K), -1)
    batch = [rollout(np.arange(5), routes=each) for each in (gone, known)]
    assert plan_trees(batch, routes="first").places.tolist() == [5, 6, 7, 8, 9]


def test_one_slot_of_one_layer_parts_rollouts_or_not_by_the_rule():
    routes = [np.zeros((6, LAYERS, TOP_K), np.uint8) for _ in range(2)]
    routes[1][2, 1, 1] = 3
    batch = [rollout(np.arange(6), routes=each) for each in routes]
    exact = plan_trees(batch)
    assert exact.segment_lengths == (2, 4, 4)
    assert exact.parents == (-1, 0, 0)
    for rule in ("first", "own"):
        plan = plan_trees(batch, routes=rule)
        assert plan.segment_lengths == (6,)
        assert plan.places.tolist() == list(range(6))
        assert np.flatnonzero(plan.differing).tolist() == [2]
    given_rows = plan_trees(batch, imposed=[None, None])
    assert given_rows.segment_lengths == (6,)
    named = plan_trees(batch, routes="first", per_token=["routes"], imposed=[None, None])
    assert named.segment_lengths == (2, 4, 4)


@given(batch=batches(), padding=st.integers(0, 3))
def test_what_rows_predict_is_found_on_whichever_rank_holds_them(batch, padding):
    if not batch:
        return
    bare = [rollout(each.tokens) for each in batch]
    packed = pack(bare, range(len(bare)), multiple_of=1)
    plan = plan_trees(bare, padding=packed.padding)
    assert np.array_equal(packed.tokens[plan.places][plan.rows], packed.tokens)
    rows, targets, pair = plan.distinct(packed.predictors, packed.targets)
    assert len({*zip(rows.tolist(), targets.tolist(), strict=True)}) == len(rows)
    assert np.array_equal(rows[pair], plan.rows[packed.predictors])
    assert np.array_equal(targets[pair], packed.targets)
    seen = []
    for rank in range(3):
        own = np.arange(rank, len(plan.places), 3)
        completions, at = plan.held(own, packed.predictors)
        assert np.array_equal(own[at], plan.rows[packed.predictors][completions])
        seen += completions.tolist()
    assert sorted(seen) == list(range(len(packed.targets)))


def test_padding_is_a_root_and_no_rollouts_are_a_plan():
    packed = pack([], [], multiple_of=4)
    plan = plan_trees([], padding=packed.padding)
    assert (plan.segment_lengths, plan.parents) == ((4,), (-1,))
    assert len(plan_trees([]).places) == 0
    assert plan_trees([]).table()
    plan = plan_trees([rollout([1, 2]), rollout([1, 3])], padding=2)
    assert (plan.segment_lengths, plan.parents) == ((1, 1, 1, 2), (-1, 0, 0, -1))
    assert plan.positions.tolist() == [0, 1, 1, 0, 1]


@given(
    batch=batches(with_routes=False),
    ranks=st.integers(1, 3),
    budget=st.integers(9, 30),
    balance=st.sampled_from(["ranks", "steps"]),
)
def test_a_deal_holds_each_rollout_once_and_counts_what_is_shared(batch, ranks, budget, balance):
    cost = sequence_flops(active_parameters=10.0, layers=1, attention_width=1)
    rules = {"ranks": ranks, "budget_tokens": budget, "balance": balance, "annealing_steps": 0}
    plan = plan_tree_packing(plan_trees(batch), cost=cost, **rules)
    parts = [part for own in plan.micro_batches for part in own]
    assert sorted(itertools.chain(*parts)) == list(range(len(batch)))
    assert len({len(own) for own in plan.micro_batches}) == 1
    for own, costs in zip(plan.micro_batches, plan.costs, strict=True):
        for part, paid in zip(own, costs, strict=True):
            trees = plan_trees([batch[i] for i in part])
            assert len(trees.places) == sum(plan.lengths[i] for i in part) <= budget
            # n**2 is twice the pairs, less n.
            want = 60 * len(trees.places) + 6 * (2 * trees.pairs[1] - len(trees.places))
            assert paid == pytest.approx(want)
    assert plan.bound_over_mean <= plan.max_over_mean * (1 + 1e-9)


def _group(prompt, count, first):
    head = first + np.arange(prompt)
    return [
        rollout(np.concatenate([head, first + 50_000 + 500 * i + np.arange(400)]))
        for i in range(count)
    ]


def test_a_tree_is_cut_where_that_is_cheaper_than_imbalance():
    """Of two groups on two ranks the larger is cut if its prompt is short, otherwise not."""
    rules = {"ranks": 2, "budget_tokens": 100_000, "annealing_steps": 0}
    for prompt, sizes in ((10, [6, 6]), (20_000, [4, 8])):
        batch = [*_group(prompt, 8, 0), *_group(prompt, 4, 100_000)]
        plan = plan_tree_packing(plan_trees(batch), **rules)
        assert sorted(sum(map(len, own)) for own in plan.micro_batches) == sizes
        separate = plan_packing([prompt + 400] * 12, **rules)
        assert max(map(sum, plan.costs)) < max(map(sum, separate.costs))


def test_refusals_say_what_to_do():
    two = [rollout([1, 2, 3]), rollout([1, 2, 4])]
    for words, error, call in (
        ("exact, first, own", UsageError, lambda: plan_trees(two, routes="last")),
        (
            "1 entries in imposed= for 2 rollouts",
            ShapeError,
            lambda: plan_trees(two, imposed=[None]),
        ),
        ("no attachment 'gates'", UsageError, lambda: plan_trees(two, per_token=["gates"])),
        (
            r"has bytes.*tensor\(\)",
            UsageError,
            lambda: plan_trees([rollout([1, 2], routes=b"packed")]),
        ),
        (
            r"has Routes.*tensor\(\)",
            UsageError,
            lambda: plan_trees([rollout([1, 2], routes=ROUTES)]),
        ),
        (
            r"each of 3 tokens.*\[1, 1\]",
            ShapeError,
            lambda: plan_trees(two, imposed=[np.zeros((1, 1)), None]),
        ),
        (
            "must have one type, dtype and row shape",
            ShapeError,
            lambda: plan_trees(two, imposed=[np.zeros((3, 1)), np.zeros((3, 2))]),
        ),
        (
            "2 tokens of padding",
            PlanError,
            lambda: plan_tree_packing(plan_trees(two, padding=2), ranks=1, budget_tokens=9),
        ),
        (
            "rollout 0 has 3 tokens, but a micro-batch has room for 2",
            PlanError,
            lambda: plan_tree_packing(plan_trees(two), ranks=1, budget_tokens=2),
        ),
    ):
        with pytest.raises(error, match=words):
            call()

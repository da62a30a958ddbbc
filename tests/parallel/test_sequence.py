import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors

from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import AttentionSpec
from primeblocks.parallel.attention.flex import tile_lists
from primeblocks.testing import ranks

ORDERS = ["balanced", "contiguous", "zigzag"]
plans = st.builds(
    plan_sequence,
    st.lists(st.integers(0, 17), max_size=7),
    ranks=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
    chunk_tokens=st.integers(1, 9),
)


@given(plan=plans)
def test_every_token_is_on_one_rank(plan):
    dealt = torch.cat([plan.indices(rank) for rank in range(plan.ranks)])
    assert dealt.sort().values.tolist() == list(range(plan.tokens))
    assert [len(plan.indices(rank)) for rank in range(plan.ranks)] == list(plan.counts)
    assert dealt[plan.row_of_token].tolist() == list(range(plan.tokens))
    for rank in range(plan.ranks):
        assert (plan.indices(rank).diff() > 0).all()


@given(plan=plans)
def test_positions_count_inside_documents(plan):
    expected = [p for length in plan.document_lengths for p in range(length)]
    starts = [
        sum(plan.document_lengths[:i])
        for i, length in enumerate(plan.document_lengths)
        for _ in range(length)
    ]
    for rank in range(plan.ranks):
        own = plan.indices(rank).tolist()
        assert plan.positions(rank).tolist() == [expected[i] for i in own]
        assert plan.document_starts(rank).tolist() == [starts[i] for i in own]


@given(plan=plans)
def test_runs_are_the_ranks_tokens_cut_at_documents(plan):
    for rank in range(plan.ranks):
        own, seen = plan.indices(rank).tolist(), []
        for start, stop, document, offset in plan.runs(rank):
            assert start < stop
            assert own[offset : offset + stop - start] == list(range(start, stop))
            assert plan.document_starts(rank)[offset : offset + stop - start].unique().tolist() == [
                document
            ]
            seen += range(start, stop)
        assert seen == own


@given(plan=plans, seed=st.integers(0, 99))
def test_labels_are_the_next_tokens_of_the_document(plan, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (1, plan.tokens), generator=generator)
    expected, start = [], 0
    for length in plan.document_lengths:
        document = tokens[0, start : start + length].tolist()
        expected += [*document[1:], -100] if document else []
        start += length
    assert plan.labels(tokens)[0].tolist() == expected
    assert plan.labels(tokens.to(torch.uint8))[0].tolist() == expected
    assert plan.labels(tokens[0], dim=0, ignore_index=-1).tolist() == [
        -1 if token == -100 else token for token in expected
    ]


def test_orders_of_one_document():
    def pieces(order):
        return plan_sequence([8], ranks=2, order=order, chunk_tokens=2).pieces

    assert pieces("contiguous") == (((0, 4),), ((4, 8),))
    assert pieces("zigzag") == (((0, 2), (6, 8)), ((2, 6),))
    # Costs of the blocks: 3, 7, 11, 15. The dearest goes first, the rest even it out.
    assert pieces("balanced") == (((0, 2), (6, 8)), ((2, 6),))


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12), ranks=st.sampled_from([2, 3, 8])
)
def test_balanced_is_no_worse_than_one_block_off(lengths, ranks):
    """Dearest first, with equal shares of blocks: no rank is a whole block dearer than another."""
    plan = plan_sequence(lengths, ranks=ranks, chunk_tokens=16)
    assert max(plan.counts) <= 16 * -(-plan.tokens // (16 * ranks))
    dearest = 16 * max(lengths)
    assert max(plan.costs) - sum(plan.costs) / ranks <= dearest


def test_the_given_cost_is_what_is_balanced():
    def only_late(positions):
        return (positions >= 96).astype(float)

    assert plan_sequence([3, 2], ranks=1).costs == (1 + 2 + 3 + 1 + 2,)  # The keys that are read.
    late = plan_sequence([128], ranks=4, cost=only_late, chunk_tokens=8)
    assert late.costs == (8.0, 8.0, 8.0, 8.0)
    early = plan_sequence([128], ranks=4, order="contiguous", cost=only_late)
    assert early.costs == (0.0, 0.0, 0.0, 32.0)
    assert early.max_over_mean == 4.0


def test_copies_leave_behind_what_was_kept():
    plan = plan_sequence([30_000], ranks=4)
    size = len(pickle.dumps(plan))
    lists = tile_lists(AttentionSpec(plan, True, 1.0).hop(0, 0), torch.device("cpu"), 128)
    assert plan.row_of_token.nbytes + sum(x.nbytes for x in lists.mask) > 100 * size
    assert len(pickle.dumps(plan)) == size
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert vars(other).keys() == {"document_lengths", "order", "pieces", "costs", "parents"}
        assert other == plan
        assert other.costs == plan.costs
        assert torch.equal(other.row_of_token, plan.row_of_token)


def test_other_plans_have_other_fingerprints():
    others = [
        plan_sequence([4, 8], ranks=2, order="contiguous"),
        plan_sequence([8, 4], ranks=2, order="contiguous"),  # Other documents, the same pieces.
        plan_sequence([4, 8], ranks=2, order="zigzag"),  # The same documents, other pieces.
        plan_sequence([4, 8], ranks=3, order="contiguous"),
    ]
    assert len({plan.fingerprint for plan in others}) == len(others)
    numpys = {"ranks": np.int64(2), "chunk_tokens": np.int32(3)}
    for order in ORDERS:
        own = plan_sequence([4, 8], ranks=2, order=order, chunk_tokens=3)
        same = plan_sequence([4, 8], order=order, **numpys)
        assert same == own
        assert same.fingerprint == own.fingerprint
    assert 0 <= same.fingerprint < 2**63


def test_a_plan_without_tokens_is_balanced():
    empty = plan_sequence([0, 0], ranks=2)
    assert (empty.tokens, empty.counts, empty.max_over_mean) == (0, (0, 0), 1.0)
    assert empty.table().splitlines()[2].split() == ["1", "0", "0", "0.0000"]


def test_a_long_plan_shows_itself_in_one_line():
    plan = plan_sequence([4] * 1000, ranks=8, chunk_tokens=1)
    assert repr(plan) == "<SequencePlan of 1000 documents, 4000 tokens, 8 ranks, order='balanced'>"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"order": "spiral"}, "one of .*balanced.*; got 'spiral'"),
        ({"ranks": 0}, "ranks must be at least 1; got 0"),
        ({"document_lengths": [3, -1]}, r"got \[3, -1\]"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1; got 0"),
        ({"parents": 3}, "got 0 parents for 1 documents"),
        ({"cost": lambda p: np.full(p.shape, np.nan)}, "one finite number"),
        ({"cost": lambda p: -1.0 * p}, r"from -3.0 to 0.0\."),
        ({"cost": lambda p: p[:2]}, r"each of 4 positions; got shape \(2,\)"),
    ],
    ids=["order", "ranks", "lengths", "block", "parents", "nan", "negative", "shape"],
)
def test_bad_plans_are_refused(arguments, said):
    arguments = {"document_lengths": [4], "ranks": 2} | arguments
    lengths = arguments.pop("document_lengths")
    with pytest.raises(PlanError, match=said):
        plan_sequence(lengths, **arguments)


def _split_and_join(lengths, order):
    group = dist.group.WORLD
    rank = group.rank()
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=2)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, plan.tokens, 2, generator=generator, dtype=torch.float64)
    leaf = whole.clone().requires_grad_()
    # A plan that was first used for inference serves a training step, whatever the default device.
    with torch.inference_mode(), torch.device("meta"):
        plan.join(plan.split(whole, group=group, dim=1), group=group, dim=1)
        assert plan.positions(rank).device == plan.labels(whole, dim=1).device == whole.device
    local = plan.split(leaf, group=group, dim=1)
    assert torch.equal(local, whole[:, plan.indices(rank)])
    joined = plan.join(local, group=group, dim=1)
    assert torch.equal(joined, whole)
    # Every rank looks at the whole with weights of its own.
    (joined * _weights(rank, joined)).sum().backward()
    total = leaf.grad.clone()
    dist.all_reduce(total)
    expected = sum(_weights(r, joined) for r in range(group.size()))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    outside = [i for i in range(plan.tokens) if i not in plan.indices(rank).tolist()]
    assert (leaf.grad[:, outside] == 0).all()


def _weights(rank, like):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7 + rank)).double()


def _in_every_order():
    for order in ORDERS:
        _split_and_join([3, 0, 5, 1], order)
    _split_and_join([1], "zigzag")  # Fewer tokens than ranks.


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_join_undoes_split(world_size):
    ranks.run(_in_every_order, world_size=world_size)


def _refusals():
    group = dist.group.WORLD
    plan = plan_sequence([4, 3], ranks=2, order="contiguous")
    with pytest.raises(ShapeError, match=r"whole sequence, with 7 tokens along dim 0; got \(6,\)"):
        plan.split(torch.zeros(6), group=group)
    with pytest.raises(ShapeError, match=r"along dim 1; got \(7,\)"):
        plan.split(torch.zeros(7), group=group, dim=1)
    with pytest.raises(ShapeError, match=r"part of rank \d, with \d tokens .* \[3, 4\] per rank"):
        plan.join(torch.zeros(7), group=group)
    with pytest.raises(ShapeError, match="whole sequence"):
        plan.labels(torch.zeros(6))
    three = plan_sequence([4, 3], ranks=3)
    for refused in (three.split, three.join):
        with pytest.raises(PlanError, match="planned for 3 ranks, but the group has 2"):
            refused(torch.zeros(7), group=group)
    alone = dist.new_group([0])
    if group.rank() == 1:
        with pytest.raises(PlanError, match="this rank is not in the group"):
            plan_sequence([7], ranks=1).check_group(alone)


def test_what_does_not_fit_the_plan_is_refused():
    ranks.run(_refusals)


@given(plan=plans)
def test_the_whole_of_a_plan_is_the_plan_of_one_rank(plan):
    assert plan.whole == plan_sequence(plan.document_lengths, ranks=1, order="contiguous")


def test_a_cast_of_the_arguments_of_a_layer_does_not_copy_a_plan():
    """FSDP2 would, for every layer, and lose the tables on the plan."""
    plan = plan_sequence([3, 4], ranks=2)
    given = {"plan": plan, "x": torch.ones(2)}
    cast = _apply_to_tensors(lambda x: x.bfloat16(), given)
    assert cast["x"].dtype == torch.bfloat16
    assert cast["plan"] is plan

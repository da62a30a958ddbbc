"""What convolutions and recurrences over a split sequence send, and what they refuse."""

import gc
import itertools
import re
import weakref

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.linear import scan_states
from primeblocks.testing import ranks
from tests.parallel.linear_cases import CASES, DELTA_HEADS, KEY, SPACE_HEADS, TAPS, VALUE, drawn


def _elements_sent(lengths, order):
    """By direction and call: elements that this rank sends to others."""
    group, sent = dist.group.WORLD, []
    original = dist.all_to_all_single

    def counted(out, x, receive, send, group):
        elements = x[:1].numel()
        sent.append(elements * (sum(send) - send[group.rank()]))
        return original(out, x, receive, send, group=group)

    dist.all_to_all_single = counted
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=4)
    own = plan.indices(group.rank())
    by_case = {}
    for name in CASES:
        inputs, by_token = drawn(name, plan.tokens)
        leaves = [x[own] if i < by_token else x for i, x in enumerate(inputs)]
        leaves = [x.requires_grad_() for x in leaves]
        out = CASES[name][2](*leaves, sequence=plan, group=group)
        forward = len(sent)
        out.sum().backward()
        by_case[name] = sent[:forward], sent[forward:]
        sent.clear()
    return by_case


def _runs_by_document(plan):
    documents = {}
    for rank in range(plan.ranks):
        for run in plan.runs(rank):
            documents.setdefault(run.document, []).append((run.start, rank))
    return [[rank for _, rank in sorted(runs)] for runs in documents.values()]


@pytest.mark.parametrize("order", ["balanced", "contiguous"])
def test_only_what_is_used_is_sent(order):
    lengths, world_size = [5, 14, 1, 12], 3
    plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=4)
    found = ranks.run(_elements_sent, lengths, order, world_size=world_size)
    for name, heads, transition in (("delta", DELTA_HEADS, KEY**2), ("space", SPACE_HEADS, 1)):
        cuts = [heads * r // world_size for r in range(world_size + 1)]
        share = [stop - start for start, stop in itertools.pairwise(cuts)]
        summaries, states = [0] * world_size, [0] * world_size
        for runs in _runs_by_document(plan):
            for place, rank in enumerate(runs[:-1]):
                once = KEY * VALUE + (transition if place else 0)
                summaries[rank] += once * (heads - share[rank])
            for rank in runs[1:]:
                for owner in range(world_size):
                    states[owner] += KEY * VALUE * share[owner] * (owner != rank)
        for rank, by_case in enumerate(found):
            forward, backward = by_case[name]
            assert forward == [summaries[rank], states[rank]]
            # Gradients go back the way that the values came.
            assert len(backward) == 2
        assert sum(sum(by_case[name][1]) for by_case in found) == sum(summaries + states)
    halo = [0] * world_size
    for receiver in range(world_size):
        wanted = {
            place
            for run in plan.runs(receiver)
            for place in range(max(run.document, run.start - TAPS + 1), run.start)
        }
        for sender in range(world_size):
            if sender != receiver:
                halo[sender] += 6 * len(wanted & set(plan.indices(sender).tolist()))
    assert [by_case["conv"][0] for by_case in found] == [[count] for count in halo]


def test_documents_that_are_whole_send_nothing():
    by_rank = ranks.run(_elements_sent, [6, 6, 6], "contiguous", world_size=3)
    assert by_rank == [{name: ([], []) for name in CASES}] * 3


def _outlives_its_plan(name):
    """Whether what a call plans keeps the plan, and so itself, when nothing else does."""
    group = dist.group.WORLD
    plan = plan_sequence([5, 14, 1, 12], ranks=group.size(), chunk_tokens=4)
    own = plan.indices(group.rank())
    inputs, by_token = drawn(name, plan.tokens)
    parts = [x[own] if i < by_token else x for i, x in enumerate(inputs)]
    CASES[name][2](*parts, sequence=plan, group=group)
    kept = weakref.ref(plan)
    gc.collect()
    gc.disable()
    del plan
    found = kept() is not None
    gc.enable()
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_planned_lives_as_long_as_the_plan(name):
    assert ranks.run(_outlives_its_plan, name) == [False, False]


def _bad_arguments(change, name):
    """Rank 1 makes a mistake; what each rank says, and that the group goes on."""
    group = dist.group.WORLD
    plan = plan_sequence([8], ranks=2, order="contiguous")
    inputs, by_token = drawn(name, 8)
    operands = [x[:4] if i < by_token else x for i, x in enumerate(inputs)]
    where = {"sequence": plan, "group": group}
    if group.rank() == 1:
        change(operands, where)
    said = ""
    try:
        CASES[name][2](*operands, **where)
    except (PlanError, RankError, ShapeError) as error:
        said = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()


def _fewer_tokens(operands, _):
    operands[:] = [x[:3] if len(x) == 4 else x for x in operands]


def _one_more_dim(operands, _):
    operands[0] = operands[0].unsqueeze(0)


def _wider(operands, _):
    operands[1] = torch.cat([operands[1]] * 2, dim=1)


def _no_groups(operands, _):
    operands[2:4] = [x[:, :0] for x in operands[2:4]]


def _float32(operands, _):
    operands[:] = [x.float() for x in operands]


def _other_plan(_, where):
    where["sequence"] = plan_sequence([4, 4], ranks=2, order="contiguous")


def _gradient(operands, _):
    operands[0].requires_grad_()


@pytest.mark.parametrize(
    ("name", "change", "there", "here"),
    [
        (
            "conv",
            _fewer_tokens,
            r"the plan gives this rank 4 tokens; got x \(3,",
            "rank 1 .* refused",
        ),
        (
            "delta",
            _fewer_tokens,
            r"the plan gives this rank 4 tokens; got v \(3,",
            "rank 1 .* refused",
        ),
        (
            "space",
            _fewer_tokens,
            r"the plan gives this rank 4 tokens; got x \(3,",
            "rank 1 .* refused",
        ),
        ("conv", _one_more_dim, r"got \(1, 4, 6\), \(6, 4\)", "rank 1 .* ShapeError"),
        ("delta", _one_more_dim, r"got \(1, 4, 3, 3\)", "rank 1 .* ShapeError"),
        ("space", _one_more_dim, r"got \(1, 4, 6, 5\)", "rank 1 .* ShapeError"),
        (
            "conv",
            _wider,
            r"weight dim 1 must be equal on all ranks; by rank it is \[4, 8\]",
            "4, 8",
        ),
        ("delta", _wider, "needs q, k", "rank 1 .* ShapeError"),
        ("space", _wider, "needs x .* dt", "rank 1 .* ShapeError"),
        ("space", _no_groups, "groups that divide heads", "rank 1 .* ShapeError"),
        ("delta", _float32, "q dtype must be equal", "torch.float64, torch.float32"),
        ("space", _other_plan, "PlanError: plan must be equal", "PlanError: plan must be equal"),
        ("conv", _gradient, r"requires_grad .*\[0, 1\]", r"requires_grad .*\[0, 1\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_ranks_mistake_is_an_error_on_all(name, change, there, here):
    (said_here, sum_here), (said_there, sum_there) = ranks.run(_bad_arguments, change, name)
    assert re.search(there, said_there), said_there
    assert re.search(here, said_here), said_here
    assert sum_here == sum_there == 2.0


def _wrong_group(name):
    plan = plan_sequence([9], ranks=2)
    inputs, _ = drawn(name, 3)
    with pytest.raises(PlanError, match="planned for 2 ranks; the group has 3"):
        CASES[name][2](*inputs, sequence=plan, group=dist.group.WORLD)


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_another_size_is_refused(name):
    ranks.run(_wrong_group, name, world_size=3)


def _wrong_summaries():
    group = dist.group.WORLD
    plan = plan_sequence([9], ranks=2, order="contiguous")
    for updates, transitions in (
        ((1, 2, 3, 4), (1, 2, 4, 4)),
        ((2, 2, 3, 4), (2, 2)),
        ((1, 2), (2,)),
    ):
        with pytest.raises(ShapeError, match=r"needs updates \[1, heads, d, ...\]"):
            scan_states(
                torch.zeros(updates), torch.zeros(transitions), sequence=plan, group=group,
                check=False,
            )  # fmt: skip


def test_summaries_that_do_not_fit_are_refused():
    ranks.run(_wrong_summaries, world_size=2)

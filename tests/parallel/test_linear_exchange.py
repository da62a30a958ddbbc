"""What convolutions and recurrences over a split sequence send, and what they refuse."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel import plan_sequence
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


def _refusals():
    """Rank 1 makes mistakes; what each rank is told. The group goes on after each."""
    group, found = dist.group.WORLD, []
    plan = plan_sequence([8], ranks=2, order="contiguous")
    for name, change, *_ in MISTAKES:
        inputs, by_token = drawn(name, 8)
        operands = [x[:4] if i < by_token else x for i, x in enumerate(inputs)]
        if group.rank() == 1:
            change(operands)
        with pytest.raises((PlanError, RankError, ShapeError)) as error:
            CASES[name][2](*operands, sequence=plan, group=group)
        found.append(f"{type(error.value).__name__}: {error.value}")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
    return found


def _fewer_tokens(operands):
    operands[:] = [x[:3] if len(x) == 4 else x for x in operands]


def _one_more_dim(operands):
    operands[0] = operands[0].unsqueeze(0)


def _wider(operands):
    operands[1] = torch.cat([operands[1]] * 2, dim=1)


def _no_groups(operands):
    operands[2:4] = [x[:, :0] for x in operands[2:4]]


def _float32(operands):
    operands[:] = [x.float() for x in operands]


# The call, the mistake, and what ranks 1 and 0 are told. `test_one_rank_wrong.py` has more.
MISTAKES = [
    ("conv", _fewer_tokens, r"this rank 4 tokens; got x \(3,", "rank 1 .* refused"),
    ("delta", _fewer_tokens, r"this rank 4 tokens; got v \(3,", "rank 1 .* refused"),
    ("space", _fewer_tokens, r"this rank 4 tokens; got x \(3,", "rank 1 .* refused"),
    ("conv", _one_more_dim, r"got \(1, 4, 6\), \(6, 4\)", "rank 1 .* ShapeError"),
    ("delta", _one_more_dim, r"got \(1, 4, 3, 3\)", "rank 1 .* ShapeError"),
    ("space", _one_more_dim, r"got \(1, 4, 6, 5\)", "rank 1 .* ShapeError"),
    ("conv", _wider, r"weight dim 1 must be equal .*\[4, 8\]", "4, 8"),
    ("delta", _wider, "needs q, k", "rank 1 .* ShapeError"),
    ("space", _wider, "needs x .* dt", "rank 1 .* ShapeError"),
    ("space", _no_groups, "groups that divide heads", "rank 1 .* ShapeError"),
    ("delta", _float32, "q dtype must be equal", "torch.float64, torch.float32"),
]


def test_one_ranks_mistake_is_an_error_on_all():
    here, there = ranks.run(_refusals)
    for (*_, told, telling), said, heard in zip(MISTAKES, there, here, strict=True):
        assert re.search(told, said), said
        assert re.search(telling, heard), heard

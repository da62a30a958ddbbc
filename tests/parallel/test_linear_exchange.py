"""What convolutions and recurrences over a split sequence send, and what they refuse."""

import itertools

import pytest
import torch.distributed as dist

from primeblocks.errors import ShapeError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.linear import state_space
from primeblocks.testing import ranks
from tests.parallel.bodies import each
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


def test_only_what_is_used_is_sent():
    cases = [([5, 14, 1, 12], "balanced"), ([5, 14, 1, 12], "contiguous"), ([6] * 3, "contiguous")]
    by_rank = ranks.run(each, _elements_sent, cases, world_size=3)
    for at, case in enumerate(cases[:2]):
        _assert_only_what_is_used(*case, [found[at] for found in by_rank])
    for *_, whole in by_rank:  # Documents that one rank has send nothing.
        assert whole == {name: ([], []) for name in CASES}


def _assert_only_what_is_used(lengths, order, found):
    world_size = len(found)
    plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=4)
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


def test_groups_must_divide_heads(one_rank):
    x, dt, B, C, A, _ = drawn("space", 4)[0]
    where = {"sequence": plan_sequence([4], ranks=1), "group": one_rank}
    for groups in (0, 4):
        with pytest.raises(ShapeError, match="groups that divide heads"):
            state_space(x, dt, A, *(y[:, :1].expand(-1, groups, -1) for y in (B, C)), **where)

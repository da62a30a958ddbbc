"""What attention over a split sequence refuses, on all ranks alike."""

import re

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.test_attention import ATTENTIONS, _inputs


def _refusals(name):
    """By change: what rank 1, which alone makes it, and rank 0 are told."""
    group = dist.group.WORLD
    rank = group.rank()
    plan = plan_sequence([6, 2], ranks=2, order="contiguous")
    found = {}
    for change, made in CHANGES.items():
        q, k, v = (x[plan.indices(rank)] for x in _inputs(8, (4, 2, 4, 4))[:3])
        qkv, rules = {"q": q.requires_grad_(), "k": k, "v": v}, {"sequence": plan}
        for key, value in made(**qkv).items() if rank == 1 else ():
            (qkv if key in qkv else rules)[key] = value
        try:
            ATTENTIONS[name](*qkv.values(), group=group, **rules)
        except (PlanError, RankError, ShapeError) as error:
            found[change] = f"{type(error).__name__}: {error}"
        total = torch.ones(1)
        dist.all_reduce(total)  # The group still works.
        assert total == 2
    return found


CHANGES = {
    "fewer tokens": lambda q, k, v, **_: {"q": q[:-1], "k": k[:-1], "v": v[:-1]},
    "other dtype": lambda q, k, v, **_: {"q": q.float(), "k": k.float(), "v": v.float()},
    "two dtypes": lambda q, **_: {"q": q.float()},
    "integers": lambda q, k, v, **_: {"q": q.long(), "k": k.long(), "v": v.long()},
    "more heads": lambda q, k, v, **_: {
        "q": q.repeat(1, 2, 1),
        "k": k.repeat(1, 2, 1),
        "v": v.repeat(1, 2, 1),
    },
    "more key heads": lambda k, v, **_: {"k": k.repeat(1, 2, 1), "v": v.repeat(1, 2, 1)},
    "no key heads": lambda k, v, **_: {"k": k[:, :0], "v": v[:, :0]},
    "odd heads": lambda q, **_: {"q": q[:, :3]},
    "odd value heads": lambda v, **_: {"v": v[:, :1]},
    "narrow keys": lambda k, **_: {"k": k[..., :3]},
    "narrow values": lambda v, **_: {"v": v[..., :3]},
    "flat": lambda q, **_: {"q": q.flatten(1)},
    "many dims": lambda q, k, v, **_: {"q": q[None, None], "k": k[None, None], "v": v[None, None]},
    "other plan": lambda **_: {"sequence": plan_sequence([7, 1], ranks=2, order="contiguous")},
    "plan of three": lambda **_: {"sequence": plan_sequence([6, 2], ranks=3)},
    "no gradient": lambda q, **_: {"q": q.detach()},
    "gradient elsewhere": lambda q, k, **_: {"q": q.detach(), "k": k.requires_grad_()},
    "gradients of keys": lambda k, **_: {"k": k.requires_grad_()},
    "window": lambda **_: {"window": 3},
    "not causal": lambda **_: {"causal": False},
    "bad window": lambda **_: {"window": 0},
    "window without causal": lambda **_: {"window": 2, "causal": False},
    "no cap": lambda **_: {"softcap": float("inf")},
    "sinks": lambda **_: {"sinks": torch.zeros(4, dtype=torch.float64)},
    "bad sinks": lambda **_: {"sinks": torch.zeros(3, dtype=torch.float64)},
}
EQUAL = r"PlanError: {} must be equal on all ranks; by rank it is \[{}\]"
# What differs is told alike on both ranks; what is wrong by itself is a RankError on rank 0.
SAID = {
    "fewer tokens": "ShapeError: the plan gives this rank 4 tokens",
    "other dtype": EQUAL.format("q dtype", "torch.float64, torch.float32"),
    "two dtypes": "ShapeError: q, k and v need one floating dtype; got torch.float32",
    "integers": "ShapeError: q, k and v need one floating dtype; got torch.int64",
    "more heads": EQUAL.format("q dim 1", "4, 8"),
    "more key heads": EQUAL.format("k dim 1", "2, 4"),
    "no key heads": "ShapeError: needs at least one head",
    "odd heads": "ShapeError: q and k need one head_dim",
    "odd value heads": "ShapeError: q and k need one head_dim",
    "narrow keys": "ShapeError: q and k need one head_dim",
    "narrow values": EQUAL.format("v dim 2", "4, 3"),
    "flat": r"ShapeError: needs \[local_tokens, heads, head_dim\]",
    "many dims": r"ShapeError: needs \[local_tokens, heads, head_dim\]",
    "other plan": EQUAL.format("plan", r"\d+, \d+"),
    "plan of three": "PlanError: the sequence is planned for 3 ranks; the group has 2",
    "no gradient": EQUAL.format("q requires_grad", "1, 0"),
    "gradient elsewhere": EQUAL.format("q requires_grad", "1, 0"),
    "gradients of keys": EQUAL.format("k requires_grad", "0, 1"),
    "window": EQUAL.format("window", "None, 3"),
    "not causal": EQUAL.format("causal", "True, False"),
    "bad window": "PlanError: a window needs causal=True and at least 1 token; got window=0",
    "window without causal": "PlanError: a window needs causal=True",
    "no cap": "PlanError: softcap must be a finite number over 0, or None; got inf",
    "sinks": EQUAL.format("sinks", "False, True"),
    "bad sinks": r"ShapeError: needs one sink a head, \[4\]; got \(3,\)",
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_one_ranks_mistake_is_an_error_on_all(name):
    there, here = ranks.run(_refusals, name)
    assert list(SAID) == list(CHANGES)
    for change, said in SAID.items():
        assert re.match(said, here[change]), (change, here[change])
        if " must be equal " in said:
            assert there[change] == here[change]
        else:
            assert there[change].startswith("RankError: rank 1 of the group refused its arguments")
            assert here[change][:300] in there[change]


def _unchecked():
    """Nothing is agreed on, a mistake is still refused, and evaluation needs no gradients."""
    group, gather = dist.group.WORLD, dist.all_gather
    plan = plan_sequence([6, 2], ranks=2, order="contiguous")
    whole = _inputs(8, (4, 2, 4, 4))[:3]
    q, k, v = (x[plan.indices(group.rank())] for x in whole)
    gathered = []

    def counted(*tensors, group):
        gathered.append(group)
        return gather(*tensors, group=group)

    dist.all_gather = counted
    for attention in ATTENTIONS.values():
        with pytest.raises(ShapeError, match="the plan gives this rank"):
            attention(q[1:], k, v, sequence=plan, group=group, check=False)
        with pytest.raises(PlanError, match="planned for 3 ranks"):
            attention(q, k, v, sequence=plan_sequence([8], ranks=3), group=group, check=False)
        out = attention(q, k, v, sequence=plan, group=group, check=False)
        assert_close_float64(out, reference.attention(*whole, [6, 2])[plan.indices(group.rank())])
        assert not gathered
        with torch.no_grad():
            leaf = q.clone().requires_grad_(group.rank() == 0)
            attention(leaf, k, v, sequence=plan, group=group)
        assert gathered.pop() is group


def test_without_check_nothing_is_agreed_on():
    ranks.run(_unchecked)


def _wrong_group():
    plan = plan_sequence([9], ranks=2)
    q, k, v, _ = _inputs(3, (2, 2, 4, 4))
    alone = dist.new_group([0])
    for attention in ATTENTIONS.values():
        with pytest.raises(PlanError, match="planned for 2 ranks; the group has 3"):
            attention(q, k, v, sequence=plan, group=dist.group.WORLD)
        if dist.get_rank():
            with pytest.raises(PlanError, match="this rank is not in the group"):
                attention(q, k, v, sequence=plan_sequence([3], ranks=1), group=alone)


def test_another_group_is_refused():
    ranks.run(_wrong_group, world_size=3)

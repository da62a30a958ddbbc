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
    for change, (made, _) in CHANGES.items():
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


# By change: what rank 1 passes, and what it is told. `test_one_rank_wrong.py` has all dtypes, dims
# and plans.
EQUAL = r"PlanError: {} must be equal on all ranks; by rank it is \[{}\]"
CHANGES = {
    "fewer tokens": (
        lambda q, k, v, **_: {"q": q[:-1], "k": k[:-1], "v": v[:-1]},
        "ShapeError: the plan gives this rank 4 tokens",
    ),
    "two dtypes": (
        lambda q, **_: {"q": q.float()},
        "ShapeError: q, k and v need one floating dtype; got torch.float32",
    ),
    "more key heads": (
        lambda k, v, **_: {"k": k.repeat(1, 2, 1), "v": v.repeat(1, 2, 1)},
        EQUAL.format("k dim 1", "2, 4"),
    ),
    "no key heads": (
        lambda k, v, **_: {"k": k[:, :0], "v": v[:, :0]},
        "ShapeError: q, k and v need at least one head",
    ),
    "odd heads": (lambda q, **_: {"q": q[:, :3]}, "ShapeError: q and k need equal head_dim"),
    "odd value heads": (lambda v, **_: {"v": v[:, :1]}, "ShapeError: q and k need equal head_dim"),
    "narrow keys": (lambda k, **_: {"k": k[..., :3]}, "ShapeError: q and k need equal head_dim"),
    "flat": (
        lambda q, **_: {"q": q.flatten(1)},
        r"ShapeError: q, k and v must be \[local_tokens, heads, head_dim\]",
    ),
    "gradients of keys": (
        lambda k, **_: {"k": k.requires_grad_()},
        EQUAL.format("k requires_grad", "0, 1"),
    ),
    "window": (lambda **_: {"window": 3}, EQUAL.format("window", "None, 3")),
    "not causal": (lambda **_: {"causal": False}, EQUAL.format("causal", "True, False")),
    "bad window": (
        lambda **_: {"window": 0},
        "PlanError: a window needs causal=True and at least 1 token; got window=0",
    ),
    "window without causal": (
        lambda **_: {"window": 2, "causal": False},
        "PlanError: a window needs causal=True",
    ),
    "no cap": (
        lambda **_: {"softcap": float("inf")},
        "PlanError: softcap must be a finite number over 0, or None; got inf",
    ),
    "sinks": (
        lambda **_: {"sinks": torch.zeros(4, dtype=torch.float64)},
        EQUAL.format("sinks", "False, True"),
    ),
    "bad sinks": (
        lambda **_: {"sinks": torch.zeros(3, dtype=torch.float64)},
        r"ShapeError: sinks must have one number per head, \[4\]; got \(3,\)",
    ),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_one_ranks_mistake_is_an_error_on_all(name):
    there, here = ranks.run(_refusals, name)
    for change, (_, said) in CHANGES.items():
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


def _twice():
    plan = plan_sequence([5], ranks=1)
    q, k, v, _ = _inputs(5, (4, 4, 8, 8))
    out = ATTENTIONS["ring"](q.requires_grad_(), k, v, sequence=plan, group=dist.group.WORLD)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_second_derivative_is_refused():
    ranks.run(_twice, world_size=1)

"""What attention over a split sequence refuses on a rank alone, and calls that agree on nothing.

`test_one_rank_wrong.py` has the mistakes of one rank among others.
"""

import pytest
import torch
import torch.distributed as dist

from primeblocks import groups
from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import RectangleKernel
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.test_attention import ATTENTIONS, _inputs
from tests.parallel.test_latent_attention import ATTENTIONS as LATENT_ATTENTIONS
from tests.parallel.test_latent_attention import _operands


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_no_rank_may_pass_is_refused(one_rank, name):
    q, k, v, _ = _inputs(5, (4, 2, 8, 8))
    latent, where = _operands(5), {"sequence": plan_sequence([5], ranks=1), "group": one_rank}
    for error, said, wrong in [
        (ShapeError, "q, k and v need at least one head", {"k": k[:, :0], "v": v[:, :0]}),
        (PlanError, "causal=True and at least 1 token; got window=0", {"window": 0}),
        (PlanError, "softcap must be a finite number over 0, .*inf", {"softcap": float("inf")}),
    ]:
        with pytest.raises(error, match=said):
            ATTENTIONS[name](**{"q": q, "k": k, "v": v, **where} | wrong)
    for attention, operands in ((ATTENTIONS, (q, k, v)), (LATENT_ATTENTIONS, latent)):
        for scale in (0.0, -1.0, float("nan"), 1j):
            with pytest.raises(PlanError, match="scale must be a finite number over 0, or None"):
                attention[name](*operands, **where, scale=scale)
        with pytest.raises(PlanError, match="must be an AttentionKernel"):
            attention[name](*operands, **where, kernel=RectangleKernel)


def _unchecked():
    """Nothing is agreed on, a mistake is still refused, and evaluation needs no gradients."""
    group, gather = dist.group.WORLD, groups._gather
    plan = plan_sequence([6, 2], ranks=2, order="contiguous")
    whole = _inputs(8, (4, 2, 4, 4))[:3]
    q, k, v = (x[plan.indices(group.rank())] for x in whole)
    gathered = []

    def counted(head, name, group):
        gathered.append(group)
        return gather(head, name, group)

    groups._gather = counted
    for attention in ATTENTIONS.values():
        with pytest.raises(ShapeError, match="the plan gives this rank"):
            attention(q[1:], k, v, sequence=plan, group=group, check=False)
        with pytest.raises(PlanError, match="planned for 3 ranks"):
            attention(q, k, v, sequence=plan_sequence([8], ranks=3), group=group, check=False)
        with pytest.raises(PlanError, match="must be an AttentionKernel; got 'flash'"):
            attention(q, k, v, sequence=plan, group=group, kernel="flash", check=False)
        out = attention(q, k, v, sequence=plan, group=group, check=False)
        assert_close_float64(out, reference.attention(*whole, [6, 2])[plan.indices(group.rank())])
        assert not gathered
        with torch.no_grad():
            leaf = q.clone().requires_grad_(group.rank() == 0)
            attention(leaf, k, v, sequence=plan, group=group)
        assert gathered.pop() is group


def test_without_check_nothing_is_agreed_on():
    ranks.run(_unchecked)


def test_a_second_derivative_is_refused(one_rank):
    q, k, v, _ = _inputs(5, (4, 4, 8, 8))
    plan = plan_sequence([5], ranks=1)
    out = ATTENTIONS["ring"](q.requires_grad_(), k, v, sequence=plan, group=one_rank)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()

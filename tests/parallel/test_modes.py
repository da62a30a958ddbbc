"""Calls over ranks under autocast and under torch.compile."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from primeblocks.errors import PlanError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    GroupedExperts,
    OncePerRankDispatcher,
    grouped_linear,
)
from primeblocks.testing import ranks
from tests.parallel.bodies import each
from tests.parallel.linear_cases import CASES, drawn
from tests.parallel.test_attention import ATTENTIONS

PLAN = plan_sequence([7, 3], ranks=2, order="contiguous")


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _qkv(plan, dtypes):
    generator = torch.Generator().manual_seed(0)
    own = plan.indices(dist.get_rank())
    shapes = zip((4, 2, 2), dtypes, strict=True)
    drawn_ = [torch.randn(plan.tokens, h, 8, generator=generator).to(d) for h, d in shapes]
    return [x[own].requires_grad_() for x in drawn_]


def _with_grads(call, operands):
    for x in operands:
        x.grad = None
    out = call(*operands)
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in operands)]


def _attend(name, dtypes, window):
    """As rotary embeddings leave them, q and k are wider than v."""
    group = dist.group.WORLD
    rules = {"sequence": PLAN, "group": group, "window": window}
    wide = _qkv(PLAN, dtypes)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    with _autocast():
        inside = _with_grads(lambda *qkv: ATTENTIONS[name](*qkv, **rules), wide)
    outside = _with_grads(lambda *qkv: ATTENTIONS[name](*qkv, **rules), narrow)
    return [x.dtype for x in inside], [
        torch.equal(a.bfloat16(), b) for a, b in zip(inside, outside, strict=True)
    ]


def test_attention_is_cast_as_torchs_own():
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    cases = [(name, dtypes, window) for name in ATTENTIONS for window in (None, 2)]
    for by_case in ranks.run(each, _attend, cases):
        for found, equal in by_case:
            assert found == [torch.bfloat16, *dtypes]
            assert all(equal)


def _one_rank_alone(name):
    """Autocast on one rank only: another dtype there."""
    wide = _qkv(PLAN, [torch.float32] * 3)
    with (
        _autocast() if dist.get_rank() else nullcontext(),
        pytest.raises(PlanError, match=r"q dtype .* \[torch.float32, torch.bfloat16\]"),
    ):
        ATTENTIONS[name](*wide, sequence=PLAN, group=dist.group.WORLD)


def test_autocast_on_one_rank_is_an_error_on_all():
    ranks.run(each, _one_rank_alone, [(name,) for name in ATTENTIONS])


def _recur(name):
    """By mode: the output of a recurrence on float32."""
    inputs, by_token = drawn(name, PLAN.tokens)
    own = PLAN.indices(dist.get_rank())
    local = [x[own].float() if i < by_token else x.float() for i, x in enumerate(inputs)]
    found = []
    for mode in (nullcontext, _autocast):
        with mode():
            found.append(CASES[name][2](*local, sequence=PLAN, group=dist.group.WORLD))
    return torch.equal(*found)


def test_recurrences_stay_in_float32_under_autocast():
    assert ranks.run(each, _recur, [(name,) for name in CASES]) == [[True] * len(CASES)] * 2


class _Layer(nn.Module):
    def __init__(self, dispatcher):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 4)
        self.experts = GroupedExperts(4, 8, 16, dispatcher=dispatcher)

    def forward(self, x):
        scores, ids = self.gate(x).float().softmax(-1).topk(2, dim=-1)
        return self.experts(x, ids % 2, scores)  # Rank 1's experts get no rows.


DISPATCHERS = {"all-to-all": AllToAllDispatcher, "once": OncePerRankDispatcher}


def _experts(kind, mode):
    """Of experts in float32 or under autocast: the output's dtype, and its part of the sum."""
    layer = _Layer(DISPATCHERS[kind](dist.group.WORLD))
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(layer.experts, name)
        share = whole.detach().chunk(2)[dist.get_rank()]
        setattr(layer.experts, name, nn.Parameter(share))
    run = torch.compile(layer, backend="eager") if mode == "compiled" else layer
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with _autocast() if mode == "autocast" else nullcontext():
        out = run(x)
    out.float().square().sum().backward()
    return out.detach(), x.grad


def test_a_rank_without_rows_casts_as_the_others():
    for by_kind in ranks.run(each, _experts, [(kind, "autocast") for kind in DISPATCHERS]):
        for out, grad in by_kind:
            assert out.dtype == torch.bfloat16
            assert grad.isfinite().all()


def test_a_bias_is_cast_as_torchs_own():
    rows, weight, bias = torch.randn(4, 8), torch.randn(2, 8, 8), torch.randn(2, 8)
    with _autocast():
        out = grouped_linear(rows, torch.tensor([4, 0]), weight, bias)
        assert torch.nn.functional.linear(rows, weight[0], bias[0]).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16


# A window, a rank without tokens, and other sizes than before.
PLANS = [([7, 3], "zigzag", 2), ([1], "contiguous", None), ([20, 0, 1], "balanced", None)]


def _compiled():
    """By plan: whether output and gradients are those without torch.compile, to the bit."""
    found = []

    def layer(q, k, v, plan, window, name="ring"):
        rules = {"sequence": plan, "group": dist.group.WORLD, "window": window}
        return ATTENTIONS[name](q * 2, k, v, **rules).sin()

    compiled = torch.compile(layer, backend="eager")
    for lengths, order, window in PLANS:
        plan = plan_sequence(lengths, ranks=2, order=order, chunk_tokens=4)
        qkv = _qkv(plan, [torch.float32] * 3)
        want = _with_grads(lambda *x: layer(*x, plan, window), qkv)  # noqa: B023
        got = _with_grads(lambda *x: compiled(*x, plan, window), qkv)  # noqa: B023
        found.append(all(torch.equal(a, b) for a, b in zip(got, want, strict=True)))
    for name in ATTENTIONS:
        torch._dynamo.reset()
        whole = torch.compile(layer, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match="function `disable` .* should not be traced"):
            whole(*qkv, plan, window, name)
    return found


def test_compiled_attention_is_the_same():
    assert ranks.run(_compiled) == [[True] * len(PLANS)] * 2


def test_compiled_experts_are_the_same():
    cases = [(kind, mode) for kind in DISPATCHERS for mode in ("eager", "compiled")]
    for found in ranks.run(each, _experts, cases):
        for eager, compiled in zip(found[::2], found[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))

"""Hops of attention: what travels while a kernel works, and what is copied."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import ShapeError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import (
    RectangleKernel,
    hops,
    latent_ring_attention,
    ring_attention,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter, assert_close_float64
from tests.parallel.test_attention import ATTENTIONS, HEADS, PACKINGS, _inputs


class _Logged(RectangleKernel):
    """Says when it is called."""

    def __init__(self, log):
        self.log = log

    def forward(self, *tensors, hop):
        self.log.append(("forward", hop.key_rank))
        return super().forward(*tensors, hop=hop)

    def backward(self, *tensors, hop):
        self.log.append(("backward", hop.key_rank))
        return super().backward(*tensors, hop=hop)


def _logged():
    """Calls of the kernel, and of the exchanges around them, in order."""
    plan, world = plan_sequence([7], ranks=3, order="contiguous"), dist.group.WORLD
    log, start, wait = [], hops._Exchange.__init__, hops._Exchange.wait

    def started(exchange, held, source, *more):
        log.append(("send", source, len(held)))
        exchange.source = source
        start(exchange, held, source, *more)

    def waited(exchange):
        log.append(("wait", exchange.source))
        return wait(exchange)

    q, k, v = (x[plan.indices(world.rank())] for x in _inputs(7, HEADS[0])[:3])
    with (
        mock.patch.object(hops._Exchange, "__init__", started),
        mock.patch.object(hops._Exchange, "wait", waited),
    ):
        rules = {"sequence": plan, "group": world, "kernel": _Logged(log)}
        out = ring_attention(q.requires_grad_(), k, v, **rules, causal=False)
        forward = log.copy()
        log.clear()
        out.sum().backward()
    return forward, log


def test_tensors_travel_while_those_at_hand_are_worked_on():
    forward, backward = ranks.run(_logged, world_size=3)[1]
    assert forward == [
        *(("send", 1, 2), ("forward", 1), ("wait", 1)),
        *(("send", 0, 2), ("forward", 0), ("wait", 0)),
        ("forward", 2),
    ]
    # Keys of the next hop leave before a hop is computed. Gradients follow after it, and are
    # waited for when the next one has been computed.
    assert backward == [
        *(("send", 1, 2), ("backward", 1), ("send", 1, 2), ("wait", 1)),
        *(("send", 0, 2), ("backward", 0), ("wait", 1), ("send", 0, 2), ("wait", 0)),
        *(("backward", 2), ("wait", 0), ("send", 2, 2), ("wait", 2)),
    ]


class _Scripted:
    """Gradients are 1 for a rank's own keys, and 2**-9 for those of any other."""

    def __init__(self, dtype):
        self.dtype = dtype

    def forward(self, q, k, v, *, hop):
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(self, grad, q, k, v, out, lse, *, hop):
        value = 1.0 if hop.key_rank == dist.get_rank() else 2**-9
        return [torch.full_like(x, value, dtype=self.dtype) for x in (q, k, v)]


def _summed():
    world = dist.group.WORLD
    plan = plan_sequence([8], ranks=4, order="contiguous")
    leaves = [torch.zeros(2, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        rules = {"sequence": plan, "group": world, "kernel": _Scripted(dtype), "causal": False}
        found += torch.autograd.grad(ring_attention(*leaves, **rules).sum(), leaves)
    return found


def test_gradients_of_hops_are_summed_in_the_dtype_of_sums():
    """Added to 1 in bfloat16 one by one, 2**-9 is lost each time; three of them are not."""
    for found in ranks.run(_summed, world_size=4):
        for grad in found:
            assert grad.dtype == torch.bfloat16
            assert (grad == 1 + 2**-7).all()


def _operators(cast, attention, *operands):
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), StepCounter() as step:
        plan = plan_sequence([16], ranks=1)
        attention(*operands, sequence=plan, group=dist.group.WORLD, check=False)
    return step.operators


def _copies():
    q, k = torch.randn(3, 16, 2, 8), torch.randn(16, 2, 8)
    latents, up = torch.randn(16, 12), torch.randn(2, 12, 8)
    return [
        _operators(False, ring_attention, q, q, q)["clone"],
        _operators(True, ring_attention, k, k, k)["_to_copy"],
        _operators(True, latent_ring_attention, torch.randn(16, 2, 9), latents, up)["_to_copy"],
    ]


def test_operands_are_folded_and_cast_once():
    """Three each; the output is cast too, to the dtype of queries."""
    assert ranks.run(_copies, world_size=1) == [[3, 3 + 1, 3 + 1]]


def _batched():
    """A batch of three rows with one plan, beside the rows one by one."""
    group = dist.group.WORLD
    plan = plan_sequence(PACKINGS[1], ranks=group.size(), chunk_tokens=3)
    own, found = plan.indices(group.rank()), []
    for attention in ATTENTIONS.values():
        *qkv, sinks = _inputs(plan.tokens, HEADS[2])
        qkv = [torch.stack([x, 2 * x, -x])[:, own].requires_grad_() for x in qkv]
        sinks.requires_grad_()
        rules = {"sequence": plan, "group": group, "sinks": sinks}
        out = attention(*qkv, **rules)
        rows = torch.stack([attention(*row, **rules) for row in zip(*qkv, strict=True)])
        grads = [torch.autograd.grad(x.square().sum(), [*qkv, sinks]) for x in (out, rows)]
        for *_, of_sinks in grads:  # Each rank has those of its tokens, or of its heads.
            dist.all_reduce(of_sinks)
        found.append(([out.detach(), *grads[0]], [rows.detach(), *grads[1]]))
        with pytest.raises(ShapeError, match="equal batch dims"):
            attention(qkv[0], *(x[:2] for x in qkv[1:]), **rules)
    return found


def test_rows_of_a_batch_share_a_plan():
    for by_attention in ranks.run(_batched, world_size=3):
        for together, one_by_one in by_attention:
            assert_close_float64(together, one_by_one)


def test_the_gradient_of_a_sink_adds_up_in_float32():
    generator = torch.Generator().manual_seed(0)
    grad, out = (torch.randn(64, 2, 256, generator=generator).bfloat16() for _ in range(2))
    lse, sinks = torch.randn(64, 2, generator=generator), torch.zeros(2)
    found = hops.gradient_of_sinks(grad, out, lse, sinks)
    exact = hops.gradient_of_sinks(grad.double(), out.double(), lse.double(), sinks.double())
    magnitude = hops.gradient_of_sinks(grad.abs().double(), out.abs().double(), lse.double(), sinks)
    assert ((found - exact).abs() <= 256 * 2**-24 * magnitude.abs()).all()

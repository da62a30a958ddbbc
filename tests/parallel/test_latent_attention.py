"""Latent attention over a split sequence against expanded heads on one rank, and its bytes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.parallel import plan_mesh, plan_sequence, reference
from primeblocks.parallel.attention import (
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
    ulysses_attention,
)
from primeblocks.planning.traffic import StepSizes, plan_traffic
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import StepCounter, assert_as_precise, assert_close_float64
from tests.parallel.bodies import each, in_turns

HEADS, NOPE, ROPE, VALUE, LATENT = 3, 5, 4, 7, 8
ATTENTIONS = {"ring": latent_ring_attention, "ulysses": latent_ulysses_attention}
SPLIT = ATTENTIONS | {
    "ring of heads": lambda *x, **more: ring_attention(*_expanded(*x), **more),
    "ulysses of heads": lambda *x, **more: ulysses_attention(*_expanded(*x), **more),
}
ORDERS = ["balanced", "contiguous", "zigzag"]
PACKINGS = [[13, 6], [5, 1, 0, 14, 2], [2], [0]]


def _operands(tokens, dtype=torch.float64, heads=HEADS):
    shapes = [
        (tokens, heads, NOPE + ROPE), (tokens, LATENT + ROPE), (heads, NOPE + VALUE, LATENT)
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def _cotangent(tokens, heads=HEADS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, heads, VALUE, generator=generator, dtype=torch.float64)


def _expanded(q, latents, up):
    """Keys and values of all heads, as transformers expands them."""
    latent, shared = latents.split([LATENT, ROPE], dim=-1)
    parts = torch.einsum("tl,hdl->thd", latent, up)
    keys = torch.cat([parts[..., :NOPE], shared[:, None].expand(-1, up.shape[0], -1)], dim=-1)
    return q, keys, parts[..., NOPE:]


def _one_rank(lengths, causal, heads=HEADS):
    leaves = [x.requires_grad_() for x in _operands(sum(lengths), heads=heads)]
    out = reference.attention(*_expanded(*leaves), lengths, causal=causal)
    out.backward(_cotangent(sum(lengths), heads))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _split(jobs, heads=HEADS, dtype=torch.float64):
    """By job: this rank's output and gradients; that of `up` is the sum of all ranks."""
    group, results = dist.group.WORLD, []
    for name, lengths, order, causal in jobs:
        plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=4)
        own = plan.indices(group.rank())
        q, latents, up = _operands(plan.tokens, dtype, heads)
        leaves = [x.requires_grad_() for x in (q[own], latents[own], up)]
        out = SPLIT[name](*leaves, sequence=plan, group=group, causal=causal)
        out.backward(_cotangent(plan.tokens, heads)[own].to(dtype))
        dist.all_reduce(leaves[2].grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return results


def _assert_equal_one_rank(jobs, world_size, heads=HEADS):
    found = ranks.run(_split, jobs, heads, world_size=world_size)
    for index, (_, lengths, order, causal) in enumerate(jobs):
        want = _one_rank(lengths, causal, heads)
        plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=4)
        for rank, results in enumerate(found):
            own = plan.indices(rank)
            expected = [x[own] for x in want[:3]]
            assert_close_float64(results[index], [*expected, want[3]])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, full):
    jobs = [
        (name, lengths, order, causal)
        for name in ATTENTIONS for lengths in PACKINGS for order in ORDERS
        for causal in (True, False) if lengths != [0] or order == "zigzag"
    ]  # fmt: skip
    _assert_equal_one_rank(in_turns(jobs, world_size, full, step=7), world_size)


@settings(max_examples=settings().max_examples // 30)
@given(
    world_size=st.integers(2, 4),
    heads=st.integers(1, 5),
    lengths=strategies.ragged_lengths(max_items=5),
    order=st.sampled_from(ORDERS),
)
def test_any_packing_equals_one_rank(world_size, heads, lengths, order):
    jobs = [(name, lengths, order, True) for name in ATTENTIONS]
    _assert_equal_one_rank(jobs, world_size, heads)


def test_bfloat16_errs_like_heads_that_travel():
    lengths = [40, 24]
    jobs = [(kind, lengths, "zigzag", True) for kind in SPLIT]
    found = ranks.run(_split, jobs, HEADS, torch.bfloat16)
    leaves = [x.double().requires_grad_() for x in _operands(64, torch.bfloat16)]
    exact = reference.attention(*_expanded(*leaves), lengths)
    exact.backward(_cotangent(64).bfloat16().double())
    plan = plan_sequence(lengths, ranks=2, order="zigzag", chunk_tokens=4)
    order = torch.cat([plan.indices(rank) for rank in range(2)])
    want = [x[order] for x in (exact.detach(), leaves[0].grad, leaves[1].grad)]
    by_kind = [
        [torch.cat([found[rank][job][at] for rank in range(2)]) for at in range(3)]
        + [found[0][job][3]]
        for job in range(4)
    ]
    for ours, naive in zip(by_kind[:2], by_kind[2:], strict=True):
        for got, theirs, wanted in zip(ours, naive, [*want, leaves[2].grad], strict=True):
            assert_as_precise(got, naive=theirs, exact=wanted)


def _bytes(name):
    """Received forward and backward, and the bytes of the latents of other ranks."""
    group = dist.group.WORLD
    plan = plan_sequence([64], ranks=group.size(), order="contiguous")
    own = plan.indices(group.rank())
    q, latents, up = _operands(64, torch.float32)
    leaves = [x.requires_grad_() for x in (q[own], latents[own], up)]
    attention = partial(ATTENTIONS[name], sequence=plan, group=group, check=False)
    with StepCounter() as forward:
        out = attention(*leaves)
    with StepCounter() as backward:
        out.backward(out)
    return dict(forward.received_bytes), dict(backward.received_bytes), latents.nbytes


def test_latents_travel_and_never_heads_in_as_many_bytes_as_planned():
    sizes = StepSizes(
        tokens=16, hidden=1, num_experts=4, top_k=1, expert_layers=0, layers=1, heads=HEADS,
        key_heads=HEADS, head_dim=(NOPE + ROPE + VALUE) // 2, root_parameters=0,
        layer_parameters=0, expert_parameters=0, activation_bytes=4, latent_dim=LATENT + ROPE,
    )  # fmt: skip
    by_rank = ranks.run(each, _bytes, [(name,) for name in ATTENTIONS], world_size=4)
    for name, found in zip(ATTENTIONS, zip(*by_rank, strict=True), strict=True):
        for forward, backward, whole in found:
            far = whole * 3 // 4
            if name == "ring":
                assert forward == {"recv_": far, "send": 0}
                assert backward == {"recv_": far + whole, "send": 0}  # Gradients come home.
                continue
            assert forward["_allgather_base_"] == far
            assert backward["_reduce_scatter_base_"] == far
            assert forward.keys() | backward.keys() == {
                "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_",
            }  # fmt: skip
        plan = plan_traffic(plan_mesh(world_size=4, context=4), sizes, attention=name)
        counted = sum(sum(part.values()) for *steps, _ in found for part in steps)
        assert counted == 4 * plan.of("context")

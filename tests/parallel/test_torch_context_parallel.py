"""Attention against torch's own context parallelism: the same tensors, documents and ranks.

On a CPU torch 2.13 runs it in parts. `context_parallel` stops at the operator that SDPA calls
there, for which DTensor has no rule, and `flex_attention` refuses gradients. What lies under both
runs, forward and backward: the ring of SDPA, given that very operator; and of FlexAttention the
sharding, the gather, the masks and the load balancers, with the operator under `flex_attention`,
which has a backward. All of it is private, and may change with each version.
"""

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import (
    FlexKernel,
    RectangleKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64

if not torch.__version__.startswith("2.13."):
    pytest.skip(
        f"torch's context parallelism is private: compared with 2.13, not {torch.__version__}",
        allow_module_level=True,
    )

from torch.distributed.tensor.experimental import _context_parallel as theirs
from torch.distributed.tensor.experimental._context_parallel import _attention as inner
from torch.distributed.tensor.parallel import parallelize_module

ATEN = torch.ops.aten
HEADS, HEAD_DIM = 4, 8
KERNELS = {"rectangles": RectangleKernel(), "flex": FlexKernel(tile_tokens=16)}
ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
BALANCERS = ["none", "of each document", "by processing time"]


def _inputs(tokens, key_heads):
    """Queries, keys, values, and the gradient of the output: `[1, heads, tokens, head_dim]`."""
    generator = torch.Generator().manual_seed(key_heads)
    heads = (HEADS, key_heads, key_heads, HEADS)
    shapes = [(1, each, tokens, HEAD_DIM) for each in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _ours(inputs, plan, **rules):
    """By attention and kernel: this rank's output, and the gradients of q, k and v."""
    own, found = plan.indices(dist.get_rank()), {}
    *qkv, grad = (x[0].transpose(0, 1)[own] for x in inputs)
    for name, attention in ATTENTIONS.items():
        for kind, kernel in KERNELS.items():
            leaves = [x.clone().requires_grad_() for x in qkv]
            where = {"sequence": plan, "group": dist.group.WORLD}
            out = attention(*leaves, kernel=kernel, **where, **rules)
            out.backward(grad)
            found[name, kind] = [out.detach(), *(x.grad for x in leaves)]
    return found


def _tokens_first(*tensors):
    return [x[0].transpose(0, 1) for x in tensors]


def _ring(inputs, causal):
    """torch's ring of SDPA, forward and backward, on this rank's part."""
    group = dist.group.WORLD
    q, k, v, grad = inputs
    out, lse, *_ = inner._templated_ring_attention(
        group, 2, ATEN._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=causal
    )
    dq, dk, dv = inner._templated_ring_attention_backward(
        group, 2, ATEN._scaled_dot_product_flash_attention_for_cpu_backward, grad, "grad_out",
        q, k, v, out, lse, causal, dropout_p=0.0,
    )  # fmt: skip
    return _tokens_first(out, dq, dk, dv)


def _compare_rings(causal, order):
    """Compare this rank's part, which torch deals as our plan does."""
    world, balanced = dist.get_world_size(), order == "zigzag"
    tokens = 8 * world
    plan = plan_sequence([tokens], ranks=world, order=order)
    indices = torch.arange(tokens)
    if balanced:
        indices = theirs._HeadTailLoadBalancer(tokens, world, "cpu")._generate_indices()[0]
    own = indices.chunk(world)[dist.get_rank()]
    assert torch.equal(own, plan.indices(dist.get_rank()))
    for key_heads in (4, 2):
        inputs = _inputs(tokens, key_heads)
        local, found = [x[:, :, own] for x in inputs], _ours(inputs, plan, causal=causal)
        for rotate in theirs._RotateMethod:
            # Sums of float64 would be taken in float32.
            options = {"convert_to_f32": False, "enable_load_balance": balanced}
            with mock.patch.multiple(inner._cp_options, **options, rotate_method=rotate):
                want = _ring(local, causal)
            for got in found.values():
                assert_close_float64(got, want)


def _all_rings():
    for causal, order in [(True, "zigzag"), (True, "contiguous"), (False, "contiguous")]:
        _compare_rings(causal, order)


def test_equal_to_torchs_ring():
    ranks.run(_all_rings, world_size=3)


class _Flex(nn.Module):
    def forward(self, q, k, v, mask):
        """The operator under `flex_attention`, which differentiates on a CPU too."""
        scale = HEAD_DIM**-0.5
        out, *_ = torch.ops.higher_order.flex_attention(
            q, k, v, _unchanged, mask.as_tuple(), scale, {}, (), ()
        )
        return out


def _unchanged(score, batch, head, query, key):
    return score


def _lengths(world):
    """Documents that torch can balance: whole chunks of each on every rank; 256 tokens a rank."""
    return [100 * world, 4 * world, 152 * world]


@cache
def _mask(world):
    lengths = _lengths(world)
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def seen(batch, head, query, key):
        return (document[query] == document[key]) & (query >= key)

    return create_block_mask(seen, 1, 1, len(document), len(document), device="cpu")


def _balancer(name, world):
    lengths = _lengths(world)
    return {
        "none": lambda: None,
        "of each document": lambda: theirs._PerDocumentHeadTailLoadBalancer(
            [lengths], world, "cpu"
        ),
        "by processing time": lambda: theirs._PTRRLoadBalancer(_mask(world), world),
    }[name]()


def _torch_flex(inputs, name):
    """Whole output and gradients of torch's FlexAttention, put together again by torch."""
    world = dist.get_world_size()
    mesh, balancer = init_device_mesh("cpu", (world,)), _balancer(name, world)
    # It would be compiled, on every rank.
    with mock.patch.object(inner, "_compiled_create_block_mask", create_block_mask):
        *qkv, grad, mask = theirs._context_parallel_shard(
            mesh, [*inputs, _mask(world)], [2] * 5, balancer
        )
    kind = theirs._ContextParallel.AttentionType.FLEX
    attention = parallelize_module(_Flex(), mesh, theirs._ContextParallel(2, kind))
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attention(*leaves, mask)
    out.backward(grad)
    parts = [out.detach(), *(x.grad for x in leaves)]
    return _tokens_first(*theirs.context_parallel_unshard(mesh, parts, [2] * 4, balancer))


def _compare_flex(key_heads):
    """Compare with torch under each of its load balancers; tokens lie on other ranks there."""
    world = dist.get_world_size()
    lengths = _lengths(world)
    inputs = _inputs(sum(lengths), key_heads)
    plan = plan_sequence(lengths, ranks=world, order="balanced", chunk_tokens=16)
    own, found = plan.indices(dist.get_rank()), _ours(inputs, plan)
    for name in BALANCERS:
        want = [x[own] for x in _torch_flex(inputs, name)]
        for got in found.values():
            assert_close_float64(got, want)


def test_equal_to_torchs_flex_attention():
    ranks.run(_compare_flex, 1, world_size=3)

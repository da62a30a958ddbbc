"""Ring attention against another one: lucidrains' ring-attention-pytorch 0.5.20, on gloo.

Two faults of the peer's gradients are worked around, for its own tests are too coarse to see them.
Its ring takes the message with the gradients of keys and values apart in the wrong place, so that
both come out as sums; its zigzag leaves out what other ranks' queries owe to keys and values.
"""

import warnings

import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import ring_attention
from primeblocks.testing import ranks
from primeblocks.testing.oracles import max_relative_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # The peer's type hints are of a kind that beartype dislikes.
    flash = pytest.importorskip(
        "ring_attention_pytorch.ring_flash_attention", reason="the peer is not installed"
    )
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_shard

TOKENS, HEADS, HEAD_DIM = 48, 4, 8
BUCKET = 6  # Smaller than a rank's part, so that the peer's inner loop runs too.
ORDERS = ("contiguous", "zigzag")
# The peer adds 1e-10 to a row's sum for each bucket that the row may not see.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-6}
CASES = [(key_heads, dtype) for key_heads in (4, 2, 1) for dtype in TOLERANCES]


def _all_attentions(causal):
    """By case and name: this rank's output, and the gradients that can be compared."""
    found = {}
    for key_heads, dtype in CASES:
        torch.set_default_dtype(dtype)  # The peer's running sums are in the default dtype.
        for order in ORDERS:
            for name, results in _both(order, key_heads, causal, dtype).items():
                found[key_heads, dtype, name, order] = [x.detach() for x in results]
    return found


def _both(order, key_heads, causal, dtype):
    plan = plan_sequence([TOKENS], ranks=dist.get_world_size(), order=order)
    q, k, v, grad = (x[plan.indices(dist.get_rank())] for x in _inputs(key_heads, dtype))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, sequence=plan, group=dist.group.WORLD, causal=causal)
    out.backward(grad)
    peer = _peer_ring if order == "contiguous" else _peer_zigzag
    # Its query head i looks at key head i % key_heads; ours at i // (heads / key_heads).
    heads = torch.arange(HEADS).view(key_heads, -1).t().flatten()
    back = heads.argsort()
    its, dq, *rest = peer(q[:, heads], k, v, grad[:, heads], causal)
    return {
        "ours": [out, *(leaf.grad for leaf in leaves)],
        "peer": [its[:, back], dq[:, back], *rest],
    }


def _inputs(key_heads, dtype):
    """Queries, keys, values, and the gradient of the output: the whole sequence."""
    generator = torch.Generator().manual_seed(key_heads)
    shapes = [(TOKENS, heads, HEAD_DIM) for heads in (HEADS, key_heads, key_heads, HEADS)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


class _Context:
    """What autograd would hand to the peer's two functions."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def _peer_ring(q, k, v, grad, causal):
    function, context = flash.RingFlashAttentionFunction, _Context()
    options = (None, causal, BUCKET, True, False, None, None, False, 1.0)
    out = function.forward(context, q[None], k[None], v[None], *options)
    dq, both, *_ = function.backward(context, grad[None])
    dk, dv = both  # The first of the two is the whole message, not its first half.
    return out[0], dq[0], dk[0], dv[0]


def _peer_zigzag(q, k, v, grad, causal):
    q.requires_grad_()
    (_, own, keys), _ = zig_zag_shard(torch.zeros(1, TOKENS, 1))  # Places in the whole sequence.
    plan = plan_sequence([TOKENS], ranks=dist.get_world_size(), order="zigzag")
    assert torch.equal(own, plan.indices(dist.get_rank()))
    seen = own[:, None] >= keys if causal else None
    out = zig_zag_attn(*(x[None].transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
    out = out[0].transpose(0, 1)
    out.backward(grad)
    return out, q.grad


def _whole(found, key_heads, dtype, name, order):
    """The sequence put together from the ranks' parts."""
    rows = plan_sequence([TOKENS], ranks=len(found), order=order).row_of_token
    parts = zip(*(by_case[key_heads, dtype, name, order] for by_case in found), strict=True)
    return [torch.cat(part)[rows] for part in parts]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_the_peer(world_size, causal):
    found = ranks.run(_all_attentions, causal, world_size=world_size)
    for case in CASES:
        ring, zigzag = (_whole(found, *case, "peer", order) for order in ORDERS)
        assert (len(ring), len(zigzag)) == (4, 2)
        for order in ORDERS:
            ours = _whole(found, *case, "ours", order)
            for theirs in (ring, zigzag):
                errors = [max_relative_error(a, b) for a, b in zip(ours, theirs, strict=False)]
                assert max(errors) <= TOLERANCES[case[1]], f"{case}, {order}: {errors}"

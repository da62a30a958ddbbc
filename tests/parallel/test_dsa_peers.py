"""Sparse attention over ranks against the references of two other libraries, on one rank."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from primeblocks.parallel import plan_sequence
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.float64 import Float64
from tests.parallel.test_dsa import (
    HEADS,
    LATENT,
    ORDERS,
    PACKING,
    ROPE,
    _inputs,
    _listed,
    _split,
)

pytest.importorskip("fla.ops.dsa", reason="fla-core is not installed; scripts/peers does")
pytest.importorskip("attn_gym", reason="attn_gym is not installed; scripts/peers does")

K = 6
OFFSETS = torch.tensor([0, *PACKING]).cumsum(0)


class _StableTopK(TorchFunctionMode):
    """Of equal values the first: theirs would be any of them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.topk, torch.Tensor.topk):
            x, k = args
            found = torch.sort(x, dim=-1, descending=True, stable=True)
            return torch.return_types.topk((found.values[..., :k], found.indices[..., :k]))
        return function(*args, **(kwargs or {}))


def _fla(drawn):
    """Ids inside documents, and the output of q and rows."""
    from fla.ops.dsa.naive import naive_dsa, naive_dsa_indexer

    indices = naive_dsa_indexer(
        drawn["index_q"][None], drawn["index_k"][None], drawn["weights"][None], K,
        scale=1.0, activation="relu", cu_seqlens=OFFSETS,
    )  # fmt: skip

    def attend(q, kv):
        key = kv[None, :, None]
        return naive_dsa(
            q[None], key, key[..., :LATENT], None, None, indices=indices, cu_seqlens=OFFSETS
        )[0]

    return indices[0], attend


def _attn_gym(drawn):
    from attn_gym.sparse import gather_attn, lightning_indexer

    offsets = OFFSETS.to(torch.int32)
    indices = lightning_indexer(
        drawn["index_q"][None], drawn["index_k"][None], drawn["weights"][None], K,
        causal=True, cu_seqlens=offsets, cu_seqlens_k=offsets, impl="reference",
    )  # fmt: skip

    def attend(q, kv):
        rows = kv[None, None]
        out = gather_attn(
            q.transpose(0, 1)[None], torch.zeros_like(rows), rows, indices,
            sliding_window_size=0, cu_seqlens=offsets, cu_seqlens_k=offsets, impl="reference",
            scale=(LATENT + ROPE) ** -0.5,
        )  # fmt: skip
        return out[0].transpose(0, 1)[..., :LATENT]

    return indices[0], attend


def _placed(indices):
    """Ids inside documents as ascending places in the sequence."""
    starts = OFFSETS[:-1].repeat_interleave(torch.tensor(PACKING)).tolist()
    rows = zip(indices.tolist(), starts, strict=True)
    return [sorted(i + start for i in row if i >= 0) for row, start in rows]


@pytest.mark.parametrize("peer", [_fla, _attn_gym])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_the_reference_of(peer, world_size):
    for order, integers in zip(ORDERS, (True, False, True), strict=True):
        drawn = _inputs(sum(PACKING), integers=integers)
        with Float64(), _StableTopK():
            chosen, attend = peer(drawn)
            q, kv = (drawn[name].clone().requires_grad_() for name in ("q", "kv"))
            out = attend(q, kv)
            out.backward(drawn["grad"])
        options = {"integers": integers, "sinks": False}
        found = ranks.run(_split, PACKING, order, K, options, world_size=world_size)
        plan = plan_sequence(PACKING, ranks=world_size, order=order, chunk_tokens=3)
        wanted = _placed(chosen)
        for rank, (indices, results) in enumerate(found):
            own = plan.indices(rank)
            assert _listed(indices) == [wanted[t] for t in own.tolist()]
            expected = [x[own] for x in (out.detach(), q.grad, kv.grad)]
            assert expected[0].shape[1:] == (HEADS, LATENT)
            assert_close_float64(results, expected)

"""Sparse attention on each device, one rank: choices of the CPU, results of plain loops."""

import pytest

from primeblocks.contrib.dsa_rules import indexer_loss
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa, dsa_attention
from primeblocks.parallel.attention.dsa import IndexerInputs, TopK, select
from primeblocks.testing.oracles import assert_close_float64
from tests.contrib import test_dsa_loss
from tests.parallel import test_dsa

# One token, fewer than k, empty.
LENGTHS = [11, 1, 3, 26, 0, 6]
PLAN = plan_sequence(LENGTHS, ranks=1)


def inputs(device):
    """In whole numbers: every score is exact, and many are equal."""
    drawn = test_dsa._inputs(PLAN.tokens, integers=True)
    return {name: x.to(device).requires_grad_() for name, x in drawn.items()}


@pytest.mark.parametrize("k", [4, 64])
def test_sparse_attention(group, device, k):
    part = inputs(device)
    out, indices = dsa_attention(
        part["q"],
        part["kv"],
        IndexerInputs(part["index_q"], part["index_k"], part["weights"]),
        sequence=PLAN,
        group=group,
        rows=test_dsa.ROWS,
        selector=TopK(k, chunk_bytes=300),
        sinks=part["sinks"],
        kernel=dsa.ReferenceKernel(chunk_bytes=300),
    )
    out.backward(part["grad"])
    chosen, expected = test_dsa._whole(LENGTHS, k, {"integers": True})
    assert test_dsa._listed(indices) == chosen
    found = [out.detach(), *(part[name].grad for name in ("q", "kv", "sinks"))]
    assert_close_float64([x.cpu() for x in found], expected)


def test_the_loss_of_an_indexer(group, device):
    part = inputs(device)
    indexer = IndexerInputs(part["index_q"], part["index_k"], part["weights"])
    indices = select(indexer, part["index_k"], selector=TopK(4), sequence=PLAN, rank=0)
    loss = indexer_loss(
        part["q"], part["kv"], indexer, indices,
        sequence=PLAN, group=group, rows=test_dsa_loss.ROWS, scale=test_dsa_loss.SCALE,
        sinks=part["sinks"], chunk_bytes=300,
    )  # fmt: skip
    loss.backward()
    learnt = [part[name].grad.cpu() for name in test_dsa_loss.LEARNS]
    found = [(loss.detach().cpu(), learnt)]
    test_dsa_loss._assert_equal_one_rank(found, LENGTHS, "balanced", 4, True, {"integers": True})

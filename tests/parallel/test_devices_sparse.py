"""Sparse attention on each device, one rank: choices of the CPU, results of plain loops."""

import pytest

from primeblocks.contrib.dsa_rules import indexer_loss
from primeblocks.contrib.dsa_rules.entries import plan_entries, windows
from primeblocks.contrib.dsa_rules.selectors import TopEntries, TopPools, TopTiles
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa, dsa_attention
from primeblocks.parallel.attention.dsa import IndexerInputs, TopK, select
from primeblocks.testing.oracles import assert_close_float64, assert_same_bits
from tests.contrib import test_dsa_entries, test_dsa_loss
from tests.parallel import test_dsa

# One token, fewer than k, empty.
LENGTHS = [11, 1, 3, 26, 0, 6]
PLAN = plan_sequence(LENGTHS, ranks=1)
SELECTORS = {
    "tokens": (TopK(4, chunk_bytes=300), None),
    "pools": (TopPools(8, 4, chunk_bytes=300), 4),
    "tiles": (TopTiles(3, 4, chunk_bytes=300), None),
    "entries": (TopEntries(3, 4, 5, chunk_bytes=300), 4),
}


def inputs(device):
    """In whole numbers: every score is exact, and many are equal."""
    drawn = test_dsa._inputs(PLAN.tokens, integers=True)
    return {name: x.to(device).requires_grad_() for name, x in drawn.items()}


@pytest.mark.parametrize("name", SELECTORS)
def test_choices_are_those_of_the_cpu(device, name):
    selector, ratio = SELECTORS[name]
    keys = PLAN.tokens if ratio is None else plan_entries(PLAN, ratio).tokens
    chosen = []
    for place in ("cpu", device):
        part = inputs(place)
        indexer = IndexerInputs(part["index_q"], part["index_k"][:0], part["weights"])
        whole = part["index_k"][:keys]
        chosen.append(select(indexer, whole, selector=selector, sequence=PLAN, rank=0))
    assert chosen[1].device.type == device
    assert_same_bits(*chosen)


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


@pytest.mark.parametrize("overlap", [0, 4])
def test_windows_of_tokens(group, device, overlap):
    x = test_dsa_entries._hidden(PLAN.tokens).to(device).requires_grad_()
    found, present = windows(x, sequence=PLAN, group=group, ratio=4, overlap=overlap)
    slope = test_dsa_entries._slope(PLAN.tokens, plan_entries(PLAN, 4).tokens, overlap + 4)
    found.backward(slope.to(device))
    ours = [[found.detach().cpu(), present.cpu(), x.grad.cpu()]]
    test_dsa_entries._assert_equal_loops(ours, LENGTHS, 4, overlap)

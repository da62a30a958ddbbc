"""Bytes, memory and launches of sparse attention over a split sequence, counted."""

import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa, dsa_attention
from primeblocks.planning.dsa import DsaSizes, dsa_cost, plan_dsa
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter
from tests.fp8.launches import Launches
from tests.parallel.test_dsa import (
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    PACKING,
    ROPE,
    ROWS,
    _inputs,
)


def _traffic(lengths, dtype, shared):
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), chunk_tokens=3)
    drawn = _inputs(plan.tokens, dtype=dtype)
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    indexer = dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"])
    rules = {"sequence": plan, "group": group, "rows": ROWS, "check": False}
    q, kv = (part[name].requires_grad_() for name in ("q", "kv"))
    with StepCounter() as forward:
        out, indices = dsa_attention(q, kv, indexer, selector=dsa.TopK(4), **rules)
    if shared:
        with StepCounter() as forward:
            out = dsa.sparse_attention(q, kv, indices, **rules)
    with StepCounter() as backward:
        out.backward(part["grad"])
    return forward.received_bytes, backward.received_bytes, forward.collectives


CASES = [(dtype, shared) for dtype in (torch.bfloat16, torch.float32) for shared in (False, True)]


def _every_traffic():
    return [_traffic(PACKING, dtype, shared) for dtype, shared in CASES]


def test_bytes_are_those_of_the_plan():
    """One collective forward, two backward, and as many bytes as `plan_dsa` says."""
    plan = plan_sequence(PACKING, ranks=3, chunk_tokens=3)
    by_rank = ranks.run(_every_traffic, world_size=3)
    for (dtype, shared), found in zip(CASES, zip(*by_rank, strict=True), strict=True):
        sizes = DsaSizes(
            heads=HEADS, index_heads=INDEX_HEADS, layers=2, index_layers=1, top_k=4,
            key_dim=LATENT + ROPE, value_dim=LATENT, index_dim=INDEX_DIM,
            row_bytes=dtype.itemsize, index_bytes=dtype.itemsize,
        )  # fmt: skip
        planned = plan_dsa(plan, sizes)
        forward = planned.gather_bytes + (0 if shared else planned.index_gather_bytes)
        for there, back, calls in found:
            assert (dict(there), calls.total()) == ({"_allgather_base_": forward}, 1)
            assert back == {
                "_allgather_base_": planned.gather_bytes,
                "_reduce_scatter_base_": planned.scatter_bytes,
            }


def test_scores_take_the_memory_that_is_planned(full):
    """16,384 tokens on eight ranks: at most a hundredth of the matrix of scores."""
    (tokens, chunk_bytes), k = (16_384, 1 << 20) if full else (4_096, 1 << 16), 64
    sizes = DsaSizes(heads=2, index_heads=2, layers=1, index_layers=1, top_k=k, index_dim=8)
    plan = plan_sequence([tokens], ranks=8, order="contiguous", cost=dsa_cost(sizes))
    planned = plan_dsa(plan, sizes, chunk_bytes=chunk_bytes)
    rows = tokens // 8
    assert planned.full_score_bytes == rows * tokens * 4
    assert planned.score_fraction <= 0.01
    generator = torch.Generator().manual_seed(0)
    q, keys, weights = (
        torch.randn(*s, generator=generator) for s in ((rows, 2, 8), (tokens, 8), (rows, 2))
    )
    # Not by `select`, whose operator shows nothing of its inside.
    with StepCounter() as step, torch.no_grad():
        indices = dsa.TopK(k, chunk_bytes=chunk_bytes).select(
            q, weights, keys, sequence=plan, rank=7, scores=dsa.index_scores
        )
    most = step.peak_bytes - indices.nbytes
    assert planned.score_bytes // 3 < most <= planned.score_bytes


def test_the_planner_at_131k_tokens():
    sizes = DsaSizes(heads=64, index_heads=32, layers=78, index_layers=21)
    plan = plan_sequence([131_072], ranks=8, cost=dsa_cost(sizes))
    planned = plan_dsa(plan, sizes)
    assert planned.score_fraction <= 0.01
    assert planned.gather_bytes == 126 << 20  # training-stack's table, received.
    assert planned.scatter_bytes == 252 << 20
    assert planned.indexer_flops == pytest.approx(8.8e12, rel=0.01)
    assert planned.attention_flops == pytest.approx(4.6e12, rel=0.01)
    assert planned.max_over_mean < 1.01
    assert "126.0 MiB" in planned.table()


def _scored_at_once(q, k, weights):
    """Stands for an engine: one launch."""
    return q[:, 0] @ k.T


def _meta(*shape):
    return torch.empty(shape, device="meta")


def test_a_device_never_makes_the_host_wait():
    """On the meta device there is nothing to read; launches are counted by chunk of queries."""
    plan = plan_sequence([64, 192], ranks=1)
    n, k, heads = plan.tokens, 16, 4
    selector = dsa.TopK(k, chunk_bytes=18 * 192 * 32)  # 32 queries at a time.
    with Launches() as chosen, torch.no_grad():
        indices = selector.select(
            _meta(n, heads, 8), _meta(n, heads), _meta(n, 8),
            sequence=plan, rank=0, scores=_scored_at_once,
        )  # fmt: skip
    chunks = 1 + 1 + 1 + 6  # The queries of each document that have no choice, and the others.
    assert not chosen.waits
    assert len(chosen.names) <= 25 * chunks
    kernel, rows = dsa.ReferenceKernel(chunk_bytes=1 << 30), dsa.Rows.latent(8, 4)
    q, kv = _meta(n, heads, 12), _meta(n, 1, 12)
    with Launches() as forward:
        out, lse = kernel.forward(q, kv, indices, rows=rows, scale=0.5)
    with Launches() as backward:
        kernel.backward(out, q, kv, indices, out, lse, rows=rows, scale=0.5)
    assert not forward.waits + backward.waits
    assert len(forward.names) <= 24
    assert len(backward.names) <= 45

"""Sparse attention over a split sequence against plain loops on one rank."""

import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import dsa, dsa_attention
from primeblocks.parallel.attention.dsa.indexer import top_ids
from primeblocks.testing import ranks, strategies
from primeblocks.testing.oracles import assert_close_float64, assert_same_bits
from tests.parallel.bodies import each, in_turns

ORDERS = ["balanced", "contiguous", "zigzag"]
# One token, fewer than k, cut by every order, empty.
PACKING = [11, 1, 3, 26, 0, 6]
HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIM = 3, 5, 3, 2, 4
ROWS = dsa.Rows.latent(LATENT, ROPE)
NAMES = ("q", "kv", "index_q", "index_k", "weights", "sinks", "grad")


def _inputs(tokens, *, integers=False, dtype=torch.float64):
    """By name. Integers from -2 to 2: every score is exact, and many are equal."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "q": (tokens, HEADS, LATENT + ROPE),
        "kv": (tokens, LATENT + ROPE),
        "index_q": (tokens, INDEX_HEADS, INDEX_DIM),
        "index_k": (tokens, INDEX_DIM),
        "weights": (tokens, INDEX_HEADS),
        "sinks": (HEADS,),
        "grad": (tokens, HEADS, LATENT),
    }
    found = {}
    for name, shape in shapes.items():
        if integers and name in ("index_q", "index_k", "weights"):
            x = torch.randint(-2, 3, shape, generator=generator).double()
        else:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = x.to(dtype)
    return found


def _split(lengths, order, k, options, chunk_bytes=64 << 20, group=None):
    """This rank's indices, output and gradients."""
    group = dist.group.WORLD if group is None else group
    options = dict(options)
    with_sinks = options.pop("sinks", True)
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    own, drawn = plan.indices(group.rank()), _inputs(plan.tokens, **options)
    part = {name: x if name == "sinks" else x[own] for name, x in drawn.items()}
    q, kv, sinks = (part[name].clone().requires_grad_() for name in ("q", "kv", "sinks"))
    out, indices = dsa_attention(
        q,
        kv,
        dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"]),
        sequence=plan,
        group=group,
        rows=ROWS,
        selector=dsa.TopK(k, chunk_bytes=chunk_bytes),
        sinks=sinks if with_sinks else None,
        kernel=dsa.ReferenceKernel(chunk_bytes=chunk_bytes),
    )
    out.backward(part["grad"])
    if not with_sinks:
        return indices, [out.detach(), q.grad, kv.grad]
    of_sinks = sinks.grad.clone()
    dist.all_reduce(of_sinks, group=group)
    return indices, [out.detach(), q.grad, kv.grad, of_sinks]


def _whole(lengths, k, options):
    """The sets of all queries, and output and gradients, by plain loops."""
    drawn = _inputs(sum(lengths), **options)
    chosen = reference.select(drawn["index_q"], drawn["index_k"], drawn["weights"], lengths, k)
    leaves = [drawn[name].double().requires_grad_() for name in ("q", "kv", "sinks")]
    out = reference.sparse_attention(
        leaves[0],
        leaves[1][:, None],
        [[ids] for ids in chosen],
        key=slice(0, LATENT + ROPE),
        value=slice(0, LATENT),
        scale=(LATENT + ROPE) ** -0.5,
        sinks=leaves[2],
    )
    if not chosen:
        return chosen, [out, *(torch.zeros_like(leaf) for leaf in leaves)]
    out.backward(drawn["grad"].double())
    return chosen, [out.detach(), *(leaf.grad for leaf in leaves)]


def _listed(indices):
    """The ids of each row, which must be compact."""
    rows = [[i for i in row if i >= 0] for row in indices[:, 0].tolist()]
    padded = [row + [-1] * (indices.shape[2] - len(row)) for row in rows]
    assert padded == indices[:, 0].tolist()
    return rows


def _assert_equal_one_rank(found, lengths, order, k, options):
    chosen, expected = _whole(lengths, k, options)
    plan = plan_sequence(lengths, ranks=len(found), order=order, chunk_tokens=3)
    for rank, (indices, results) in enumerate(found):
        own = plan.indices(rank)
        assert indices.dtype == torch.int32
        assert _listed(indices) == [chosen[t] for t in own.tolist()]
        assert_close_float64(results[:3], [x[own] for x in expected[:3]])
        assert_close_float64(results[3:], expected[3:])


def _assert_all_equal_one_rank(cases, world_size):
    found = ranks.run(each, _split, cases, world_size=world_size)
    for at, (lengths, order, k, options, _) in enumerate(cases):
        _assert_equal_one_rank([results[at] for results in found], lengths, order, k, options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_rank(world_size, full):
    rules = ((4, True, 300), (7, False, 64 << 20), (64, True, 300))
    cases = [
        (PACKING, order, k, {"integers": integers}, chunk_bytes)
        for order in ORDERS
        for k, integers, chunk_bytes in rules
    ]
    _assert_all_equal_one_rank(in_turns(cases, world_size, full), world_size)


@settings(max_examples=settings().max_examples // 20)
@given(
    world_size=st.integers(1, 4),
    packings=st.lists(strategies.ragged_lengths(max_items=6), min_size=2, max_size=2),
    order=st.sampled_from(ORDERS),
    k=st.integers(1, 9),
    integers=st.booleans(),
    chunk_bytes=st.sampled_from([1, 500, 1 << 20]),
)
def test_any_packing_equals_one_rank(world_size, packings, order, k, integers, chunk_bytes):
    rules = (order, k, {"integers": integers}, chunk_bytes)
    _assert_all_equal_one_rank([(lengths, *rules) for lengths in packings], world_size)


def test_float32_errs_by_rounding_alone():
    """Scores of integers are exact in float32 too: the sets are those of float64."""
    options = {"integers": True, "dtype": torch.float32}
    chosen, expected = _whole(PACKING, 7, options)
    found = ranks.run(_split, PACKING, "balanced", 7, options, world_size=3)
    plan = plan_sequence(PACKING, ranks=3, order="balanced", chunk_tokens=3)
    for rank, (indices, results) in enumerate(found):
        own = plan.indices(rank)
        assert _listed(indices) == [chosen[t] for t in own.tolist()]
        for got, want in zip(results, [x[own] for x in expected[:3]] + expected[3:], strict=True):
            assert (got - want).norm() <= 1e-6 * want.norm()


@given(
    rows=st.integers(1, 5), columns=st.integers(1, 40), k=st.integers(1, 12), seed=st.integers(0)
)
def test_top_ids_are_those_of_a_stable_sort(rows, columns, k, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    scores = torch.randint(-2, 3, (rows, columns), generator=generator).double()
    special = torch.rand(rows, columns, generator=generator)
    scores[special < 0.2], scores[special > 0.9] = -torch.inf, torch.nan
    scores[(special > 0.85) & (special < 0.9)] = torch.inf
    ranked = torch.where(scores.isnan(), torch.inf, scores)
    wanted = []
    for row in ranked.tolist():
        best = sorted((-score, i) for i, score in enumerate(row) if score > -math.inf)[:k]
        ids = sorted(i for _, i in best)
        wanted.append(ids + [-1] * (k - len(ids)))
    assert top_ids(scores, k).tolist() == wanted


class _BestTwo:
    """A selector that shows itself otherwise on each rank, as objects do by their address."""

    select = dsa.TopK(2).select

    def __repr__(self):
        return f"a selector of rank {dist.get_rank()}"


def _nan():
    group = dist.group.WORLD
    plan = plan_sequence([12], ranks=group.size(), order="contiguous")
    drawn = _inputs(12)
    drawn["index_k"][3] = torch.nan
    drawn["kv"][3] = torch.nan
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    out, indices = dsa_attention(
        part["q"], part["kv"],
        dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"]),
        sequence=plan, group=group, rows=ROWS, selector=_BestTwo(), scale=np.float32(0.5),
    )  # fmt: skip
    return out.isnan().flatten(1).any(1), (indices == 3).flatten(1).any(1)


def test_what_is_no_number_is_chosen_and_reaches_the_output():
    found = ranks.run(_nan, world_size=2)
    reached, chosen = (torch.cat([of_rank[i] for of_rank in found]) for i in (0, 1))
    assert reached.tolist() == chosen.tolist() == [t >= 3 for t in range(12)]


def _checkpointed(keep):
    """Gradients of kv where a recomputation would choose other rows."""
    group = dist.group.WORLD
    plan = plan_sequence(PACKING, ranks=group.size(), chunk_tokens=3)
    drawn = _inputs(plan.tokens)
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    indexer = dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"])
    calls = []

    def scores(q, k, weights):
        found = dsa.index_scores(q, k, weights)
        return -found if len(calls) == 2 and not fixed else found

    def layer(q, kv):
        calls.append(1)
        out, _ = dsa_attention(
            q, kv, indexer, sequence=plan, group=group, rows=ROWS, selector=dsa.TopK(3),
            scores=scores,
        )  # fmt: skip
        return out

    results = []
    for fixed in (True, False):  # noqa: B007
        q, kv = (part[name].clone().requires_grad_() for name in ("q", "kv"))
        calls.clear()
        options = {"context_fn": dsa.keep_indices} if keep else {}
        checkpoint(layer, q, kv, use_reentrant=False, **options).backward(part["grad"])
        assert len(calls) == 2
        results.append([q.grad, kv.grad])
    return results


def test_checkpointing_keeps_the_first_choice():
    for kept, chosen_again in ranks.run(each, _checkpointed, [(True,), (False,)]):
        for a, b in zip(*kept, strict=True):
            assert_same_bits(a, b)
        assert not torch.equal(chosen_again[0][0], chosen_again[1][0])  # Else nothing is seen.


def _many_in_flight():
    """Gradients of many micro-batches, checkpointed, beside those without."""
    group, results = dist.group.WORLD, []
    for options in ({}, {"use_reentrant": False, "context_fn": dsa.keep_indices}):
        outs, leaves = [], []
        for lengths in ([n, 9] for n in range(1, 11)):
            plan = plan_sequence(lengths, ranks=group.size(), order="zigzag")
            own, drawn = plan.indices(group.rank()), _inputs(plan.tokens)
            part = {name: x if name == "sinks" else x[own] for name, x in drawn.items()}
            indexer = dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"])

            def layer(q, kv, plan=plan, indexer=indexer):
                return dsa_attention(
                    q, kv, indexer, sequence=plan, group=group, rows=ROWS, selector=dsa.TopK(3)
                )[0]

            leaves.append([part[name].clone().requires_grad_() for name in ("q", "kv")])
            run = checkpoint if options else lambda f, *x: f(*x)
            outs.append((run(layer, *leaves[-1], **options) * part["grad"]).sum())
        sum(outs).backward()
        results.append([x.grad for pair in leaves for x in pair])
        assert pickle.loads(pickle.dumps(plan)) == plan
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


def test_many_plans_may_wait_for_their_backward():
    for equal in ranks.run(_many_in_flight, world_size=2):
        assert all(equal)


def _modes():
    """Bits under autocast and compiled, beside the call as it is."""
    group = dist.group.WORLD
    plan = plan_sequence([7, 9], ranks=group.size(), chunk_tokens=3)
    drawn = _inputs(plan.tokens, dtype=torch.float32)
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    indexer = dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"])

    def call(q, kv):
        return dsa_attention(
            q, kv, indexer, sequence=plan, group=group, rows=ROWS, selector=dsa.TopK(4)
        )[0]

    def run(function, dtype):
        q, kv = (part[name].clone().to(dtype).requires_grad_() for name in ("q", "kv"))
        out = function(q, kv)
        out.sum().backward()
        return [x.bfloat16() for x in (out.detach(), q.grad, kv.grad)]

    narrow, plain = run(call, torch.bfloat16), run(call, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = run(call, torch.float32)
    compiled = run(torch.compile(call, backend="eager"), torch.float32)
    pairs = [*zip(wide, narrow, strict=True), *zip(compiled, plain, strict=True)]
    return [torch.equal(a, b) for a, b in pairs]


def test_autocast_and_compile_change_nothing_else():
    """As in torch's own attention, autocast casts operands; a graph ends before the call."""
    for equal in ranks.run(_modes, world_size=2):
        assert all(equal)


def test_what_no_rank_may_pass_is_refused(one_rank):
    drawn, ids = _inputs(5), torch.zeros(5, 1, 2)
    where = {"sequence": plan_sequence([5], ranks=1), "group": one_rank, "rows": ROWS}
    for said, indices in [
        (r"\[5, 1, k\] of torch.int32", ids.long()),
        ("at least one id", ids[:, :, :0].int()),
    ]:
        with pytest.raises(ShapeError, match=said):
            dsa.sparse_attention(drawn["q"], drawn["kv"], indices, **where)
    with pytest.raises(PlanError, match="needs columns"):
        dsa.Rows((0, 0), (0, 3))
    with pytest.raises(PlanError, match="k must be at least 1; got 0"):
        dsa.TopK(0)

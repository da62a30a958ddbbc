"""The loss of an indexer over a split sequence against plain loops and autograd on one rank."""

import random

import pytest
import torch
import torch.distributed as dist

from primeblocks.contrib.dsa_rules import indexer_loss
from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import dsa
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter
from tests.parallel.test_dsa import ORDERS, PACKING, _inputs

HEADS, LATENT, ROPE = 3, 5, 3
ROWS = dsa.Rows.latent(LATENT, ROPE)
SCALE = 0.4
LEARNS = ("index_q", "index_k", "weights")


def _indexer(part):
    return dsa.IndexerInputs(part["index_q"], part["index_k"], part["weights"])


def _split(lengths, order, k, with_sinks, options, chunk_bytes):
    """This rank's loss, and gradients of what learns, the loss of rank r taken r + 1 times."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    drawn = _inputs(plan.tokens, **options)
    own = plan.indices(group.rank())
    part = {name: x if name == "sinks" else x[own].requires_grad_() for name, x in drawn.items()}
    rules = {"sequence": plan, "group": group, "rows": ROWS, "scale": SCALE}
    rules["sinks"] = part["sinks"] if with_sinks else None
    (keys,) = dsa.gather_tokens(part["index_k"], sequence=plan, group=group)
    indices = dsa.select(
        _indexer(part), keys, selector=dsa.TopK(k), sequence=plan, rank=group.rank()
    )
    loss = indexer_loss(
        part["q"], part["kv"], _indexer(part), indices, chunk_bytes=chunk_bytes, **rules
    )
    (loss * (group.rank() + 1)).backward()
    assert part["q"].grad is part["kv"].grad is part["sinks"].grad is None
    return loss.detach(), [part[name].grad for name in LEARNS]


def _whole(plan, k, with_sinks, options):
    """By rank, the loss of its queries; the gradients of all tokens."""
    drawn = {name: x.double() for name, x in _inputs(plan.tokens, **options).items()}
    chosen = reference.select(
        drawn["index_q"], drawn["index_k"], drawn["weights"], plan.document_lengths, k
    )
    index_q, index_k, weights = (drawn[name].requires_grad_() for name in LEARNS)
    losses = []
    for rank in range(plan.ranks):
        of_rank = [torch.zeros((), dtype=torch.float64)]
        for t in plan.indices(rank).tolist():
            rows = drawn["kv"][chosen[t]]
            scores = SCALE * drawn["q"][t] @ rows[:, : LATENT + ROPE].T
            if with_sinks:
                scores = torch.cat([scores, drawn["sinks"][:, None]], dim=1)
            p = scores.softmax(1)[:, : len(rows)].sum(0)
            p /= p.sum()
            found = weights[t] @ (index_q[t] @ index_k[chosen[t]].T).relu()
            of_rank.append((p * (p.log() - found.log_softmax(0))).sum())
        losses.append(torch.stack(of_rank).sum())
    total = sum(loss * (rank + 1) for rank, loss in enumerate(losses))
    # Nothing depends on what learns where no query has a choice.
    total = total + 0.0 * (index_q.sum() + index_k.sum() + weights.sum())
    total.backward()
    return [loss.detach() for loss in losses], [x.grad for x in (index_q, index_k, weights)]


def _assert_equal_one_rank(found, lengths, order, k, with_sinks, options):
    plan = plan_sequence(lengths, ranks=len(found), order=order, chunk_tokens=3)
    losses, grads = _whole(plan, k, with_sinks, options)
    scale = max(1.0, *(x.abs().max().item() for x in losses))
    for rank, (loss, ours) in enumerate(found):
        assert abs(loss - losses[rank]) <= 1e-12 * scale
        for part, grad in zip(ours, grads, strict=True):
            # A rank's part may consist of rounding errors of the whole gradient.
            atol = 1e-11 * max(1.0, grad.norm().item())
            torch.testing.assert_close(part, grad[plan.indices(rank)], rtol=0, atol=atol)


def _split_all(cases):
    return [_split(*case) for case in cases]


def _drawn_cases(world_size):
    """Packings of any lengths, empty ones too."""
    chance = random.Random(world_size)
    for integers in (False, True) * 4:
        lengths = [chance.randint(0, 17) for _ in range(chance.randint(1, 5))]
        order, k = chance.choice(ORDERS), chance.randint(1, 9)
        yield lengths, order, k, True, {"integers": integers}, 500


@pytest.mark.parametrize("world_size", [3, 4])
def test_equal_to_one_rank(world_size):
    rules = ((4, True, 300), (7, False, 64 << 20), (64, True, 2000))
    cases = [
        (PACKING, order, k, with_sinks, {}, chunk_bytes)
        for order in ORDERS
        for k, with_sinks, chunk_bytes in rules
    ]
    # Gradients that are rounding errors alone.
    cases += [(lengths, "balanced", 2, True, {"integers": True}, 500) for lengths in ([0], [3, 10])]
    cases += _drawn_cases(world_size)
    found = ranks.run(_split_all, cases, world_size=world_size)
    for at, (*case, _) in enumerate(cases):
        _assert_equal_one_rank([results[at] for results in found], *case)


def test_float32_errs_by_rounding_alone():
    options = {"integers": True, "dtype": torch.float32}
    found = ranks.run(_split, PACKING, "balanced", 7, True, options, 300, world_size=3)
    plan = plan_sequence(PACKING, ranks=3, order="balanced", chunk_tokens=3)
    losses, grads = _whole(plan, 7, True, options)
    for rank, (loss, ours) in enumerate(found):
        assert abs(loss - losses[rank]) <= 1e-5 * losses[rank]
        for a, b in zip(ours, grads, strict=True):
            assert a.dtype == torch.float32
            assert (a - b[plan.indices(rank)]).norm() <= 1e-5 * b.norm()


def _alone():
    """A call on one rank, and a sink that leaves nothing to tokens."""
    plan = plan_sequence([6], ranks=1)
    drawn = _inputs(6)
    part = drawn | {name: drawn[name].requires_grad_() for name in LEARNS}
    indices = torch.arange(3, dtype=torch.int32).expand(6, 1, 3).contiguous()
    indices[:2] = -1
    found = [
        indexer_loss(
            part["q"], part["kv"], _indexer(part), ids, sequence=plan, group=dist.group.WORLD,
            rows=ROWS, sinks=sinks,
        )
        for sinks in (None, torch.full((HEADS,), 800.0).double())
        for ids in (indices, indices[:, :, :0].new_full((6, 1, 1), -1))
    ]  # fmt: skip
    (found[0] + found[2]).backward()
    return [x.detach() for x in found], [part[name].grad for name in LEARNS]


def test_queries_without_ids_count_nothing_and_sinks_may_take_all():
    (((one, nothing, sunk, still_nothing), grads),) = ranks.run(_alone, world_size=1)
    assert nothing == still_nothing == 0
    assert one > 0
    assert sunk > 0
    assert all(x.isfinite().all() for x in (sunk, *grads))
    assert not grads[0][:2].any()
    assert grads[0][2:].any()


def _traffic():
    group = dist.group.WORLD
    plan = plan_sequence(PACKING, ranks=group.size(), chunk_tokens=3)
    drawn = _inputs(plan.tokens, dtype=torch.float32)
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    for name in LEARNS:
        part[name].requires_grad_()
    indices = torch.zeros(len(part["q"]), 1, 2, dtype=torch.int32)
    with StepCounter() as forward:
        loss = indexer_loss(
            part["q"], part["kv"], _indexer(part), indices, sequence=plan, group=group, rows=ROWS,
            check=False,
        )  # fmt: skip
    with StepCounter() as backward:
        loss.backward()
    return forward.received_bytes, backward.received_bytes


def test_bytes_are_those_of_the_docstring():
    """One collective forward; backward those of the index keys alone, there and back."""
    plan = plan_sequence(PACKING, ranks=3, chunk_tokens=3)
    index_dim = _inputs(1)["index_k"].shape[1]
    rows = 2 * max(plan.counts)
    for there, back in ranks.run(_traffic, world_size=3):
        assert there == {"_allgather_base_": rows * (LATENT + ROPE + index_dim) * 4}
        keys = rows * index_dim * 4
        assert back == {"_allgather_base_": keys, "_reduce_scatter_base_": keys}


def _memory():
    return [_peaks(chunk_bytes) for chunk_bytes in CHUNKS]


def _peaks(chunk_bytes):
    group, tokens, k = dist.group.WORLD, 512, 64
    plan = plan_sequence([tokens], ranks=1)
    part = _inputs(tokens, dtype=torch.float32)
    for name in LEARNS:
        part[name].requires_grad_()
    indices = torch.arange(k, dtype=torch.int32).expand(tokens, 1, k).contiguous()
    with StepCounter() as forward:
        loss = indexer_loss(
            part["q"], part["kv"], _indexer(part), indices, sequence=plan, group=group, rows=ROWS,
            chunk_bytes=chunk_bytes,
        )  # fmt: skip
    with StepCounter() as backward:
        loss.backward()
    slopes = tokens * k * 4
    return forward.peak_bytes - slopes, backward.peak_bytes - sum(
        part[name].nbytes for name in LEARNS
    )


CHUNKS = (1 << 15, 1 << 17)


def test_memory_is_that_of_a_chunk():
    """Products of all queries would take 512 x 64 x 2 x 4 bytes, 256 KiB, for each head."""
    (found,) = ranks.run(_memory, world_size=1)
    for chunk_bytes, (forward, backward) in zip(CHUNKS, found, strict=True):
        assert chunk_bytes // 4 < forward <= chunk_bytes
        assert chunk_bytes // 4 < backward <= chunk_bytes


def _refusals():
    group = dist.group.WORLD
    plan = plan_sequence([4, 6], ranks=2, order="contiguous")
    drawn = _inputs(10)
    part = {name: plan.split(x, group=group) for name, x in drawn.items() if name != "sinks"}
    good = {"q": part["q"], "kv": part["kv"], "indexer": _indexer(part)}
    good["indices"] = torch.zeros(5, 1, 2, dtype=torch.int32)
    good |= {"sequence": plan, "group": group, "rows": ROWS}
    grouped = {"kv": part["kv"][:, None].expand(-1, 3, -1)}
    grouped["indices"] = good["indices"].expand(-1, 3, -1)
    for error, said, wrong in [
        (UnsupportedError, "one list per query; got 3, one per key head", grouped),
        (ShapeError, "this rank 5 tokens", {"q": part["q"][:4]}),
        (
            ShapeError,
            "an indexer's q must be",
            {"indexer": _indexer(part | {"weights": part["q"][0]})},
        ),
        (ShapeError, "of torch.int32", {"indices": good["indices"].long()}),
        (PlanError, "scale must be a finite number over 0", {"scale": "1"}),
        (PlanError, "index_k requires_grad must be equal", {"indexer": _asks(part, group.rank())}),
    ]:
        with pytest.raises(error, match=said):
            indexer_loss(**(good | wrong))


def _asks(part, rank):
    return _indexer(part | {"index_k": part["index_k"].clone().requires_grad_(rank == 1)})


def test_what_does_not_fit_is_refused():
    ranks.run(_refusals, world_size=2)

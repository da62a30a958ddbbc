"""What a dispatch asks of the host, counted on a device that is none; rows of a given number."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from primeblocks.errors import PlanError, RankError
from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    GroupedExperts,
    LocalDispatcher,
    OncePerRankDispatcher,
    grouped_swiglu,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter, assert_close_float64
from tests.parallel.bodies import each
from tests.parallel.test_dispatchers import (
    EXPERTS,
    _assert_equal,
    _batch,
    _gradients,
    _loops,
    _share,
    _weights,
)

KINDS = {
    "local": (LocalDispatcher, {}),
    "all_to_all": (AllToAllDispatcher, {}),
    "once_per_rank": (OncePerRankDispatcher, {}),
    "capacity": (AllToAllDispatcher, {"capacity_rows": 20}),
}
# Dispatch, combine, and their backward. Only a read can tell a refusal of another rank.
READS = {
    ("local", True, 1): [1, 0, 0],
    ("local", False, 1): [0, 0, 0],
    ("local", True, 4): [1, 0, 0],
    ("local", False, 4): [1, 0, 0],
    **{(kind, True, n): [1, 1, 0] for kind in list(KINDS)[1:] for n in (1, 4)},
    **{(kind, False, n): [1, 0, 0] for kind in ("all_to_all", "once_per_rank") for n in (1, 4)},
    **{("capacity", False, n): [0, 0, 0] for n in (1, 4)},
}


def _made(kind, **rules):
    make, own = KINDS[kind]
    where = () if make is LocalDispatcher else (dist.group.WORLD,)
    return make(*where, **own, **rules)


def _step(dispatcher, inputs, ids, device):
    """Counts of each part, and its results."""
    x, scores = (t.detach().clone().to(device).requires_grad_() for t in inputs)
    ids = ids.to(device)
    parts = [StepCounter(device=device) for _ in range(3)]
    with parts[0]:
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
    with parts[1]:
        out = dispatcher.combine(sent.tokens, sent)
    with parts[2]:
        out.backward(out)
    for found in (sent.counts, sent.offs):
        assert found.device.type == device
    results = [t.detach().cpu() for t in (sent.tokens, sent.counts, out, x.grad, scores.grad)]
    return [part.host_reads.total() for part in parts], results


def _everything():
    from tests.pretend import Device

    x, scores, ids = _batch(7 + dist.get_rank(), seed=dist.get_rank())
    found = {}
    for kind, check, alignment in READS:
        dispatcher = _made(kind, check=check, alignment=alignment)
        _, expected = _step(dispatcher, (x, scores), ids, "cpu")
        with Device():
            reads, results = _step(dispatcher, (x, scores), ids, "pretend")
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)
        found[kind, check, alignment] = reads
    return found


def test_a_dispatch_reads_once():
    for found in ranks.run(_everything, world_size=3):
        assert found == READS


def _layer():
    from tests.pretend import Device

    with Device():
        where = {"dtype": torch.bfloat16, "device": "pretend"}
        module = GroupedExperts(4, 16, 8, dispatcher=LocalDispatcher(check=False), **where)
        x = torch.randn(9, 16).bfloat16().to("pretend").requires_grad_()
        ids, scores = torch.randint(4, (9, 2)).to("pretend"), torch.rand(9, 2).to("pretend")
        with StepCounter(device="pretend") as step:
            module(x, ids, scores).sum().backward()
    return step.host_reads


def test_a_layer_reads_nothing_more():
    assert ranks.run(_layer, world_size=2) == [{}, {}]


@pytest.fixture
def eighth():
    """Rank 0 of eight, the others of which are not there."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "operators", "peaks"),
    [("local", (25, 235), (1.25, 1.25)), ("capacity", (75, 235), (3.1, 2.1))],
)
def test_no_float32_copy_of_all_rows(eighth, kind, operators, peaks):
    """Qwen3-30B-A3B: operators each way, and peak bytes in those of all rows in bfloat16.

    On the meta device, where nothing has a value that could be read. A float32 copy would be 2.
    Over ranks rows are sent, arrive and are grouped: three times they.
    """
    tokens, hidden, top_k, experts = 32768, 2048, 8, 128
    rows = tokens * top_k
    rules = {"capacity_rows": rows // 8} if kind == "capacity" else {}
    dispatcher = KINDS[kind][0](*([eighth] if rules else []), check=False, **rules)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    scores = torch.empty(tokens, top_k, device="meta", requires_grad=True)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device="meta")
    steps = [StepCounter(device="meta") for _ in range(2)]
    with steps[0]:
        sent = dispatcher.dispatch(x, scores, ids, num_experts=experts)
        out = dispatcher.combine(sent.tokens, sent)
    with steps[1]:
        out.backward(out.detach())
    for step, most, peak in zip(steps, operators, peaks, strict=True):
        assert not step.host_reads
        assert step.operators.total() <= most
        assert step.peak_bytes <= peak * rows * hidden * 2


def _of_capacity(tokens_by_rank, alignment, check):
    rank = dist.get_rank()
    x, scores, ids = _batch(tokens_by_rank[rank], seed=rank)
    dispatcher = _made("capacity", alignment=alignment, check=check)

    def ours(x, scores, gate_up, down):
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
        assert len(sent.tokens) >= 20 * len(tokens_by_rank)
        assert int(sent.counts.sum()) < len(sent.tokens)
        y = grouped_swiglu(sent.tokens, sent.counts, gate_up, down)
        behind = torch.arange(len(y))[:, None] >= sent.counts.sum()
        return dispatcher.combine(y.masked_fill(behind, torch.nan), sent)

    return _gradients(ours, x, scores, *(_share(w, rank) for w in _weights()), seed=-rank)


@pytest.mark.parametrize("tokens_by_rank", [(5, 0, 2), (3, 1, 0, 6)], ids=str)
def test_a_capacity_changes_no_result(tokens_by_rank):
    """Rows behind the last expert's may be anything: here they are NaN."""
    cases = [(tokens_by_rank, 1, True), (tokens_by_rank, 8, False)]
    found = ranks.run(each, _of_capacity, cases, world_size=len(tokens_by_rank))
    alone = [_loops(*_batch(n, seed=rank), seed=-rank) for rank, n in enumerate(tokens_by_rank)]
    for got in zip(*found, strict=True):
        for mine, want in zip(got, alone, strict=True):
            _assert_equal(mine[:3], want[:3])
        for i in (3, 4):
            whole = torch.cat([mine[i] for mine in got])
            assert_close_float64(whole, sum(grads[i] for grads in alone))


def _crowded():
    """Twenty-two rows go to one rank: first from rank 1 alone, then from both."""
    x, scores, ids = _batch(11, seed=0)
    crowded, wrong = torch.zeros_like(ids), dist.get_rank() == 1
    with pytest.raises(
        PlanError if wrong else RankError, match="22 rows .* is 20. Raise capacity_rows"
    ):
        _made("capacity").dispatch(x, scores, crowded if wrong else ids, num_experts=EXPERTS)
    with pytest.raises(RuntimeError, match="over capacity_rows=20"):
        _made("capacity", check=False).dispatch(x, scores, crowded, num_experts=EXPERTS)
    with pytest.raises(PlanError, match="must be at least 1; got 0"):
        AllToAllDispatcher(dist.group.WORLD, capacity_rows=0)


def test_more_than_the_capacity_is_an_error():
    ranks.run(_crowded)

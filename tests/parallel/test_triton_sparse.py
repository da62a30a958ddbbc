"""What Triton's kernels of sparse attention add to the common suite: launches, bits, refusals."""

import contextlib
import mmap

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa
from primeblocks.testing import ranks
from tests.fp8.launches import Launches
from tests.parallel.sparse_cases import CASES

triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
INTERPRETED = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from primeblocks.parallel.adapters import triton as adapter  # noqa: E402
from primeblocks.parallel.adapters.triton import (  # noqa: E402
    index_scores,
    sparse_kernel,
)

# The same comparisons on both; a program takes the interpreter about 10 ms, so sizes are small.
pytestmark = [
    # Of NumPy, about the loops of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
SCORES = adapter.TritonIndexScores()


def run(case, drawn, *, dtype=torch.float32):
    q, kv, grad = (drawn[name].to(dtype).to(DEVICE) for name in ("q", "kv", "grad"))
    ids, kernel = drawn["indices"].to(DEVICE), adapter.TritonSparseKernel()
    how = {"rows": case.rows, "scale": case.scale}
    out, lse = kernel.forward(q, kv, ids, **how)
    return [out, lse, *kernel.backward(grad, q, kv, ids, out, lse, **how)]


class _Counter:
    """A kernel that counts its launches, and does not start: the interpreter copies by itself."""

    def __init__(self, name, counts):
        self.name, self.counts = name, counts

    def __getitem__(self, grid):
        self.counts.append(self.name)
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def counting(monkeypatch):
    """Names of launched kernels, and what torch launches beside them."""
    counts = []
    with monkeypatch.context() as patch, Launches() as launches:
        for name in ("attend", "find_slopes", "add_to_rows"):
            patch.setattr(sparse_kernel, name, _Counter(name, counts))
        patch.setattr(index_scores, "score_tiles", _Counter("score_tiles", counts))
        yield counts, launches


def test_launches_are_few_and_no_host_reads(monkeypatch):
    case = CASES["repeated"]
    drawn = {name: x.float().to(DEVICE) for name, x in case.draw().items() if name != "indices"}
    ids = case.draw()["indices"].to(DEVICE)
    operands = (drawn["q"], drawn["kv"], ids)
    kernel = adapter.TritonSparseKernel()
    how = {"rows": case.rows, "scale": case.scale}
    with counting(monkeypatch) as (counts, launches):
        out, lse = kernel.forward(*operands, **how)
    assert counts == ["attend"]
    assert not launches.waits
    made = set(launches.names)
    with counting(monkeypatch) as (counts, launches):
        kernel.backward(drawn["grad"], *operands, out, lse, **how)
    assert counts == ["find_slopes", "add_to_rows"]
    assert not launches.waits
    # torch fills what is empty with NaN in tests; else the sums alone are set to zero.
    made |= set(launches.names)
    assert made <= {"fill_", "zeros", "zero_"}
    assert launches.copied_bytes == 0


def test_an_id_beyond_the_rows_shows():
    case = CASES["grouped"]
    drawn = case.draw()
    drawn["indices"][0, 0, 19] = case.entries
    out, lse, dq, dkv = run(case, drawn)
    for x in (out[0, :3], lse[0, :3], dq[0, :3]):
        assert x.isnan().all()
    for x in (out[0, 3:], out[1:], dq[1:]):
        assert not x.isnan().any()
    assert dkv.isnan().any()


@pytest.mark.skipif(not INTERPRETED, reason="maps memory of the host")
def test_heads_may_be_far_apart():
    """Offsets of heads beyond 2**31 numbers, in memory that is mapped only where it is used."""
    far, (heads, dim) = (1 << 30) + 8, (3, 16)
    assert (heads - 1) * far > 2**31
    size_bytes, lazily = ((heads - 1) * far + 2 * dim) * 2, getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily
    mapped = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.bfloat16)
    apart = mapped.as_strided((2, heads, dim), (dim, far, 1))
    drawn, kernel = torch.Generator().manual_seed(0), adapter.TritonSparseKernel()
    q, grad = (torch.randn(2, heads, n, generator=drawn).bfloat16() for n in (dim, 12))
    kv = torch.randn(8, 1, dim, generator=drawn).bfloat16()
    ids = torch.tensor([[[0, 1, 2, -1]], [[3, 4, 5, 7]]], dtype=torch.int32)
    how = {"rows": dsa.Rows.latent(12, 4), "scale": 0.25}
    found = []
    for each in (q, apart.copy_(q)):
        out, lse = kernel.forward(each, kv, ids, **how)
        slopes = kernel.backward(grad, each, kv, ids, out, lse, **how)
        scores = SCORES(each, kv[:, 0], each[..., 0].float())
        found.append([out, lse, *slopes, scores])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_deterministic_algorithms_are_refused(monkeypatch):
    monkeypatch.setattr(sparse_kernel, "INTERPRETED", False)
    monkeypatch.setattr(sparse_kernel, "_on_hopper", lambda x: True)
    torch.use_deterministic_algorithms(True)
    case = CASES["one"]
    with pytest.raises(UnsupportedError, match="any order.*ReferenceKernel"):
        run(case, case.draw())


def test_operands_that_do_not_fit_are_refused():
    kernel = adapter.TritonSparseKernel()
    rows = dsa.Rows.latent(8, 4)
    q, kv = torch.zeros(3, 4, 12, device=DEVICE), torch.zeros(5, 2, 12, device=DEVICE)
    ids = torch.zeros(3, 2, 6, dtype=torch.int32, device=DEVICE)
    wide, heads = dsa.Rows.latent(512, 65), dsa.Rows.heads(4, 8)
    refused = [
        (ShapeError, "q must be", (q[0], kv, ids, rows)),
        (ShapeError, "do not fit", (q[..., :8], kv, ids, rows)),
        (ShapeError, "do not fit", (q, kv[..., :8], ids, rows)),
        (ShapeError, "do not fit", (q, kv, ids[:2], rows)),
        (ShapeError, "do not fit", (q[:, :3], kv, ids, rows)),
        (ShapeError, "int64", (q, kv, ids.long(), rows)),
        (ShapeError, "bfloat16", (q, kv.bfloat16(), ids, rows)),
        (UnsupportedError, "float64.*ReferenceKernel", (q.double(), kv.double(), ids, rows)),
        (
            UnsupportedError,
            "up to 576 columns.*577",
            (q.new_zeros(3, 4, 577), kv.new_zeros(5, 2, 577), ids, wide),
        ),
        (
            UnsupportedError,
            "the value in their first columns",
            (q, kv, ids, dsa.Rows((0, 12), (4, 8))),
        ),
        (UnsupportedError, "the value in their first columns", (q[..., :4], kv, ids, heads)),
    ]
    for error, match, (*operands, read) in refused:
        with pytest.raises(error, match=match):
            kernel.forward(*operands, rows=read, scale=1.0)


def indexer(queries, candidates, heads, dim, *, integers=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries)
    shapes = ((queries, heads, dim), (candidates, dim), (queries, heads))
    if integers:
        return [torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (33, 150, 5, 20), (3, 130, 64, 128)])
def test_scores_err_by_rounding_alone(sizes, dtype):
    q, k, weights = indexer(*sizes, dtype=dtype)
    weights = weights.float()
    found = SCORES(q.to(DEVICE), k.to(DEVICE), weights.to(DEVICE))
    assert found.dtype == torch.float32
    exact_q, exact_k, exact_weights = (x.double() for x in (q, k, weights))
    wanted = dsa.index_scores(exact_q, exact_k, exact_weights)
    sums = dsa.index_scores(exact_q.abs(), exact_k.abs(), exact_weights.abs())
    assert ((found.cpu() - wanted).abs() <= (sizes[2] + sizes[3] + 2) * 2.0**-24 * sums).all()


def test_scores_of_integers_are_exact_and_select_the_same_tokens():
    cpu = indexer(60, 60, 3, 12, integers=True, dtype=torch.bfloat16)
    q, k, weights = (x.to(DEVICE) for x in cpu)
    assert torch.equal(SCORES(q, k, weights).cpu(), dsa.index_scores(*cpu))
    plan = plan_sequence([40, 20], ranks=1, order="contiguous")
    inputs = dsa.IndexerInputs(q, k, weights)
    chosen = [
        dsa.select(
            *(inputs, inputs.k),
            selector=dsa.TopK(5, chunk_bytes=9000),
            sequence=plan,
            rank=0,
            scores=scores,
        )
        for scores in (SCORES, None)
    ]
    assert torch.equal(*chosen)


def test_scores_take_any_rows_and_pass_a_nan_on(monkeypatch):
    q, k, weights = (x.to(DEVICE) for x in indexer(5, 40, 3, 16))
    plain = SCORES(q, k, weights)
    apart = [x.mT.contiguous().mT for x in (q, k, weights)]
    assert torch.equal(SCORES(*apart), plain)
    fields = [torch.nn.functional.pad(x, (2, 3), value=torch.nan) for x in (q, k, weights)]
    assert torch.equal(SCORES(*(x[..., 2:-3] for x in fields)), plain)
    k[7, 3] = torch.nan
    assert SCORES(q, k, weights)[:, 7].isnan().all()
    assert SCORES(q, k, weights).isnan().sum() == 5
    assert SCORES(q[:0], k, weights[:0]).shape == (0, 40)
    with counting(monkeypatch) as (counts, launches):
        SCORES(q, k, weights)
    assert counts == ["score_tiles"]
    assert not launches.waits
    assert set(launches.names) <= {"fill_"}


def test_scores_that_the_kernel_does_not_have_are_refused():
    q, k, weights = (x.to(DEVICE) for x in indexer(2, 3, 4, 16))
    refused = [
        (ShapeError, "q must be", (q[0], k, weights)),
        (ShapeError, "q must be", (q, k[:, :8], weights)),
        (ShapeError, "q must be", (q, k, weights[:1])),
        (ShapeError, "one dtype", (q, k.bfloat16(), weights)),
        (ShapeError, "int32", (q, k, weights.int())),
        (UnsupportedError, "index_scores", (q.double(), k.double(), weights)),
        (UnsupportedError, "128", (q.repeat(1, 40, 1), k, weights.repeat(1, 40))),
    ]
    for error, match, operands in refused:
        with pytest.raises(error, match=match):
            SCORES(*operands)


def _attend(lengths, ours):
    """Output and gradients of this rank's queries and rows."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order="balanced", chunk_tokens=3)
    own, generator = plan.indices(group.rank()), torch.Generator().manual_seed(0)
    shapes = ((3, 24), (24,), (2, 16), (16,), (2,), (3, 16))
    q, kv, *index, grad = (
        torch.randint(-4, 5, (plan.tokens, *shape), generator=generator).float()[own]
        for shape in shapes
    )
    q, kv = (x / 4 for x in (q, kv))
    sinks = torch.tensor([0.5, -0.5, 1.0]).requires_grad_()
    q.requires_grad_(), kv.requires_grad_()
    engines = {"kernel": adapter.TritonSparseKernel(), "scores": SCORES} if ours else {}
    out, indices = dsa.dsa_attention(
        *(q, kv, dsa.IndexerInputs(*index)),
        sequence=plan,
        group=group,
        rows=dsa.Rows.latent(16, 8),
        selector=dsa.TopK(5),
        sinks=sinks,
        **engines,
    )
    out.backward(grad)
    return indices, [out.detach(), q.grad, kv.grad, sinks.grad]


@pytest.mark.skipif(not INTERPRETED, reason="needs two ranks on a CPU")
def test_ranks_attend_as_with_the_reference():
    lengths = [11, 1, 6]
    for ours, theirs in zip(
        *(ranks.run(_attend, lengths, each, world_size=2) for each in (True, False)), strict=True
    ):
        assert torch.equal(ours[0], theirs[0])
        for one, other in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

"""One suite for every kernel of sparse attention, where it can run: forward, backward, sinks.

Triton's run in its interpreter (TRITON_INTERPRET=1) or on a CUDA device; what is not here is
skipped, with the reason.
"""

import pytest
import torch

from primeblocks.errors import MissingPackageError, UnsupportedError
from primeblocks.parallel.attention.dsa import ReferenceKernel
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64
from tests.parallel.sparse_cases import CASES, Case, exact, float32_bounds, naive

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT64 = 1e-12


def reference():
    return ReferenceKernel()


def reference_by_query():
    return ReferenceKernel(chunk_bytes=1)


def triton():
    from primeblocks.parallel.adapters.triton import TritonSparseKernel
    from primeblocks.parallel.adapters.triton.rows import INTERPRETED

    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton needs TRITON_INTERPRET=1 or a CUDA device")
    return TritonSparseKernel()


MAKERS = (reference, reference_by_query, triton)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERY = pytest.mark.parametrize(
    ("make", "device"),
    [
        *(pytest.param(make, CPU, id=f"{make.__name__}-cpu") for make in MAKERS),
        *(pytest.param(make, CUDA, marks=GPU, id=f"{make.__name__}-cuda") for make in MAKERS),
    ],
)
pytestmark = [
    # Of NumPy, about the loops of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def _as(x, dtype, device):
    """In another dtype and place, with what lies around it in memory."""
    if x.untyped_storage().nbytes() == x.nbytes:
        return x.to(dtype).to(device)
    field = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    field = field.to(dtype).to(device)
    return field.as_strided(x.shape, x.stride(), x.storage_offset())


class Engine:
    """A kernel on its device; what it does not take is skipped, with its reason."""

    def __init__(self, make, device):
        try:
            self.kernel, self.device = make(), device
        except (MissingPackageError, UnsupportedError) as error:
            pytest.skip(str(error))

    def __call__(self, case, drawn, dtype, *, sinks=False):
        """out, lse, dq and dkv, on the CPU."""
        q, kv, grad = (_as(drawn[name], dtype, self.device) for name in ("q", "kv", "grad"))
        ids = drawn["indices"].to(self.device)
        how = {"rows": case.rows, "scale": case.scale}
        try:
            out, lse = self.kernel.forward(q, kv, ids, **how)
        except UnsupportedError as error:
            pytest.skip(str(error))
        if sinks:
            total = torch.logaddexp(lse, drawn["sinks"].to(lse))
            out, lse = (out * (lse - total).exp().unsqueeze(-1)).to(dtype), total
        dq, dkv = self.kernel.backward(grad, q, kv, ids, out, lse, **how)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        assert (out.dtype, lse.dtype, dq.dtype, dkv.dtype) == (dtype, sums, dtype, sums)
        assert out.shape == grad.shape
        assert lse.shape == q.shape[:2]
        return [x.cpu() for x in (out, lse, dq, dkv)]


@EVERY
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_float64_is_exact(make, device, name, sinks):
    case = CASES[name]
    drawn = case.draw()
    found = Engine(make, device)(case, drawn, torch.float64, sinks=sinks)
    wanted = exact(case, drawn, sinks=sinks)
    assert_close_float64(found, [wanted.out, wanted.lse, wanted.dq, wanted.dkv], tolerance=FLOAT64)


@EVERY
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_float32_errs_by_rounding_alone(make, device, name, sinks):
    case = CASES[name]
    drawn = case.draw()
    found = Engine(make, device)(case, drawn, torch.float32, sinks=sinks)
    wanted, bounds = exact(case, drawn, sinks=sinks), float32_bounds(case, drawn)
    for part, value in zip(("out", "lse", "dq", "dkv"), found, strict=True):
        right, most = getattr(wanted, part), getattr(bounds, part)
        off = (value.double() - right).abs().masked_fill(value.double() == right, 0.0)
        assert (off <= most).all(), f"{part}: {float((off / most).max())} of the bound"


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_errs_at_most_twice_as_much_as_the_naive(make, device, name, dtype):
    case = CASES[name]
    drawn = case.draw()
    found = Engine(make, device)(case, drawn, dtype)
    wanted, plain = exact(case, drawn), naive(case, drawn, dtype)
    for part, value in zip(("out", "lse", "dq", "dkv"), found, strict=True):
        right = getattr(wanted, part)
        # Its own dtype is finer than that of the naive one, whose rounding is the measure.
        rounded = value.to(dtype) if part in ("lse", "dkv") else value
        assert_as_precise(rounded, naive=getattr(plain, part), exact=right)


@EVERY
def test_columns_that_are_neither_key_nor_value_have_no_part(make, device):
    case = CASES["wider"]
    drawn = case.draw()
    drawn["kv"][..., 100:] = torch.nan
    clean = dict(drawn, kv=drawn["kv"].nan_to_num())
    engine = Engine(make, device)
    found = engine(case, drawn, torch.float32)
    for one, other in zip(found, engine(case, clean, torch.float32), strict=True):
        if make is triton and device == CUDA:  # Atomics add in any order.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(one, other)
    assert (found[3][..., 100:] == 0).all()


@EVERY
@pytest.mark.parametrize(("queries", "k"), [(0, 4), (3, 4), (2, 0)])
def test_nothing_selected_is_an_output_of_zero(make, device, queries, k):
    case = Case(4, 5, CASES["grouped"].rows, (0,) * queries, k, groups=2)
    out, lse, dq, dkv = Engine(make, device)(case, case.draw(), torch.float32)
    assert out.shape == (queries, 4, 32)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (dq == 0).all()
    assert dkv.shape == (5, 2, 48)
    assert (dkv == 0).all()


@EVERY
def test_any_strides_will_do(make, device):
    case = CASES["grouped"]
    drawn = case.draw()
    engine = Engine(make, device)
    plain = engine(case, drawn, torch.float32)
    strided = dict(drawn)
    for name in ("q", "kv", "grad"):
        strided[name] = drawn[name].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strided["indices"] = drawn["indices"].mT.contiguous().mT
    for one, other in zip(plain, engine(case, strided, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@EVERY
@pytest.mark.parametrize("name", ["grouped", "shared", "one"])
def test_nothing_is_read_beside_the_operands(make, device, name):
    """Vectors lie among NaN, of which one that is read makes a NaN, even times zero."""
    case = CASES[name]
    drawn = case.draw()
    fenced = dict(drawn)
    for part in ("q", "kv", "grad"):
        x = drawn[part]
        field = torch.full((len(x) + 2, x.shape[1], x.shape[2] + 9), torch.nan, dtype=x.dtype)
        fenced[part] = field[1:-1, :, 4:-5].copy_(x)
    engine = Engine(make, device)
    plain = engine(case, drawn, torch.float32)
    for one, other in zip(plain, engine(case, fenced, torch.float32), strict=True):
        assert not other.isnan().any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@EVERY
def test_a_value_that_is_no_number_is_seen_where_it_is_read(make, device):
    case = CASES["repeated"]
    drawn = case.draw()
    drawn["kv"][2] = torch.nan
    out, lse, dq, dkv = Engine(make, device)(case, drawn, torch.float32)
    reads = (drawn["indices"] == 2).any(-1).squeeze(1)
    assert reads.any()
    assert not reads.all()
    for x in (out, lse, dq):
        assert torch.equal(x.isnan().flatten(1).all(1), reads)
        assert torch.equal(x.isnan().flatten(1).any(1), reads)
    assert dkv.isnan().any()

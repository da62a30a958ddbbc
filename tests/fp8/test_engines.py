"""One suite for every engine, on the device for which it is: dense, groups, tokens, gradients.

On a machine without a GPU the engines for any device run, which tests the suite.
"""

import contextlib

import pytest
import torch
from torch import Tensor

from primeblocks.errors import MissingPackageError, UnsupportedError
from primeblocks.fp8 import (
    Quantized,
    Recipe,
    Tile,
    grouped_matmul,
    matmul,
    quantize,
)
from primeblocks.fp8.reference import ReferenceGemm, SimulatedGemm
from tests.fp8.launches import Launches
from tests.fp8.test_matmul import exact_product

ROW, SQUARE = Tile(1, 128), Tile(128, 128)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Hopper's tensor cores sum a tile of 128 in four steps of 32 products and the sum so far. Each step
# aligns its 33 addends to the largest, and cuts them off 13 bits below its leading one: 14 bits, as
# DeepSeek-V3 measured, arXiv:2412.19437, section 3.5.2.
STEPS = 4 * 33 * 2.0**-13


def reference():
    return ReferenceGemm()


def simulated():
    return SimulatedGemm()


def cublas():
    from primeblocks.fp8.adapters.cublas import CublasGemm, check_device

    check_device(CUDA)
    return CublasGemm()


def deep_gemm():
    from primeblocks.fp8.adapters.deep_gemm import DeepGemm, check_device

    check_device(CUDA)
    return DeepGemm()


def triton():
    from primeblocks.fp8.adapters.triton import TritonGemm

    return TritonGemm()


def on_gpu(*makers):
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
    return [pytest.param(make, CUDA, marks=marks, id=f"{make.__name__}-cuda") for make in makers]


ON_CPU = [pytest.param(make, CPU, id=f"{make.__name__}-cpu") for make in (reference, simulated)]
EVERY = pytest.mark.parametrize(
    ("make", "device"), [*ON_CPU, *on_gpu(reference, simulated, cublas, deep_gemm, triton)]
)
OF_GROUPS = pytest.mark.parametrize(
    ("make", "device"), [*ON_CPU, *on_gpu(reference, simulated, deep_gemm, triton)]
)
OF_TOKENS = pytest.mark.parametrize(
    ("make", "device"), [*ON_CPU, *on_gpu(reference, simulated, triton)]
)


def engine_of(make):
    try:
        return make()
    except (UnsupportedError, MissingPackageError) as error:
        pytest.skip(str(error))


def matrix(*shape, seed, device=CPU):
    """Values whose tiles have very different scales: one tile's for another's would show."""
    generator = torch.Generator().manual_seed(seed)
    tiles = 2.0 ** torch.randint(-4, 5, (*shape[:-1], -(-shape[-1] // 128)), generator=generator)
    spread = tiles.repeat_interleave(128, -1)[..., : shape[-1]]
    return (torch.randn(shape, generator=generator) * spread).to(device)


def at_home(x):
    """On a CPU, whose float64 products are the oracle."""
    return x.cpu() if isinstance(x, Tensor) else Quantized(x.codes.cpu(), x.scales.cpu(), x.tile)


def magnitude(x):
    return Quantized(x.codes.float().abs().to(torch.float8_e4m3fn), x.scales, x.tile)


def assert_agrees(result, a, b):
    """Within the worst case, value by value, and within half of it in the mean.

    In the mean a cut loses half a unit, of an addend that is about as large as a tile's sum.
    """
    a, b, result = at_home(a), at_home(b), at_home(result)
    exact, sum_of_magnitudes = exact_product(a, b), exact_product(magnitude(a), magnitude(b))
    unit = torch.finfo(result.dtype).eps / 2
    float32 = (a.scales.shape[-1] + 2) * 2.0**-24
    error = result.double() - exact
    bound = (1 + 2.0**-6) * unit * exact.abs() + (STEPS + float32) * sum_of_magnitudes
    assert result.shape == exact.shape
    assert (error.abs() <= bound).all()
    if exact.norm() > 0:
        assert error.norm() / exact.norm() <= unit + STEPS / 2


@contextlib.contextmanager
def no_waits(device, make):
    """Refuse every wait of the host: torch raises at one on a GPU."""
    if device == CPU or make in (reference, simulated):
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Launches() as launches:
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not launches.waits


def twice(make, device, function, *args):
    """Call to compile and to allocate, then again without a wait. Equal bits both times."""
    first = function(*args)
    with no_waits(device, make):
        again = function(*args)
    assert torch.equal(first, again)
    return first


def on_tensor_cores(a, b, wrong=1.0):
    """`a @ b.T` by the arithmetic that STEPS describes; one tile's scales may be wrong."""
    x, y = a.codes.double(), b.codes.double()
    total = torch.zeros(a.shape[0], b.shape[0])
    for tile in range(a.scales.shape[1]):
        partial = torch.zeros(a.shape[0], b.shape[0], 1, dtype=torch.float64)
        for step in range(128 * tile, 128 * tile + 128, 32):
            products = x[:, None, step : step + 32] * y[None, :, step : step + 32]
            addends = torch.cat([products, partial], -1)
            unit = 2.0 ** (torch.frexp(addends.abs().amax(-1, keepdim=True)).exponent - 1.0 - 13)
            partial = ((addends / unit).trunc() * unit).sum(-1, keepdim=True)
        scales = a.scales[:, tile, None] * b.scales.repeat_interleave(b.tile.rows, 0)[None, :, tile]
        total += scales * partial[..., 0].float() * (wrong if tile == 1 else 1.0)
    return total.bfloat16()


@pytest.mark.parametrize("tile", [ROW, SQUARE])
def test_the_tolerance_admits_tensor_cores_and_little_else(tile):
    a, b = quantize(matrix(32, 512, seed=0), ROW), quantize(matrix(128, 512, seed=1), tile)
    result = on_tensor_cores(a, b)
    assert_agrees(result, a, b)
    off = result.double() / ReferenceGemm()(a, b).double() - 1
    assert off.abs().max() > 2.0**-8  # More than the rounding to bfloat16.
    shifted = Quantized(a.codes, a.scales.roll(1, 1), ROW)
    for wrong in (on_tensor_cores(shifted, b), on_tensor_cores(a, b, 1.1), result.roll(1, 0)):
        with pytest.raises(AssertionError):
            assert_agrees(wrong, a, b)


@EVERY
@pytest.mark.parametrize("tile", [ROW, SQUARE])
@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(256, 384, 512), (4, 128, 128), (260, 256, 640), (128, 512, 896)]
)
def test_dense_products(make, device, tile, rows, out, inner):
    if make is deep_gemm and tile == ROW and rows < 64:
        pytest.skip("refused: its kernel does not compile")
    gemm = engine_of(make)
    a = quantize(matrix(rows, inner, seed=0, device=device), ROW)
    b = quantize(matrix(out, inner, seed=1, device=device), tile)
    assert_agrees(twice(make, device, gemm, a, b), a, b)


@EVERY
@pytest.mark.parametrize("scale", [1e-9, 1e-14, 1e9])
def test_products_of_very_small_and_large_values(make, device, scale):
    gemm = engine_of(make)
    a = quantize(scale * matrix(64, 256, seed=0, device=device), ROW)
    b = quantize(scale * matrix(128, 256, seed=1, device=device), SQUARE)
    assert_agrees(gemm(a, b), a, b)


@EVERY
def test_a_scale_that_is_not_a_number_reaches_the_result(make, device):
    gemm = engine_of(make)
    x = matrix(64, 256, seed=0, device=device)
    x[3, 7] = torch.nan
    a = quantize(x, ROW, nonfinite="nan")
    result = gemm(a, quantize(matrix(128, 256, seed=1, device=device), SQUARE))
    assert result[3].isnan().all()
    assert result.isfinite().sum() == 63 * 128


GROUPS = [(128, 128, 384, 512), (0, 256, 256, 640), (640, 640, 640, 640), (0, 0, 0, 0)]


@OF_GROUPS
@pytest.mark.parametrize("ends", GROUPS)
def test_products_of_groups(make, device, ends):
    """Groups padded to 128, which every engine takes; empty ones, and rows that are nobody's."""
    gemm = engine_of(make)
    a = quantize(matrix(640, 256, seed=0, device=device), ROW)
    b = quantize(matrix(4, 384, 256, seed=1, device=device), SQUARE)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    result = twice(make, device, gemm.grouped, a, b, offsets)
    for expert, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        of_a = Quantized(a.codes[start:end], a.scales[start:end], ROW)
        of_b = Quantized(b.codes[expert], b.scales[expert], SQUARE)
        assert_agrees(result[start:end], of_a, of_b)
    assert (result[ends[-1] :] == 0).all()


@OF_TOKENS
@pytest.mark.parametrize("ends", [*GROUPS, (100, 100, 333, 640), (1, 127, 129, 500)])
def test_products_over_tokens(make, device, ends):
    """An expert's end may cut a tile, whose scale then serves both sides."""
    gemm = engine_of(make)
    a = quantize(matrix(256, 640, seed=0, device=device), ROW)
    b = quantize(matrix(128, 640, seed=1, device=device), ROW)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    result = twice(make, device, gemm.k_grouped, a, b, offsets)
    assert result.dtype == torch.float32
    for expert, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        assert_agrees(result[expert], _tokens(a, start, end), _tokens(b, start, end))


def _tokens(x, start, end):
    """The same matrix with zeros at the tokens of others."""
    codes = x.codes.float()
    codes[:, :start], codes[:, end:] = 0, 0
    return Quantized(codes.to(torch.float8_e4m3fn), x.scales, x.tile)


@EVERY
@pytest.mark.parametrize("wgrad", ["bfloat16", "float8"])
def test_gradients_are_products_of_the_same_codes(make, device, wgrad):
    """Each result has the bits of the engine's own product, rounded to the dtype of x."""
    gemm = engine_of(make)
    recipe = Recipe(gemm=gemm, wgrad=wgrad)
    x, weight, dy = (
        matrix(*shape, seed=seed, device=device).bfloat16()
        for seed, shape in enumerate([(256, 384), (512, 384), (256, 512)])
    )
    x.requires_grad_(), weight.requires_grad_()
    y = matmul(x, weight, recipe=recipe)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    codes, codes_t = quantize(weight, SQUARE), quantize(weight.mT, SQUARE)
    assert torch.equal(y, gemm(quantize(x, ROW), codes).bfloat16())
    assert torch.equal(dx, gemm(quantize(dy, ROW), codes_t).bfloat16())
    if wgrad == "float8":
        columns = quantize(dy.mT, ROW), quantize(x.mT, ROW)
        assert torch.equal(dw, gemm(*columns).bfloat16())


@OF_GROUPS
def test_gradients_of_experts_are_products_of_the_same_codes(make, device):
    gemm = engine_of(make)
    x, experts, dy = (
        matrix(*shape, seed=seed, device=device).bfloat16()
        for seed, shape in enumerate([(640, 256), (4, 384, 256), (640, 384)])
    )
    offsets = torch.tensor((128, 128, 384, 512), dtype=torch.int32, device=device)
    x.requires_grad_(), experts.requires_grad_()
    y = grouped_matmul(x, experts, offsets, recipe=Recipe(gemm=gemm))
    dx, dw = torch.autograd.grad(y, (x, experts), dy)
    codes, codes_t = quantize(experts, SQUARE), quantize(experts.mT, SQUARE)
    assert torch.equal(y, gemm.grouped(quantize(x, ROW), codes, offsets).bfloat16())
    assert torch.equal(dx, gemm.grouped(quantize(dy, ROW), codes_t, offsets).bfloat16())
    assert (dw[1] == 0).all()
    exact = dy[128:384].double().mT @ x[128:384].double()
    bound = 2.0**-8 * 1.01 * exact.abs() + 256 * 2.0**-23 * (
        dy[128:384].double().abs().mT @ x[128:384].double().abs()
    )
    assert ((dw[2].double() - exact).abs() <= bound).all()


@OF_GROUPS
def test_no_host_waits_for_a_step_of_experts(make, device):
    """Quantising, forward and backward together."""
    gemm = engine_of(make)
    x, experts = (
        matrix(*shape, seed=seed, device=device).bfloat16().requires_grad_()
        for seed, shape in enumerate([(640, 256), (4, 384, 256)])
    )
    offsets = torch.tensor((128, 128, 384, 512), dtype=torch.int32, device=device)

    def step():
        y = grouped_matmul(x, experts, offsets, recipe=Recipe(gemm=gemm))
        return torch.cat([g.flatten() for g in torch.autograd.grad(y, (x, experts), y.detach())])

    twice(make, device, step)

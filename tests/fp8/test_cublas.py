"""Arguments against torch's own shape functions, values through a fake of `scaled_mm`, refusals.

The fake holds its arguments to cuBLAS's documented layouts, and multiplies with the reference.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.fp8 import Quantized, Recipe, Tile, grouped_matmul, matmul, quantize
from primeblocks.fp8.adapters import cublas
from primeblocks.fp8.adapters.cublas import CublasGemm
from primeblocks.fp8.reference import ReferenceGemm
from tests.fp8.launches import Launches

ROW, SQUARE = Tile(1, 128), Tile(128, 128)
BLOCKS = st.integers(1, 6)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cublas, "check_device", lambda device: None)


@pytest.fixture
def fake(monkeypatch, hopper):
    """`scaled_mm` on a CPU; the list of what it was called with."""
    calls = []

    def scaled_mm(mat_a, mat_b, **scales):
        calls.append((mat_a, mat_b, scales))
        return _scaled_mm(mat_a, mat_b, **scales)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return calls


def _scaled_mm(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype):
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.stride() == (a.shape[1], 1)  # "TN": both contiguous along the inner dim.
    assert b.stride() == (1, b.shape[0])
    assert a.shape[0] % 4 == b.shape[1] % 4 == 0  # "M and N must be multiples of 4."
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0  # ATen, _scaled_mm_cuda_v2_out.
    assert scale_recipe_a == ScalingType.BlockWise1x128
    scales = [_rows_first(scale_a, a.shape), ()]
    if scale_recipe_b == ScalingType.BlockWise1x128:
        scales[1], tile = _rows_first(scale_b, b.t().shape), ROW
    else:
        scales[1], tile = _inner_first(scale_b, b.t().shape), SQUARE
    operands = zip((a, b.t()), scales, (ROW, tile), strict=True)
    return ReferenceGemm()(*(Quantized(*parts) for parts in operands)).to(output_dtype)


def _checked(scales, shape):
    assert scales.dtype == torch.float32
    assert tuple(scales.shape) == shape
    assert scales.storage_offset() % 4 == 0  # "Starting addresses must be 16B aligned."
    return scales


def _rows_first(scales, shape):
    """VEC128: "M-major with shape M x L"."""
    assert scales.stride() == (1, shape[0])
    return _checked(scales, (shape[0], shape[1] // 128))


def _inner_first(scales, shape):
    """BLK128x128: "K-major, and the stride between columns must be a multiple of 4"."""
    tiles = shape[1] // 128
    padded = (tiles + 3) // 4 * 4
    assert scales.stride() == (1, padded)
    return _checked(scales, (padded, shape[0] // 128))[:tiles].t()


def operands(rows, out, inner, tile=SQUARE):
    generator = torch.Generator().manual_seed(rows + out + inner)
    a, b = (torch.randn(n, inner, generator=generator) for n in (rows, out))
    return quantize(a, ROW), quantize(b, tile)


def shapes_alone(rows, out, inner, tile):
    def of(n, tile):
        codes = torch.empty(n, inner, dtype=torch.float8_e4m3fn, device="meta")
        return Quantized(codes, torch.empty(tile.grid(n, inner), device="meta"), tile)

    return of(rows, ROW), of(out, tile)


@given(rows=st.integers(1, 65), out=BLOCKS, inner=BLOCKS, tile=st.sampled_from([ROW, SQUARE]))
def test_torchs_own_checks_of_a_cuda_call_pass(rows, out, inner, tile):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas, "check_device", lambda device: None)
        result = CublasGemm()(*shapes_alone(4 * rows, 128 * out, 128 * inner, tile))
    assert result.shape == (4 * rows, 128 * out)
    assert result.dtype == (torch.bfloat16 if tile == SQUARE else torch.float32)


def test_torchs_own_checks_see_a_wrong_layout(hopper, monkeypatch):
    """So that the test above can fail."""
    monkeypatch.setattr(cublas, "_row_scales", lambda scales: scales)
    with pytest.raises(RuntimeError, match="must have shape"):
        CublasGemm()(*shapes_alone(64, 128, 512, SQUARE))


@pytest.mark.parametrize("tile", [ROW, SQUARE])
@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(4, 128, 128), (60, 256, 512), (8, 384, 640), (128, 128, 896)]
)
def test_products_are_those_of_the_reference(fake, rows, out, inner, tile):
    a, b = operands(rows, out, inner, tile)
    result = CublasGemm()(a, b)
    assert torch.equal(result, ReferenceGemm()(a, b).to(result.dtype))
    assert len(fake) == 1


def test_scales_that_lie_right_are_not_copied(fake):
    a, b = operands(64, 128, 512)
    laid = Quantized(a.codes, a.scales.t().contiguous().t(), ROW)
    with Launches() as launches:
        CublasGemm()(laid, b)
    assert fake[0][2]["scale_a"].data_ptr() == laid.scales.data_ptr()
    assert fake[0][2]["scale_b"].data_ptr() == b.scales.data_ptr()
    assert fake[0][0].data_ptr() == a.codes.data_ptr()
    assert fake[0][1].data_ptr() == b.codes.data_ptr()
    assert not launches.waits


def test_scales_off_a_boundary_of_16_bytes_are_copied(fake):
    a, b = operands(64, 128, 512)

    def moved(x, scales):
        off = torch.cat([torch.ones(1), scales.flatten()])[1:].view_as(scales)
        assert off.storage_offset() == 1
        return Quantized(x.codes, off.t() if x is a else off, x.tile)

    result = CublasGemm()(moved(a, a.scales.t()), moved(b, b.scales))
    assert torch.equal(result, ReferenceGemm()(a, b).bfloat16())


@pytest.mark.parametrize(
    ("tile", "inner", "expected", "copied"),
    [
        (SQUARE, 512, ["copy_", "_scaled_mm_v2"], 4 * 64 * 4),
        (SQUARE, 640, ["copy_", "new_ones", "copy_", "_scaled_mm_v2"], 4 * 64 * 5 + 4 * 5),
        (ROW, 512, ["copy_", "copy_", "_scaled_mm_v2"], 4 * (64 + 128) * 4),
    ],
)
def test_launches_and_bytes_copied(hopper, tile, inner, expected, copied):
    a, b = shapes_alone(64, 128, inner, tile)
    with Launches() as launches:
        CublasGemm()(a, b)
    assert launches.names == expected
    assert launches.copied_bytes == copied
    assert 32 * copied <= 64 * inner + 128 * inner * (tile == ROW) + 32 * 4 * 5
    assert not launches.waits


@pytest.mark.parametrize("wgrad", ["bfloat16", "float8"])
def test_gradients_go_through_it(fake, wgrad):
    """Each of the three products is the reference's, rounded to bfloat16 once or not at all."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(n, k, generator=generator) for n, k in _DENSE)
    ours, reference = (
        _gradients(Recipe(gemm=gemm, wgrad=wgrad), x, weight, dy)
        for gemm in (CublasGemm(), ReferenceGemm())
    )
    assert len(fake) == (3 if wgrad == "float8" else 2)
    for one, other in zip(ours[:2], reference[:2], strict=True):
        assert torch.equal(one, other.bfloat16().float())
    assert torch.equal(ours[2], reference[2])  # Float32 in both.


_DENSE = ((128, 256), (384, 256), (128, 384))


def _gradients(recipe, x, weight, dy):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = matmul(x, weight, recipe=recipe)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


@pytest.mark.parametrize("wgrad", ["bfloat16", "float8"])
def test_experts_go_to_the_engine_that_was_passed(fake, wgrad):
    generator = torch.Generator().manual_seed(0)
    x, experts = (torch.randn(n, generator=generator) for n in ((256, 128), (2, 256, 128)))
    offsets = torch.tensor([100, 256], dtype=torch.int32)
    recipe = Recipe(gemm=CublasGemm(experts=ReferenceGemm()), wgrad=wgrad)
    x.requires_grad_(), experts.requires_grad_()
    y = grouped_matmul(x, experts, offsets, recipe=recipe)
    y.sum().backward()
    same = grouped_matmul(x, experts, offsets, recipe=Recipe(wgrad=wgrad))
    assert torch.equal(y, same)
    assert not fake


def test_experts_are_refused_without_an_engine():
    a, b, offsets = *operands(8, 128, 128), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="TritonGemm"):
        CublasGemm().grouped(a, Quantized(b.codes[None], b.scales[None], SQUARE), offsets)
    with pytest.raises(UnsupportedError, match="TritonGemm"):
        CublasGemm().k_grouped(a, b, offsets)


def _flipped(x):
    codes = x.codes.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    return Quantized(codes.t(), x.scales, x.tile)


REFUSED = {
    "rows": (operands(6, 128, 128), UnsupportedError, "multiples of 4.*got 6"),
    "outputs": (operands(8, 72, 128, ROW), UnsupportedError, "multiples of 16.*72"),
    "ragged weights": (operands(8, 192, 128), UnsupportedError, "192 outputs"),
    "ragged inner": (operands(8, 128, 192), UnsupportedError, "inner dim of 192"),
    "inner dims": ((operands(8, 128, 128)[0], operands(8, 128, 256)[1]), ShapeError, "128.*256"),
    "devices": (
        (operands(8, 128, 128)[0], shapes_alone(8, 128, 128, SQUARE)[1]),
        ShapeError,
        "on cpu.*on meta",
    ),
    "mx": (tuple(quantize(torch.ones(8, 128), Tile(1, 32)) for _ in "ab"), UnsupportedError, "32"),
    "tall": (
        (quantize(torch.ones(128, 128), SQUARE), operands(8, 128, 128)[1]),
        UnsupportedError,
        "128 x 128 by 128 x 128",
    ),
    "transposed codes": (
        (operands(8, 128, 128)[0], _flipped(operands(8, 128, 128)[1])),
        UnsupportedError,
        r"codes of b|those of b",
    ),
    "a batch": (
        (operands(8, 128, 128)[0], quantize(torch.ones(2, 128, 128), SQUARE)),
        ShapeError,
        r"\[2, 128, 128\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_take_is_refused_before_anything_is_launched(fake, case):
    (a, b), error, message = REFUSED[case]
    with Launches() as launches, pytest.raises(error, match=message):
        CublasGemm()(a, b)
    assert not fake
    assert not launches.names


def test_no_rows_are_no_launch(fake):
    a, b = operands(8, 128, 128)
    none = Quantized(a.codes[:0], a.scales[:0], ROW)
    assert CublasGemm()(none, b).shape == (0, 128)
    assert not fake


def test_devices_are_refused_by_name(monkeypatch):
    with pytest.raises(UnsupportedError, match="CUDA device; got cpu"):
        CublasGemm()(*operands(8, 128, 128))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(UnsupportedError, match=r"only on .* 9\.0; cuda:0 has 10\.0"):
        cublas.check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(UnsupportedError, match=r"12\.9 or later; this build is for 12\.8"):
        cublas.check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cublas.check_device(torch.device("cuda", 0))


def test_it_is_a_value():
    assert CublasGemm() == CublasGemm(None)
    assert hash(Recipe(gemm=CublasGemm(ReferenceGemm()))) == hash(
        Recipe(gemm=CublasGemm(ReferenceGemm()))
    )
    assert Recipe(gemm=CublasGemm()).fingerprint() == Recipe().fingerprint()

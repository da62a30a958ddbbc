"""Arguments, layouts and refusals against a fake of the library, which has its source's checks."""

import sys
import types

import pytest
import torch

from primeblocks.errors import MissingPackageError, ShapeError, UnsupportedError
from primeblocks.fp8 import Quantized, Recipe, Tile, grouped_matmul, matmul, quantize
from primeblocks.fp8.adapters import deep_gemm
from primeblocks.fp8.adapters.deep_gemm import DeepGemm
from primeblocks.fp8.reference import ReferenceGemm
from tests.fp8.fake_deep_gemm import FakeDeepGemm
from tests.fp8.launches import Launches

ROW, SQUARE = Tile(1, 128), Tile(128, 128)


@pytest.fixture
def fake(monkeypatch):
    library = FakeDeepGemm()
    monkeypatch.setattr(deep_gemm, "check_hopper", lambda device, engine: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    deep_gemm._library.cache_clear()
    yield library
    deep_gemm._library.cache_clear()


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def offsets_of(*ends, device=None):
    return torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("tile", "rows", "out", "inner"),
    [
        *((SQUARE, *sizes) for sizes in [(1, 128, 128), (7, 384, 640), (130, 128, 512)]),
        *((ROW, *sizes) for sizes in [(64, 128, 128), (71, 384, 640), (130, 128, 512)]),
    ],
)
def test_products_are_those_of_the_reference(fake, rows, out, inner, tile):
    a, b = quantize(matrix(rows, inner), ROW), quantize(matrix(out, inner, seed=1), tile)
    result = DeepGemm()(a, b)
    assert result.dtype == (torch.bfloat16 if tile == SQUARE else torch.float32)
    assert torch.equal(result, ReferenceGemm()(a, b).to(result.dtype))
    assert fake.calls == ["fp8_gemm_nt"]


@pytest.mark.parametrize(
    "ends", [(128, 128, 384), (0, 0, 384), (384, 384, 384), (128, 256, 256), (0, 0, 0)]
)
def test_groups_are_those_of_the_reference(fake, ends):
    """Empty experts, the first and the last among them, and rows that are nobody's."""
    a, b = quantize(matrix(384, 256), ROW), quantize(matrix(3, 128, 256, seed=1), SQUARE)
    result = DeepGemm().grouped(a, b, offsets_of(*ends))
    assert torch.equal(result, ReferenceGemm().grouped(a, b, offsets_of(*ends)).bfloat16())
    assert fake.calls == ["m_grouped_fp8_gemm_nt_contiguous"]


@pytest.mark.parametrize("ends", [(100, 384), (128, 200), (1, 129)])
def test_offsets_that_are_not_aligned_fail_an_assertion_on_the_device(fake, ends):
    a, b = quantize(matrix(384, 128), ROW), quantize(matrix(2, 128, 128, seed=1), SQUARE)
    with pytest.raises(RuntimeError, match="multiple of 128. Pad"):
        DeepGemm().grouped(a, b, offsets_of(*ends))
    assert not fake.calls


def test_no_host_reads_and_few_launches(fake):
    """On the meta device, where there is nothing to read."""

    def shapes(*shape, tile):
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        grid = (*shape[:-2], *tile.grid(*shape[-2:]))
        return Quantized(codes, torch.empty(grid, device="meta"), tile)

    a, experts = shapes(512, 256, tile=ROW), shapes(4, 384, 256, tile=SQUARE)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    with Launches() as launches:
        assert DeepGemm().grouped(a, experts, offsets).shape == (512, 384)
        assert DeepGemm()(a, shapes(384, 256, tile=SQUARE)).shape == (512, 384)
        assert DeepGemm()(a, shapes(384, 256, tile=ROW)).shape == (512, 384)
    assert not launches.waits
    layout = ["remainder", "any", "logical_not", "_assert_async", "arange", "searchsorted"]
    ours = ["new_zeros", *layout, "eq", "masked_fill_", "new_zeros"]
    theirs = ["zero_", "copy_", "add_"]  # Of the fake.
    assert sorted(launches.names) == sorted(ours + theirs)
    assert launches.copied_bytes == 512 * 384 * 2  # The fake's result; codes and scales stay.


def test_gradients_go_through_it(fake):
    recipes = [Recipe(gemm=gemm, wgrad="float8") for gemm in (DeepGemm(), ReferenceGemm())]
    found = []
    for recipe in recipes:
        x, weight = matrix(128, 256).requires_grad_(), matrix(384, 256, seed=1).requires_grad_()
        y = matmul(x, weight, recipe=recipe)
        found.append((y, *torch.autograd.grad(y, (x, weight), matrix(128, 384, seed=2))))
    for ours, reference in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(ours, reference.bfloat16().float())
    assert torch.equal(found[0][2], found[1][2])
    assert fake.calls == ["fp8_gemm_nt"] * 3


@pytest.mark.parametrize("wgrad", ["bfloat16", "float8"])
def test_gradients_of_experts_go_through_it(fake, wgrad):
    found = []
    for gemm in (DeepGemm(k_groups=ReferenceGemm()), ReferenceGemm()):
        x, experts = matrix(384, 128).requires_grad_(), matrix(3, 256, 128, seed=1).requires_grad_()
        y = grouped_matmul(
            x, experts, offsets_of(128, 128, 384), recipe=Recipe(gemm=gemm, wgrad=wgrad)
        )
        found.append((y, *torch.autograd.grad(y, (x, experts), matrix(384, 256, seed=2))))
    for ours, reference in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(ours, reference.bfloat16().float())
    assert torch.equal(found[0][2], found[1][2])
    assert fake.calls == ["m_grouped_fp8_gemm_nt_contiguous"] * 2


def test_products_over_tokens_are_refused_without_an_engine(fake):
    a, b = quantize(matrix(128, 128), ROW), quantize(matrix(128, 128, seed=1), ROW)
    with pytest.raises(UnsupportedError, match="k_groups=.*TritonGemm"):
        DeepGemm().k_grouped(a, b, offsets_of(128))


@pytest.mark.parametrize(
    ("shapes", "tile", "error", "message"),
    [
        ([(64, 128), (96, 128)], ROW, UnsupportedError, "multiples of 64; got 96"),
        ([(63, 128), (128, 128)], ROW, UnsupportedError, "needs at least 64 rows.*got 63"),
        ([(8, 128), (192, 128)], SQUARE, UnsupportedError, "192 outputs"),
        ([(8, 192), (128, 192)], SQUARE, UnsupportedError, "inner dim of 192"),
        ([(8, 128), (128, 256)], SQUARE, ShapeError, "128.*256"),
        ([(8, 128), (2, 128, 128)], SQUARE, ShapeError, "matrices"),
        ([(8, 128), (128, 128)], Tile(64, 128), UnsupportedError, "64 x 128"),
    ],
)
def test_what_it_does_not_take_is_refused_before_anything_is_launched(
    fake, shapes, tile, error, message
):
    a, b = quantize(matrix(*shapes[0]), ROW), quantize(matrix(*shapes[1]), tile)
    with Launches() as launches, pytest.raises(error, match=message):
        DeepGemm()(a, b)
    assert not fake.calls
    assert not launches.names


@pytest.mark.parametrize(
    ("tile", "offsets", "error", "message"),
    [
        (ROW, offsets_of(128, 256), UnsupportedError, "experts in tiles of 128 x 128"),
        (SQUARE, offsets_of(256), ShapeError, r"\[2, 128, 128\] and \[1\]"),
        (SQUARE, offsets_of(128, 256).long(), ShapeError, "int64"),
        (SQUARE, offsets_of(128, 256, device="meta"), ShapeError, "on meta"),
    ],
)
def test_groups_that_do_not_fit_are_refused(fake, tile, offsets, error, message):
    a, b = quantize(matrix(256, 128), ROW), quantize(matrix(2, 128, 128, seed=1), tile)
    with Launches() as launches, pytest.raises(error, match=message):
        DeepGemm().grouped(a, b, offsets)
    assert not fake.calls
    assert not launches.names


def test_experts_whose_codes_are_views_are_refused(fake):
    a = quantize(matrix(256, 128), ROW)
    b = quantize(matrix(2, 128, 128, seed=1), SQUARE).transposed
    with pytest.raises(UnsupportedError, match="k_major"):
        DeepGemm().grouped(a, b, offsets_of(128, 256))
    assert not fake.calls


def test_the_library_is_found_by_its_functions(monkeypatch, fake):
    """Version 1.0.0 on PyPI has the name, and other functions."""
    old = types.ModuleType("deep_gemm")
    old.gemm_fp8_fp8_bf16_nt = None
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    for name in ("vllm", "vllm.third_party"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", fake)
    assert deep_gemm._library() is fake


def test_a_missing_library_is_told_with_what_was_passed_over(monkeypatch, fake, tmp_path):
    old = types.ModuleType("deep_gemm")
    old.fp8_gemm_nt = None
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "sgl_deep_gemm.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError) as caught:
        DeepGemm()(quantize(matrix(8, 128), ROW), quantize(matrix(128, 128), SQUARE))
    told = str(caught.value)
    assert "pip install sgl-deep-gemm" in told
    assert "deep_gemm: has no m_grouped_fp8_gemm_nt_contiguous" in told
    assert "vllm.third_party.deep_gemm: ModuleNotFoundError" in told
    assert "sgl_deep_gemm: OSError, libcudart.so.13: no such file" in told


def test_devices_are_refused_by_name(monkeypatch):
    with pytest.raises(UnsupportedError, match="CUDA device; got cpu"):
        DeepGemm()(quantize(matrix(8, 128), ROW), quantize(matrix(128, 128), SQUARE))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(UnsupportedError, match=r"only on .* 9\.0; cuda:0 has 10\.0"):
        deep_gemm.check_device(torch.device("cuda", 0))


def test_it_is_a_value():
    assert DeepGemm() == DeepGemm(None)
    assert hash(Recipe(gemm=DeepGemm(ReferenceGemm()))) == hash(
        Recipe(gemm=DeepGemm(ReferenceGemm()))
    )
    assert Recipe(gemm=DeepGemm()).fingerprint() == Recipe().fingerprint()
    assert DeepGemm.alignment == 128

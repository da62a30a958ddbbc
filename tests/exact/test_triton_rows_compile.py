"""Kernels of `exact` compiled for GPUs that are not here, and the adapter without one."""

import re
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import UnsupportedError
from tests.triton_compiler import compiled, spilled_bytes

SMALLEST = 99 << 10  # Shared memory of a program on the smallest GPUs since Ampere.
SHARED = 227 << 10  # The same on Hopper and Blackwell.
KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TARGETS = (90, 100)  # Hopper and Blackwell
AS_BFLOAT16 = "launched as bfloat16: only with --full"
LAYOUTS = {"rows": {"right_column": 1}, "columns": {"right_row": 1}}


@pytest.fixture(scope="module")
def kernels():
    triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile")
    from primeblocks.exact.adapters.triton import attention, products, rows

    return SimpleNamespace(**{**vars(attention), **vars(products), **vars(rows)})


def build(kernel, launch, kinds, *, target, aligned=True):
    launch = dict(launch)
    warps, fusion = launch.pop("num_warps"), launch.pop("enable_fp_fusion", True)
    return compiled(
        kernel, kinds, launch, target=target, warps=warps, fusion=fusion, aligned=aligned
    )


def build_row(kernels, kind, size, dtype, *, target, aligned=True, **constants):
    kinds = dict.fromkeys(("values", "out"), KINDS[dtype])
    launch = kernels._launch_of_rows(kind, size) | constants
    return build(kernels._compute_rows, launch, kinds, target=target, aligned=aligned)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_products_add_alike_at_any_address(kernels, dtype, layout, target, tmp_path, full):
    """One program owns a tile of the result, in the same steps for rows of any alignment.

    Loads of 16-bit operands spill registers if rows are not aligned.
    """
    if dtype == torch.float16 and (layout, target) != ("rows", 90) and not full:
        pytest.skip(AS_BFLOAT16)
    kinds = dict.fromkeys(("left", "right", "out"), KINDS[dtype]) | {"ends": "*i64"}
    launch = kernels._launch_of_products(dtype) | LAYOUTS[layout]
    steps = []
    for aligned in (True, False):
        binary = build(kernels._multiply_tiles, launch, kinds, target=target, aligned=aligned)
        assert spilled_bytes(binary, tmp_path) == 0 or not (aligned or dtype == torch.float32)
        assert binary.metadata.shared <= SMALLEST
        ptx = binary.asm["ptx"]
        assert not re.search(r"\b(atom|red)\.global", ptx)
        steps.append(re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|\bmma)\.[\w.:]+", ptx))
        if dtype == torch.float32:  # Two of Blackwell's are one instruction for two sums.
            fused = re.findall(r"fma\.rn\.(f32x2|f32)\b", ptx)
            assert not steps[-1]
            assert fused.count("f32") + 2 * fused.count("f32x2") == 64 * 64 // 256 * 16
    assert steps[0] == steps[1]
    if dtype != torch.float32:
        assert steps[0]
    if dtype != torch.float32 and target == 90:
        assert len(steps[0]) == 4
        assert all("m64n128k16.f32" in step for step in steps[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [128, 151936])
@pytest.mark.parametrize("kind", ["total", "softmax", "log_softmax"])
def test_rows_are_rounded_as_written_and_spill_nothing(kernels, kind, width, target, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        binary = build_row(kernels, kind, width, dtype, target=target)
        assert spilled_bytes(binary, tmp_path) == 0
        ptx = binary.asm["ptx"]
        assert ("div.rn.f32" in ptx) == (kind == "softmax")
        for other in ("div.full", "rcp."):
            assert other not in ptx
        if kind == "total":
            assert "fma.rn.f32" not in ptx
            assert ".ftz" not in ptx


def test_rows_of_odd_widths_spill_nothing_on_a_hopper(kernels, tmp_path):
    for kind in ("total", "softmax"):
        binary = build_row(kernels, kind, 4097, torch.bfloat16, target=90, aligned=False)
        assert spilled_bytes(binary, tmp_path) == 0


def test_sizes_of_one_compile(kernels):
    """Triton makes a constant of an integer that is 1."""
    kinds = dict.fromkeys(("left", "right", "out"), "*bf16") | {"ends": "*i64"}
    ones = dict.fromkeys(("inner", "columns", "right_group", "right_row", "right_column"), 1)
    launch = kernels._launch_of_products(torch.bfloat16) | ones
    assert build(kernels._multiply_tiles, launch, kinds, target=90).asm["cubin"]
    for kind in ("total", "log_softmax"):
        assert build_row(kernels, kind, 1, torch.bfloat16, target=90, width=1).asm["cubin"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_attention_adds_alike_at_any_address(kernels, dtype, sizes, target, tmp_path, full):
    """In the same steps, and without spilled registers if the width is a multiple of 16."""
    if dtype == torch.float16 and (sizes, target) != ((128, 128), 90) and not full:
        pytest.skip(AS_BFLOAT16)
    if sizes == (32, 32) and not full:
        pytest.skip("a width that models do not have: only with --full")
    kinds = dict.fromkeys(("query", "key", "value", "out"), KINDS[dtype])
    kinds |= {"positions": "*i64", "scale": "fp32"}
    launch = kernels._launch_of_attention(dtype, *sizes)
    steps = []
    for aligned in (True, False):
        binary = build(kernels._attend_tile, launch, kinds, target=target, aligned=aligned)
        if aligned:
            assert spilled_bytes(binary, tmp_path) == 0
        assert binary.metadata.shared <= SHARED
        ptx = binary.asm["ptx"]
        assert not re.search(r"\b(atom|red)\.global", ptx)
        assert "div.rn.f32" in ptx
        steps.append(re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|\bmma)\.[\w.:]+", ptx))
    if target == 100:  # Loads of aligned rows overlap with products, which repeats instructions.
        steps = [set(each) for each in steps]
    assert steps[0] == steps[1]
    assert bool(steps[0]) == (dtype != torch.float32)


def test_a_cpu_is_refused_outside_the_interpreter(kernels):
    with pytest.raises(UnsupportedError, match=r"batch_invariant\(\) on a CPU"):
        kernels.total(torch.ones(2))
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        kernels.matmul(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="got one on cpu"):
        kernels.attend(*torch.ones(3, 2, 2, 2), positions=torch.arange(2), scale=1.0)

"""Kernels compiled for GPUs that are not here, and the adapter where it cannot run."""

import importlib
import re
import sys
from collections import Counter

import pytest
import torch

from primeblocks.errors import MissingPackageError, UnsupportedError
from primeblocks.fp8 import Tile, quantize
from tests.sass import is_code, stored_codes
from tests.triton_compiler import bad_assemblers, compiled, sass_by_assembler, spilled_bytes

TARGETS = (90, 100)  # Hopper and Blackwell
QUANTIZE = {
    "pointers": {
        **{"scores": "*fp32", "codes": "*u8", "scales": "*fp32"},
        **{"flipped_codes": "*u8", "flipped_scales": "*fp32"},
    },
    # x_column is that of contiguous rows.
    "constants": {"POWERS": False, "INTEGERS": False, "COLUMNS": 128, "x_column": 1},
}
ROWS_ONLY = {"HEIGHT": 1, "WIDTH": 128, "BOTH": False, "ROWS": 64, "warps": 4}
BOTH = {"HEIGHT": 1, "WIDTH": 128, "BOTH": True, "ROWS": 128, "warps": 8}
PLAIN = {"GATED": False, "SCORED": False, "QUOTIENT": "reciprocal"}
QUANTIZERS = {
    "rows": PLAIN | ROWS_ONLY,
    "both layouts": PLAIN | BOTH,
    "weights": PLAIN | BOTH | {"HEIGHT": 128},
    "weights, ue8m0": PLAIN | BOTH | {"HEIGHT": 128, "POWERS": True},
    "weights, 64 x 64": PLAIN | BOTH | {"HEIGHT": 64, "WIDTH": 64},
    "weights, 32 x 32, amax": PLAIN | BOTH | {"HEIGHT": 32, "WIDTH": 32, "QUOTIENT": "amax"},
    "mxfp8": PLAIN | ROWS_ONLY | {"WIDTH": 32, "POWERS": True},
    "division": PLAIN | ROWS_ONLY | {"QUOTIENT": "division"},
    "weights, division": PLAIN | BOTH | {"HEIGHT": 128, "QUOTIENT": "division"},
    "amax": PLAIN | ROWS_ONLY | {"QUOTIENT": "amax"},
}
GATED = {"GATED": True, "SCORED": True, "QUOTIENT": "reciprocal"}
SWIGLU = {
    "rows": GATED | ROWS_ONLY | {"ROWS": 32},
    "both layouts": GATED | BOTH,
    "square": GATED | BOTH | {"HEIGHT": 128},
}
# The strides that are 1: of a's scales, which are stored by column, and of b's.
PRODUCTS = {
    "dense": {"MODE": "dense", "B_ROWS": 128, "PARTS": 2, "b_scale_tile": 1},
    "dense, narrow": {"MODE": "dense", "B_ROWS": 128, "PARTS": 1, "b_scale_tile": 1},
    "dense, 1 x 128": {"MODE": "dense", "B_ROWS": 1, "PARTS": 1, "b_scale_row": 1},
    "mxfp8": {"MODE": "dense", "B_ROWS": 1, "PARTS": 1, "b_scale_row": 1, "TILE": 32},
    "grouped": {"MODE": "rows", "B_ROWS": 128, "PARTS": 2, "b_scale_tile": 1},
    "k_grouped": {"MODE": "tokens", "B_ROWS": 1, "PARTS": 1, "b_scale_row": 1},
}


@pytest.fixture(scope="module")
def kernels():
    triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile")
    from primeblocks.fp8.adapters.triton import gemm
    from primeblocks.fp8.adapters.triton import quantize as quantizer

    return quantizer._quantize_blocks, gemm


def compiled_quantizer(kernel, variant, dtype, target):
    constants = {**QUANTIZE["constants"], **variant}
    warps = constants.pop("warps")
    pointers = {"x": dtype, **QUANTIZE["pointers"]}
    binary = compiled(kernel, pointers, constants, target=target, warps=warps)
    for assembler, sass in sass_by_assembler(binary).items():
        assert_every_code_is_stored(sass, variant, dtype, assembler)
    return binary


def assert_every_code_is_stored(sass, variant, dtype, assembler):
    """Codes of a thread are in words of 16 bytes, as often as there are layouts, and nothing else.

    They are in the order of their numbers, where the way from load to store can be followed.
    """
    stored, shared = stored_codes(sass)
    stored = [word for word in stored if len(word) == 16]
    last = [byte for word in stored for byte in word]
    made = [byte for byte in last if byte[0] == "code"] + [byte for word in shared for byte in word]
    foreign = sum(not is_code(byte) for byte in last + made)
    assert foreign == 0, f"ptxas {assembler}: {foreign} of {len(last + made)} bytes are no codes"
    expected = codes_per_thread(variant) * (2 if variant["BOTH"] else 1)
    assert len(set(last)) == len(last) == len(made) == expected, f"ptxas {assembler}"
    assert len(set(Counter(made).values())) == 1, f"ptxas {assembler}: some codes more often"
    size = {"*bf16": 2, "*fp32": 4}.get(dtype)
    if size and not variant["GATED"] and variant["QUOTIENT"] != "division":
        highest = [*range(size - 1, 16, size)] * size  # The byte with the sign of each number.
        for word in stored:
            if word[0][0] == "code":
                assert [origin[0] for _, origin in word] == ["loaded"] * 16, f"ptxas {assembler}"
                assert [origin[2] for _, origin in word] == highest, f"ptxas {assembler}"


def codes_per_thread(variant):
    return variant["ROWS"] * 128 // (32 * variant["warps"])


def test_both_assemblers_that_lose_codes_are_here(kernels):
    if "12.8" not in bad_assemblers():
        pytest.skip("needs nvidia-cuda-nvcc-cu12==12.8.93 or triton 3.6; scripts/peers has it")
    assert bad_assemblers().keys() == {"12.8", "12.9"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_divide_exactly_and_read_16_bytes_at_a_time(kernels, name, target, tmp_path):
    variant = QUANTIZERS[name]
    binary = compiled_quantizer(kernels[0], variant, "*bf16", target)
    ptx = binary.asm["ptx"]
    divisions = len(re.findall(r"\bdiv\.rn\.f32", ptx))
    assert divisions >= (64 if name == "division" else 2)
    for inexact in ("div.full", ".approx", "rcp.", ".ftz", "fma.rn.f32", "mad.f32"):
        assert inexact not in ptx
    per_thread = codes_per_thread(variant)
    layouts = 2 if name == "both layouts" else 1  # Weights' codes are those of the transpose.
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == layouts * per_thread // 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == per_thread * 2 // 16
    assert not re.search(r"ld\.global\.b(8|16|32)", ptx)
    assert not re.search(r"st\.global\.b(8|16)\b", ptx)
    assert spilled_bytes(binary, tmp_path) == 0


@pytest.mark.parametrize("name", ["rows", "weights"])
@pytest.mark.parametrize("dtype", ["*fp32", "*fp16", "*fp64"])
def test_other_dtypes_compile(kernels, dtype, name):
    for target in TARGETS:
        ptx = compiled_quantizer(kernels[0], QUANTIZERS[name], dtype, target).asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.parametrize("name", ["rows", "both layouts", "weights"])
def test_transposed_inputs_compile(kernels, name):
    for target in TARGETS:
        variant = QUANTIZERS[name] | {"x_row": 1, "x_column": 4096}
        ptx = compiled_quantizer(kernels[0], variant, "*bf16", target).asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SWIGLU)
def test_swiglu_is_one_kernel(kernels, name, target, tmp_path):
    binary = compiled_quantizer(kernels[0], SWIGLU[name], "*bf16", target)
    ptx = binary.asm["ptx"]
    assert "ex2.approx.f32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx)  # The activation takes its dtype first.
    assert "fma.rn.f32" not in ptx
    assert not re.search(r"ld\.global\.b(8|16)\b", ptx)
    assert spilled_bytes(binary, tmp_path) == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_on_tensor_cores_and_are_added_in_float32(kernels, name, target, tmp_path):
    gemm, variant = kernels[1], PRODUCTS[name]
    pointers = {
        **{"a": "*fp8e4nv", "b": "*fp8e4nv", "a_scales": "*fp32", "b_scales": "*fp32"},
        **{"out": "*fp32" if name == "k_grouped" else "*bf16", "offsets": "*i32"},
    }
    constants = {
        **{"TILE": 128, "GROUPS": 32, "BLOCK": gemm.BLOCK, "TURN": 8, "STAGES": gemm.STAGES},
        **{"a_scale_row": 1, **variant},
    }
    binary = compiled(gemm._multiply_blocks, pointers, constants, target=target, warps=8)
    ptx = binary.asm["ptx"]
    if target == 90:
        # A tile of the inner dim is summed by the tensor cores, and no more: a loop starts anew.
        sums = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)
        loops = 3 if name == "k_grouped" else 1
        assert len(sums) == loops * variant["PARTS"] * constants["TILE"] // 32
    else:
        assert "tcgen05.mma" in ptx
    per_thread = gemm.BLOCK * gemm.BLOCK // 256
    assert ptx.count("fma.rn.f32") >= variant["PARTS"] * per_thread
    copies = re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10", ptx)
    assert len(copies) >= (1 + variant["PARTS"]) * 4 * (gemm.STAGES - 1) * constants["TILE"] // 128
    assert binary.metadata.shared <= 227 * 1024
    # Two parts take all registers that there are, and some of what is left out is read in the loop.
    assert spilled_bytes(binary, tmp_path) <= (256 if variant["PARTS"] == 2 else 16)


def test_a_cpu_is_refused_outside_the_interpreter(kernels):
    from primeblocks.fp8.adapters.triton import TritonGemm, TritonQuantizer

    x = torch.ones(2, 128)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        TritonQuantizer()(x, Tile(1, 128))
    q = quantize(x, Tile(1, 128))
    with pytest.raises(UnsupportedError, match=r"ReferenceGemm\(\)"):
        TritonGemm()(q, q)


def test_its_absence_has_a_remedy(monkeypatch):
    name = "primeblocks.fp8.adapters.triton"
    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingPackageError, match=r"triton is not .* pip install '\.\[triton\]'"):
        importlib.import_module(name)

"""A fake of DeepGEMM on compute capability 9.0: the checks of its source, and a reference's values.

From csrc/apis/gemm.hpp, csrc/apis/layout.hpp and csrc/utils/layout.hpp of 2.6.1: an assertion here
is one there, except that tensors may lie anywhere. Groups are computed as its kernel does: the
expert of a 128-row tile's first row is taken for all of them, and a tile whose first row has none
is not written.
"""

import torch

from primeblocks.fp8 import Quantized, Tile
from primeblocks.fp8.reference import ReferenceGemm

BLOCK = 128


class FakeDeepGemm:
    """The two functions that the engine uses; counts their calls by name."""

    def __init__(self):
        self.calls = []

    def fp8_gemm_nt(
        self, a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None,
        compiled_dims="nk", disable_ue8m0_cast=False,
    ):  # fmt: skip
        assert not disable_ue8m0_cast
        assert recipe_a is None
        assert recipe_b is None
        self.calls.append("fp8_gemm_nt")
        rows, columns, gran_k = recipe or (1, BLOCK, BLOCK)
        (m, k), (n, k_) = _k_major(a[0], 2), _k_major(b[0], 2)
        assert d.shape == (m, n)
        assert k == k_
        assert d.stride(-1) == 1
        first = _operand(a, (rows, gran_k))
        second = _operand(b, (columns, gran_k))
        if columns == 1:  # The kernel 1D1D.
            assert m >= 64  # 0.1.5 compiled nothing for 4.
            assert d.dtype == torch.float32
            assert c is not None
            assert c.data_ptr() == d.data_ptr()
            d += ReferenceGemm()(first, second) if not d.is_meta else 0
        else:  # 1D2D.
            assert c is None
            assert d.dtype == torch.bfloat16
            d.copy_(ReferenceGemm()(first, second) if not d.is_meta else d)

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a, b, d, grouped_layout, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False
    ):
        assert not disable_ue8m0_cast
        self.calls.append("m_grouped_fp8_gemm_nt_contiguous")
        rows, columns, gran_k = recipe or (1, BLOCK, BLOCK)
        (m, k), (groups, n, k_) = _k_major(a[0], 2), _k_major(b[0], 3)
        assert k == k_
        assert min(n, k, groups) > 0
        assert d.shape == (m, n)
        assert d.dtype == torch.bfloat16
        assert d.stride(-1) == 1
        assert grouped_layout.is_contiguous()
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (m,)
        first, second = _operand(a, (rows, gran_k)), _operand(b, (columns, gran_k))
        if d.is_meta:
            d.zero_()
            return
        for top in range(0, m, BLOCK):
            expert, part = int(grouped_layout[top]), slice(top, top + BLOCK)
            if expert >= 0:
                tile = Quantized(first.codes[part], first.scales[part], first.tile)
                of = Quantized(second.codes[expert], second.scales[expert], second.tile)
                d[part] = ReferenceGemm()(tile, of).bfloat16()


def _k_major(x, dims):
    assert x.dtype == torch.float8_e4m3fn
    assert x.ndim == dims
    assert x.stride(-1) == 1
    assert dims == 2 or x.stride(0) == x.shape[-2] * x.shape[-1]
    return x.shape


def _operand(pair, gran):
    codes, scales = pair
    rows, inner = gran
    assert scales.dtype == torch.float32
    assert scales.ndim == codes.ndim
    assert scales.shape[:-2] == codes.shape[:-2]
    assert scales.shape[-2:] == (-(-codes.shape[-2] // rows), -(-codes.shape[-1] // inner))
    if rows == BLOCK:  # "SM90 SFB must be contiguous, or contiguous after transposing".
        assert scales.is_contiguous() or scales.mT.is_contiguous()
    return Quantized(codes, scales, Tile(rows, inner))

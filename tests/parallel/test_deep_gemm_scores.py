"""DeepGEMM's scores of an indexer, against a fake of the library that has its source's checks."""

import sys
import types

import pytest
import torch

from primeblocks.errors import MissingPackageError, ShapeError, UnsupportedError
from primeblocks.parallel.adapters import deep_gemm
from primeblocks.parallel.adapters.deep_gemm import DeepGemmIndexScores, quantize_vectors
from primeblocks.parallel.attention import dsa
from primeblocks.testing.oracles import StepCounter


class FakeDeepGemm:
    """`fp8_mqa_logits` of 2.6.1 on compute capability 9.0.

    From csrc/apis/attention.hpp and the kernel: an assertion here is one there, except that tensors
    may lie anywhere. Logits have rows of 1024 bytes or a multiple; what no one wrote is NaN.
    """

    def __init__(self):
        self.calls = 0

    def fp8_mqa_logits(
        self, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end,
        clean_logits=True, max_seqlen_k=0,
    ):  # fmt: skip
        self.calls += 1
        (rows, heads, dim), (keys, scales) = q.shape, kv
        assert heads in (32, 64)
        assert dim in (32, 64, 128)
        assert keys.shape == (len(keys), dim)
        assert scales.shape == (len(keys),)
        assert weights.shape == (rows, heads)
        assert q.is_contiguous()
        assert keys.is_contiguous()
        assert scales.is_contiguous()
        assert weights.stride(1) == 1
        assert (q.dtype, keys.dtype) == (torch.float8_e4m3fn,) * 2
        assert (scales.dtype, weights.dtype) == (torch.float32,) * 2
        for ends in (cu_seq_len_k_start, cu_seq_len_k_end):
            assert ends.shape == (rows,)
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
        assert not clean_logits
        assert max_seqlen_k == 0
        wide = -(-(len(keys) + 256) // 256) * 256
        logits = q.new_empty(-(-rows * heads // 128) * 128 // heads, wide, dtype=torch.float32)
        logits.fill_(torch.nan)
        products = torch.einsum("qhd,kd->qhk", q.float(), keys.float()).relu_()
        found = (products * weights.unsqueeze(-1)).sum(1) * scales
        column = torch.arange(len(keys), device=q.device)
        inside = (column >= cu_seq_len_k_start[:, None]) & (column < cu_seq_len_k_end[:, None])
        logits[:rows, : len(keys)] = found.where(inside, torch.nan)
        return logits[:rows, : len(keys)]


@pytest.fixture
def fake(monkeypatch):
    library = FakeDeepGemm()
    monkeypatch.setattr(deep_gemm, "_capability", lambda device: 9)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    deep_gemm._library.cache_clear()
    yield library
    deep_gemm._library.cache_clear()


def indexer(queries, candidates, heads=32, dim=64):
    generator = torch.Generator().manual_seed(queries)
    shapes = ((queries, heads, dim), (candidates, dim), (queries, heads))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def scaled(x):
    codes, scales = quantize_vectors(x)
    return codes.double() * scales.double().unsqueeze(-1)


@pytest.mark.parametrize(("heads", "dim"), [(32, 64), (64, 128)])
def test_scores_are_those_of_the_quantized_operands(fake, heads, dim):
    q, k, weights = indexer(7, 300, heads, dim)
    with StepCounter() as step:
        found = DeepGemmIndexScores()(q.bfloat16(), k.bfloat16(), weights)
    assert not step.host_reads
    q, k = (scaled(x.bfloat16()) for x in (q, k))
    wanted = dsa.index_scores(q, k, weights.double())
    sums = dsa.index_scores(q.abs(), k.abs(), weights.double().abs())
    assert found.dtype == torch.float32
    assert found.shape == (7, 300)
    assert ((found - wanted).abs() <= (heads + dim + 6) * 2.0**-24 * sums).all()
    assert fake.calls == 1


def test_rounding_is_that_of_e4m3():
    """Half of a unit, which is at most amax / 28 where a code is near the largest."""
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)) * 1e-6
    error = (scaled(x) - x).abs()
    assert (error <= x.abs().amax(-1, keepdim=True) / 28).all()
    codes, scales = quantize_vectors(torch.zeros(2, 8))
    assert (codes.float() == 0).all()
    assert (scales == 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_no_number_makes_its_scores_so(fake, bad):
    q, k, weights = indexer(3, 9)
    k[4, 5] = bad
    found = DeepGemmIndexScores()(q, k, weights)
    assert found[:, 4].isnan().all()
    assert found.isnan().sum() == 3


def test_what_it_does_not_take_is_refused_before_anything_is_launched(fake, monkeypatch):
    q, k, weights = indexer(3, 9)
    refused = [
        (ShapeError, "q must be", (q[0], k, weights)),
        (ShapeError, "q must be", (q, k[:, :32], weights)),
        (UnsupportedError, r"\(32, 64\) heads.*TritonIndexScores", indexer(3, 9, 16)),
        (UnsupportedError, "columns", indexer(3, 9, 32, 48)),
    ]
    for error, match, operands in refused:
        with pytest.raises(error, match=match):
            DeepGemmIndexScores()(*operands)
    assert DeepGemmIndexScores()(q[:0], k, weights[:0]).shape == (0, 9)
    assert not fake.calls
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="CUDA devices; got cpu"):
        DeepGemmIndexScores()(q, k, weights)
    with pytest.raises(UnsupportedError, match="index_scores"):
        deep_gemm.check_device(torch.device("cpu"))


def test_a_missing_library_is_told_with_what_was_passed_over(monkeypatch, fake, tmp_path):
    old = types.ModuleType("deep_gemm")
    old.gemm_fp8_fp8_bf16_nt = None  # Version 1.0.0 on PyPI.
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "sgl_deep_gemm.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError) as caught:
        DeepGemmIndexScores()(*indexer(3, 9))
    for part in ("deep_gemm: has no fp8_mqa_logits", "libcudart.so.13", "pip install"):
        assert part in str(caught.value)

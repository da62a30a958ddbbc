"""The GPU's benchmark of float8: its code at small sizes on a CPU, its arithmetic, its refusal."""

import sys
import types

import pytest
import torch

from benchmarks.fp8_parts import gpu, gpu_dense, gpu_sides
from benchmarks.fp8_parts.gpu_sides import SMALL, Side, engines_of, quantizer_of
from benchmarks.harness import collect
from primeblocks.fp8 import Tile, quantize


def test_bytes_and_operations_are_counted():
    x = torch.zeros(256, 384, dtype=torch.bfloat16)
    way = 256 * 384 + 256 * 3 * 4
    assert gpu_dense.quantize_bytes(256, 384, ways=1) == x.nbytes + way
    assert gpu_dense.quantize_bytes(256, 384, ways=2) == x.nbytes + 2 * way
    assert gpu_dense.step_flops(5, 3, 2) == 3 * (2 * 5 * 3 * 2)


def test_every_figure_of_the_issue_is_measured():
    found = collect(gpu.figures("cpu", SMALL))
    assert {
        "fp8.quantize.gpu.copy_bandwidth_fraction",
        "fp8.dense_128.gpu.speedup_vs_bf16",
        "fp8.grouped_fwd_bwd.gpu.speedup_vs_bf16",
        "fp8.wgrad.gpu.tflops",
        "fp8.swiglu_fwd_bwd.gpu.speedup_vs_bf16",
    } <= found.keys()
    assert "fp8.grouped_fwd_bwd.gpu.reference.wgrad_float8.speedup_vs_bf16" in found
    assert all(value > 0 for name, (value, _, _) in found.items() if "spread" not in name)


def test_torchaos_quantizer_is_compared_and_timed(monkeypatch):
    def theirs(x, width):
        q = quantize(x, Tile(1, width))
        return q.codes, q.scales

    kernels = types.SimpleNamespace(triton_fp8_blockwise_act_quant_lhs=theirs)
    monkeypatch.setattr(gpu_dense, "find_torchao", lambda _: types.SimpleNamespace(kernels=kernels))
    found = gpu_dense.of_quantizing(Side("cpu", SMALL, quantizer_of("cpu")))
    assert found["fp8.quantize.gpu.speedup_vs_torchao"][0] > 0


def test_nothing_is_timed_that_disagrees(monkeypatch):
    monkeypatch.setattr(gpu_dense, "FLOAT8_ERROR", 1e-4)
    with pytest.raises(AssertionError, match="relative error"):
        collect(gpu.figures("cpu", SMALL))


def test_engines_that_are_not_there_are_left_out_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(gpu_sides, "_prove", lambda gemm, device: None)  # It needs a device.
    names = [name for name, _ in engines_of("cuda")]
    assert names[0] == "cublas"
    assert "deep_gemm" not in names
    assert "left out: deep_gemm: DeepGEMM is not installed" in capsys.readouterr().err


def test_an_engine_that_computes_something_else_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def misread(gemm, device):
        raise RuntimeError("dim == 2 or dim == 3")

    monkeypatch.setattr(gpu_sides, "_prove", misread)
    assert "cublas" not in [name for name, _ in engines_of("cuda")]
    assert "left out: cublas: dim == 2 or dim == 3" in capsys.readouterr().err

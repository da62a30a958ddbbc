"""The GPU's benchmark of sparse attention: its code at small sizes on a CPU, its arithmetic."""

import pytest
import torch

from benchmarks.dsa_parts import gpu, gpu_sides
from benchmarks.dsa_parts.gpu_sides import SMALL, Operands
from benchmarks.harness import collect
from primeblocks.parallel.attention.dsa import ReferenceKernel, Rows


def operands(queries, heads, k):
    return Operands(
        torch.zeros(queries, heads, 24, dtype=torch.bfloat16),
        torch.zeros(100, 1, 24, dtype=torch.bfloat16),
        torch.zeros(queries, 1, k, dtype=torch.int32),
        torch.zeros(queries, heads, 16, dtype=torch.bfloat16),
        Rows.latent(16, 8),
        pairs=queries * k,
    )


def test_bytes_and_operations_are_counted():
    some = operands(5, 3, 7)
    assert gpu.attention_flops(some, backward=False) == 2 * 5 * 7 * 3 * (24 + 16)
    assert gpu.attention_flops(some, backward=True) == 2 * 5 * 7 * 3 * (24 * 3 + 16 * 2)
    read = 2 * 5 * 3 * 24 + 2 * 100 * 24 + 4 * 5 * 7
    out, lse = 2 * 5 * 3 * 16, 4 * 5 * 3
    assert gpu.attention_bytes(some, backward=False) == read + out + lse
    gradients = 2 * 5 * 3 * 24 + 4 * 100 * 24
    assert gpu.attention_bytes(some, backward=True) == read + 2 * out + lse + gradients


def test_drawn_indices_are_as_selected_ones():
    positions = torch.tensor([0, 3, 90, 7])
    ids = gpu_sides.draw_indices(positions, 100, 8)[:, 0]
    assert ids.dtype == torch.int32
    for position, row in zip(positions.tolist(), ids.tolist(), strict=True):
        chosen = [i for i in row if i >= 0]
        assert row == chosen + [-1] * (8 - len(chosen))
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(8, position + 1)
        assert max(chosen) <= position


def test_every_figure_of_the_issue_is_measured():
    found = collect(gpu.figures("cpu", SMALL))
    for model in ("tiny", "small"):
        for kind in ("forward", "backward"):
            for quantity in ("tflops", "fraction_of_roofline"):
                assert f"dsa.{model}.{kind}.gpu.reference.{quantity}" in found
        assert f"dsa.{model}.scores.gpu.torch.tflops" in found
        assert f"dsa.{model}.select.gpu.torch.seconds" in found
    assert all(value > 0 for name, (value, _, _) in found.items() if "spread" not in name)


def test_the_gate_finds_a_wrong_gradient():
    class Wrong(ReferenceKernel):
        def backward(self, *args, **kwargs):
            dq, dkv = super().backward(*args, **kwargs)
            return dq, dkv * 1.02

    how = ("cpu", 2, Rows.latent(16, 8), 20)
    gpu_sides.gate(ReferenceKernel(), *how)
    with pytest.raises(AssertionError, match="relative error"):
        gpu_sides.gate(Wrong(), *how)


def test_nothing_is_timed_that_disagrees(monkeypatch):
    monkeypatch.setattr(gpu_sides, "BF16_ERROR", 1e-4)
    with pytest.raises(AssertionError, match="relative error"):
        collect(gpu.figures("cpu", SMALL))

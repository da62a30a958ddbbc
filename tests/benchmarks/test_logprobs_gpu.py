"""The GPU's benchmark of log-probabilities: its code at small sizes on a CPU, and its refusals."""

import pytest
import torch

from benchmarks.async_loop_parts import logprobs_gpu
from benchmarks.async_loop_parts.logprobs import operands, plain_logprobs
from benchmarks.harness import collect

SMALL = logprobs_gpu.SMALL


def test_every_figure_of_the_issue_is_measured():
    found = collect(logprobs_gpu.figures("cpu", SMALL))
    ours = ("token_logprobs", "token_scores", "chunked_loss")
    whats = ("error", "peak_memory", "peak_memory_fraction", "time", "time_ratio", "time_spread")
    assert found.keys() == {
        f"async_loop.logprobs.gpu.{dtype}.{side}.{what}"
        for dtype in ("float32", "bfloat16")
        for side in ours
        for what in whats
    }
    assert all(value > 0 for name, (value, _, _) in found.items() if "spread" not in name)


def test_memory_is_that_beside_the_operands():
    given = operands(24, 300, 16)
    # Logits, their logarithms of probabilities and slopes: two at once, and the gradients.
    least = 4 * 2 * 24 * 300
    assert least < logprobs_gpu.peak_bytes(plain_logprobs, given) < 2 * least + 4 * 300 * 16


def test_nothing_is_timed_that_errs(monkeypatch):
    monkeypatch.setitem(logprobs_gpu.LIMITS, torch.bfloat16, 1e-5)
    with pytest.raises(AssertionError, match=r"bfloat16.token_logprobs errs by .*, over 1e-05"):
        collect(logprobs_gpu.figures("cpu", SMALL))

"""Devices on which a test runs: what a GPU would show first is tried on a CPU before."""

import pytest
import torch

__all__ = ["DEVICES"]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

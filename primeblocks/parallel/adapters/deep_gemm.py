"""DeepGEMM's scores of an indexer, in float8: run on one H100, with sgl-deep-gemm 0.1.5.

    dsa_attention(..., scores=DeepGemmIndexScores())

Checked on a CPU against a fake that holds the library to the checks of its source (2.6.1). It
compiles a kernel for each number of heads and columns when it is first used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingPackageError, ShapeError, UnsupportedError

__all__ = ["DeepGemmIndexScores", "Quantize", "check_device", "quantize_vectors"]

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]

# sgl-deep-gemm on PyPI installs the first of these names too.
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm", "sgl_deep_gemm")
_SYMBOL = "fp8_mqa_logits"
_HEADS = {9: (32, 64), 10: (8, 16, 32, 64)}
_COLUMNS = (32, 64, 128)


def quantize_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each vector to E4M3 with one scale, its largest magnitude over 448. Local.

    A vector with a NaN or an infinity has a scale of NaN, and so have its scores.

    Returns:
        Codes `[..., columns]` in float8_e4m3fn, and scales `[...]` in float32.
    """
    x = x.float()
    scales = x.abs().amax(-1) / 448
    scales = scales.masked_fill(scales == torch.inf, torch.nan)
    scales = torch.where(scales == 0, 1.0, scales.clamp_min(torch.finfo(torch.float32).tiny))
    return (x / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def check_device(device: torch.device) -> None:
    """Refuse where the library is not, or a device for which it has no kernel. Local.

    Raises:
        UnsupportedError: no CUDA device of compute capability 9 or 10.
        MissingPackageError: no module has the function.
    """
    _capability(device)
    _library()


@dataclass(frozen=True)
class DeepGemmIndexScores:
    """Scores of an indexer by DeepGEMM; see `IndexScores`. Scores in float32, of E4M3 operands.

    32 or 64 heads, on compute capability 10 also 8 or 16, of 32, 64 or 128 columns. Rounding
    changes near ties, so a selection differs from that of `index_scores`: models trained with a
    float8 indexer select like this. DeepSeek's rotates queries and keys by a Hadamard matrix
    before; do so with those of `IndexerInputs`.

    The scale of a query's vector goes into its head's weight: a ReLU passes positive factors on.
    Keys are quantized at each call, which is for each chunk of queries.

    Args:
        quantize: takes vectors `[..., columns]`, returns float8_e4m3fn codes and float32 scales,
            positive ones.

    Source: github.com/deepseek-ai/DeepGEMM.
    """

    quantize: Quantize = quantize_vectors

    def __call__(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Score queries against keys. Local; no host waits.

        Raises:
            ShapeError: shapes do not fit.
            UnsupportedError: heads, columns or a device that the library does not take.
            MissingPackageError: it is not installed; says where it was sought.
        """
        _check(q, k, weights)
        rows, candidates = q.shape[0], k.shape[0]
        if not rows * candidates:
            return q.new_empty(rows, candidates, dtype=torch.float32)
        library = _library()
        queries, scales = self.quantize(q)
        keys, of_keys = self.quantize(k)
        starts = torch.zeros(rows, dtype=torch.int32, device=q.device)
        # Every key is scored: what is in the future is the selector's to know.
        scores = getattr(library, _SYMBOL)(
            queries.contiguous(),
            (keys.contiguous(), of_keys.contiguous()),
            (weights.float() * scales).contiguous(),
            starts,
            torch.full_like(starts, candidates),
            clean_logits=False,
        )
        return torch.from_dlpack(scores)  # sgl-deep-gemm returns a tensor of its own kind.


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        raise UnsupportedError(f"DeepGEMM runs on CUDA devices; got {device}. Use index_scores.")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _HEADS:
        raise UnsupportedError(
            f"DeepGEMM scores on compute capability 9 and 10; {device} has {major}.{minor}. Use "
            "index_scores."
        )
    return major


def _check(q: Tensor, k: Tensor, weights: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, weights {tuple(weights.shape)}"
    if not (
        (q.ndim, k.ndim, weights.ndim) == (3, 2, 2)
        and q.shape[:2] == weights.shape
        and q.shape[2] == k.shape[1]
    ):
        raise ShapeError(
            "needs q [queries, index_heads, index_dim], k [candidates, index_dim] and weights "
            f"[queries, index_heads]; got {shapes}."
        )
    heads = _HEADS[_capability(q.device)]
    if q.shape[1] not in heads or q.shape[2] not in _COLUMNS:
        raise UnsupportedError(
            f"DeepGEMM scores {heads} heads of {_COLUMNS} columns on {q.device}; got {shapes}. Use "
            "index_scores, or primeblocks.parallel.adapters.triton.TritonIndexScores()."
        )


@functools.cache
def _library() -> Any:
    """Import the first module that has the function, by its name and not by a version.

    Raises:
        MissingPackageError: with the reason for which each was passed over.
    """
    passed_over = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # Its shared library asks for CUDA's when loaded, and one of its versions asserts that
            # there is a CUDA toolkit.
            first = str(error).splitlines()[0] if str(error) else "no reason given"
            passed_over.append(f"{name}: {type(error).__name__}, {first}")
            continue
        if hasattr(module, _SYMBOL):
            return module
        passed_over.append(f"{name}: has no {_SYMBOL}")
    raise MissingPackageError(
        "DeepGEMM",
        remedy="pip install sgl-deep-gemm, or vLLM for CUDA brings it; deep_gemm 1.0.0 on PyPI is "
        f"another interface. Passed over: {'; '.join(passed_over)}.",
    )

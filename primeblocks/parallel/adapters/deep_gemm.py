"""Float8 scores of an indexer by DeepGEMM. This code has run on one H100, with sgl-deep-gemm 0.1.5.

    dsa_attention(..., scores=DeepGemmIndexScores())

On a CPU, tests replace DeepGEMM by a fake, which repeats the checks in the source of DeepGEMM
2.6.1. DeepGEMM compiles a kernel at the first call with a new number of heads or columns.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingPackageError, UnsupportedError
from ..attention.dsa.indexer import check_scored

__all__ = ["DeepGemmIndexScores", "check_device", "quantize_vectors"]

# sgl-deep-gemm on PyPI also installs the first of these names.
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm", "sgl_deep_gemm")
_SYMBOL = "fp8_mqa_logits"
_HEADS = {9: (32, 64), 10: (8, 16, 32, 64)}
_COLUMNS = (32, 64, 128)


def quantize_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each vector to E4M3 with one scale: the vector's largest magnitude / 448. Local.

    A vector with a NaN or an infinity gets a NaN scale, and NaN scores.

    Returns:
        Codes `[..., columns]` in float8_e4m3fn, and scales `[...]` in float32.
    """
    x = x.float()
    scales = x.abs().amax(-1) / 448
    scales = scales.masked_fill(scales == torch.inf, torch.nan)
    scales = torch.where(scales == 0, 1.0, scales.clamp_min(torch.finfo(torch.float32).tiny))
    return (x / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def check_device(device: torch.device) -> None:
    """Refuse a machine without DeepGEMM, or a device for which DeepGEMM has no kernel. Local.

    Raises:
        UnsupportedError: `device` is not a CUDA device of compute capability 9 or 10.
        MissingPackageError: no installed module has DeepGEMM's function `fp8_mqa_logits`.
    """
    _capability(device)
    _library()


@dataclass(frozen=True)
class DeepGemmIndexScores:
    """An `IndexScores` that uses DeepGEMM, with E4M3 operands and float32 scores.

    The kernel supports 32 or 64 heads of 32, 64 or 128 columns. On compute capability 10, the
    kernel also supports 8 or 16 heads. Rounding changes the order of nearly equal scores, so the
    selection can differ from a selection by `index_scores`. Models that were trained with a float8
    indexer also select by scores of rounded operands. DeepSeek's own code first rotates queries
    and keys by a Hadamard matrix. vLLM 0.32 does not, and rounds scales up to powers of two.

    The kernel does not take scales of queries. Instead, the weight of a head is multiplied by the
    scale of the query vector. The scores are the same, because a ReLU commutes with positive
    factors. Each chunk of queries needs one call, and each call quantizes the keys again.

    Source: github.com/deepseek-ai/DeepGEMM.
    """

    def __call__(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Score queries against keys. Local. The host does not wait.

        Raises:
            ShapeError: shapes do not fit.
            UnsupportedError: the library does not take the heads, the columns or the device.
            MissingPackageError: the library is not installed. The message lists the tried modules.
        """
        _check(q, k, weights)
        rows, candidates = q.shape[0], k.shape[0]
        if not rows * candidates:
            return q.new_empty(rows, candidates, dtype=torch.float32)
        library = _library()
        queries, scales = quantize_vectors(q)
        keys, of_keys = quantize_vectors(k)
        starts = torch.zeros(rows, dtype=torch.int32, device=q.device)
        # Score every key, because the selector masks keys that are in the future.
        with torch.cuda.device_of(q):  # The library launches on the current device.
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
    shapes = check_scored(q, k, weights)
    heads = _HEADS[_capability(q.device)]
    if q.shape[1] not in heads or q.shape[2] not in _COLUMNS:
        raise UnsupportedError(
            f"DeepGEMM scores {heads} heads of {_COLUMNS} columns on {q.device}; got {shapes}. Use "
            "index_scores, or primeblocks.parallel.adapters.triton.TritonIndexScores()."
        )


@functools.cache
def _library() -> Any:
    """Import the first module that has the function. The version is not read."""
    passed_over = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # DeepGEMM's shared library loads CUDA's libraries, and one version of DeepGEMM asserts
            # that a CUDA toolkit exists.
            first = str(error).splitlines()[0] if str(error) else "no reason given"
            passed_over.append(f"{name}: {type(error).__name__}, {first}")
            continue
        if hasattr(module, _SYMBOL):
            return module
        passed_over.append(f"{name}: has no {_SYMBOL}")
    raise MissingPackageError(
        "DeepGEMM",
        remedy="Run: pip install sgl-deep-gemm, or install vLLM for CUDA, which includes it. "
        f"deep_gemm 1.0.0 on PyPI has another interface. Tried: {'; '.join(passed_over)}.",
    )

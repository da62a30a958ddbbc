"""Deltas of one bf16 tensor on one core: bytes and time, against verl's and against a copy.

What changes moves by one unit in the last place, as it does in an optimizer step. GB/s count the
bytes of the full tensor. Bytes are also set against the entropy of such a change, and against
16-bit gaps with whole values, the plain coding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from primeblocks.weightsync.delta.deltas import apply_delta, encode_delta

from ..harness import compare
from .verl_delta import VERL, VerlDelta

__all__ = ["figures"]

NUMEL = 64 << 20
SHARES = {"0.1_percent": 0.001, "1_percent": 0.01, "10_percent": 0.1}


def figures(*, numel: int = NUMEL) -> dict[str, tuple[float, str, str]]:
    """By share of changed elements; the plain names are those of 1 %."""
    found: dict[str, tuple[float, str, str]] = {}
    for name, share in SHARES.items():
        measured = _measure(share, numel)
        found |= {f"weightsync.delta.{name}.{key}": figure for key, figure in measured.items()}
    for key in ("bytes_ratio_bf16", "speedup_vs_verl"):
        found[f"weightsync.delta.{key}"] = found[f"weightsync.delta.1_percent.{key}"]
    return found


def _measure(share: float, numel: int) -> dict[str, tuple[float, str, str]]:
    old = (torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    new = _step(old, share)
    delta = encode_delta(new, old)
    assert delta is not None
    verl = VerlDelta()
    flush = verl.encode(new, old)
    targets = [old.clone() for _ in range(4)]

    def agree() -> None:
        apply_delta(targets[0], delta)
        verl.apply_masked(targets[1], flush)
        verl.apply_indexed(targets[2], flush)
        for target in targets[:3]:
            assert torch.equal(target.view(torch.int16), new.view(torch.int16))

    encode, apply, theirs, masked, indexed, copy = compare(
        lambda: encode_delta(new, old),
        lambda: apply_delta(targets[0], delta),
        lambda: verl.encode(new, old),
        lambda: verl.apply_masked(targets[1], flush),
        lambda: verl.apply_indexed(targets[2], flush),
        lambda: targets[3].copy_(new),
        agree=agree,
        runs=5,
    )
    ours, full = encode.median + apply.median, old.nbytes
    least = numel * _entropy_bits(share) / 8
    return {
        "bytes_ratio_bf16": (len(delta) / full, "ratio", "full tensor"),
        "bytes_over_entropy": (len(delta) / least, "ratio", "entropy of independent changes"),
        "bytes_vs_u16_gaps": (len(delta) / _gap_bytes(new, old), "ratio", "u16 gaps, whole values"),
        "bytes_vs_verl": (len(delta) / flush.size_bytes, "ratio", VERL),
        "encode.gb_per_s": (full / encode.median / 1e9, "GB/s", ""),
        "encode.copy_bandwidth_fraction": (copy.median / encode.median, "ratio", "torch copy_"),
        "apply.gb_per_s": (full / apply.median / 1e9, "GB/s", ""),
        "encode.speedup_vs_verl": (theirs.median / encode.median, "ratio", VERL),
        "speedup_vs_verl_loader": (
            (theirs.median + masked.median) / ours, "ratio", f"{VERL}, loader for SGLang",
        ),
        "speedup_vs_verl": (
            (theirs.median + indexed.median) / ours, "ratio", f"{VERL}, values written by index",
        ),
        "encode.spread": (encode.spread, "ratio", ""),
    }  # fmt: skip


def _step(old: Tensor, share: float) -> Tensor:
    generator = np.random.default_rng(0)
    new = old.clone()
    words = new.view(torch.int16).numpy()
    chosen = generator.random(len(words)) < share
    words[chosen] += generator.choice(np.array([-1, 1], dtype=np.int16), chosen.sum())
    return new


def _entropy_bits(share: float) -> float:
    """Of an element that moves up or down with probability `share` / 2 each."""
    return float(share - share * np.log2(share) - (1 - share) * np.log2(1 - share))


def _gap_bytes(new: Tensor, old: Tensor) -> int:
    """Two bytes a gap, two a value."""
    return 4 * int((new.view(torch.int16) != old.view(torch.int16)).sum())

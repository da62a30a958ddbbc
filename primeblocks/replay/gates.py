"""Gate weights of given experts, from live scores.

Three formulas cover the routers in use. Each repeats the host's own arithmetic, its dtype
included: for the experts that the router would have chosen the results are the same bits.
All are local and differentiable; gradients reach the logits of every expert (softmax) or of
the named ones (sigmoid, chosen softmax).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

__all__ = ["chosen_softmax_gates", "sigmoid_gates", "softmax_gates"]


def softmax_gates(
    logits: Float[Tensor, "tokens experts"],
    experts: Int64[Tensor, "tokens top_k"],
    *,
    renormalise: bool,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "tokens top_k"]:
    """Softmax over all experts, then pick: Qwen3-MoE, Qwen3.5-MoE, OLMoE, Mixtral."""
    gates = F.softmax(logits, dim=-1, dtype=dtype).gather(-1, experts)
    if renormalise:
        # An engine's choice may have no mass here at all; 0 / 0 would poison the whole batch.
        gates = gates / gates.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    return gates


def chosen_softmax_gates(
    logits: Float[Tensor, "tokens experts"], experts: Int64[Tensor, "tokens top_k"]
) -> Float[Tensor, "tokens top_k"]:
    """Pick, then softmax over the picked, in the dtype of the logits: GPT-OSS."""
    return F.softmax(logits.gather(-1, experts), dim=-1)


def sigmoid_gates(
    logits: Float[Tensor, "tokens experts"],
    experts: Int64[Tensor, "tokens top_k"],
    *,
    renormalise: bool,
    scale: float = 1.0,
) -> Float[Tensor, "tokens top_k"]:
    """Independent sigmoids: DeepSeek-V3, GLM-4.5, GLM-5, MiniMax-M2, Nemotron-H, AFMoE, Laguna.

    The correction bias of these routers takes part in choosing and not in weighing, so a replay
    needs neither it nor the expert groups.
    """
    gates = logits.sigmoid().gather(-1, experts)
    if renormalise:
        # The host's guard against a row of zeros.
        gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
    return gates * scale

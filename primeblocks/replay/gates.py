"""Gate weights of given experts, from the router's logits.

This module has three functions, one for each formula of the hosts. Each function repeats the
arithmetic and the dtype of the host's code. For the experts that the router itself would choose,
results have the same bits as the host's gate weights. All three functions are local and
differentiable. A row of `experts` may have any number of ids, not only `top_k`.

If a saturated router gives exactly 0 to all experts of a row, a host without an epsilon would
divide 0 by 0. For such a row, the functions return the limit of the host's formula: the softmax
over the logits of the row's experts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

__all__ = ["chosen_softmax_gates", "sigmoid_gates", "softmax_gates"]


def softmax_gates(
    logits: Float[Tensor, "tokens experts"],
    experts: Int64[Tensor, "tokens columns"],
    *,
    renormalise: bool,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "tokens columns"]:
    """Return the gates of `experts` in a softmax over the logits of all experts.

    Models: Qwen3-MoE, Qwen3.5-MoE, OLMoE, Mixtral.
    """
    gates = F.softmax(logits, dim=-1, dtype=dtype).gather(-1, experts)
    return _divided(gates, logits, experts) if renormalise else gates


def chosen_softmax_gates(
    logits: Float[Tensor, "tokens experts"], experts: Int64[Tensor, "tokens columns"]
) -> Float[Tensor, "tokens columns"]:
    """Return a softmax over the logits of `experts` alone, in the dtype of the logits (GPT-OSS)."""
    return F.softmax(logits.gather(-1, experts), dim=-1)


def sigmoid_gates(
    logits: Float[Tensor, "tokens experts"],
    experts: Int64[Tensor, "tokens columns"],
    *,
    renormalise: bool,
    scale: float = 1.0,
    epsilon: float = 1e-20,
) -> Float[Tensor, "tokens columns"]:
    """Return the gates of `experts`, each computed by a sigmoid of the expert's own logit.

    Models: DeepSeek-V3, GLM-4.5, GLM-5, MiniMax-M2, MiniMax-M3, Nemotron-H, AFMoE, Laguna.

    The correction bias of these routers affects choices and not weights, so a replay needs neither
    the bias nor the expert groups.

    Args:
        epsilon: used only with `renormalise`. The host adds `epsilon` to the sum of a row's gates,
            and divides the gates by the result. Pass 0 for MiniMax-M2, MiniMax-M3 and Laguna.
    """
    gates = logits.sigmoid().gather(-1, experts)
    if renormalise and epsilon:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + epsilon)
    elif renormalise:
        gates = _divided(gates, logits, experts)
    return gates * scale


def _divided(
    gates: Float[Tensor, "tokens columns"],
    logits: Float[Tensor, "tokens experts"],
    experts: Int64[Tensor, "tokens columns"],
) -> Float[Tensor, "tokens columns"]:
    """Divide gates by their sum. The same bits as the plain division if the sum is above 1e-19."""
    total = gates.sum(dim=-1, keepdim=True)
    # The square of a larger sum is a normal number, by which backward can divide.
    massless = total < torch.finfo(total.dtype).tiny ** 0.5
    limit = F.softmax(logits.gather(-1, experts), dim=-1, dtype=gates.dtype)
    # Fill before dividing, because where() alone would multiply an unused inf by 0 in backward.
    return torch.where(massless, limit, gates / total.masked_fill(massless, 1.0))

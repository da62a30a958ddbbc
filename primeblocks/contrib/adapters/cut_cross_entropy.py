"""Log-probabilities by Apple's cut cross-entropy, whose GPU kernels we have never run.

    logprobs = token_logprobs(hidden, head.weight, ids)

On CUDA, the package runs its Triton kernels, which never store logits. On a CPU, the package runs a
plain computation, compiled by torch. The plain computation stores all logits and is for tests. This
module was checked with version 25.1.1 of the package on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import UnsupportedError, needs
from ...losses.logit_chunks import Head, check_operands

with needs("cut_cross_entropy", "triton", extra="cut_cross_entropy"):
    from cut_cross_entropy import linear_cross_entropy

__all__ = ["token_logprobs"]

_DTYPES = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
}
_NEUTRAL = {"temperature": 1.0, "head_dtype": None, "group": None, "first_word": 0}
_OTHER = "Use primeblocks.losses.logprobs.token_logprobs instead."


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "words hidden"],
    ids: Int[Tensor, " tokens"],
    **options: Any,
) -> Float[Tensor, " tokens"]:
    """Return the log-probability of one word per row, in float32.

    You can call this function like `losses.logprobs.token_logprobs`. Local. Differentiable once, in
    `hidden` and `weight`. The host waits for the device once per call.

    For the chosen word's logit, the kernels round each product to the operands' dtype before they
    sum the products. With bfloat16 operands, the result has an error as large as the rounding error
    of bfloat16 logits. The kernels also sum gradients in the operands' dtype and in any order, so
    two calls can return different gradients.

    Args:
        hidden: the hidden states.
        weight: the weight of the head.
        ids: an id outside of the vocabulary, such as -100, gets the log-probability NaN.
        options: only `temperature=1.0`, `head_dtype=None`, `group=None` and `first_word=0`, as in
            `losses.logprobs.token_logprobs`.

    Raises:
        UnsupportedError: an option has another name or value, `ids` has several words per row,
            or the kernels do not support the dtype or the device.
        ShapeError, UsageError: as for `losses.logprobs.token_logprobs`.

    Source: arXiv:2411.09009; github.com/apple/ml-cross-entropy.
    """
    check_operands(hidden, weight, ids, 1.0, Head(0, None, (1, 1), None, False))
    _check(hidden, ids, options)
    if not len(ids):  # No grid of programs has no side.
        return (hidden @ weight[:1].mT)[:, 0].float()
    here = (ids >= 0) & (ids < len(weight))
    with torch.cuda.device_of(hidden):  # The package starts its kernels on the current device.
        losses = linear_cross_entropy(
            hidden,
            weight.contiguous(),
            # The package reads rows by unchecked ids, and gives -100 a loss of 0.
            ids.long().clamp(0, len(weight) - 1),
            reduction="none",
            filter_eps=None,  # Else the backward skips blocks of small gradients.
            impl="cce" if hidden.device.type == "cuda" else "torch_compile",
        )
    return torch.where(here, -losses, torch.nan)


def _check(hidden: Tensor, ids: Tensor, options: dict[str, Any]) -> None:
    for name, value in options.items():
        neutral = name in _NEUTRAL and not isinstance(value, Tensor) and value == _NEUTRAL[name]
        if not neutral:
            raise UnsupportedError(f"cut_cross_entropy does not support {name}=. {_OTHER}")
    if ids.ndim != 1:
        raise UnsupportedError(
            f"cut_cross_entropy takes one word per row; got ids {list(ids.shape)}. {_OTHER}"
        )
    device = hidden.device.type
    if hidden.dtype not in (dtypes := _DTYPES.get(device, ())):
        can = f"{device} in {', '.join(map(str, dtypes))}" if dtypes else "cpu and cuda"
        raise UnsupportedError(
            f"cut_cross_entropy works on {can}; got {hidden.dtype} on {device}. {_OTHER}"
        )

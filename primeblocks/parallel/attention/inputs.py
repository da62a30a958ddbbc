"""Checks of the arguments of attention over a split sequence."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from numbers import Integral, Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlanError, ShapeError, UnsupportedError
from ...groups import agreed, check_alike, check_tensors, facts_of
from ..sequence import SequencePlan, check_plan
from .kernel import AttentionKernel, AttentionSpec
from .rectangles import RectangleKernel
from .varlen import VarlenKernel

__all__ = ["Inputs", "autocast", "check_factors", "check_kernel", "check_sinks", "checked"]


class Inputs(NamedTuple):
    """Tensors and rules of one call. Batch rows are folded into heads, and autocast is applied."""

    q: Tensor
    """`[local_tokens, batch * heads, head_dim]`. k and v likewise."""
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    """`[batch * heads]`"""
    spec: AttentionSpec
    kernel: AttentionKernel
    batch: int | None
    """None if the input has no batch dim"""

    def unfold(self, out: Tensor) -> Tensor:
        if self.batch is None:
            return out
        return out.unflatten(1, (self.batch, -1)).transpose(0, 1)


def checked(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    kernel: AttentionKernel | None,
    check: bool,
    whole: bool,
) -> Inputs:
    """Check the arguments, then cast and fold tensors. Collective if `check`.

    If `whole`, one call of the kernel covers the whole sequence instead of one hop.
    """
    with agreed(name, q, k, v, group=group, check=check) as call:
        check_plan(sequence, group, trees=causal)
        check_tensors(q=q, k=k, v=v, **({} if sinks is None else {"sinks": sinks}))
        if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
            raise ShapeError(
                f"q, k and v need equal batch dims; got {tuple(q.shape)}, {tuple(k.shape)}, "
                f"{tuple(v.shape)}."
            )
        batch = q.shape[0] if q.ndim == 4 else None
        if sinks is not None and sinks.ndim == 1 and batch is not None:
            sinks = sinks.repeat(batch)
        q, k, v = (autocast(x) for x in (q, k, v))
        if batch is not None:
            q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
        _check_shapes(q, k, v, sinks)
        sequence.check_tokens(group, q=q, k=k, v=v)
        check_alike(q=q, k=k, v=v)
        check_factors(scale=scale, softcap=softcap)
        _check_window(window, causal=causal)
        factor = q.shape[2] ** -0.5 if scale is None else float(scale)
        spec = AttentionSpec(sequence.whole if whole else sequence, causal, factor, window, softcap)
        check_kernel(kernel, spec, q, v.shape[2])
        chosen = _default(spec, q, v.shape[2]) if kernel is None else kernel
        call.facts |= {
            "plan": sequence.fingerprint,
            "window": window,
            "causal": bool(causal),
            "scale": scale,
            "softcap": softcap,
            "batch": batch,
            "sinks": sinks is not None,
            **({} if sinks is None else facts_of("sinks", sinks)),
        }
        call.facts |= facts_of("q", q) | facts_of("k", k) | facts_of("v", v)
    return Inputs(q, k, v, sinks, spec, chosen, batch)


def check_kernel(kernel: object, spec: AttentionSpec, q: Tensor, value_dim: int) -> None:
    """Refuse a kernel that cannot compute some rank's part. All ranks refuse alike. Local."""
    if isinstance(kernel, type) or not isinstance(kernel, AttentionKernel | None):
        raise PlanError(
            f"kernel must be an AttentionKernel; got {kernel!r:.80}. Pass FlexKernel(), "
            "RectangleKernel() or None."
        )
    if isinstance(kernel, VarlenKernel):
        kernel.check(spec, q, value_dim)


def _default(spec: AttentionSpec, q: Tensor, value_dim: int) -> AttentionKernel:
    """Return the default kernel: flash attention on CUDA if possible. Equal on all ranks."""
    if q.device.type == "cuda":
        flash = VarlenKernel()
        with suppress(UnsupportedError):
            flash.check(spec, q, value_dim)
            return flash
    return RectangleKernel()


def autocast(x: Tensor) -> Tensor:
    """Cast as autocast would, if it is on. Float64 and integers stay as they are. Local."""
    kind = x.device.type
    if x.dtype not in _CAST or not torch.amp.is_autocast_available(kind):
        return x
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


_CAST = (torch.float32, torch.bfloat16, torch.float16)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ShapeError(
            "q, k and v must be [local_tokens, heads, head_dim], or a batch of these; got "
            f"{shapes}."
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[2]):
        raise ShapeError(
            f"q, k and v need at least one head with at least one column; got {shapes}."
        )
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            "q and k need equal head_dim. k and v need equal numbers of heads, which must divide "
            f"the heads of q; got {shapes}."
        )
    check_sinks(sinks, q)


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise ShapeError(
            f"sinks must have one number per head, [{q.shape[1]}]; got {tuple(sinks.shape)} of "
            f"{sinks.dtype}."
        )


def check_factors(**factors: float | None) -> None:
    """Raise PlanError if a given factor of scores is not a finite number over 0. Local."""
    for name, factor in factors.items():
        if factor is not None and not (isinstance(factor, Real) and 0 < factor < inf):
            raise PlanError(f"{name} must be a finite number over 0, or None; got {factor!r}.")


def _check_window(window: int | None, *, causal: bool) -> None:
    if not isinstance(window, Integral | None) or (
        window is not None and (window < 1 or not causal)
    ):
        raise PlanError(
            f"a window needs causal=True and at least 1 token; got window={window!r}, "
            f"causal={causal}."
        )

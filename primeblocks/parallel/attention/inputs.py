"""What attention over a split sequence demands of its arguments, on all ranks alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlanError, ShapeError, UsageError
from ...groups import agree
from ..sequence import SequencePlan

__all__ = ["checked"]


def checked(
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
    check: bool,
) -> float:
    """Return the scale of the scores. Collective if `check`, local otherwise.

    Raises:
        ShapeError, PlanError, RankError: as `ring_attention` says.
    """
    problem: UsageError | None = None
    try:
        sequence.check_group(group)
        _check(q, k, v, sinks, sequence.counts[group.rank()], causal=causal, window=window)
    except (PlanError, ShapeError) as error:
        problem = error
    if problem is not None and (not check or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise problem
    if check:
        facts = {"plan": sequence.fingerprint, "window": window or 0, "causal": int(causal)}
        # A backward that one rank does not run would leave the others waiting.
        facts["sinks"] = 0 if sinks is None else 1 + _wants_gradient(sinks)
        for name, x in (("q", q), ("k", k), ("v", v)):
            facts |= {f"{name} dim {dim}": size for dim, size in enumerate(x.shape) if dim}
            facts[f"{name} bytes an element"] = x.element_size()
            facts[f"{name} requires_grad"] = _wants_gradient(x)
        # Of a rank that has a problem the others want no facts; there may be too many.
        agree({} if problem else facts, problem=problem, group=group, device=q.device)
    return q.shape[2] ** -0.5 if scale is None else scale


def _wants_gradient(x: Tensor) -> int:
    return int(torch.is_grad_enabled() and x.requires_grad)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    tokens: int,
    *,
    causal: bool,
    window: int | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ShapeError(f"needs [local_tokens, heads, head_dim]; got {shapes}.")
    if not q.shape[0] == k.shape[0] == v.shape[0] == tokens:
        raise ShapeError(
            f"the plan gives this rank {tokens} tokens; got {shapes}. Split by the same plan."
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[2]):
        raise ShapeError(f"needs at least one head, and one number in it; got {shapes}.")
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            "q and k need one head_dim, k and v the same heads, and these must divide the heads "
            f"of q; got {shapes}."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(f"q, k and v need one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ShapeError(f"needs one sink a head, [{q.shape[1]}]; got {tuple(sinks.shape)}.")
    if window is not None and (window < 1 or not causal):
        raise PlanError(
            f"a window needs causal=True and at least 1 token; got window={window}, "
            f"causal={causal}."
        )

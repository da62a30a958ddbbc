"""Multi-head latent attention over a split sequence: latents travel, and each rank expands them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import ShapeError
from ...groups import agreed, check_alike, check_tensors, facts_of, outside_graphs
from ..sequence import SequencePlan, check_plan
from .dsa.gather import gather_tokens, scatter_gradients
from .hops import Hops, attend
from .inputs import autocast, check_factors, check_kernel
from .kernel import AttentionKernel, AttentionSpec, Hop, accumulator_dtype
from .rectangles import RectangleKernel
from .ulysses import Heads

__all__ = ["latent_ring_attention", "latent_ulysses_attention"]


@outside_graphs
def latent_ring_attention(
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool = True,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Compute `ring_attention` with keys and values that are expanded from latents.

    Ranks send latents, with one row per token for all heads. Every hop expands latents to keys and
    values, and the backward of the hop expands the latents again. Differentiable. The call is
    collective. If ranks have equal token counts, each rank sends and receives (ranks - 1) times the
    bytes of its latents. The backward sends the latents again, and sends their gradients once
    around the ring in float32, or in float64 for float64 operands.

    Args:
        q: `[local_tokens, heads, nope_dim + rope_dim]`, with rotary embedding applied to the last
            `rope_dim` columns.
        latents: `[local_tokens, latent_dim + rope_dim]`: the normalised latent, then the rotated
            part of the key that all heads share.
        up: `[heads, nope_dim + value_dim, latent_dim]`: for each head, the projections of the
            latent to the head's part of the key and to the head's value.
        scale: the factor by which scores are multiplied. Default: `(nope_dim + rope_dim) ** -0.5`.
        kernel: the kernel that computes each hop. Default: `RectangleKernel()`, on every device.
        sequence, group, causal, check: as in `ring_attention`.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError, PlanError, UnsupportedError, RankError: the errors of `ring_attention`.

    Source: arXiv:2405.04434 (latent attention), arXiv:2310.01889 (the ring).
    """
    q, latents, up, spec, expanded = _checked(
        "latent_ring_attention", q, latents, up, sequence=sequence, group=group, causal=causal,
        scale=scale, kernel=kernel, check=check, whole=False,
    )  # fmt: skip
    return attend(Hops(spec, expanded, 2, expanded.value_dim(up), group), None, q, up, latents)


@outside_graphs
def latent_ulysses_attention(
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool = True,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Compute `ulysses_attention` with keys and values that are expanded from latents.

    Each rank sends all queries of its tokens, and receives the queries of its heads for all tokens.
    Each rank also gathers all latents, and expands the latents to keys and values of its own heads.
    Differentiable. The call is collective: one all-to-all of q, one all-to-all of the output, and
    one gather of latents. The gather is padded to the rank with the most tokens. Instead of the
    gather, the backward makes a reduce-scatter of the latents' gradients in float32, or in float64
    for float64 operands.

    Arguments, result and errors are the same as for `latent_ring_attention`.

    Source: arXiv:2405.04434 (latent attention), arXiv:2309.14509.
    """
    q, latents, up, spec, expanded = _checked(
        "latent_ulysses_attention", q, latents, up, sequence=sequence, group=group, causal=causal,
        scale=scale, kernel=kernel, check=check, whole=True,
    )  # fmt: skip
    ranks, rank, heads = group.size(), group.rank(), q.shape[1]
    parts = [range(heads * r // ranks, heads * (r + 1) // ranks) for r in range(ranks)]
    own, far = parts[rank], Heads(sequence, group)
    whole = _Gathered.apply(latents, sequence, group)
    hops = Hops(spec, expanded, 2, expanded.value_dim(up), None)
    out = attend(hops, None, far.gather(q, parts), up[own.start : own.stop], whole)
    return far.scatter(out, parts)


class _Expanded:
    """A kernel whose travelling tensors are latents. Queries and `up` stay."""

    def __init__(self, inner: AttentionKernel, nope_dim: int) -> None:
        self.inner, self.nope_dim = inner, nope_dim

    def value_dim(self, up: Tensor) -> int:
        return up.shape[1] - self.nope_dim

    def forward(self, q: Tensor, up: Tensor, latents: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        return self.inner.forward(q, *self._keys_and_values(up, latents), hop=hop)

    def backward(
        self, grad: Tensor, q: Tensor, up: Tensor, latents: Tensor, out: Tensor, lse: Tensor,
        *, hop: Hop,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        k, v = self._keys_and_values(up, latents)
        dq, dk, dv = self.inner.backward(grad, q, k, v, out, lse, hop=hop)
        dtype = accumulator_dtype(q)
        of_heads = torch.cat([dk[..., : self.nope_dim], dv], dim=-1).to(latents.dtype).flatten(1)
        latent = latents[:, : up.shape[2]]
        of_up = (of_heads.mT @ latent).view(up.shape)
        of_shared = dk[..., self.nope_dim :].sum(1, dtype=dtype)
        of_latents = torch.cat([(of_heads @ up.flatten(0, 1)).to(dtype), of_shared], dim=-1)
        return dq, of_up, of_latents

    def _keys_and_values(self, up: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        heads, _, latent = up.shape
        expanded = (latents[:, :latent] @ up.flatten(0, 1).mT).unflatten(1, (heads, -1))
        part, v = expanded.split([self.nope_dim, self.value_dim(up)], dim=-1)
        shared = latents[:, None, latent:].expand(-1, heads, -1)
        return torch.cat([part, shared], dim=-1), v


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latents: Tensor, sequence: SequencePlan, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.where, ctx.dtype = (sequence, group), latents.dtype
        (whole,) = gather_tokens(latents, sequence=sequence, group=group)
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sequence, group = ctx.where
        wide = grads[0].to(accumulator_dtype(grads[0]))
        return scatter_gradients(wide, sequence=sequence, group=group).to(ctx.dtype), None, None


def _checked(
    name: str,
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None,
    kernel: AttentionKernel | None,
    check: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec, _Expanded]:
    """Check the operands, and return them cast as autocast would. Collective if `check`."""
    with agreed(name, q, latents, up, group=group, check=check) as call:
        check_plan(sequence, group, trees=causal)
        check_tensors(q=q, latents=latents, up=up)
        check_factors(scale=scale)
        q, latents, up = autocast(q), autocast(latents), autocast(up)
        _check_shapes(q, latents, up)
        sequence.check_tokens(group, q=q, latents=latents)
        check_alike(q=q, latents=latents, up=up)
        factor = q.shape[2] ** -0.5 if scale is None else float(scale)
        spec = AttentionSpec(sequence.whole if whole else sequence, causal, factor)
        nope_dim = q.shape[2] - latents.shape[1] + up.shape[2]
        check_kernel(kernel, spec, q, up.shape[1] - nope_dim)
        call.facts |= {"plan": sequence.fingerprint, "causal": bool(causal), "scale": scale}
        call.facts |= facts_of("q", q) | facts_of("latents", latents) | facts_of("up", up)
    expanded = _Expanded(RectangleKernel() if kernel is None else kernel, nope_dim)
    return q, latents, up, spec, expanded


def _check_shapes(q: Tensor, latents: Tensor, up: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, latents {tuple(latents.shape)}, up {tuple(up.shape)}"
    if (q.ndim, latents.ndim, up.ndim) != (3, 2, 3):
        raise ShapeError(
            "q must be [local_tokens, heads, head_dim], latents [local_tokens, latent_dim + "
            f"rope_dim] and up [heads, nope_dim + value_dim, latent_dim]; got {shapes}."
        )
    rope = latents.shape[1] - up.shape[2]
    nope = q.shape[2] - rope
    if q.shape[1] != up.shape[0] or 0 in up.shape or rope < 0 or not 0 <= nope < up.shape[1]:
        raise ShapeError(
            "q and up need equal numbers of heads. latents need latent_dim + rope_dim columns, "
            "with rope_dim of 0 or more. q needs nope_dim + rope_dim columns, with nope_dim "
            f"below the rows that up has per head; got {shapes}."
        )

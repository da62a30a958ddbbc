"""The experts of one layer, over rows that are grouped by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ...errors import ShapeError
from ...groups import check_tensors, outside_graphs
from ...layout import local_part
from ..attention.inputs import autocast
from .dispatcher import TokenDispatcher

__all__ = ["GroupedExperts", "GroupedMm", "expert_linear", "grouped_linear", "grouped_swiglu"]

GroupedMm = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""A product of grouped rows: (name of the weight, tokens, weight, offsets on the same device)."""


@outside_graphs
def grouped_linear(
    tokens: Float[Tensor, "slots in_features"],
    counts: Int64[Tensor, " experts"],
    weight: Float[Tensor, "experts out_features in_features"],
    bias: Float[Tensor, "experts out_features"] | None = None,
) -> Float[Tensor, "slots out_features"]:
    """Multiply each expert's range of rows by the expert's own matrix. Local. Differentiable.

    Torch's grouped kernel multiplies bfloat16 operands, and on a CPU also float32 operands. The
    kernel needs matrices in which each dim takes a multiple of 16 bytes. A loop over experts
    multiplies all other operands. Under autocast, the kernel and the loop compute in the dtype of
    autocast. An expert without rows gets a zero gradient instead of None, so that FSDP reduces the
    gradient.

    Args:
        tokens: rows grouped by expert, such as `Dispatched.tokens`.
        counts: the number of rows of each expert. The sum of the counts may be below the number of
            rows in `tokens`. Results for rows after the last group are undefined. The host reads
            the counts if `counts` is on the host, or if the loop over experts is used.

    Raises:
        ShapeError: shapes do not fit together, or `counts` and `weight` have different numbers of
            experts.
        ShapeError: the sum of `counts` is above the number of rows, and the host reads `counts`.
    """
    check_tensors(tokens=tokens, counts=counts, weight=weight)
    if counts.ndim != 1 or weight.ndim != 3 or tokens.shape[1:] != weight.shape[2:]:
        raise ShapeError(
            "grouped_linear needs tokens [slots, in], counts [experts] and weight [experts, out, "
            f"in]; got {tuple(tokens.shape)}, {tuple(counts.shape)}, {tuple(weight.shape)}."
        )
    if len(counts) != len(weight):
        raise ShapeError(
            f"{len(counts)} counts for {len(weight)} experts. Give the dispatcher the group of "
            "the ranks that share the experts: AllToAllDispatcher(meshes.expert.get_group())."
        )
    # torch's kernel ignores autocast, and the loop does not. A rank without rows uses the loop, so
    # its result would have another dtype.
    tokens, weight = autocast(tokens), autocast(weight)
    kernel = _fits_kernel(tokens, weight)
    rows = [] if kernel and counts.device.type != "cpu" else counts.tolist()
    if sum(rows) > len(tokens):
        raise ShapeError(
            f"counts add up to {sum(rows)}, but tokens has {len(tokens)} rows. Pass the counts of "
            "these tokens."
        )
    if kernel:
        ends = counts.cumsum(0, dtype=torch.int32).to(tokens.device)
        out = F.grouped_mm(tokens.contiguous(), weight.transpose(1, 2), offs=ends)
        if out.requires_grad:
            out.register_hook(torch.Tensor.contiguous)  # The kernel refuses an expanded gradient.
    else:
        *parts, behind = tokens.split([*rows, len(tokens) - sum(rows)])
        out = torch.cat([F.linear(x, w) for x, w in zip(parts, weight.unbind(), strict=True)])
        if len(behind):
            out = F.pad(out, (0, 0, 0, len(behind)))
    if bias is not None:
        out = out + _of_rows(bias, counts, len(tokens))
    return out


def grouped_swiglu(
    tokens: Float[Tensor, "slots hidden"],
    counts: Int64[Tensor, " experts"],
    gate_up: Float[Tensor, "experts gate_and_up hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
    *,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Float[Tensor, "slots hidden"]:
    """Run each expert, `down(activation(gate) * up)`, on its rows. Local. Differentiable.

    The first half of dim 1 of `gate_up` is the gate. The function raises the errors of
    `grouped_linear`.
    """
    gate, up = grouped_linear(tokens, counts, gate_up).chunk(2, dim=-1)
    return grouped_linear(activation(gate) * up, counts, down)


class GroupedExperts(nn.Module):
    """The experts of one layer, with the parameter names of transformers.

    The module is built with all experts of the layer. After `fully_shard_moe`, each rank stores its
    share of the experts. `dispatcher` must use the ranks that share the experts. A call is
    collective if the calls of the dispatcher are collective. To use another product, such as a
    product in float8, set the attribute `grouped_mm`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        dispatcher: TokenDispatcher,
        activation: Callable[[Tensor], Tensor] = F.silu,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.dispatcher = dispatcher
        self.activation = activation
        self.grouped_mm: GroupedMm | None = None
        gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device)
        self.gate_up_proj = nn.Parameter(nn.init.normal_(gate_up, std=hidden**-0.5))
        self.down_proj = nn.Parameter(nn.init.normal_(down, std=intermediate**-0.5))

    def forward(self, x: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `[tokens, hidden]`. The arguments are as in `TokenDispatcher.dispatch`."""
        sent = self.dispatcher.dispatch(x, scores, expert_ids, num_experts=self.num_experts)
        gate, up = expert_linear(self, "gate_up_proj", sent.tokens, sent.counts).chunk(2, dim=-1)
        y = expert_linear(self, "down_proj", self.activation(gate) * up, sent.counts)
        return self.dispatcher.combine(y, sent)


def expert_linear(module: Any, name: str, tokens: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by one weight of `module`, with the weight's adapter. Local.

    Uses `module.grouped_mm(name, tokens, weight, offsets)` if the module has this attribute.

    Args:
        name: a parameter `[experts, out, in]`, or `[experts, in, out]` if `module.is_transposed`.
            The module may also have `NAME_bias`, and the factors of `add_expert_lora`.
    """

    def local(suffix: str) -> Tensor | None:
        found = getattr(module, name + suffix, None)
        return None if found is None else local_part(found)

    weight = local("")
    assert weight is not None, name
    if getattr(module, "is_transposed", False):
        weight = weight.transpose(1, 2)
    product = getattr(module, "grouped_mm", None)
    if product is None:
        out = grouped_linear(tokens, counts, weight, local("_bias"))
    else:
        out = _other_product(product, name, tokens, counts, weight, local("_bias"))
    a, b = local("_lora_A"), local("_lora_B")
    if a is None or b is None or any(layer._disable_adapters for layer in module.lora_switches):
        return out
    inner = grouped_linear(tokens, counts, a.to(tokens.dtype)) * module.lora_scaling
    return out + grouped_linear(inner, counts, b.to(tokens.dtype))


@outside_graphs
def _other_product(
    product: GroupedMm,
    name: str,
    tokens: Tensor,
    counts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    offsets = counts.cumsum(0, dtype=torch.int32).to(tokens.device)
    out = product(name, autocast(tokens), weight, offsets)
    return out if bias is None else out + _of_rows(bias, counts, len(tokens))


def _of_rows(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    counts = counts.to(bias.device)
    behind = torch.cat((counts, (rows - counts.sum())[None]))
    of_each = F.pad(autocast(bias), (0, 0, 0, 1))
    return of_each.repeat_interleave(behind, 0, output_size=rows)


def _fits_kernel(tokens: Tensor, weight: Tensor) -> bool:
    if tokens.dtype != weight.dtype or not tokens.numel():
        return False
    on_cpu = tokens.device.type == "cpu"
    fits = tokens.dtype == torch.bfloat16 or (on_cpu and tokens.dtype == torch.float32)
    # The kernel needs rows of a multiple of 16 bytes.
    return fits and all(size * tokens.element_size() % 16 == 0 for size in weight.shape[1:])

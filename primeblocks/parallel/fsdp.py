"""FSDP2 over dense and expert meshes: sharding, gradient scaling, clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..errors import PlanError
from .mesh import Meshes

__all__ = ["clip_grad_norm_", "fully_shard_moe", "global_token_count"]


def fully_shard_moe(
    model: nn.Module,
    meshes: Meshes,
    *,
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    routers: Iterable[nn.Module] = (),
    precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard a mixture-of-experts model in place; names of parameters stay.

    Experts are dealt over `meshes.expert`, then sharded over `meshes.expert_fsdp`; all else is
    sharded over `meshes.fsdp`, the ranks of a context group included. Afterwards every gradient is
    the plain SUM of all ranks' loss contributions, whatever the meshes: divide each local loss by
    `global_token_count`. Local, but the model's weights must be equal on all ranks; forward and
    backward are collective.

    With context > 1 each rank passes its own part of the sequences, and the model's attention must
    look beyond it: see `ring_attention` and `ulysses_attention`.

    Args:
        layers: modules to gather one at a time, as a rule the decoder layers, in their order.
        experts: modules whose every parameter has the experts as dim 0, and whose forward takes
            the local part of it and dispatches over `meshes.expert`.
        routers: modules that compute, and reduce their gradients, in float32 where `precision`
            would have less: a small error of a score is another expert.
        precision: dtypes of compute and reduction; default: as the parameters are.

    Raises:
        PlanError: the expert degree does not divide the experts, or there are none.
    """
    layers, experts = list(layers), list(experts)
    if meshes.plan.expert > 1 and not experts:
        raise PlanError(f"expert={meshes.plan.expert}, but no experts were given. Use expert=1.")
    policy = MixedPrecisionPolicy() if precision is None else precision
    for module in experts:
        _check_shared(module, meshes.plan.expert)
    for module in experts:
        _deal_experts(module, meshes)
        _fully_shard_experts(module, meshes, policy)
    if policy.param_dtype in (torch.bfloat16, torch.float16):
        exact = replace(policy, param_dtype=torch.float32, reduce_dtype=torch.float32)
        for module in routers:
            fully_shard(module, mesh=meshes.fsdp, mp_policy=exact)
    for layer in layers:
        fully_shard(layer, mesh=meshes.fsdp, mp_policy=policy)
    fully_shard(model, mesh=meshes.fsdp, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The default divides by the size of the module's own mesh, which differs between
            # dense and expert parameters. gloo has no scaled sum, so ask for a plain one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if meshes.plan.expert > 1:
        _prefetch(layers)


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, *, meshes: Meshes) -> Tensor:
    """Scale gradients in place so that their total 2-norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for any mix of meshes inside `meshes.loss`. A gradient
    that is no DTensor must be equal on all ranks. One collective of one number.

    Returns:
        The total norm before scaling, in float64, equal on all ranks. Not finite if a gradient is
        not; the gradients are spoilt then: check before the optimizer step.

    Raises:
        PlanError: a gradient holds partial sums.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_copies[_copies(grad, meshes.plan.world_size)].append(_local(grad))
    device = meshes.loss.device_type
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, locals_ in by_copies.items():
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in locals_]
        total += torch.stack(norms).square().sum().to(device) / copies
    dist.all_reduce(total, group=meshes.loss.get_group())
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in by_copies.values():
        for x in locals_:
            x.mul_(scale.to(x.device, x.dtype))
    return norm


def global_token_count(local: int | Tensor, meshes: Meshes) -> int:
    """Sum a count over all ranks: what a loss is divided by. Collective.

    Args:
        local: the tokens of this rank that count in the loss; may be 0.
    """
    device = meshes.loss.device_type
    count = torch.as_tensor(local, dtype=torch.int64, device=device).clone()
    dist.all_reduce(count, group=meshes.loss.get_group())
    return int(count)


def _check_shared(module: nn.Module, degree: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.shape[0] % degree:
            raise PlanError(
                f"{name} has {parameter.shape[0]} experts, which expert={degree} ranks cannot "
                "share equally."
            )


def _deal_experts(module: nn.Module, meshes: Meshes) -> None:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            # Every rank keeps its part of what it holds: nothing is sent.
            dealt = distribute_tensor(
                parameter.detach(), meshes.expert, [Shard(0)], src_data_rank=None
            )
            setattr(owner, name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))


def _fully_shard_experts(module: nn.Module, meshes: Meshes, policy: MixedPrecisionPolicy) -> None:
    ranks = meshes.plan.expert_fsdp

    def placement(parameter: nn.Parameter) -> Shard:
        local = _local(parameter)
        # More ranks than experts would leave some of them empty; split inside the experts then.
        uneven = local.shape[0] % ranks != 0
        return Shard(1) if uneven and local.ndim > 1 and local.shape[1] % ranks == 0 else Shard(0)

    fully_shard(module, mesh=meshes.expert_fsdp, mp_policy=policy, shard_placement_fn=placement)


def _prefetch(layers: list[nn.Module]) -> None:
    """Gather the next layer's parameters before this one's experts.

    FSDP gathers ahead of the host, but the host waits for the token counts of each layer.
    """
    units: list[list[Any]] = [
        [m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in layers
    ]
    for (this, *_), following in pairwise(units):
        this.set_modules_to_forward_prefetch(following)
    for (this, *_), before in pairwise(reversed(units)):
        this.set_modules_to_backward_prefetch(before)


def _copies(grad: Tensor, world_size: int) -> int:
    """How many ranks hold the same elements."""
    if not isinstance(grad, DTensor):
        return world_size
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise PlanError(f"a partial gradient {grad.placements} has no norm. Redistribute it.")
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return world_size // prod(n for p, n in sizes if not isinstance(p, Replicate))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x

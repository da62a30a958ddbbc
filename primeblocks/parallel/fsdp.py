"""FSDP2 over dense and expert meshes: sharding, clipping and token counts.

FSDP2 would divide each gradient by the size of the parameter's mesh, which differs between expert
and dense parameters. This file requests plain sums instead. The caller divides the loss by the
token count of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice, pairwise
from math import prod
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..errors import PlanError, UnsupportedError, check_counts
from ..groups import agreed, check_tensors
from ..layout import local_part
from .experts.dispatcher import LocalDispatcher
from .gathered import after_forward, check_reduced, shards_of
from .mesh import Meshes, check_meshes

__all__ = [
    "check_dispatcher",
    "check_optimizer",
    "clip_grad_norm_",
    "fully_shard_moe",
    "global_token_count",
]


def fully_shard_moe(
    model: nn.Module,
    meshes: Meshes,
    *,
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    routers: Iterable[nn.Module] = (),
    precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard a mixture-of-experts model in place. Parameter names do not change.

    Each rank of `meshes.expert` keeps its share of the experts, and `meshes.expert_fsdp` shards
    this share. `meshes.fsdp` shards all other parameters, also over the ranks of a context group.
    If a context group shares a sequence, the model's attention must join the parts of the sequence.
    Every gradient of the sharded model is the plain SUM over all ranks, so divide each local loss
    by `global_token_count`. Local. The model's weights must be equal on all ranks. Forward and
    backward of the sharded model are collective.

    Args:
        layers: modules whose parameters are gathered one module at a time, in the order of
            execution. Usually, `layers` are the decoder layers.
        experts: modules in which dim 0 of every parameter counts the experts. The forward of a
            module in `experts` must use the local experts and dispatch over `meshes.expert`.
            `precision` casts only the first floating-point argument of the forward, which must be
            the tokens. Scores keep their dtype.
        routers: modules that compute in float32, even if `precision` sets bfloat16 or float16.
            Their gradients are reduced in float32 too. A small error of a score could change the
            chosen expert. Outputs of routers are not cast.
        precision: dtypes of compute and reduction. Default: the dtype of the parameters.
        reshard_after_forward: free gathered parameters after forward and gather them again for
            backward. With `reshard_after_forward=False`, each micro-batch gathers parameters once
            instead of twice. A forward without gradients always frees gathered parameters.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer states on the
            host. By default, shards, gradients and optimizer states are on the device.

    Raises:
        PlanError: `model` or a given module is sharded already, or a given module is not part of
            `model`.
        PlanError: the expert degree does not divide the number of experts, or the expert degree is
            above 1 and `experts` is empty.
        PlanError: a dispatcher uses other ranks than `meshes.expert`, or `reshard_after_forward` is
            a number. FSDP2 would use the number as a group size, and the groups of dense parameters
            and experts would differ.
        UnsupportedError: parameters that are gathered together have different dtypes.
    """
    check_meshes(meshes)
    layers, experts, routers = (
        _modules(name, given, model)
        for name, given in (("layers", layers), ("experts", experts), ("routers", routers))
    )
    if any(isinstance(each, FSDPModule) for each in (model, *layers, *experts, *routers)):
        raise PlanError(
            "fully_shard_moe (or parallelize) was called on a model that is sharded already. Call "
            "it once, on a new model, and load its weights with load_pretrained."
        )
    if meshes.plan.expert > 1 and not experts:
        raise PlanError(f"expert={meshes.plan.expert}, but no experts were given. Use expert=1.")
    if not isinstance(reshard_after_forward, bool):
        raise PlanError(
            f"reshard_after_forward must be True or False; got {reshard_after_forward!r}. A number "
            "of ranks would mean different groups for dense parameters and for experts."
        )
    policy = MixedPrecisionPolicy() if precision is None else precision
    offload = OffloadPolicy() if offload_policy is None else offload_policy
    kept: dict[str, Any] = {
        "offload_policy": offload,
        "reshard_after_forward": reshard_after_forward,
    }
    low = torch.bfloat16, torch.float16
    exact = policy.param_dtype in low or policy.reduce_dtype in low
    _check_dtypes([*experts, *(routers if exact else ()), *layers, model])
    for module in experts:
        _check_shared(module, meshes.plan.expert)
        check_dispatcher(getattr(module, "dispatcher", None), meshes)
    for module in experts:
        _deal_experts(module, meshes)
        _fully_shard_experts(module, meshes, policy, kept)
    if exact:
        compute = torch.float32 if policy.param_dtype in low else policy.param_dtype
        full = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for module in routers:
            fully_shard(module, mesh=meshes.fsdp, mp_policy=full, **kept)
    for layer in layers:
        fully_shard(layer, mesh=meshes.fsdp, mp_policy=policy, **kept)
    fully_shard(model, mesh=meshes.fsdp, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Request plain sums, because gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(after_forward)
    if meshes.plan.expert > 1:
        _prefetch(layers)
    meshes.models.add(model)


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    meshes: Meshes,
    optimizer: torch.optim.Optimizer | None = None,
    check: bool = True,
) -> Tensor:
    """Scale gradients in place so that their total 2-norm is at most `max_norm`.

    The function works like `torch.nn.utils.clip_grad_norm_`, for parameters on different meshes. A
    gradient that is not a DTensor must be equal on all ranks. If a forward after the last backward
    left parameters gathered, the function reshards the model and scales the gradients of the
    shards. The call is collective: one all-reduce of one number, and one more small collective with
    `check=True`.

    Args:
        optimizer: an optimizer to check: every tensor that the optimizer updates must be in
            `parameters`.
        check: compare `max_norm` on all ranks first, so that a mistake on one rank raises an error
            on all ranks instead of hanging. The comparison makes the host wait for a GPU.

    Returns:
        The total norm before scaling, in float64, equal on all ranks. If a gradient is not finite,
        the norm is not finite, and all gradients are unusable after the call. Check the norm before
        the optimizer step.

    Raises:
        PlanError: a gradient is a partial sum, ranks pass different values of `max_norm`, or
            `optimizer` updates tensors that are not in `parameters`.
        PlanError: FSDP2 left parameters unsharded, so their gradients are wrong. Reentrant
            checkpointing leaves parameters unsharded if several forwards precede one backward. So
            does an error inside a backward. The call drops gradients that are not reduced.
            Also raised if `parameters` were listed after a forward without a backward, and FSDP2
            has freed some of them.
        ShapeError: a parameter is not a tensor.
        RankError: another rank refused its arguments.
    """
    check_meshes(meshes)
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    total = torch.zeros((), dtype=torch.float64, device=meshes.device)
    group = meshes.loss.get_group()
    with agreed("clip_grad_norm_", total, group=group, check=check) as call:
        if not isinstance(max_norm, Real) or not max_norm >= 0:
            raise PlanError(f"max_norm must be a number from 0 up; got {max_norm!r}.")
        if not isinstance(parameters, Iterable):
            raise PlanError(f"parameters must be tensors; got one {type(parameters).__name__}.")
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in given:
            check_tensors(parameter=parameter)
        given = shards_of(given, meshes)
        if optimizer is not None:
            _check_steps(given, optimizer)
        for parameter in given:
            grad = parameter.grad
            if grad is not None:
                by_copies[_copies(grad, meshes.plan.world_size)].append(local_part(grad))
        call.facts["max_norm"] = float(max_norm)
    for copies, locals_ in by_copies.items():
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in locals_]
        total += torch.stack(norms).square().sum().to(total.device) / copies
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in by_copies.values():
        for x in locals_:
            wide = torch.promote_types(x.dtype, torch.float32)
            # A GPU rounds a factor without dims to the dtype of x.
            torch.mul(x, scale.to(x.device, wide).expand_as(x), out=x)
    return norm


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates tensors outside of the model. Local.

    Sharding replaces parameters. An optimizer that was made before sharding still updates the old
    parameters, and would not train the model. An optimizer that was made after a forward without a
    backward updates gathered copies. The call reshards `model`.

    Args:
        model: the model, or an `nn.ModuleList` of all models that the optimizer updates.

    Raises:
        PlanError: some tensors of the optimizer are not parameters of `model`, or FSDP2 left
            parameters unsharded, as for `clip_grad_norm_`.
    """
    check_reduced(model)
    _check_steps(list(model.parameters()), optimizer)


def _check_steps(parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in parameters}
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    foreign = sum(id(tensor) not in known for tensor in stepped)
    if foreign:
        raise PlanError(
            f"{foreign} of {len(stepped)} tensors of the optimizer are not parameters of the "
            "model. The optimizer was made before the model was sharded, or after a forward "
            "without a backward, and would not train the model. Make the optimizer after "
            "parallelize or fully_shard_moe, before the first forward."
        )


def global_token_count(local: int | Tensor, meshes: Meshes) -> int:
    """Return the token count of all ranks, by which you divide the loss. Two small collectives.

    Args:
        local: the number of this rank's tokens that count in the loss, possibly 0.

    Raises:
        PlanError: `local` is not a whole number of at least 0.
        RankError: another rank refused its arguments.
    """
    check_meshes(meshes)
    count = torch.zeros((), dtype=torch.int64, device=meshes.device)
    group = meshes.loss.get_group()
    with agreed("global_token_count", count, group=group):
        check_counts(least=0, local=local)
        count.fill_(int(local))
    dist.all_reduce(count, group=group)
    return int(count)


def _modules(name: str, given: object, model: nn.Module) -> list[nn.Module]:
    if isinstance(given, nn.Module) and not isinstance(given, Iterable):
        raise PlanError(
            f"{name} must be a list of modules; got one {type(given).__name__}. Pass a list."
        )
    found, inside = list(given), set(model.modules())  # type: ignore[call-overload]
    odd = [x for x in found if not isinstance(x, nn.Module) or x not in inside]
    if odd:
        raise PlanError(
            f"{len(odd)} of {len(found)} {name} are not modules of this {type(model).__name__}; "
            f"the first is a {type(odd[0]).__name__}. Pass modules, not names or copies."
        )
    return found


def check_dispatcher(dispatcher: object, meshes: Meshes) -> None:
    """Raise PlanError if a dispatcher is known to use other ranks than `meshes.expert`."""
    group = getattr(dispatcher, "group", None)
    shared = dist.get_process_group_ranks(meshes.expert.get_group())
    over = shared
    if isinstance(group, dist.ProcessGroup):
        over = dist.get_process_group_ranks(group)
    elif isinstance(dispatcher, LocalDispatcher):
        over = [dist.get_rank()]
    if over != shared:
        raise PlanError(
            f"the {type(dispatcher).__name__} of experts uses ranks {over}, but ranks {shared} "
            "share the experts. Give the dispatcher the group meshes.expert.get_group()."
        )


def _check_shared(module: nn.Module, degree: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.shape[0] % degree:
            raise PlanError(
                f"{name} has {parameter.shape[0]} experts, which expert={degree} ranks cannot "
                "share equally. Plan with an expert degree that divides the number of experts."
            )


def _check_dtypes(units: list[nn.Module]) -> None:
    """Refuse units of several dtypes, as FSDP2 does at the first forward.

    `units` must list inner units before the units that contain them.
    """
    taken: set[nn.Parameter] = set()
    for unit in units:
        own = [(name, p) for name, p in unit.named_parameters() if p not in taken]
        taken |= {parameter for _, parameter in own}
        found = {parameter.dtype: name for name, parameter in own if parameter.requires_grad}
        if len(found) > 1:
            shown = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
            raise UnsupportedError(
                f"parameters of a {type(unit).__name__} have several dtypes: {shown}. FSDP2 "
                "gathers only parameters of one dtype together. Convert the model to one dtype, "
                "such as float32 with precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
            )


def _deal_experts(module: nn.Module, meshes: Meshes) -> None:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            # Every rank already has all experts, so nothing is sent.
            dealt = distribute_tensor(
                parameter.detach(), meshes.expert, [Shard(0)], src_data_rank=None
            )
            setattr(owner, name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))


def _fully_shard_experts(
    module: nn.Module, meshes: Meshes, policy: MixedPrecisionPolicy, kept: dict[str, Any]
) -> None:
    ranks = meshes.plan.expert_fsdp
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        # FSDP2 would also cast the scores, which would round gates and the gradients of routers.
        module.register_forward_pre_hook(_cast_tokens(policy.param_dtype), with_kwargs=True)
        policy = replace(policy, cast_forward_inputs=False)

    def placement(parameter: nn.Parameter) -> Shard:
        local = local_part(parameter)
        # If ranks cannot share the experts evenly, split inside the experts instead.
        uneven = local.shape[0] % ranks != 0
        return Shard(1) if uneven and local.ndim > 1 and local.shape[1] % ranks == 0 else Shard(0)

    mesh = meshes.expert_fsdp
    fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, **kept)


def _cast_tokens(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    """A hook that casts the first floating-point argument."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = dict(enumerate(args)) | kwargs
        floating = (k for k, x in given.items() if isinstance(x, Tensor) and x.is_floating_point())
        for name in islice(floating, 1):
            given[name] = given[name].to(dtype)
        return tuple(given[place] for place in range(len(args))), {k: given[k] for k in kwargs}

    return hook


def _prefetch(layers: list[nn.Module]) -> None:
    """Gather the next layer's parameters before the experts of this layer run.

    FSDP gathers ahead only while the host is ahead of the device. Here the host waits for the token
    counts of each layer.
    """
    units: list[list[Any]] = [
        [m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in layers
    ]
    for (this, *_), following in pairwise(units):
        this.set_modules_to_forward_prefetch(following)
    for (this, *_), before in pairwise(reversed(units)):
        this.set_modules_to_backward_prefetch(before)


def _copies(grad: Tensor, world_size: int) -> int:
    """Count the ranks that store the same elements."""
    if not isinstance(grad, DTensor):
        return world_size
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise PlanError(f"a partial gradient {grad.placements} has no norm. Redistribute it.")
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return world_size // prod(n for p, n in sizes if not isinstance(p, Replicate))

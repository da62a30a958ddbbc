"""Degrees of parallelism, and the groups of ranks that they make."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import PlanError, check_counts
from ..groups import agreed

__all__ = ["MeshPlan", "Meshes", "check_meshes", "on_device", "plan_mesh"]


@dataclass(frozen=True)
class Meshes:
    """The process groups of one plan. All meshes exist, and the mesh of an unused axis has size 1.

    Attributes:
        plan: the plan from which the meshes were built.
        fsdp: the mesh that shards dense parameters. If replicate > 1, the mesh has the two axes
            (replicate, fsdp).
        expert_fsdp: the mesh that shards the parameters of experts. If replicate > 1, the mesh has
            the two axes (replicate, expert_fsdp).
        expert: the mesh on which each rank owns an equal share of the experts.
        context: the mesh on which each rank has a part of the same sequences.
        batch: the mesh on which each rank reads different samples.
        loss: the mesh of all ranks, for token counts and norms.
        device: the device of this rank, with its number. A new thread uses GPU 0 by default.
        models: weak references to the models that `fully_shard_moe` sharded over these meshes.
    """

    plan: MeshPlan
    fsdp: DeviceMesh
    expert_fsdp: DeviceMesh
    expert: DeviceMesh
    context: DeviceMesh
    batch: DeviceMesh
    loss: DeviceMesh
    device: torch.device
    models: WeakSet[nn.Module] = field(
        default_factory=WeakSet, init=False, repr=False, compare=False
    )


@dataclass(frozen=True)
class MeshPlan:
    """Checked degrees of parallelism, made by `plan_mesh`.

    The ranks form one grid (replicate, expert_fsdp, expert) for parameters, and another grid
    (batch, context) for data. Rank numbers are consecutive along the last axis of a grid. The ranks
    of an expert group or a context group are therefore neighbours. These groups communicate most,
    and neighbouring ranks are usually on one machine, where communication is fast.
    """

    world_size: int
    replicate: int
    context: int
    expert: int

    @property
    def fsdp(self) -> int:
        """Number of ranks that share one copy of the dense parameters, including context ranks."""
        return self.world_size // self.replicate

    @property
    def expert_fsdp(self) -> int:
        """Number of ranks that share one copy of the same experts."""
        return self.fsdp // self.expert

    @property
    def batch(self) -> int:
        """Number of ranks that read different samples."""
        return self.world_size // self.context

    def table(self) -> str:
        """Return one line per axis: its size, the group of rank 0, and the data that is sent."""
        axes = {
            "replicate": (self.replicate, self.fsdp, "gradients: all-reduce"),
            "fsdp": (self.fsdp, 1, "dense weights: all-gather; gradients: reduce-scatter"),
            "expert_fsdp": (self.expert_fsdp, self.expert, "expert weights, the same way"),
            "expert": (self.expert, 1, "tokens to their experts: all-to-all"),
            "context": (self.context, 1, "attention over split sequences"),
            "batch": (self.batch, self.context, "nothing; different samples"),
            "loss": (self.world_size, 1, "token counts and norms"),
        }
        lines = [f"{'axis':<12}{'size':>6}  {'ranks with 0':<22}carries"]
        for name, (size, step, carries) in axes.items():
            group = [step * i for i in range(size)]
            shown = group if size <= 4 else [*group[:2], "...", group[-1]]
            lines.append(f"{name:<12}{size:>6}  {','.join(map(str, shown)):<22}{carries}")
        return "\n".join(lines)

    def build(self, device: str) -> Meshes:
        """Make the process groups. Collective over all ranks. Call this method once.

        The new groups have the timeout that you passed to `init_process_group`.

        Args:
            device: "cpu" or "cuda", without a number.

        Raises:
            PlanError: torch.distributed is not initialised, the number of running ranks differs
                from the plan, `device` cannot be used, or ranks build different plans.
            RankError: another rank refused its plan.
        """
        if not dist.is_initialized():
            raise PlanError(
                "torch.distributed is not initialised. Call torch.distributed.init_process_group "
                "first."
            )

        everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        with agreed("MeshPlan.build", on_device(device), group=everyone) as call:
            if dist.get_world_size() != self.world_size:
                raise PlanError(
                    f"the mesh is planned for {self.world_size} ranks, but "
                    f"{dist.get_world_size()} ranks are running. Plan with "
                    f"world_size={dist.get_world_size()}."
                )
            call.facts |= {**asdict(self), "device": device}
        options = everyone._get_backend(everyone._device_types[0]).options

        def mesh(**axes: int) -> DeviceMesh:
            made = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
            # DeviceMesh gives new groups the default timeout of the backend.
            for group in made.get_all_groups() if options else ():
                group.set_timeout(options._timeout)
            return made

        return self.over(mesh)

    def over(self, mesh: Callable[..., DeviceMesh]) -> Meshes:
        """Return the meshes that `mesh` makes from the sizes of named axes.

        Rank numbers must be consecutive along the last axis of each mesh that `mesh` makes.
        """
        dense = mesh(replicate=self.replicate, fsdp=self.fsdp)
        # FSDP2 requires that an expert's two axes come from one mesh.
        sparse = mesh(replicate=self.replicate, expert_fsdp=self.expert_fsdp, expert=self.expert)
        data = mesh(batch=self.batch, context=self.context)
        copies = ("replicate",) if self.replicate > 1 else ()
        return Meshes(
            plan=self,
            fsdp=dense[(*copies, "fsdp")],
            expert_fsdp=sparse[(*copies, "expert_fsdp")],
            expert=sparse["expert"],
            context=data["context"],
            batch=data["batch"],
            loss=mesh(loss=self.world_size),
            device=torch.empty(0, device=dense.device_type).device,
        )


def plan_mesh(
    *, world_size: int, replicate: int = 1, context: int = 1, expert: int = 1
) -> MeshPlan:
    """Check the degrees of parallelism, and derive the sizes of all axes. Pure.

    Args:
        world_size: the total number of ranks.
        replicate: the number of full copies of the sharded model (HSDP).
        context: the number of ranks that share a sequence. The dense parameters are also sharded
            over these ranks.
        expert: the number of ranks that share the experts of one copy of the model.

    Raises:
        PlanError: a degree is below 1, or does not divide the number of ranks that it splits.
    """
    plan = MeshPlan(world_size=world_size, replicate=replicate, context=context, expert=expert)
    check_counts(**asdict(plan))
    _check_divides("replicate", replicate, "world_size", world_size)
    _check_divides("context", context, "world_size / replicate", plan.fsdp)
    _check_divides("expert", expert, "world_size / replicate", plan.fsdp)
    return plan


def check_meshes(meshes: object) -> None:
    """Raise PlanError if `meshes` are not `Meshes`, for example if they are a plan. Local."""
    if not isinstance(meshes, Meshes):
        raise PlanError(
            f"meshes must be Meshes; got a {type(meshes).__name__}. Pass "
            "plan_mesh(world_size=...).build(device), on every rank."
        )


def on_device(device: str) -> Tensor:
    """Return an empty tensor on `device`. `agreed` sends from the device of this tensor. Local.

    If this process has not used `device` yet, this function chooses the rank's device as torch's
    DeviceMesh would. DeviceMesh would not choose later, because the device is then in use.

    Raises:
        PlanError: `device` does not exist or cannot be used.
    """
    try:
        if torch.device(device).index is not None:
            raise RuntimeError("each rank chooses its number")
        accelerator = torch.get_device_module(device)
        if accelerator.is_available() and not accelerator.is_initialized():
            own = os.environ.get("LOCAL_RANK") or dist.get_rank() % accelerator.device_count()
            accelerator.set_device(int(own))
        return torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise PlanError(f"device={device!r} cannot be used here: {error}") from error


def _check_divides(name: str, degree: int, whole_name: str, whole: int) -> None:
    if whole % degree:
        fitting = [d for d in range(1, whole + 1) if whole % d == 0]
        raise PlanError(
            f"{name}={degree} does not divide {whole_name} = {whole}. Use one of {fitting}."
        )

"""Adapters between torchtitan 0.3.0 and this package, for dispatchers, experts and meshes.

`RoutedExperts.Config` accepts any `LocalTokenDispatcher.Config`, such as its subclass
`ForTorchtitan.Config`. This module does not patch torchtitan. An import of this module also imports
torchtitan's MoE modules, which takes seconds and needs triton. The import checks once per process
which type of device is present.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import MissingPackageError, PlanError, UnsupportedError, needs
from ...groups import Call, agreed, facts_of
from ..experts.all_to_all import AllToAllDispatcher
from ..experts.dispatcher import (
    Dispatched,
    LocalDispatcher,
    TokenDispatcher,
    agree_on_outputs,
    check_outputs,
    check_slots,
)
from ..mesh import Meshes, plan_mesh

with needs("torchtitan", extra="torchtitan"):
    from torchtitan import __version__ as _RELEASE

_TESTED = "0.3.0"
if _RELEASE != _TESTED:
    raise UnsupportedError(
        f"this adapter was written for torchtitan {_TESTED}, and dispatchers and meshes change "
        f"often; found {_RELEASE}. Run: pip install torchtitan=={_TESTED}"
    )

try:
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        LocalTokenDispatcher,
    )
except ImportError as error:
    raise MissingPackageError(error.name or "torchtitan", "torchtitan") from error

__all__ = [
    "ForTorchtitan",
    "FromTorchtitan",
    "dispatcher_for",
    "join_weights",
    "meshes_from",
    "split_weights",
    "use_dispatcher",
]

Make = Callable[[dist.ProcessGroup | None], TokenDispatcher]


def dispatcher_for(group: dist.ProcessGroup | None) -> TokenDispatcher:
    """Return an `AllToAllDispatcher` over `group`, or a `LocalDispatcher` for None. Local."""
    return LocalDispatcher() if group is None else AllToAllDispatcher(group)


class ForTorchtitan(LocalTokenDispatcher):
    """A dispatcher of this package, for use inside of torchtitan.

    Use `ForTorchtitan.Config` in place of torchtitan's `AllToAllTokenDispatcher.Config`.
    `use_dispatcher` replaces the dispatchers of a whole model. Costs and errors are the same as for
    the dispatcher that `make` returns.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """The configuration from which torchtitan builds the dispatcher.

        Attributes:
            make: a function that returns a `TokenDispatcher` for the group over which the experts
                are split, or for None if this rank has all experts. The dispatcher calls `make`
                when the model is built, and again in `wire_meshes`.
        """

        make: Make = dispatcher_for

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._make = config.make
        self.dispatcher = config.make(None)

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Split the experts over the ranks of `ep_mesh`. Torchtitan calls this method. Local."""
        self.dispatcher = self._make(None if ep_mesh is None else ep_mesh.get_group())

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Return the rows of the local experts, each expert's row count, and `combine`'s input."""
        del counts  # Our dispatcher checks the ids and counts them itself.
        sent = self.dispatcher.dispatch(x, scores, expert_ids, num_experts=self.num_experts)
        return sent.tokens, sent.counts, sent

    def combine(self, y: Tensor, dispatched: Dispatched, x: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, weighted by scores."""
        del x
        return self.dispatcher.combine(y, dispatched)


class FromTorchtitan:
    """A `TokenDispatcher` that uses a dispatcher of torchtitan.

    Torchtitan's dispatchers convert the outputs of experts to float32, even float64 outputs, before
    they multiply the outputs by scores. The weighted outputs of a token are added in the dtype of
    the tokens. Calls are collective if torchtitan's dispatcher has a mesh. On gloo, set
    torchtitan's option `spmd_backend="partial_dtensor"`.

    Args:
        theirs: a dispatcher of torchtitan that is wired to its mesh. Without a mesh, every expert
            is local.
        check: as for `AllToAllDispatcher`.

    Raises:
        UnsupportedError: `theirs` is neither a `LocalTokenDispatcher` nor an
            `AllToAllTokenDispatcher`.
    """

    def __init__(self, theirs: Any, *, check: bool = True) -> None:
        _check_kind(theirs, (LocalTokenDispatcher, AllToAllTokenDispatcher))
        self.theirs, self.check = theirs, check

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        """Send tokens to their experts, as `TokenDispatcher.dispatch` does.

        The call raises the errors of `TokenDispatcher.dispatch`. The call also raises PlanError if
        `num_experts` or the width of `expert_ids` differs from torchtitan's configuration. The call
        also raises PlanError if the number of ranks does not divide the number of experts.
        """
        self._admit(x, scores, expert_ids, num_experts)
        flat = expert_ids.flatten().long()
        # Not with bincount, for which the host waits.
        chosen = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        tokens, counts, metadata = self.theirs.dispatch(
            x, scores.contiguous(), expert_ids.contiguous(), chosen
        )
        # torchtitan's combine takes the tokens again, but reads only their shape and dtype.
        return Dispatched(tokens, counts, (metadata, x.detach()))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Send results back, as `TokenDispatcher.combine` does."""
        if self._mesh is None:
            check_outputs(y, dispatched)
        else:
            name, group = "FromTorchtitan.combine", self._mesh.get_group()
            agree_on_outputs(name, y, dispatched, group=group, check=self.check)
        metadata, x = dispatched.handle
        return self.theirs.combine(y, metadata, x)

    def _admit(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> None:
        mesh, ranks = self._mesh, 1
        call: AbstractContextManager[Call] = nullcontext(Call())
        if mesh is not None:
            name, group, ranks = "FromTorchtitan.dispatch", mesh.get_group(), mesh.size()
            call = agreed(name, x, scores, group=group, check=self.check)
        with call as agreement:
            check_slots(x, scores, expert_ids, num_experts=num_experts, values=self.check)
            expected = (self.theirs.num_experts, self.theirs.top_k)
            if (num_experts, expert_ids.shape[1]) != expected or num_experts % ranks:
                raise PlanError(
                    f"got {num_experts} experts, {expert_ids.shape[1]} per token, over {ranks} "
                    f"ranks. torchtitan's dispatcher was configured for {expected[0]} experts and "
                    f"{expected[1]} per token, and all ranks need equal shares. Configure the "
                    "dispatcher for this layer."
                )
            agreement.facts["num_experts"] = num_experts
            agreement.facts |= facts_of("x", x) | facts_of("scores", scores)

    @property
    def _mesh(self) -> DeviceMesh | None:
        return getattr(self.theirs, "ep_mesh", None)


def use_dispatcher(target: Any, make: Make = dispatcher_for) -> tuple[str, ...]:
    """Replace the dispatcher of every `RoutedExperts` of a torchtitan model, in place. Local.

    Args:
        target: a model before or after parallelisation, or the config tree of a model.
        make: see `ForTorchtitan.Config`.

    Returns:
        The names of the changed modules in the built model.

    Raises:
        UnsupportedError: `target` has no `RoutedExperts`, or a `RoutedExperts` has a dispatcher
            other than torchtitan's local or all-to-all dispatcher. Nothing was changed.
    """
    if isinstance(target, nn.Module):
        found = [(n, m) for n, m in target.named_modules() if isinstance(m, RoutedExperts)]
        tested: tuple[type, ...] = (LocalTokenDispatcher, AllToAllTokenDispatcher, ForTorchtitan)
    else:
        found = [(name, config) for name, config, *_ in target.traverse(RoutedExperts.Config)]
        tested = (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config, ForTorchtitan.Config)
    if not found:
        raise UnsupportedError(
            f"{type(target).__qualname__} does not contain RoutedExperts of torchtitan {_TESTED}. "
            "Pass a torchtitan model with experts, or its config."
        )
    for _, owner in found:
        _check_kind(owner.token_dispatcher, tested)
    for _, owner in found:
        old = owner.token_dispatcher
        new = ForTorchtitan.Config(num_experts=old.num_experts, top_k=old.top_k, make=make)
        if isinstance(target, nn.Module):
            new = new.build()
            new.wire_meshes(ep_mesh=getattr(old, "ep_mesh", None))
        owner.token_dispatcher = new
    return tuple(name for name, _ in found)


def meshes_from(parallel_dims: ParallelDims) -> Meshes:
    """Return `Meshes` with torchtitan's degrees of parallelism, over torchtitan's process groups.

    In `Meshes`, the degree `dp_replicate` is `replicate`, `dp_shard` x `cp` is `fsdp`, `efsdp` is
    `expert_fsdp`, `ep` is `expert`, and `cp` is `context`. All axes of the meshes have process
    groups. Axes over the same ranks share a group. The function makes groups for axes of size 1,
    and for `fsdp` if torchtitan did not make this group.

    The call is collective if `build_mesh` has not run yet, or if the function makes a group, and
    otherwise local.

    Raises:
        UnsupportedError: tp or pp is above 1.
        PlanError: ep does not divide dp_shard x cp.
    """
    dims = parallel_dims
    for name, degree in (("tp", dims.tp), ("pp", dims.pp)):
        if degree > 1:
            raise UnsupportedError(
                f"got {name}={degree}, but these meshes shard only parameters, experts and "
                f"sequences. Use {name}=1 and raise ep, cp or dp_shard."
            )
    plan = plan_mesh(
        world_size=dims.world_size, replicate=dims.dp_replicate, context=dims.cp, expert=dims.ep
    )
    groups = {}
    for host in dims.get_all_one_dimensional_meshes().values():
        groups[tuple(dist.get_process_group_ranks(host.get_group()))] = host.get_group()

    def mesh(**axes: int) -> DeviceMesh:
        grid = torch.arange(plan.world_size).view(*axes.values())
        here = (grid == dist.get_rank()).nonzero()[0].tolist()
        along = []
        for axis in range(grid.ndim):
            ranks = tuple(grid.movedim(axis, -1)[*here[:axis], *here[axis + 1 :]].tolist())
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            along.append(groups[ranks])
        device = dims.world_mesh.device_type
        return DeviceMesh.from_group(along, device, grid, mesh_dim_names=tuple(axes))

    return plan.over(mesh)


def join_weights(w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
    """Join torchtitan's `w1_EFD`, `w2_EDF`, `w3_EFD` to `gate_up_proj` and `down_proj`. Local."""
    return torch.cat((w1, w3), dim=1), w2


def split_weights(gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `gate_up_proj` and `down_proj` into views `w1_EFD`, `w2_EDF` and `w3_EFD`. Local."""
    gate, up = gate_up.chunk(2, dim=1)
    return gate, down, up


def _check_kind(dispatcher: Any, tested: tuple[type, ...]) -> None:
    # Compare exactly, because a subclass may pad rows or drop them.
    if type(dispatcher) not in tested:
        raise UnsupportedError(
            f"{type(dispatcher).__qualname__} is not one of the tested dispatchers of torchtitan "
            f"{_TESTED}: {[kind.__qualname__ for kind in tested]}."
        )
